"""No option is ignored: given another value, it changes what the command asks of the code behind it, or is refused by its name.

The code behind a command is replaced by a recorder, so that nothing is trained, searched or measured here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from upshift.cli.main import app
from upshift.cli.usage.messages import annotation_of
from upshift.errors import RequestError, UpshiftError

ROOT = Path(__file__).parents[2]
MODEL, DATA, SPACE = (str(ROOT / "examples" / name) for name in ("decoder_8b.json", "texts.txt", "space.yaml"))
ROOT_COMMAND: Any = typer.main.get_command(app)


class Reached(Exception):
    """The code behind a command was called; it says with what."""


class Worker:
    """Commands whose work is one function: its module, its name, and what the command needs to get there."""

    def __init__(self, module: str, name: str, *arguments: str, beside: tuple[str, ...] = ()) -> None:
        self.module, self.name, self.arguments, self.beside = module, name, arguments, beside

    def replaced(self) -> ModuleType:
        def record(*positional: Any, **named: Any) -> None:
            known = {name: value for name, value in named.items() if not callable(value)}
            words = repr((positional, sorted(known.items())))
            raise Reached(re.sub(r" at 0x[0-9a-f]+", "", words))  # addresses of callbacks, which differ in every call

        module = ModuleType(self.module)
        setattr(module, self.name, record)
        for name in self.beside:
            setattr(module, name, SimpleNamespace)
        return module


WORKERS = {
    "train": Worker("upshift.training.run", "run_training", MODEL, "--data", DATA, beside=("Watcher",)),
    "tune": Worker("upshift.tuning.tune", "tune", MODEL, "--data", DATA, "--space", SPACE, beside=("Progress",)),
    "bench compare": Worker("upshift.benchmarking.ab_test", "compare", "true", "false"),
    "compare-runs": Worker("upshift.training.compare_runs", "compare_runs", "one", "other"),
    "load-test": Worker("upshift.serving.load_test.run", "load_test", "http://127.0.0.1:1"),
}
OUTPUT_ALONE = {"--json", "--html", "--help", "--results", "--init"}  # where the answer goes, not what is asked
VALUES = {
    "--dpo-loss": "ipo", "--simpo-gamma": "1",  # of texts that are read before the code behind is reached
    "--set": "precision=fp32", "--allow": "bf16-weights", "--rate": "3,4", "--precision": "fp32", "--lr-scheduler-type": "cosine",
    "--schedule": "gpipe", "--fully-shard": "weights", "--measure": "cpu_seconds",
    "--report-to": "wandb,mlflow",
}  # fmt: skip


def command_of(path: str) -> Any:
    found = ROOT_COMMAND
    for name in path.split():
        found = found.commands[name]
    return found


def options_of(path: str) -> list[Any]:
    return [option for option in command_of(path).params if option.param_type_name == "option"]


def long_name(option: Any) -> str:
    return str(next(name for name in option.opts if name.startswith("--")))


def kinds_of(path: str, option: Any) -> set[Any]:
    """Return the types that the option's values may have."""
    hint, *_ = get_args(annotation_of(command_of(path), option))  # of Annotated[hint, ...]
    return {hint, *get_args(hint)}


def another_value(path: str, option: Any) -> list[str]:
    """Return the words of the command line that give the option another value than its default."""
    name = long_name(option)
    if option.is_flag:
        return [name if not option.default else option.secondary_opts[0]]
    if name in VALUES:
        return [name, VALUES[name]]
    kinds = kinds_of(path, option)
    if int in kinds:
        return [name, str((option.default or 1) + 1)]
    return [name, str((option.default or 0.25) / 2 + 0.25) if float in kinds else "another"]


def outcome(path: str, worker: Worker, *more: str) -> str:
    """Return what the command asks of the code behind it, or the words that it is refused with."""
    with pytest.MonkeyPatch.context() as patch:
        replaced, (package, _, name) = worker.replaced(), worker.module.rpartition(".")
        patch.setitem(sys.modules, worker.module, replaced)
        patch.setattr(import_module(package), name, replaced, raising=False)  # where a test before has imported the real one
        patch.setattr("typer.testing._get_command", lambda _: ROOT_COMMAND)  # it builds all commands anew, 40 ms, at each call
        found = CliRunner().invoke(app, [*path.split(), *worker.arguments, *more])
    if isinstance(found.exception, Reached):
        return str(found.exception)
    if isinstance(found.exception, UpshiftError):
        return f"refused: {found.exception}"
    assert found.exit_code == 2, (found.exit_code, found.exception, found.output)
    return f"refused: {found.output}"


