"""Adapters through the training loop: put around a model, saved as peft saves them, resumed bit for bit, 4 bits below or not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_ranks import run_jobs
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig
from warm_processes import WarmProcesses

import upshift
from upshift.errors import Interrupted, NothingFits, RequestError
from upshift.loading.rewrite.merge import merge
from upshift.models.adapter import check_module_names
from upshift.models.profile import Variant
from upshift.models.source import ADAPTER_WEIGHTS, AdapterOptions, find_model, find_model_to_train
from upshift.models.tracing.profile_model import profile_model
from upshift.models.tracing.segments import Tracer
from upshift.planning.cost.communication import Volumes
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.memory import predict_memory
from upshift.planning.cost.partition import elements, stage_of, trained_part
from upshift.planning.cost.process_memory import USABLE_SHARE
from upshift.planning.plan import Plan
from upshift.planning.planner import find_host, find_source, plan, plan_training
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.workload import Workload
from upshift.record import Record
from upshift.training.arguments import Arguments
from upshift.training.batches.collate import to_tensors
from upshift.training.batches.layout import layout_for
from upshift.training.batches.sampler import BatchSource
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.training.job.job import Job, TrainingData, prepare_data, run_job
from upshift.training.loop.events import Event, StepDone
from upshift.training.loop.state import check_run_file

LENGTH, GLOBAL_BATCH = 32, 4
CHEAP = ("torch_compile=off", "precision=fp32", "attention=sdpa")  # little is traced
RANK_4 = AdapterOptions(lora_rank=4)
FOUR_BITS = pytest.param(True, marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights and tokenizer, and text."""
    folder = tmp_path_factory.mktemp("adapter")
    words = "the quick brown fox jumps over lazy dogs while seven wizards watch the moon rise".split()  # noqa: SIM905
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(words, size=generator.integers(20, 60))) for _ in range(40)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = train_byte_level_bpe(texts, 300)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def data(home: Path) -> TrainingData:
    return prepare_data(find_model(str(home / "model")), home / "data.jsonl", sequence_length=LENGTH)


def a_job(home: Path, output: Path, *, model: Path | None = None, plan: dict[str, Any] | None = None, **fields: Any) -> Job:
    options = {name: fields.pop(name) for name in list(fields) if name in Arguments.model_fields}
    given = {"max_steps": 6, "learning_rate": 3e-3, "max_grad_norm": 0.5} | options
    reference = str(model or home / "model")
    adapter = fields.pop("adapter", RANK_4 if model is None else AdapterOptions())
    plain = {
        "device": "cpu", "host": "test", "model": "test", "sequence_length": LENGTH, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
    return Job(
        model_reference=reference, plan=Plan.model_validate(plain | (plan or {})), arguments=Arguments(**given),
        data=str(home / "data.jsonl"), global_batch=GLOBAL_BATCH, output=str(output), adapter=adapter, **fields,
    )  # fmt: skip


def losses(record: Record) -> list[float]:
    return [loss for _, loss in record.details["loss_curve"]]


def next_loss(model: Any, data: TrainingData) -> float:
    held_out = data.evaluation
    assert held_out is not None
    ids = torch.from_numpy(held_out.tokens[None, : held_out.lengths[0]].astype(int))
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def test_train_plans_proves_and_saves_an_adapter(home: Path, data: TrainingData, tmp_path: Path) -> None:
    record = upshift.train(
        str(home / "model"), str(home / "data.jsonl"), output=tmp_path / "out", sequence_length=LENGTH, global_batch=GLOBAL_BATCH,
        fixed=CHEAP, lora_rank=4, trial_seconds=4.0,
        arguments={"max_steps": 6, "learning_rate": 3e-3},
    )  # fmt: skip
    assert losses(record)[-1] < losses(record)[0] - 0.02
    assert record.baseline is not None and record.prediction_error("peak_gib") == pytest.approx(0.0, abs=0.1)
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= saved
    assert "model.safetensors" not in saved and "config.json" not in saved
    assert all("lora_" in name for name in load_file(tmp_path / "out" / "adapter_model.safetensors"))
    # As peft reads it: around the model that it names, and around one that the user has loaded.
    attached = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(home / "model")
    before = next_loss(base, data)
    assert next_loss(attached, data) == next_loss(PeftModel.from_pretrained(base, tmp_path / "out"), data) < before


@pytest.mark.parametrize("four_bits", [False, FOUR_BITS])
def test_interrupted_and_resumed_is_undisturbed(four_bits: bool, home: Path, data: TrainingData, tmp_path: Path) -> None:
    undisturbed = run_job(a_job(home, tmp_path / "one", adapter=RANK_4.changed(load_in_4bit=four_bits)), data)

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="checkpoint-3"):
        run_job(a_job(home, tmp_path / "two", adapter=RANK_4.changed(load_in_4bit=four_bits)), data, on_event=stop)
    held = sum(file.stat().st_size for file in (tmp_path / "two" / "checkpoint-3").glob("*.safetensors"))
    trained = sum(tensor.nbytes for tensor in load_file(tmp_path / "one" / "adapter_model.safetensors").values())
    assert held < 3 * trained + 65536, "weights and two moments of the adapter, nothing of the model"
    resumed = run_job(a_job(home, tmp_path / "two", adapter=RANK_4.changed(load_in_4bit=four_bits), resume=True), data)
    assert losses(resumed) == losses(undisturbed)
    final = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two")]
    assert final[0].keys() == final[1].keys()
    assert all(torch.equal(tensor, final[1][name]) for name, tensor in final[0].items())


