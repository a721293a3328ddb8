"""What a script gives upshift.Trainer beside its TrainingArguments is used, or refused before the first step with its name."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig
from test_trainer import causal_lm
from transformers import TrainingArguments

import upshift
from upshift.errors import RequestError
from upshift.planning.plan import Plan


def a_trainer(folder: Path, *, arguments: dict[str, Any] | None = None, **options: Any) -> upshift.Trainer:
    task = causal_lm()
    given = {
        "output_dir": str(folder),
        "max_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    options = {"model": task.model(), "train_dataset": task.data, "data_collator": task.collator} | options
    return upshift.Trainer(args=TrainingArguments(**(given | (arguments or {}))), **options)


def a_plan(**fields: Any) -> Plan:
    given = {"device": "cpu", "host": "test", "model": "test", "sequence_length": 24, "per_device_train_batch_size": 8}
    return Plan(**(given | fields))


CONTRADICTIONS = {
    "precision=fp32": {"bf16": True},
    "optim=adafactor": {"optim": "sgd"},
    "activation_checkpointing=0": {"gradient_checkpointing": True},
    "torch_compile=layer": {"torch_compile": True},
}


@pytest.mark.parametrize("fixed", CONTRADICTIONS)
def test_a_field_that_contradicts_an_argument_is_refused(fixed: str, tmp_path: Path) -> None:
    argument = next(iter(CONTRADICTIONS[fixed]))
    name, _, value = fixed.partition("=")
    as_plan = a_plan(**{name: int(value) if value.isdigit() else value})
    for options in ({"fixed": fixed, "trial_seconds": 0}, {"plan": as_plan}):
        with pytest.raises(RequestError, match=rf"{fixed} contradicts TrainingArguments\({argument}") as refused:
            a_trainer(tmp_path, arguments=CONTRADICTIONS[fixed], **options).train()
        assert "leave out one of them" in str(refused.value)


def test_a_plan_that_names_no_optimizer_leaves_it_to_the_arguments(tmp_path: Path) -> None:
    plan = a_plan().changed(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    trainer = a_trainer(tmp_path, arguments={"optim": "sgd"}, plan=plan)
    trainer.train()
    optimizer: Any = trainer.optimizer
    assert isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.SGD)


@pytest.mark.parametrize(("name", "value"), [("fixed", "precision=fp32"), ("allow", "bf16-weights"), ("memory_limit_gib", 8.0)])
def test_options_of_a_choice_are_refused_beside_a_plan(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"{name} is for a plan that Upshift chooses"):
        a_trainer(tmp_path, plan=a_plan(), **{name: value})


class Unnamed:
    """A collator that draws from a generator of its own, and returns what has no names."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, rows: list[Any]) -> tuple[torch.Tensor]:
        return (torch.rand(len(rows), generator=self.generator),)


@pytest.mark.parametrize("options", [{"plan": a_plan()}, {"fixed": "precision=fp32"}])
def test_data_without_names_does_not_drop_a_plan(options: dict[str, Any], tmp_path: Path) -> None:
    collator = Unnamed()
    before = collator.generator.get_state()
    with pytest.raises(RequestError, match=r"no plan can be made here .*no names.*leave out plan"):
        a_trainer(tmp_path, data_collator=collator, **options).train()
    assert torch.equal(collator.generator.get_state(), before)


@pytest.mark.parametrize("text", ["packing=false", "packing=FALSE", "packing=0"])
def test_a_value_is_read_as_the_planner_reads_it(text: str, tmp_path: Path) -> None:
    cheap = ("precision=fp32", "torch_compile=off", "attention=sdpa", "activation_checkpointing=0")
    trainer = a_trainer(tmp_path, fixed=(text, *cheap), trial_seconds=0)
    trainer.train()
    assert trainer.upshift_choice is not None and trainer.upshift_choice.plan.packing is False


