"""Questions to a plan through the command line, and its lock file: written, accepted by whatever reads plans, checked again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.models.profile import ModelProfile, Variant
from upshift.models.source import ModelSource, find_model
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.analysis import lock_file as locking
from upshift.planning.analysis.max_size import with_layers
from upshift.planning.cost.memory import predict_memory
from upshift.planning.plan import Plan
from upshift.planning.planner import plan_training, read_plan
from upshift.planning.workload import Workload

PLAN = ("--sequence-length", "64", "--global-batch", "4")
ON = ("--on", "1xh100")


def config_of(layers: int, *, hidden: int = 64, positions: int = 256) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=300, hidden_size=hidden, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def folder_of(config: LlamaConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return folder_of(config_of(3), tmp_path_factory.mktemp("model"))


@pytest.fixture
def locked(upshift, model, tmp_path) -> Path:
    path = tmp_path / "plan.json"
    code, _, err = upshift("plan", model, *PLAN, *ON, "--lock", path)
    assert code == 0, err
    return path


def test_a_lock_is_a_plan_file(locked, model):
    document = json.loads(locked.read_text())
    found = read_plan(locked, host=describe("1xh100"), source=find_model(str(model)))
    assert found == Plan.model_validate(document["plans"][0]["plan"])
    assert {"torch", "transformers", "python", "upshift"} <= document["lock"]["versions"].keys()
    assert document["lock"]["host_fingerprint"] == found.host and document["lock"]["model"] == found.model
    assert {"parameters", "before the layers", "after model.layers"} <= document["lock"]["segments"].keys()
    assert str(model) not in locked.read_text()  # it names no path of the machine that wrote it
    assert locking.LockFile.from_json(locked.read_text()) == locking.read_lock(locked)


def test_nothing_moved(upshift, locked, model):
    code, out, err = upshift("plan", model, "--check", locked, "--json")
    assert code == 0, err
    check = json.loads(out)["check"]
    assert check["moved"] is False and check["segments"] == [] and check["versions"] == {} and check["parts_gib"] == []
    assert check["peak_gib"]["before"] == pytest.approx(check["peak_gib"]["now"])
    code, out, _ = upshift("plan", model, *ON, "--check", locked)
    assert code == 0 and "nothing moved" in out


def test_what_moved_is_named(upshift, locked, model):
    """As if the plan had been locked with a library whose layers held less."""
    document = json.loads(locked.read_text())
    entry, lock = document["plans"][0], document["lock"]
    entry["predicted"]["peak_gib"] *= 0.8
    for parts in entry["predicted"]["memory"].values():
        parts["activations"] = 0.5 * parts.get("activations", 0.0)
    lock["versions"]["transformers"] = "4.0.0"
    layer = next(name for name in lock["segments"] if "model.layers layer" in name)
    lock["segments"][layer] = "0"
    locked.write_text(json.dumps(document))
    code, out, _ = upshift("plan", model, "--check", locked, "--json")
    assert code == 1
    check = json.loads(out)["check"]
    assert check["moved"] is True and "activations" in {part["name"] for part in check["parts_gib"]}
    assert check["segments"] == [layer] and check["versions"]["transformers"][0] == "4.0.0"
    code, out, _ = upshift("plan", model, "--check", locked)
    said = " ".join(out.split())  # whatever the width of the terminal
    assert code == 1 and all(words in said for words in ("4.0.0", layer, "activations"))


def one_line(answer: tuple[int, str, str], *words: str) -> None:
    code, _, err = answer
    assert code == 2, err
    line = err.strip().splitlines()[-1]
    assert line.startswith("upshift: ") and "Traceback" not in err
    assert all(word in line for word in words), line


def test_another_model_or_host_is_said_by_name(upshift, locked, tmp_path):
    other = folder_of(config_of(4), tmp_path / "other")
    one_line(
        upshift("plan", other, "--check", locked), "the plan is locked for LlamaForCausalLM", find_model(str(other)).model_hash
    )
    model = find_model(str(other))
    with pytest.raises(RequestError, match=model.model_hash):
        locking.check_identity(locking.read_lock(locked), model, None)


def test_another_host(upshift, locked, model):
    one_line(upshift("plan", model, "--on", "1xa100-80gb", "--check", locked), "1xa100-80gb", "1xh100")


def test_files_that_are_no_lock(upshift, model, tmp_path):
    one_line(upshift("plan", model, "--check", tmp_path / "nothing.json"), "nothing.json", "--lock")
    (tmp_path / "broken.json").write_text("{")
    one_line(upshift("plan", model, "--check", tmp_path / "broken.json"), "broken.json", "--lock")
    code, out, _ = upshift("plan", model, *PLAN, *ON, "--json")
    (tmp_path / "unlocked.json").write_text(out)
    assert code == 0
    one_line(upshift("plan", model, "--check", tmp_path / "unlocked.json"), "unlocked.json", "--lock")
    one_line(upshift("plan", model, *PLAN, *ON, "--lock", tmp_path / "no" / "folder.json"), "folder.json", "folder")


def test_a_deeper_model_is_the_same_profile_again(tmp_path):
    """Layers added to a profile against a trace of the deeper model: parameters, FLOPs and memory to the byte."""
    profiles = [traced(config_of(layers), tmp_path / str(layers), (Variant("bf16", "sdpa", False),)) for layers in (3, 7)]
    deeper, real = with_layers(profiles[0], 7), profiles[1]
    assert deeper.parameters == real.parameters and deeper.num_layers == real.num_layers
    for batch, sequence in ((1, 32), (4, 64)):
        assert deeper.train_flops(batch, sequence) == pytest.approx(real.train_flops(batch, sequence), rel=1e-9)
    for recomputed in (0, 3, 7):
        plan = plan_of("bf16", recomputed, sequence=64)
        peaks = [predict_memory(p, p.steps[0], plan).peak for p in (deeper, real)]
        assert peaks[0] == pytest.approx(peaks[1], abs=1.0)


def traced(config: LlamaConfig, folder: Path, variants: tuple[Variant, ...]) -> ModelProfile:
    return profile_model(find_model(str(folder_of(config, folder))), sequence_length=64, variants=variants)


def plan_of(precision: str, recomputed: int, *, sequence: int) -> Plan:
    return Plan(
        device="cuda", host="", model="", sequence_length=sequence, precision=precision,  # type: ignore[arg-type]
        activation_checkpointing=recomputed,
        per_device_train_batch_size=2, gradient_accumulation_steps=2,
    )  # fmt: skip


def test_memory_of_a_traced_model_grows(model):
    """What --largest rests on, for every recomputation and precision of a real trace."""
    source = find_model(str(model))
    profile = profile_model(
        source, sequence_length=128, variants=tuple(Variant(p, "sdpa", False) for p in ("fp32", "bf16", "bf16-pure"))
    )
    assert len(profile.steps) == 3
    for step in profile.steps:
        precision = {"bf16-pure": "bf16-weights"}.get(step.precision, step.precision)
        for recomputed in (0, 1, 3):
            plan = plan_of(precision, recomputed, sequence=128)
            for shapes in ([(2, s) for s in range(32, 129, 8)], [(b, 64) for b in range(1, 12)]):
                peaks = [predict_memory(profile, step, plan, shape=shape).peak for shape in shapes]
                assert peaks == sorted(peaks)


def test_questions_on_the_command_line(upshift, model):
    code, out, err = upshift(
        "plan", model, *PLAN, *ON, "--json", "--why", "precision=fp32", "--why", "optim=adafactor", "--shadow-prices"
    )
    assert code == 0, err
    document = json.loads(out)
    assert [one["asked"] for one in document["why"]] == ["precision=fp32", "optim=adafactor"]
    assert document["why"][1]["allow"] == ["adafactor"]
    assert {"change", "gain", "why", "plan"} == document["shadow_prices"][0].keys()
    code, out, _ = upshift("plan", model, *PLAN, *ON, "--why", "precision=fp32", "--shadow-prices")
    assert code == 0 and "Why not precision=fp32" in out and "more memory" in out


NARROW = ("--set", "attention=sdpa", "--set", "precision=bf16", "--set", "torch_compile=off")  # searched at every size tried


@pytest.mark.parametrize(("what", "least"), [("sequence", 256), ("batch", 8), ("model", 4)])
def test_largest_on_the_command_line(upshift, model, what, least):
    plan = {"batch": PLAN[:2], "sequence": PLAN[2:]}.get(what, PLAN)
    code, out, err = upshift("plan", model, *plan, *ON, "--largest", what, "--json", *NARROW)
    assert code == 0, err
    assert json.loads(out)["largest"]["value"] >= least
    code, out, _ = upshift("plan", model, *plan, *ON, "--largest", what, *NARROW)
    assert code == 0 and "fit 1xh100" in out


def test_compare_on_the_command_line(upshift, model):
    arguments = ("plan", model, *PLAN, "--compare", "1xh100,1xt4", "--price", "h100=2.5/h,t4=0.4/h", "--tokens", "1e9")
    code, out, err = upshift(*arguments, "--deadline", "72h", "--json")
    assert code == 0, err
    comparison = json.loads(out)["comparison"]
    assert comparison["tokens"] == 10**9 and comparison["sorted_by"] == "money"
    money = [row["money"] for row in comparison["hosts"]]
    assert money == sorted(money) and all(row["in_time"] is not None for row in comparison["hosts"])
    code, out, _ = upshift(*arguments)
    assert code == 0 and "1xt4" in out and "upper bound" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--why", "colour=blue"), ("colour", "precision")),
        (("--largest", "width"), ("width", "sequence, batch, model")),
        (("--price", "h100=2/h"), ("--price", "--compare")),
        (("--compare", "1xh100", "--price", "h100=two/h"), ("h100=two/h", "h100=2.5/h")),
        (("--compare", "1xh100", "--deadline", "soon"), ("soon", "72h")),
        (("--compare", "1xh100", "--tokens", "lots"), ("lots", "300B")),
        (("--compare", "1xh100", "--largest", "model"), ("--largest", "--compare")),
        (("--largest", "sequence"), ("--largest sequence", "--sequence-length")),
    ],
)
def test_wrong_questions(upshift, model, arguments, words):
    on = () if "--compare" in arguments else ON
    one_line(upshift("plan", model, *PLAN, *on, *arguments), *words)


def test_a_lock_of_this_machine_is_checked_on_it(model):
    """A plan for a machine that was detected holds for that machine alone."""
    source = find_model(str(model))
    planning = plan_training(source, describe("1xh100"), Workload(sequence_length=64, global_batch=4))
    made = locking.lock_plan(planning, source, fixed=(), described=False)
    locking.check_identity(made, source, planning.host)
    with pytest.raises(RequestError, match="1xl4"):
        locking.check_identity(made, source, describe("1xl4"))
    other = ModelSource(reference="other", directory=None, config={**source.config, "num_hidden_layers": 9})
    with pytest.raises(RequestError, match="other is LlamaForCausalLM"):
        locking.check_identity(made, other, None)