CASES = [(path, long_name(option)) for path in WORKERS for option in options_of(path) if long_name(option) not in OUTPUT_ALONE]


NUMBERS = [
    (path, long_name(option))
    for path in WORKERS
    for option in options_of(path)
    if {int, float} & kinds_of(path, option) and bool not in kinds_of(path, option)
]


@pytest.fixture(scope="module")
def defaults() -> Iterator[dict[str, str]]:
    yield {path: outcome(path, worker) for path, worker in WORKERS.items()}


@pytest.mark.parametrize("path", WORKERS)
def test_the_same_command_asks_the_same(path: str, defaults: dict[str, str]) -> None:
    assert outcome(path, WORKERS[path]) == defaults[path]


@pytest.mark.parametrize("path", WORKERS)
def test_the_code_behind_a_command_is_reached(path: str, defaults: dict[str, str]) -> None:
    assert not defaults[path].startswith("refused")


@pytest.mark.parametrize(("path", "name"), CASES)
def test_an_option_changes_what_is_asked_or_is_refused(path: str, name: str, defaults: dict[str, str]) -> None:
    option = next(option for option in options_of(path) if long_name(option) == name)
    if name in WORKERS[path].arguments:
        given = list(WORKERS[path].arguments)
        given[given.index(name) + 1] = "another"
        found = outcome(path, Worker(WORKERS[path].module, WORKERS[path].name, *given, beside=WORKERS[path].beside))
    else:
        found = outcome(path, WORKERS[path], *another_value(path, option))
    assert found != defaults[path]
    if found.startswith("refused"):
        asked = name.removeprefix("--")
        assert name in found or asked in found or asked.replace("-", "_") in found or "another" in found, found


def xla_outcome(*more: str, has_records: bool) -> str:
    """Return what ``train --backend xla`` asks of the code behind it, of which none runs, or the words of its refusal."""
    asked: list[str] = []

    def recorder(name: str, answer: Any = None) -> Any:
        def record(*positional: Any, **named: Any) -> Any:
            known = {key: value for key, value in named.items() if not callable(value)}
            asked.append(re.sub(r" at 0x[0-9a-f]+", "", repr((name, positional, sorted(known.items())))))
            return answer

        return record

    data = SimpleNamespace(
        training=range(80), evaluation=None, objective=SimpleNamespace(pad_token_id=0), tokenizer=None,
        histogram=SimpleNamespace(longest=8, lengths=(8,), counts=(80,)),
    )  # fmt: skip
    modules: dict[str, dict[str, Any]] = {
        "upshift.xla.data.tfrecord": {
            "has_records": lambda path: has_records, "read_index": recorder("index", SimpleNamespace(num_examples=80)),
            "record_batches": recorder("records"),
        },
        "upshift.xla.data.batches": {"Batches": recorder("batches"), "plan_buckets": recorder("buckets")},
        "upshift.xla.training.train": {"train": recorder("train")},
        "upshift.xla.tensorflow": {"need_tensorflow": lambda purpose: None},
        "upshift.training.data.dataset": {"prepare_data": recorder("data", data)},
        "upshift.training.loop.state": {"fingerprint": lambda sequences: "same"},
        "upshift.training.batches.layout": {"Layout": SimpleNamespace},
        "upshift.training.batches.sampler": {
            "BatchSource": recorder("source"), "evaluation_batches": None,
            "count_steps": lambda epochs, num_sequences, global_batch: int(epochs * num_sequences / global_batch),
        },
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for module, names in modules.items():
            replaced = ModuleType(module)
            vars(replaced).update(names)
            patch.setitem(sys.modules, module, replaced)
        patch.setattr("upshift.models.source.find_model", lambda reference: reference)
        patch.setattr("upshift.cli.train_xla._print_results", lambda *arguments, as_json: None)
        patch.setattr("typer.testing._get_command", lambda _: ROOT_COMMAND)
        found = CliRunner().invoke(app, ["train", "MODEL", "--data", "DATA", "--backend", "xla", *more])
    if isinstance(found.exception, UpshiftError):
        return f"refused: {found.exception}"
    assert found.exit_code in (0, 2), found.exception
    return "\n".join(asked) if found.exit_code == 0 else f"refused: {found.output}"


NOT_OF_XLA = {"--backend", "--data", "--config"} | OUTPUT_ALONE


@pytest.mark.parametrize("has_records", [False, True])
def test_xla_uses_each_option_of_train_or_refuses_it(has_records: bool) -> None:
    """Of texts, and of TFRecord files, whose rows are tokenized already."""
    default = xla_outcome(has_records=has_records)
    assert "'train'" in default and default == xla_outcome(has_records=has_records)
    names = [long_name(option) for option in options_of("train") if long_name(option) not in NOT_OF_XLA]
    assert len(names) > 40
    for option in options_of("train"):
        name = long_name(option)
        if name in names:
            found = xla_outcome(*another_value("train", option), has_records=has_records)
            assert found != default, f"{name} is ignored"
            words = name.removeprefix("--")
            assert not found.startswith("refused") or words in found or words.replace("-", "_") in found, (name, found)


def test_xla_tests_no_plans() -> None:
    assert "trial-seconds" in xla_outcome("--trial-seconds", "5", has_records=False)
    assert xla_outcome("--trial-seconds", "0", has_records=False) == xla_outcome(has_records=False)


@pytest.mark.parametrize(("path", "name"), NUMBERS)
def test_a_wrong_number_is_refused_with_the_option(path: str, name: str) -> None:
    found = outcome(path, WORKERS[path], name, "many")
    assert found.startswith("refused")
    assert name in found


def test_the_version_is_that_of_the_package() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.output) == (0, f"upshift {version('upshift')}\n")


