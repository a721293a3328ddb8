"""TRL's trainers with plans: TRL's own losses, metrics and files, computed under a plan. Skipped where TRL is not installed."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from chat_models import byte_level_tokenizer, make_chats, save_model, words, write_jsonl

import upshift
import upshift.trl
from upshift.errors import MissingExtra, RequestError

trl = pytest.importorskip("trl", reason="trl is not installed, so its trainers cannot be compared")
datasets = pytest.importorskip("datasets", reason="datasets is not installed, which TRL's trainers need")

WIDTH = 64  # of all rows, so that one trace serves all cases
PLANNED = {"fixed": ("precision=fp32", "torch_compile=off"), "trial_seconds": 0}
STEPS = 30


def _rows(make: Any) -> Any:
    draws = random.Random(3)
    return datasets.Dataset.from_list([make(draws, number) for number in range(16)])


def _completion(draws: random.Random) -> str:
    return " " + words(draws, draws.randint(2, 10))


def texts() -> Any:
    return _rows(lambda draws, number: {"text": words(draws, draws.randint(4, 24))})


def completions() -> Any:
    return _rows(lambda draws, number: {"prompt": words(draws, 4), "completion": _completion(draws)})


def preferences() -> Any:
    return _rows(lambda draws, number: {"prompt": words(draws, 4), "chosen": _completion(draws), "rejected": _completion(draws)})


def judgements() -> Any:
    return _rows(lambda draws, number: {"prompt": words(draws, 4), "completion": _completion(draws), "label": number % 2 == 0})


def lora() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed, so no adapter can be trained")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sft": ("SFT", texts, {}),
    "sft, texts end to end": ("SFT", texts, {"packing": True, "max_length": WIDTH, "per_device_train_batch_size": 1}),
    "sft, completions": ("SFT", completions, {}),
    "sft, noise": ("SFT", texts, {"neftune_noise_alpha": 5}),
    "sft, two batches a step": ("SFT", completions, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "dpo": ("DPO", preferences, {}),
    "dpo, reference computed before": ("DPO", preferences, {"precompute_ref_log_probs": True}),
    "dpo, adapter": ("DPO", preferences, {"peft_config": lora}),
    "reward": ("Reward", preferences, {}),
    "kto": ("KTO", judgements, {}),
    "kto, adapter": ("KTO", judgements, {"peft_config": lora}),
    "kto, reference computed before": ("KTO", judgements, {"precompute_ref_log_probs": True, "undesirable_weight": 1.5}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


def make_trainer(library: Any, case: str, model: Path, output: Path, **options: Any) -> Any:
    """Return the case's trainer of a library: trl or upshift.trl. ``options`` belong to its config, or to upshift."""
    kind, data, changes = CASES[case]
    changes = dict(changes)
    peft_config = changes.pop("peft_config", None)
    of_upshift = {name: options.pop(name) for name in ("plan", "fixed", "trial_seconds") if name in options}
    config = getattr(trl, f"{kind}Config")(
        **{"output_dir": str(output), "report_to": "none", "use_cpu": True, "max_steps": STEPS, "logging_steps": 1, "seed": 7,
           "save_strategy": "no", "disable_tqdm": True, "bf16": False, "per_device_train_batch_size": 4, "learning_rate": 1e-4,
           "pad_to_multiple_of": WIDTH, **changes, **options}
    )  # fmt: skip
    torch.manual_seed(0)  # of a new adapter, or of the head of a reward model
    return getattr(library, f"{kind}Trainer")(
        model=str(model),
        args=config,
        train_dataset=data(),
        **({"peft_config": peft_config()} if peft_config else {}),
        **of_upshift,
    )


def measured(trainer: Any) -> list[dict[str, Any]]:
    """Return what a training logged, without its times."""
    times = ("runtime", "per_second", "step_time")
    return [
        {name: value for name, value in entry.items() if not any(time in name for time in times)}
        for entry in trainer.state.log_history
    ]


