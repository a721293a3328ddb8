"""A run that resumes notices any other data, and any other option before it reads the data."""
# ruff: noqa: F811  fixtures of another file

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_every_option import another_value, long_name, options_of
from test_train import GLOBAL_BATCH, LENGTH, a_job, a_plan, home, prepared  # noqa: F401  fixtures
from transformers import AutoConfig

from upshift.cli.train import parse, request_of
from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.training.arguments import Arguments
from upshift.training.data.dataset import TrainingData
from upshift.training.data.tokens import Sequences
from upshift.training.job.job import run_job
from upshift.training.loop.state import CHANGEABLE_ARGUMENTS, WITHOUT_WORDS, fingerprint
from upshift.training.run import Watcher, run_training

COMPARED_APART = {"sequence_length"}  # by the run file, under its own name
FOLLOWS = {"reference"}  # from the data and the model
NAMES = {field.name for field in fields(Sequences)} - COMPARED_APART - FOLLOWS


def some_sequences() -> Sequences:
    values: dict[str, Any] = {
        "tokens": np.arange(12, dtype=np.int32), "starts": np.array([0, 5]), "lengths": np.array([5, 7]), "sequence_length": 8,
        "labels": np.arange(12, dtype=np.int32), "source_lengths": np.array([2, 3]), "reference": np.zeros(2, np.float32),
        "margins": np.array([0.5, 0.5], np.float32), "ratings": np.array([True, True]),
    }  # fmt: skip
    assert {*values} == {field.name for field in fields(Sequences)}
    return Sequences(**values)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_array_of_the_data_is_in_its_fingerprint(name: str) -> None:
    """A value that changes, and an array that is missing."""
    sequences = some_sequences()
    changed = getattr(sequences, name).copy()
    changed[-1] = not changed[-1] if changed.dtype == np.bool_ else changed[-1] + 1
    others = [replace(sequences, **{name: changed})]
    if name not in ("tokens", "starts", "lengths"):
        others.append(replace(sequences, **{name: None}))
    found = [fingerprint(other) for other in (sequences, *others)]
    assert len({*found}) == len(found) and fingerprint(some_sequences()) == found[0]
    assert fingerprint(replace(sequences, reference=np.ones(2, np.float32))) == found[0]


PAGE = Path(__file__).parents[3] / "docs" / "training_run.md"
NOT_OF_A_RUN = {  # where the answer goes, where options come from, and whether a run begins or goes on
    "--output", "--json", "--backend", "--config", "--init", "--from-axolotl", "--from-llama-factory", "--resume", "--overwrite",
}  # fmt: skip
OPTIONS = [option for option in options_of("train") if long_name(option) not in NOT_OF_A_RUN]
MIDWAY = {
    "--max-steps": "3", "--learning-rate": "0.003", "--warmup-steps": "2", "--max-grad-norm": "0.5", "--eval-steps": "1",
    "--save-steps": "1", "--sequence-length": str(LENGTH), "--global-batch": str(GLOBAL_BATCH), "--trial-seconds": "0",
}  # fmt: skip
OTHER_VALUES = {  # of options that take no other word, or whose usual other value the run has
    "--max-steps": "4", "--objective": "dpo", "--metric-for-best-model": "accuracy", "--data-format": "text", "--loss-on": "all",
    "--chat-template": "chatml", "--split": "train[:50%]", "--long-rows": "split", "--kto-loss": "apo_zero_unpaired",
    "--lora-target": "q_proj", "--lora-modules-to-save": "lm_head", "--report-to": "tensorboard", "--warmup-steps": "1",
    "--max-grad-norm": "0.25", "--text-column": "words",
}  # fmt: skip


class DataRead(Exception):
    """The options were accepted, and the data is read next."""