def test_processes_have_the_same_adapter(home: Path, data: TrainingData, tmp_path: Path) -> None:
    """Its first weights are random: each rank draws the same."""
    one = run_job(a_job(home, tmp_path / "one"), data)
    two = run_job(a_job(home, tmp_path / "two", plan={"num_processes": 2, "gradient_accumulation_steps": 1}), data)
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)


def test_an_adapter_directory_goes_on_from_its_weights(home: Path, data: TrainingData, tmp_path: Path) -> None:
    first = run_job(a_job(home, tmp_path / "first"), data)
    second = run_job(a_job(home, tmp_path / "second", model=tmp_path / "first", max_steps=1), data)
    assert first.measured and second.measured and first.measured.evaluation_loss
    assert losses(second)[0] < losses(first)[0] - 0.02
    foreign = tmp_path / "foreign"
    shutil.copytree(tmp_path / "first", foreign)
    config = json.loads((foreign / "adapter_config.json").read_text())
    (foreign / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    with pytest.raises(RequestError, match="is of another adapter"):
        run_job(a_job(home, tmp_path / "third", model=foreign), data)


def test_a_damaged_adapter_checkpoint_is_passed_over(home: Path, data: TrainingData, tmp_path: Path) -> None:
    run_job(a_job(home, tmp_path / "out", save_steps=2, max_steps=4), data)
    newest = tmp_path / "out" / "checkpoint-4" / "adapter_model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    resumed = run_job(a_job(home, tmp_path / "out", max_steps=6, resume=True), data)
    assert resumed.details["resumed_from_step"] == 2


def test_what_cannot_be_trained_is_said(home: Path, tmp_path: Path) -> None:
    model, text = str(home / "model"), str(home / "data.jsonl")
    for options, words in (
        ({"load_in_4bit": True}, "--lora-rank"),
        ({"lora_rank": 4, "from_config": True}, "--from-config draws random weights"),
        ({"lora_rank": 0}, "--lora-rank 0"),
    ):
        with pytest.raises(RequestError, match=words):
            upshift.train(model, text, output=tmp_path / "out", **options)  # type: ignore[arg-type]
    four = find_model_to_train(model, AdapterOptions(lora_rank=4, load_in_4bit=True))
    assert four.quantized_from == "float32" and "quantization_config" in four.config


@pytest.mark.parametrize("four_bits", [False, True])
def test_an_adapter_is_planned_on_several_devices(home: Path, four_bits: bool) -> None:
    """The embedding does nothing in the backward pass: a moment of the step that holds nothing. Speed follows from the frozen
    weights, so all of them are counted."""
    model = str(home / "model")
    found = plan(model, sequence_length=LENGTH, global_batch=4, on="2xh100", lora_rank=4, load_in_4bit=four_bits)
    parameters = found.profile.parameters
    frozen = sum(shape.count * shape.elements for shape in parameters.frozen_shapes)
    assert frozen == parameters.total - parameters.trainable > parameters.trainable
    assert found.best.num_processes == 2


# Adapters as people configure them

# By name: the options, and the same in peft's own words.
CONFIGURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "some modules, rsLoRA": (
        {"lora_target": "q_proj,v_proj", "lora_alpha": 5, "lora_rslora": True},
        {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 5, "use_rslora": True},
    ),
    "DoRA": ({"lora_dora": True}, {"target_modules": "all-linear", "lora_alpha": 8, "use_dora": True}),
    "modules trained whole": (
        {"lora_modules_to_save": "lm_head,embed_tokens,layers.1.mlp"},
        {"target_modules": "all-linear", "lora_alpha": 8, "modules_to_save": ["embed_tokens", "layers.1.mlp", "lm_head"]},
    ),
    "DoRA of an embedding and a head": (
        {"lora_target": ["embed_tokens", "lm_head"], "lora_alpha": 16, "lora_dora": True},
        {"target_modules": ["embed_tokens", "lm_head"], "lora_alpha": 16, "use_dora": True},
    ),
}
ONE_MICRO_BATCH = {"per_device_train_batch_size": GLOBAL_BATCH, "gradient_accumulation_steps": 1}
# Two ranks, and what they divide.
TWO_RANKS: dict[str, dict[str, Any]] = {
    "the batch": {"num_processes": 2, "gradient_accumulation_steps": 1},
    "optimizer state": {
        "num_processes": 2, "gradient_accumulation_steps": 1, "layout": {"fully_shard": "optimizer", "shard_size": 2},
    },
    "weights": {"num_processes": 2, "gradient_accumulation_steps": 1, "layout": {"fully_shard": "weights", "shard_size": 2}},
    "layers": {"num_processes": 2, "layout": {"pipeline_parallel": 2}},
    "layers, twice": {
        "num_processes": 2,
        "layout": {"pipeline_parallel": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b"},
    },
}  # fmt: skip


def train_by_peft(home: Path, data: TrainingData, job: Job, fields: dict[str, Any]) -> tuple[Any, list[float]]:
    """Train the job's steps in a plain loop of torch, with the adapter that peft makes of these fields."""
    base = AutoModelForCausalLM.from_pretrained(home / "model")
    arguments = job.arguments
    torch.manual_seed(arguments.seed)
    model = get_peft_model(base, LoraConfig(r=4, **fields)).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=arguments.learning_rate, weight_decay=0.0)
    layout = layout_for(job.plan, data.objective, data_rank=0)
    source = BatchSource(
        sequences=data.training, global_batch=GLOBAL_BATCH, layout=layout, objective=data.objective, seed=arguments.seed
    )
    by_step = []
    for step, batch in zip(range(arguments.max_steps), source.batches(), strict=False):
        loss = model(**to_tensors(batch.micro_batches[0])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, arguments.max_grad_norm)
        optimizer.param_groups[0]["lr"] = arguments.learning_rate * (1 - step / arguments.max_steps)
        optimizer.step()
        optimizer.zero_grad()
        by_step.append(loss.item())
    return model, by_step


