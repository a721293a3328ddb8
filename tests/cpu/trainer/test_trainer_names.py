"""upshift.Trainer is made to be subclassed: every name that it adds begins with one prefix, so that none meets a script's own."""

from __future__ import annotations

import inspect
import pkgutil
import re
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import upshift
import upshift.training.hf_trainer
import upshift.tuning
from upshift.errors import RequestError
from upshift.training.hf_trainer.planned_training import check_order_of_bases

PREFIX = ("_upshift_", "upshift_")
KINDS = [(upshift.Trainer, transformers.Trainer), (upshift.Seq2SeqTrainer, transformers.Seq2SeqTrainer)]


def added(kind: type, library: type) -> set[str]:
    """What the class has beyond the library's, whatever mix-in it is of."""
    annotated = {name for part in kind.__mro__ for name in inspect.get_annotations(part)}
    return (set(dir(kind)) | annotated) - set(dir(library))


@pytest.mark.parametrize(("kind", "library"), KINDS, ids=("Trainer", "Seq2SeqTrainer"))
def test_names_of_the_class(kind: type, library: type) -> None:
    instance = _attributes_of(library)
    names = {name for name in added(kind, library) - instance if not name.startswith("__")}
    assert len(names) > 50
    assert not [name for name in names if not name.startswith(PREFIX)]


def _attributes_of(library: type) -> set[str]:
    """The names that the library's own methods set on an instance."""
    found: set[str] = set()
    for part in library.__mro__[:-1]:
        for name in dir(part):
            function = inspect.getattr_static(part, name)
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            found |= {*code.co_names} if code is not None else set()
    return found


def test_an_order_of_bases_that_hides_a_method_is_refused() -> None:
    def method(self: Any) -> None: ...

    other = type("Other", (transformers.Trainer,), {"training_step": method, "__init__": method})
    compatible = type("Compatible", (transformers.Trainer,), {"compute_loss": method, "own": method, "__init__": method})
    check_order_of_bases(type("Script", (upshift.Trainer, compatible), {}))
    check_order_of_bases(type("Script", (other, upshift.Trainer), {}))
    check_order_of_bases(type("Script", (upshift.Trainer,), {"training_step": method}))
    script = type("Script", (upshift.Trainer, type("Derived", (other,), {})), {})
    refusal = "class Script: Derived comes after upshift.Trainer, which would hide its training_step; write class Script(Derived"
    for trainer_class in (script, type("Smaller", (script,), {})):
        with pytest.raises(RequestError, match=re.escape(refusal)):
            check_order_of_bases(trainer_class)


def test_no_other_class_is_mixed_in() -> None:
    """The test above sees all there are: each class of these packages that overrides a method of transformers.Trainer."""
    mixed = {part for kind, _ in KINDS for part in kind.__mro__}
    found = []
    for package in (upshift.training.hf_trainer, upshift.tuning):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for part in vars(import_module(module.name)).values():
                if isinstance(part, type) and part.__module__ == module.name and "evaluation_loop" in vars(part):
                    found.append(part)
    assert found and set(found) <= mixed


def rows() -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [{"input_ids": (tokens := draw.integers(2, 64, 8).tolist()), "labels": tokens} for _ in range(16)]


def made(kind: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=1)
    )
    arguments = transformers.Seq2SeqTrainingArguments if "Seq2Seq" in kind.__name__ else TrainingArguments
    settings = arguments(
        str(folder), max_steps=4, save_steps=2, eval_strategy="steps", eval_steps=2, report_to="none", use_cpu=True,
        disable_tqdm=True, logging_steps=1, load_best_model_at_end=True,
    )  # fmt: skip
    return kind(model=model, args=settings, train_dataset=rows(), eval_dataset=rows()[:4])


@pytest.mark.parametrize(("kind", "library"), KINDS, ids=("Trainer", "Seq2SeqTrainer"))
def test_names_of_an_instance(kind: Any, library: Any, tmp_path: Path) -> None:
    ours, theirs = made(kind, tmp_path / "ours"), made(library, tmp_path / "theirs")
    for moment in ("made", "trained", "evaluated"):
        names = vars(ours).keys() - vars(theirs).keys()
        assert names and not [name for name in names if not name.startswith(PREFIX)], moment
        if moment == "made":
            ours.train(), theirs.train()
        else:
            ours.evaluate(), theirs.evaluate()


def test_a_subclass_may_use_any_name_without_the_prefix(tmp_path: Path) -> None:
    """Those that were ours once, and all that the mix-ins would have without the prefix."""
    plain = {name.removeprefix("_upshift").removeprefix("upshift_") for name in added(*KINDS[0]) if name.startswith(PREFIX)}
    assert {"_tokenizer", "_mesh"} <= plain
    theirs = set(dir(transformers.Trainer)) | _attributes_of(transformers.Trainer)
    taken = {name: f"the script's {name}" for name in plain - theirs}
    trainer = made(type("Own", (upshift.Trainer,), taken), tmp_path)
    for name, value in taken.items():
        setattr(trainer, name, value)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    again = made(type("Own", (upshift.Trainer,), taken), tmp_path)
    again.train(resume_from_checkpoint=True)
    assert all(getattr(trainer, name) == value for name, value in taken.items())


def test_planning_is_not_counted_as_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = upshift.Trainer._upshift_choose

    def slowly(self: Any) -> Any:
        time.sleep(0.5)
        return choose(self)

    monkeypatch.setattr(upshift.Trainer, "_upshift_choose", slowly)
    trainer = made(upshift.Trainer, tmp_path)
    start = time.perf_counter()
    metrics = trainer.train().metrics
    seconds = time.perf_counter() - start
    assert metrics["planning_runtime"] >= 0.5 and metrics["train_runtime"] <= seconds - metrics["planning_runtime"] + 0.01
    assert metrics["train_samples_per_second"] == pytest.approx(4 * 8 / metrics["train_runtime"], rel=0.01)