def may_change() -> set[str]:
    """Return the options that the page about runs lets a run change, some of them under a condition."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| `--.* \| .*\b[Yy]ou may ", line)]
    assert len(rows) == 4
    return {name for row in rows for name in re.findall(r"`(--[\w-]+)`", row.split("|")[1])}


@pytest.fixture(scope="module")
def run_so_far(home: Path, prepared: Callable[[str], TrainingData], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run that can go on."""
    output = tmp_path_factory.mktemp("midway") / "out"
    narrow = AutoConfig.from_pretrained(home / "llama")
    narrow.update({"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 1, "head_dim": 16})
    narrow.save_pretrained(home / "narrow")
    plan = a_plan(model=find_model(str(home / "llama")).model_hash)
    run_job(a_job(home, output, plan=plan, max_steps=3, eval_steps=1, save_steps=1, stop_after_tokens=1), prepared("llama"))
    return output


def resume(home: Path, output: Path, given: dict[str, str], flags: list[str]) -> None:
    words = [word for option in ({"--data": str(home / "data.jsonl")} | MIDWAY | given).items() for word in option]
    words = [str(home / "llama"), *words, "--output", str(output), "--resume", *flags]
    run_training(request_of(parse(words)), Watcher())


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise DataRead

    monkeypatch.setattr("upshift.training.run.prepare_data", read)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("option", OPTIONS, ids=long_name)
def test_an_option_may_change_or_is_refused_by_name_before_the_data_is_read(option: Any, home: Path, run_so_far: Path) -> None:
    name = long_name(option)
    other_values = OTHER_VALUES | {"--mup-base": str(home / "narrow")}
    value = [other_values[name]] if name in other_values else another_value("train", option)[1:]
    flags = ["--from-config"] if name != "--from-config" else []
    given, more = ({name: value[0]}, flags) if value else ({}, [*flags, name])
    with pytest.raises((DataRead, RequestError)) as caught:
        resume(home, run_so_far, given, more)
    if name in may_change():
        assert caught.type is DataRead, caught.value
    else:
        assert caught.type is RequestError and re.search(name[2:].replace("-", "[-_]"), str(caught.value)), caught.value


@pytest.mark.usefixtures("no_data")
def test_the_same_line_goes_on_and_both_values_are_named(home: Path, run_so_far: Path) -> None:
    with pytest.raises(DataRead):
        resume(home, run_so_far, {}, ["--from-config"])
    batch = "global_batch=4 differs from the run in .*, which has global_batch=8; resume with --global-batch 8,"
    with pytest.raises(RequestError, match=batch):
        resume(home, run_so_far, {"--global-batch": "4"}, ["--from-config"])
    with pytest.raises(RequestError, match=r"max_grad_norm=0.25 differs .*; resume with --max-grad-norm 0.5,"):
        resume(home, run_so_far, {"--max-grad-norm": "0.25"}, ["--from-config"])
    with pytest.raises(RequestError, match=r"you gave --eval-size 2, and the run in .* has no --eval-size; resume with"):
        resume(home, run_so_far, {"--eval-size": "2"}, ["--from-config"])


@pytest.mark.usefixtures("no_data")
def test_a_length_that_is_not_given_is_that_of_the_run(home: Path, run_so_far: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model's default is another one."""
    given = {"--data": str(home / "data.jsonl")} | {name: value for name, value in MIDWAY.items() if name != "--sequence-length"}
    options = [word for option in given.items() for word in option]
    with pytest.raises(DataRead):
        words = [str(home / "llama"), *options, "--output", str(run_so_far), "--resume", "--from-config"]
        run_training(request_of(parse(words)), Watcher())
    assert f"--sequence-length is {LENGTH}, as in the run in {run_so_far}" in caplog.text


def test_the_words_of_a_difference_are_options_of_the_command() -> None:
    names = {name for option in options_of("train") for name in option.opts}
    listed = {"global_batch", "sequence_length", "objective", *Arguments.model_fields} - {*WITHOUT_WORDS, *CHANGEABLE_ARGUMENTS}
    assert {name for name in listed if f"--{name.replace('_', '-')}" not in names} == set()