def test_a_given_plan_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = a_plan(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    a_trainer(tmp_path, plan=plan).train()
    printed = capsys.readouterr()
    lines = (printed.out + printed.err).splitlines()
    assert any(plan.label() in line and "plan:" in line for line in lines) and not any(
        "your own settings" in line for line in lines
    )


def test_a_loss_that_is_set_on_the_trainer_is_the_scripts_own(tmp_path: Path) -> None:
    """Its logits are whole, as those of a loss of the class."""
    trainer = a_trainer(tmp_path, fixed="loss_chunk_tokens=512", trial_seconds=0)

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    trainer.compute_loss = types.MethodType(compute_loss, trainer)
    with pytest.raises(RequestError, match="loss_chunk_tokens=512 is not possible: the script's own loss may read all logits"):
        trainer.train()


@pytest.mark.parametrize("own_loss", [False, True])
def test_a_measurement_that_runs_out_of_memory_ends_no_script(own_loss: bool, tmp_path: Path) -> None:
    """The measurement runs in fp32, and may need more memory than the run itself."""
    is_measured: list[bool] = []
    trainer = a_trainer(tmp_path, arguments={"remove_unused_columns": False})  # they are those of forward
    compute_loss = trainer.compute_loss if own_loss else None
    forward = trainer.model.forward

    def short_of_memory(*inputs: Any, **named: Any) -> Any:
        if trainer.upshift_choice is None:
            is_measured.append(True)
            raise torch.OutOfMemoryError("simulated")
        return forward(*inputs, **named)

    trainer.model.forward = short_of_memory
    if compute_loss is not None:
        trainer.compute_loss = lambda *inputs, **named: compute_loss(*inputs, **named)  # type: ignore[method-assign]
    trainer.train()
    assert is_measured and trainer.upshift_choice is not None and trainer.state.global_step == 1
    assert "ran out of memory" in trainer.upshift_choice.reason and trainer.upshift_choice.planning is None


@pytest.mark.parametrize("options", [{"fixed": "precision=fp32"}, {"plan": a_plan()}, {"fixed": "attention=sdpa"}, {}])
def test_the_attention_of_the_script_stays(options: dict[str, Any], tmp_path: Path) -> None:
    """Scripts load eager attention for its weights, or because sdpa computes something else for their model."""
    cheap = ("torch_compile=off", "activation_checkpointing=0", "packing=False")
    if "fixed" in options:
        options = {"fixed": (options["fixed"], *cheap), "trial_seconds": 0}
    trainer = a_trainer(tmp_path, **options)
    trainer.model.set_attn_implementation("eager")
    used = set()
    trainer.model.register_forward_hook(lambda model, inputs, outputs: used.add(model.config._attn_implementation))
    trainer.train()
    assert trainer.upshift_choice is not None and (trainer.upshift_choice.planning is not None) == ("fixed" in options)
    fixed = options.get("fixed", ())
    assert trainer.upshift_choice.plan.attention == ("sdpa" if "attention=sdpa" in fixed or not options else "eager")
    assert trainer.model.config._attn_implementation == "eager"
    assert used == ({"eager", "sdpa"} if "attention=sdpa" in fixed else {"eager"})


@pytest.mark.parametrize("engine", ["is_deepspeed_enabled", "is_fsdp_enabled", "parallelism_config"])
def test_an_engine_of_a_launcher_is_refused_before_the_first_step(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in no field of TrainingArguments: accelerate reads it from the environment, for several GPUs only."""

    class Launched(upshift.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if engine == "parallelism_config":
                monkeypatch.setattr(Accelerator, engine, property(lambda self: ParallelismConfig(tp_size=2)))
            else:
                setattr(self, engine, True)

    task = causal_lm()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(RequestError, match=r"accelerate runs .* start the script with torchrun"):
        Launched(model=task.model(), args=arguments, train_dataset=task.data, data_collator=task.collator)


class Writer:
    """The interface of SummaryWriter, whose own module needs a library that tests do not install."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append(tag)


@pytest.mark.parametrize("kind", ["a writer", "a module"])
def test_a_loss_that_is_only_measured_reaches_no_tracker(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    module: Any = types.ModuleType("wandb")
    module.log = lambda values: writer.written.extend(values)
    monkeypatch.setitem(sys.modules, "wandb", module)
    board: Any = types.ModuleType("tensorboardX")
    board.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "tensorboardX", board)

    class Tracking(upshift.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if kind == "a writer":
                writer.add_scalar("loss", 1.0, self.state.global_step)
            else:
                sys.modules["wandb"].log({"loss": 1.0})
            return loss

    task = causal_lm()
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    trainer = Tracking(model=task.model(), args=arguments, train_dataset=task.data, data_collator=task.collator)
    trainer.train()
    assert writer.written == ["loss"] * 2 and trainer.upshift_choice is not None
    name = "SummaryWriter.add_scalar" if kind == "a writer" else "wandb.log"
    assert f"the loss calls {name} for each batch" in trainer.upshift_choice.reason