def check_same(ours: Any, theirs: Any) -> None:
    assert [entry.keys() for entry in measured(ours)] == [entry.keys() for entry in measured(theirs)]
    for our_entry, their_entry in zip(measured(ours), measured(theirs), strict=True):
        for name, value in their_entry.items():
            np.testing.assert_allclose(our_entry[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_metrics_are_trls_own_under_a_plan(case: str, model: Path, tmp_path: Path) -> None:
    theirs = make_trainer(trl, case, model, tmp_path / "theirs")
    theirs.train()
    ours = make_trainer(upshift.trl, case, model, tmp_path / "ours", **PLANNED)
    ours.train()
    check_same(ours, theirs)
    losses = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
    assert len(losses) == STEPS and losses[0] != losses[-1]
    choice = ours.upshift_choice
    assert choice.planning is not None and choice.reason.startswith("the batches stay whole: ")
    assert choice.plan.activation_checkpointing == 0  # TRL's default is to recompute all layers
    assert theirs.model.is_gradient_checkpointing and ours.model.is_gradient_checkpointing  # the plan's choice has ended


def test_a_batch_whose_rows_are_compared_stays_whole(model: Path, tmp_path: Path) -> None:
    """KTO compares each row with the others' divergence: the mean loss of two halves is another, so none is ever computed."""
    trainer = make_trainer(upshift.trl, "kto", model, tmp_path, learning_rate=1e-2, **PLANNED)
    compute_loss = trainer.compute_loss
    sizes: list[int] = []

    def counted(model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        sizes.append(len(inputs["label"]))
        return compute_loss(model, inputs, *arguments, **named)

    trainer.compute_loss = counted
    trainer.train()
    assert set(sizes) == {4} and trainer.upshift_choice.planning is not None

    def loss_of_rows(batch: dict[str, Any], rows: slice) -> float:
        inputs = {name: value[rows] if isinstance(value, list | torch.Tensor) else value for name, value in batch.items()}
        with torch.no_grad():
            return float(compute_loss(trainer.model, inputs))

    trainer.model.eval()
    differences = []
    for batch in trainer.get_train_dataloader():
        halves = (loss_of_rows(batch, slice(2)) + loss_of_rows(batch, slice(2, 4))) / 2
        differences.append(abs(loss_of_rows(batch, slice(4)) - halves))
    assert max(differences) > 1e-3, differences


@pytest.mark.parametrize("case", ["sft, completions", "kto"])
def test_a_run_is_saved_resumed_and_loaded(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**PLANNED, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(upshift.trl, case, model, tmp_path / "run", **options)
    whole.train()
    assert "upshift: plan: fp32" in capsys.readouterr().err
    resumed = make_trainer(upshift.trl, case, model, tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (resumed, whole)]
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    resumed.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-6"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in whole.model.state_dict().items())
    assert "trl" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")  # the model card that TRL writes


def make_online_trainer(library: Any, kind: str, model: Path, output: Path, **options: Any) -> Any:
    """Return a trainer that generates its batches from prompts. Its rows have WIDTH tokens, half of them for the completion."""
    of_upshift = {name: options.pop(name) for name in ("plan", "fixed", "trial_seconds", "rollout_func") if name in options}
    config = getattr(trl, f"{kind}Config")(
        **{"output_dir": str(output), "report_to": "none", "use_cpu": True, "max_steps": 6, "logging_steps": 1, "seed": 7,
           "disable_tqdm": True, "save_strategy": "no", "bf16": False, "per_device_train_batch_size": 4, "num_generations": 2,
           "max_completion_length": 6, "pad_to_multiple_of": WIDTH // 2, "learning_rate": 1e-3, **options}
    )  # fmt: skip
    return getattr(library, f"{kind}Trainer")(
        model=str(model),
        args=config,
        train_dataset=_rows(lambda draws, number: {"prompt": words(draws, 4)}),
        reward_funcs=lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
        **of_upshift,
    )


ONLINE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {}),
    "grpo, reference model, two batches a step": ("GRPO", {"beta": 0.1, "gradient_accumulation_steps": 2}),
    "grpo, each generation trains four steps": ("GRPO", {"num_iterations": 2, "steps_per_generation": 2}),
    "rloo": ("RLOO", {}),
}


@pytest.mark.parametrize("case", ONLINE_CASES)
def test_rows_that_trl_generates_get_a_plan_and_trls_own_losses(case: str, model: Path, tmp_path: Path) -> None:
    kind, options = ONLINE_CASES[case]
    theirs = make_online_trainer(trl, kind, model, tmp_path / "theirs", **options)
    theirs.train()
    ours = make_online_trainer(upshift.trl, kind, model, tmp_path / "ours", **options, **PLANNED)
    ours.train()
    check_same(ours, theirs)
    norms = [entry["grad_norm"] for entry in ours.state.log_history if "loss" in entry]
    assert len(set(norms)) == 6  # advantages have the mean 0, and so has GRPO's loss on the rows of one generation
    choice = ours.upshift_choice
    assert choice.reason == "the batches stay whole: the trainer generates the rows"
    assert f"rows of {WIDTH} tokens: the longest of 16 prompts" in choice.covers
    plan = choice.plan
    accumulation = options.get("gradient_accumulation_steps", 1)
    assert (plan.per_device_train_batch_size, plan.gradient_accumulation_steps) == (4, accumulation)
    assert plan.sequence_length == WIDTH and plan.torch_compile == "off"


def test_rows_of_unknown_length_run_as_in_trl(model: Path, tmp_path: Path) -> None:
    """A function of the script may make the rows. That is known before anything is traced or tried."""

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[-1.0] * len(row) for row in ids]}

    trainer = make_online_trainer(upshift.trl, "GRPO", model, tmp_path, rollout_func=roll_out, max_steps=1)
    output = trainer.train()
    assert "of rollout_func are not known" in trainer.upshift_choice.reason and trainer.upshift_choice.planning is None
    assert output.metrics["planning_runtime"] < 2
    compiled = make_online_trainer(upshift.trl, "GRPO", model, tmp_path, fixed="torch_compile=layer")
    with pytest.raises(RequestError, match="generation calls the same layers for each token"):
        compiled.train()


@pytest.mark.parametrize("field", ["packing=True", "per_device_train_batch_size=2"])
def test_a_field_that_would_cut_the_batches_is_refused_by_name(field: str, model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(upshift.trl, "dpo", model, tmp_path, fixed=field)
    with pytest.raises(RequestError, match=f"{field} is not possible: batches of 8 rows stay whole, because "):
        trainer.train()


def test_a_short_run_says_why_it_has_no_plan(model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(upshift.trl, "dpo", model, tmp_path, max_steps=2)
    trainer.train()
    assert "less than planning it would" in trainer.upshift_choice.reason and trainer.upshift_choice.planning is None


def test_the_script_of_the_page_runs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of docs/trl.md on rows of chats, with use_cpu=True as the page says. TRL's default is bf16."""
    page = (Path(__file__).parents[3] / "docs" / "trl.md").read_text(encoding="utf-8")
    script = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    script = script.replace('SFTConfig(output_dir="trained"', 'SFTConfig(output_dir="trained", use_cpu=True')
    (tmp_path / "my-model").symlink_to(model, target_is_directory=True)
    write_jsonl(tmp_path / "chats.jsonl", make_chats(8, seed=1))
    exec(compile(script, "docs/trl.md", "exec"), {})
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained").config.num_hidden_layers == 2


def test_upshift_before_the_library_is_refused(model: Path, tmp_path: Path) -> None:
    config = trl.SFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    hidden = type("Hidden", (upshift.Trainer, trl.SFTTrainer), {})
    with pytest.raises(RequestError, match=re.escape("write class Hidden(SFTTrainer, upshift.Trainer)")):
        hidden(model=str(model), args=config, train_dataset=texts())
    assert type("Kept", (trl.SFTTrainer, upshift.Trainer), {})(model=str(model), args=config, train_dataset=texts())


def test_an_experimental_trainer_is_found_by_its_name_and_gets_a_plan(model: Path, tmp_path: Path) -> None:
    orpo = pytest.importorskip("trl.experimental.orpo", reason="this TRL has no ORPOTrainer")

    def trained(library: Any, name: str, **of_upshift: Any) -> Any:
        config = orpo.ORPOConfig(
            str(tmp_path / name), report_to="none", use_cpu=True, max_steps=10, logging_steps=1, seed=7, save_strategy="no",
            disable_tqdm=True, bf16=False, per_device_train_batch_size=4, learning_rate=1e-4,
        )  # fmt: skip
        trainer = library.ORPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(model),
            args=config,
            train_dataset=preferences(),
            processing_class=transformers.AutoTokenizer.from_pretrained(model),
            **of_upshift,
        )
        trainer.train()
        return trainer

    ours = trained(upshift.trl, "ours", **PLANNED)
    check_same(ours, trained(orpo, "theirs"))
    assert isinstance(ours, orpo.ORPOTrainer) and upshift.trl.ORPOTrainer is type(ours)
    plan = ours.upshift_choice.plan
    assert ours.upshift_choice.planning is not None and plan.per_device_train_batch_size == 8  # answers; prompts are in them
    with pytest.raises(AttributeError, match="no 'UnheardOfTrainer'.*SFTTrainer and those of trl.experimental"):
        _ = upshift.trl.UnheardOfTrainer


def test_names() -> None:
    assert {"SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer", "GRPOTrainer"} <= set(dir(upshift.trl))
    first = upshift.trl.SFTTrainer
    assert upshift.trl.SFTTrainer is first and issubclass(first, trl.SFTTrainer) and issubclass(first, upshift.Trainer)
    with pytest.raises(AttributeError, match="SFTConfig.*it has .*SFTTrainer.* trl has the rest"):
        _ = upshift.trl.SFTConfig


def test_without_trl_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshift.tuning.library_trainers.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=re.escape("upshift.trl needs trl: run  pip install '.[trl]'")):
        _ = upshift.trl.OnlineDPOTrainer