@pytest.mark.parametrize("name", CONFIGURED)
def test_losses_and_weights_are_those_of_pefts_own_loop(name: str, home: Path, data: TrainingData, tmp_path: Path) -> None:
    options, fields = CONFIGURED[name]
    adapter = RANK_4.changed(**options)
    job = a_job(home, tmp_path / "out", adapter=adapter, plan=ONE_MICRO_BATCH, max_steps=3)
    expected, by_step = train_by_peft(home, data, job, fields)
    record = run_job(job, data)
    assert losses(record) == pytest.approx(by_step, abs=1e-5)
    # The plan counts what peft trains.
    profile = profile_model(find_source(str(home / "model"), adapter), sequence_length=LENGTH, variants=())
    assert profile.parameters.trainable == sum(weight.numel() for weight in expected.parameters() if weight.requires_grad)
    # The adapter says what was asked for, peft reads it, and upshift merges it as peft does.
    saved = LoraConfig.from_pretrained(tmp_path / "out")
    by_peft = expected.peft_config["default"]
    for field in ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora"):
        assert getattr(saved, field) == getattr(by_peft, field), field
    assert set(saved.modules_to_save or ()) == set(by_peft.modules_to_save or ())
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "model"), tmp_path / "out").merge_and_unload()
    merge(str(tmp_path / "out"), tmp_path / "merged", progress=lambda *_: None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    trained = expected.merge_and_unload().state_dict()
    for key, weight in read.state_dict().items():
        assert torch.equal(merged[key], weight), key
        torch.testing.assert_close(weight, trained[key], atol=1e-4, rtol=1e-3)


def four_layers(home: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Save the model of ``home`` with four layers, which two ranks can divide twice, and return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(home / "model", num_hidden_layers=4)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


WHOLE_AND_DORA = RANK_4.changed(lora_dora=True, lora_modules_to_save="lm_head,embed_tokens,layers.3.mlp")
GATHERED = ("gradients", "weights")  # layers of a bf16 model in which LoRA is fp32 and the MLP, trained whole, bf16


@pytest.fixture(scope="module")
def saved_adapters(
    home: Path, data: TrainingData, tmp_path_factory: pytest.TempPathFactory, warm_processes: WarmProcesses
) -> Path:
    """The adapters that one process and two ranks save after the same two steps."""
    folder = tmp_path_factory.mktemp("saved adapters")
    fp32 = four_layers(home, folder / "fp32", torch.float32)
    bf16 = four_layers(home, folder / "bf16", torch.bfloat16)

    def job(name: str, plan: dict[str, Any], model: Path) -> Job:
        return a_job(home, folder / name, model=model, adapter=WHOLE_AND_DORA, plan=plan, max_steps=2)

    run_job(job("one process", {}, fp32), data)
    run_job(job("one process, bf16", {}, bf16), data)
    jobs = {name: job(name, plan, fp32) for name, plan in TWO_RANKS.items()}
    for fully_shard in GATHERED:
        name = f"{fully_shard}, bf16"
        jobs[name] = job(name, TWO_RANKS["weights"] | {"layout": {"fully_shard": fully_shard, "shard_size": 2}}, bf16)
    run_jobs(jobs, data, tmp_path_factory.mktemp("jobs"), warm_processes)
    return folder


@pytest.mark.parametrize("divided", [*TWO_RANKS, *(f"{fully_shard}, bf16" for fully_shard in GATHERED)])
def test_two_ranks_save_the_adapter_of_one_process(divided: str, saved_adapters: Path) -> None:
    precise = "bf16" not in divided
    alone = "one process" if precise else "one process, bf16"
    expected = load_file(saved_adapters / alone / ADAPTER_WEIGHTS)
    saved = load_file(saved_adapters / divided / ADAPTER_WEIGHTS)
    dtypes = {weight.dtype for weight in expected.values()}
    assert dtypes == ({torch.float32} if precise else {torch.float32, torch.bfloat16})
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        if precise:
            torch.testing.assert_close(saved[name], weight, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        difference = (saved[name].float() - weight.float()).abs().mean()
        print(name, float(difference))
        assert difference < 0.1 * 3e-3, f"{name}: two steps move a weight by up to twice the learning rate"
    configs = [LoraConfig.from_pretrained(saved_adapters / name).to_dict() for name in (alone, divided)]
    assert configs[0] == configs[1]


def held_out_loss(model: Any, data: TrainingData) -> float:
    """Return the mean loss of all held-out tokens, one sequence at a time."""
    held_out = data.evaluation
    assert held_out is not None
    total, count = 0.0, 0
    for start, length in zip(held_out.starts, held_out.lengths, strict=True):
        ids = torch.from_numpy(held_out.tokens[None, start : start + length].astype(int))
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids).loss) * (int(length) - 1)
        count += int(length) - 1
    return total / count


def test_dropout_of_an_adapter_is_drawn_in_training_alone(home: Path, data: TrainingData, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"max_steps": 3, "learning_rate": 3e-2}
    plain = run_job(a_job(home, tmp_path / "plain", **fields), data)
    dropped = run_job(a_job(home, tmp_path / "dropped", adapter=RANK_4.changed(lora_dropout=0.5), **fields), data)
    assert losses(dropped)[0] == losses(plain)[0], "LoRA begins at zero"
    assert losses(dropped)[1:] != losses(plain)[1:]
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "dropped")
    assert dropped.measured and dropped.measured.evaluation_loss == pytest.approx(held_out_loss(saved, data), abs=1e-5)
    assert abs(held_out_loss(saved.train(), data) - held_out_loss(saved.eval(), data)) > 1e-3, "dropout would be seen"