@pytest.mark.parametrize("risk", ["0", "0.5", "-0.1", "1", "nan"])
def test_a_risk_that_is_no_probability_is_refused(risk: str) -> None:
    found = CliRunner().invoke(app, ["plan", "MODEL", "--on", "h100", "--risk", risk])
    assert isinstance(found.exception, RequestError)
    assert f"--risk {risk}" in str(found.exception)


def test_values_that_no_file_can_have_are_refused() -> None:
    refused = {"data to-tfrecord MODEL --data d --output o --shards 0": "--shards", "encode MODEL --input none -o o": "none"}
    for line, words in refused.items():
        found = CliRunner().invoke(app, line.split())
        assert found.exit_code != 0
        assert words in f"{found.exception} {found.output}"


def test_cases_of_benchmarks_are_those_of_the_folder(tmp_path: Path) -> None:
    for command in (["bench", "list"], ["bench", "run", "published"], ["bench", "report"]):
        found = CliRunner().invoke(app, [*command, "--cases", str(tmp_path / "none")])
        assert found.exit_code != 0
        assert isinstance(found.exception, RequestError), found.exception
        assert "none" in str(found.exception) or "published" in str(found.exception)


def test_every_option_of_every_command_is_named_by_a_test() -> None:
    """Those above are, by what they run over."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "tests").rglob("*.py")))
    by_harness = {name for _, name in CASES}
    missing = []

    def look(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            look(inner, f"{path} {name}")
        for option in command.params:
            if option.param_type_name == "option" and not getattr(command, "commands", None):
                name = long_name(option)
                if name not in text and name not in by_harness:
                    missing.append(f"{path} {name}")

    look(ROOT_COMMAND, "upshift")
    assert missing == []


LENGTHS = {"--sequence-length", "--prompt-length", "--output-length", "--max-new-tokens"}


def commands(path: str = "") -> Iterator[str]:
    inside = getattr(command_of(path), "commands", {})
    if path and not inside:
        yield path
    for name in inside:
        yield from commands(f"{path} {name}".strip())


OF_LENGTHS = [(path, long_name(option)) for path in commands() for option in options_of(path) if LENGTHS & {*option.opts}]


@pytest.mark.parametrize(("path", "name"), OF_LENGTHS)
def test_no_length_is_fixed_before_the_model_is_known(path: str, name: str) -> None:
    """A model may have fewer positions than any number that stands in a command."""
    assert next(option for option in options_of(path) if name in option.opts).default is None