def test_fewer_modules_are_another_plan(home: Path) -> None:
    """An input is kept for the gradient of A: of seven matrices a layer, or of two."""
    trained, peaks = [], []
    for target in ("all-linear", "q_proj,v_proj"):
        source = find_source(str(home / "model"), RANK_4.changed(lora_target=target))
        profile = profile_model(source, sequence_length=LENGTH, variants=(Variant("fp32", "sdpa", False),))
        job = a_job(home, Path("out"), plan=ONE_MICRO_BATCH)
        trained.append(profile.parameters.trainable)
        peaks.append(predict_memory(profile, profile.steps[0], job.plan).peak)
    # By layer and rank: inputs and outputs of q, k, v, o, gate, up and down.
    assert trained == [3 * 4 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 128)), 3 * 4 * (64 + 64 + 64 + 32)]
    assert peaks[1] < 0.9 * peaks[0]


def test_a_regular_expression_of_paths_means_what_it_means_in_peft(home: Path) -> None:
    def trained(target: str) -> set[str]:
        options = RANK_4.changed(lora_target=target)
        source = find_model_to_train(str(home / "model"), options)
        check_module_names(source, options)
        model = Tracer(source).full_model(torch.float32)
        return {name for name, value in model.named_parameters() if value.requires_grad}

    assert trained(r"model\.layers\.\d+\.self_attn\.(q|v)_proj") == trained("q_proj,v_proj")
    first = trained(r".*layers\.0\..*\.(q|v)_proj")
    assert first == {name for name in trained("q_proj,v_proj") if ".layers.0." in name}
    assert 0 < len(first) < len(trained("q_proj,v_proj"))


@pytest.mark.parametrize("saved", ["", "lm_head"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_of_a_pipeline_are_priced_by_what_they_have(saved: str, tied: bool, home: Path, tmp_path: Path) -> None:
    """The last stage has the copy of a head that is trained whole, and the frozen weight below it."""
    LlamaConfig.from_pretrained(home / "model", num_hidden_layers=4, tie_word_embeddings=tied).save_pretrained(tmp_path)
    source = find_model_to_train(str(tmp_path), RANK_4.changed(lora_modules_to_save=saved))
    profile = profile_model(source, sequence_length=LENGTH, variants=())
    weights = dict(Tracer(source).full_model(torch.float32).named_parameters(remove_duplicate=False))
    plan = a_job(home, tmp_path, plan=TWO_RANKS["layers"]).plan
    for rank, places in (
        (0, ("embed_tokens", "layers.0.", "layers.1.")),
        (1, ("layers.2.", "layers.3.", "model.norm.", "lm_head")),
    ):
        of_stage = [weight for name, weight in weights.items() if any(place in name for place in places)]
        stage = stage_of(profile, plan, rank)
        trained = sum(weight.numel() for weight in of_stage if weight.requires_grad)
        assert elements(profile, plan, stage) == pytest.approx(sum(weight.numel() for weight in of_stage))
        assert trained_part(profile, plan, stage) * profile.parameters.trainable == pytest.approx(trained)
        (exchanged, *_) = Volumes(profile, plan, stage, Memo()).gradients()
        assert exchanged.num_bytes == pytest.approx(4 * trained)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_alpha": 8}, "^--lora-alpha is an option of a new adapter; add --lora-rank"),
        ({"lora_target": "q_proj"}, "^--lora-target is an option of a new adapter"),
        ({"lora_dora": True}, "^--lora-dora is an option of a new adapter"),
        ({"lora_rank": 4, "lora_alpha": 0}, "^--lora-alpha 0 is not possible"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "^--lora-dropout 1 is not possible; give 0 or more and below 1"),
        ({"lora_rank": 4, "lora_dropout": -0.1}, "^--lora-dropout -0.1 is not possible"),
        ({"lora_rank": 4, "lora_target": ","}, "^--lora-target , names no module"),
        ({"lora_rank": 4, "lora_target": ""}, "^--lora-target names no module"),
        ({"lora_rank": 4, "lora_target": "q_proj,all-linear"}, "^--lora-target all-linear stands alone"),
        ({"lora_rank": 4, "lora_target": "q_proj,query"}, "^--lora-target query: .* it has .*q_proj.*v_proj"),
        ({"lora_rank": 4, "lora_target": "(q|"}, "is no regular expression .*give one, or names"),
        ({"lora_rank": 4, "lora_target": ["q_proj", ".*v"]}, "stands alone; join several with |"),
        ({"lora_rank": 4, "lora_target": "[qv]_proj"}, "matches the path of no module .* model.layers.0"),
        ({"lora_rank": 4, "lora_target": ".*up_proj", "lora_modules_to_save": "mlp"}, "is within --lora-modules-to-save mlp"),
        ({"lora_rank": 4, "lora_target": "layers"}, "^--lora-target layers: model.layers is a ModuleList.*such as q_proj$"),
        ({"lora_rank": 4, "lora_target": "q_proj,mlp"}, "^--lora-target mlp: model.layers.0.mlp is a LlamaMLP.*as gate_proj$"),
        ({"lora_rank": 4, "lora_target": ".*layers\\.0.*"}, "^--lora-target model.layers.0: model.layers.0 is a LlamaDecoder"),
        ({"lora_rank": 4, "lora_target": "norm"}, "LlamaRMSNorm.*name other modules"),
        ({"lora_rank": 4, "lora_modules_to_save": "head"}, "^--lora-modules-to-save head: .* it has .*lm_head"),
        ({"lora_rank": 4, "lora_modules_to_save": "head"}, "it has (?!.*layers)"),
        ({"lora_rank": 4, "lora_modules_to_save": "norm"}, "would also train model.layers.0.input_layernorm; give model.norm"),
        (
            {"lora_rank": 4, "lora_modules_to_save": "layers"},
            "^--lora-modules-to-save layers: model.layers is a ModuleList.*model.l",
        ),
        ({"lora_rank": 4, "lora_target": "up_proj", "lora_modules_to_save": "mlp"}, "^--lora-target up_proj is within"),
        ({"lora_rank": 4, "lora_modules_to_save": "lm_head,mlp", "load_in_4bit": True}, "^--lora-modules-to-save mlp: .*4 bits"),
    ],
)
def test_adapters_that_the_model_cannot_have_are_refused(
    options: dict[str, Any], words: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.get("load_in_4bit") and find_spec("bitsandbytes") is None:
        words = "needs bitsandbytes"
    model = str(home / "model")
    monkeypatch.setattr("upshift.training.run.prepare_data", lambda *_, **__: pytest.fail("the data was read first"))
    with pytest.raises(RequestError, match=words):
        upshift.train(model, str(home / "data.jsonl"), output=tmp_path / "out", **options)
    with pytest.raises(RequestError, match=words):
        plan(model, sequence_length=LENGTH, global_batch=4, **options)


@pytest.mark.parametrize(
    ("name", "advised", "trained"),
    [
        ("norm", "model.norm", {"model.norm.weight"}),
        ("gate", "mlp.gate", {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}),
        ("layernorm", None, set()),
    ],
)
def test_the_advised_name_trains_what_was_named_and_nothing_else(
    name: str, advised: str | None, trained: set[str], tmp_path: Path
) -> None:
    """peft looks only at the end of a path: ``norm`` is also the end of ``input_layernorm``."""
    config = Qwen2MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_experts=2,
    )  # fmt: skip
    config.architectures = ["Qwen2MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    wrong = RANK_4.changed(lora_target="q_proj", lora_modules_to_save=name)
    with pytest.raises(RequestError, match=f"give {advised}$" if advised else "has no such module"):
        check_module_names(find_model_to_train(str(tmp_path), wrong), wrong)
    if advised is None:
        return
    options = wrong.changed(lora_modules_to_save=advised)
    source = find_model_to_train(str(tmp_path), options)
    check_module_names(source, options)
    model = Tracer(source).full_model(torch.float32)
    whole = {weight for weight, value in model.named_parameters() if value.requires_grad and "lora_" not in weight}
    assert {weight.removeprefix("base_model.model.").replace(".modules_to_save.default", "") for weight in whole} == trained


@pytest.mark.parametrize("names", ["lm_head", "lm_head,embed_tokens"])
def test_copies_of_tied_weights_are_named(names: str, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for tied in (False, True):
        caplog.clear()
        config = LlamaConfig.from_pretrained(home / "model", tie_word_embeddings=tied)
        config.save_pretrained(tmp_path / str(tied))
        options = RANK_4.changed(lora_modules_to_save=names)
        check_module_names(find_model_to_train(str(tmp_path / str(tied)), options), options)
        warnings = [message for message in caplog.messages if "are one weight" in message]
        assert len(warnings) == tied
        assert not tied or ("lm_head" in warnings[0] and "model.embed_tokens" in warnings[0])


def test_options_of_a_new_adapter_are_not_for_an_old_one(home: Path, tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(home / "model"), "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    for options, option in (({"lora_alpha": 8}, "--lora-alpha"), ({"lora_rank": 4}, "--lora-rank")):
        with pytest.raises(RequestError, match=f"has an adapter already, and {option} is .*leave {option} out .*{home}"):
            find_model_to_train(str(tmp_path), AdapterOptions(**options))
    assert find_model_to_train(str(tmp_path), AdapterOptions()).adapter is not None


def test_a_run_resumes_with_its_own_adapter(home: Path, data: TrainingData, tmp_path: Path) -> None:
    run_job(a_job(home, tmp_path / "out", adapter=RANK_4.changed(lora_target="q_proj"), max_steps=2, save_steps=1), data)
    for options, given, of_run in (
        ({"lora_rank": 4, "lora_target": "v_proj"}, "--lora-target v_proj", "--lora-target q_proj; resume with"),
        ({"lora_rank": 4, "lora_target": "q_proj", "lora_alpha": 9}, "--lora-alpha 9", "--lora-alpha 8"),
        ({"lora_rank": 4, "lora_target": "q_proj", "lora_dora": True}, "--lora-dora", "no --lora-dora"),
        ({}, "no --lora-rank", "--lora-rank 4"),
    ):
        words = f"^you gave {given}, and the run in .* has {of_run}"
        with pytest.raises(RequestError, match=words):
            upshift.train(str(home / "model"), str(home / "data.jsonl"), output=tmp_path / "out", resume=True, **options)
    check_run_file(tmp_path / "out", resume=True, adapter=RANK_4.changed(lora_target="q_proj", lora_alpha=8))


# Frozen weights that are on the disk

ELSEWHERE = {"weight_offload": "disk"}


@pytest.mark.parametrize(
    "choices", [{}, {"activation_checkpointing": 2}, {"attention": "block", "packing": True}, {"loss_chunk_tokens": 16}], ids=str
)
def test_frozen_weights_on_the_disk_train_bit_for_bit(
    choices: dict[str, Any], home: Path, data: TrainingData, tmp_path: Path
) -> None:
    there = run_job(a_job(home, tmp_path / "there", plan=choices, max_steps=3), data)
    elsewhere = run_job(a_job(home, tmp_path / "elsewhere", plan=choices | ELSEWHERE, max_steps=3), data)
    assert losses(elsewhere) == losses(there)
    assert elsewhere.measured and there.measured
    assert elsewhere.measured.evaluation_loss == there.measured.evaluation_loss
    assert elsewhere.measured.peak_gib < there.measured.peak_gib  # type: ignore[operator]
    trained = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("there", "elsewhere")]
    assert all(torch.equal(tensor, trained[1][name]) for name, tensor in trained[0].items())


def test_weights_wait_on_the_disk_where_nothing_else_fits(home: Path) -> None:
    source = find_model_to_train(str(home / "model"), RANK_4)
    workload = Workload(sequence_length=LENGTH, global_batch=GLOBAL_BATCH)
    host = find_host(None).one_device().changed(disk_bytes_per_second=1e6)
    # As of another machine: what ran on this one corrects nothing.
    roomy = plan_training(source, host, workload, fixed=CHEAP, described=True)
    plans = [*roomy.ranking.candidates, *roomy.ranking.too_big]
    assert {candidate.plan.weight_offload for candidate in plans} == {"none"}
    least = min(plans, key=lambda candidate: candidate.resident * candidate.plan.num_processes)

    def offloaded(plan: Plan) -> Candidate:
        found = cost_plan(plan.changed(weight_offload="disk"), host=host, profile=roomy.profile, workload=workload)
        assert isinstance(found, Candidate)
        return found

    moved = offloaded(least.plan)
    layers = sum(parameter.nbytes for parameter in LlamaForCausalLM.from_pretrained(home / "model").model.layers.parameters())
    rows = 320 * 64 * 4
    parts = [candidate.memory.phases["forward"].parts["weights"] for candidate in (least, moved)]
    assert parts[0] - parts[1] == layers / 3 + rows, "all but two of three layers, and the embedding"
    steps = least.plan.gradient_accumulation_steps
    computed = least.time.total - least.time.terms["update"]
    read = steps * (2 * layers - 2 * layers / 3)  # two layers are still there where a pass turns round
    assert moved.time.total == pytest.approx(least.time.terms["update"] + max(read / 1e6, computed))

    free = int((least.resident + moved.resident) / 2 / USABLE_SHARE)
    assert host.cpu is not None
    short = host.changed(cpu=host.cpu.changed(free_memory_bytes=free))
    planning = plan_training(source, short, workload, fixed=CHEAP, described=True)
    assert {candidate.plan.weight_offload for candidate in planning.ranking.candidates} == {"disk"}
    assert planning.default.plan.weight_offload == "disk"
    assert "weights on disk" in planning.best.label() and planning.numbers(planning.ranking.candidates[0]).tokens_per_second
    no_disk = short.changed(disk_bytes_per_second=None)
    with pytest.raises(NothingFits):
        plan_training(source, no_disk, workload, fixed=CHEAP, described=True)
    for fixed, words in (
        (("weight_offload=host",), "from files on a disk whose rate was measured"),
        (("weight_offload=disk", "torch_compile=layer", "num_processes=1"), "use torch_compile=off"),
        (("weight_offload=disk", "num_processes=2"), "use num_processes=1"),
        (("weight_offload=disk", "activation_checkpointing=2", "recompute_granularity=selective"), "recompute_granularity=full"),
    ):
        plain = () if any("torch_compile" in one for one in fixed) else CHEAP
        with pytest.raises(RequestError, match=words):
            plan_training(source, host, workload, fixed=(*plain, "attention=sdpa", *fixed), described=True)


def test_only_frozen_weights_wait_elsewhere(home: Path, data: TrainingData, tmp_path: Path) -> None:
    whole = a_job(home, tmp_path / "out", plan=ELSEWHERE, adapter=AdapterOptions())
    with pytest.raises(RequestError, match="is for frozen weights; add an adapter"):
        run_job(whole, data)
    random = a_job(home, tmp_path / "out", plan=ELSEWHERE, from_config=True)
    with pytest.raises(RequestError, match="--from-config has none"):
        run_job(random.changed(overwrite=True), data)
    with pytest.raises(RequestError, match="is not possible in the Trainer"):
        upshift.Trainer(LlamaForCausalLM.from_pretrained(home / "model"), fixed=("weight_offload=disk",))
