"""``upshift tune`` and ``hyperparameter_search``: nothing is started in vain, ended early what is no good, nothing is lost."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import psutil
import pytest
from headless import opened
from optuna.pruners import NopPruner, ThresholdPruner
from searching_trainer import FOUND, make_trainer
from transformers import LlamaConfig
from transformers.trainer_utils import HPSearchBackend
from typer.testing import CliRunner
from warm_processes import WarmProcesses

from upshift.cli import train as train_command
from upshift.cli.main import app
from upshift.cli.options import move_flags_to_set
from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.models.source import find_model
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.tuning.jobs import TrialRunner, remove_trial
from upshift.tuning.mup_check import Growth, write_narrow
from upshift.tuning.report import write_study_page
from upshift.tuning.space import _FLOATS, NAMES, make_space
from upshift.tuning.study import StudyTrial, count_finished, decision_steps, make_pruner, open_study, reason_of, run_study
from upshift.tuning.trainer_trial import skip_unread_evaluations
from upshift.tuning.tune import TrialRow, TuneResult, tune

HELPERS = Path(__file__).parents[1] / "helpers"

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards watch the moon rise above old mountains".split()  # noqa: E501, SIM905
SPACE = {"learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}, "global_batch": [4, 4096], "warmup_steps": [0, 2]}
CHEAP = ("torch_compile=off", "precision=fp32", "attention=sdpa")  # little is traced
HP_SCRIPT = HELPERS / "searching_trainer.py"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, chance = tmp_path_factory.mktemp("tune"), np.random.default_rng(0)
    texts = [" ".join(chance.choice(WORDS, size=chance.integers(4, 30))) for _ in range(80)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2, vocab_size=320,
        max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(folder / "llama")
    train_byte_level_bpe(texts, 300).save_pretrained(folder / "llama")
    return folder


def searched(home: Path, output: Path, **more: Any) -> TuneResult:
    options: dict[str, Any] = {"space": SPACE, "trials": 6, "from_config": True, "sequence_length": 32, "trial_seconds": 0.0}
    options |= {"arguments": {"max_steps": 9, "seed": 1}, "fixed": CHEAP}
    return tune(str(home / "llama"), str(home / "data.jsonl"), output=output, **options | more)


@pytest.fixture(scope="module")
def found(home: Path) -> TuneResult:
    return searched(home, home / "out")


def test_the_best_trial_and_its_model(home: Path, found: TuneResult) -> None:
    assert len(found.trials) == 6 and found.best[0].values is not None and found.checkpoint is not None
    complete = [row for row in found.trials if row.state == "complete"]
    assert found.best[0].values["eval_loss"] == min(row.values["eval_loss"] for row in complete if row.values)
    assert (Path(found.checkpoint) / "model.safetensors").is_file()
    kept = {path.name for path in (home / "out").glob("trial-*")}
    assert kept == {f"trial-{row.number}" for row in found.best}
    assert all(row.steps == 9 for row in complete)


@pytest.mark.parametrize("pruner", ["halving", "hyperband", "median"])
def test_evaluations_that_decide_nothing_are_not_made(pruner: str, tmp_path: Path) -> None:
    """The same trials end at the same evaluations as when every one is made; the best is the same."""
    losses = np.random.default_rng(0).normal(size=(60, 1)) + np.random.default_rng(1).normal(size=(60, 27)) / 4

    def ended(at: tuple[int, ...] | None) -> tuple[int, list[int | None]]:
        """The best trial, and after which evaluation each one ended."""
        study = optuna.create_study(study_name="same", pruner=make_pruner(pruner, 27))

        def run(asked: StudyTrial) -> list[float]:
            for number in range(1, 27):
                if at is None or number in at:
                    asked.report(losses[asked.number, number - 1], number)
            return [losses[asked.number, -1]]

        run_study(study, run, trials=60)
        last = [max(one.intermediate_values) if one.state.name == "PRUNED" else None for one in study.trials]
        return study.best_trial.number, last

    at = decision_steps(make_pruner(pruner, 27), 27)
    assert ended(at) == ended(None) and len(set(ended(None)[1])) > 2
    assert len(at) == (27 if pruner == "median" else 4)


def test_a_trial_is_evaluated_at_rungs_and_at_its_end(found: TuneResult) -> None:
    study = optuna.load_study(study_name=found.study, storage=found.storage)
    seen = {frozenset(trial.intermediate_values) for trial in study.trials if trial.state.name == "COMPLETE"}
    assert seen == {frozenset({1, 3})}


def test_what_cannot_run_is_a_row_with_its_reason(found: TuneResult) -> None:
    large = [row for row in found.trials if row.parameters["global_batch"] == 4096]
    assert large and all(row.state == "fail" and "use a global batch of at most" in row.reason for row in large)
    for row in found.trials:
        assert (row.reason == "") == (row.state == "complete"), row


def test_a_study_goes_on_and_keeps_to_what_it_is(home: Path, found: TuneResult) -> None:
    more = searched(home, home / "out", trials=7)
    assert len(more.trials) == 7 and more.trials[:6] == found.trials
    with pytest.raises(RequestError, match="has space .* use the same, or another --output"):
        searched(home, home / "out", space={"learning_rate": [1e-3]})


@pytest.mark.usefixtures("found")
def test_only_what_this_study_wrote_is_removed(home: Path, tmp_path: Path) -> None:
    """Neither a user's folder of a trial's name, nor another study's model, nor a trial's folder that a user has used."""
    kept = [*home.glob("out/trial-*/model.safetensors")]
    with pytest.raises(RequestError, match="has the models of the study 'upshift', kept there; .*another --output"):
        searched(home, home / "out", study_name="other")
    assert kept and [*home.glob("out/trial-*/model.safetensors")] == kept
    notes = tmp_path / "trial-0" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(RequestError, match=r"trial-0 is not of this study's trials; move it away"):
        searched(home, tmp_path)
    (notes.parent / "upshift_run.json").write_text("{}")
    remove_trial(notes.parent)
    assert notes.read_text() == "mine"
    notes.unlink()
    remove_trial(notes.parent)
    assert not notes.parent.exists()
    with pytest.raises(RequestError, match=r"study.db cannot be used: .*give another --output"):
        searched(home, home / "out" / "study.db")


NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320}


@pytest.mark.parametrize("other", [{}, {"num_hidden_layers": 3}, {"vocab_size": 512}, {"rms_norm_eps": 1e-3}])
def test_a_narrow_copy_of_something_else_is_not_written_over(other: dict[str, Any], tmp_path: Path) -> None:
    """Whatever of its config differs: widths, depth, vocabulary, a number of the computation."""
    config = LlamaConfig(**NARROW, max_position_embeddings=64)
    config.save_pretrained(tmp_path / "model")
    folder = tmp_path / "out" / "narrow"
    halved = {name: NARROW[name] // 2 for name in NARROW if name != "vocab_size"} if other else {}
    other_config = LlamaConfig(**{**NARROW, "max_position_embeddings": 64, **halved, **other})
    other_config.save_pretrained(folder)
    with pytest.raises(RequestError, match=r"narrow is another model than .*model of --mup-width 16; give another --output"):
        write_narrow(find_model(str(tmp_path / "model")), 16, folder)
    assert LlamaConfig.from_pretrained(folder).to_dict() == other_config.to_dict()
    write_narrow(find_model(str(tmp_path / "model")), 16, tmp_path / "again")
    write_narrow(find_model(str(tmp_path / "model")), 16, tmp_path / "again")  # the same model once more


CHANGES: dict[str, dict[str, Any]] = {
    "evaluations 9, not 3": {"evaluations": 3},
    "request from_config True, not False": {"from_config": False},
    "space parameters learning_rate high 0.1, not 0.2": {"space": {"learning_rate": {"low": 1e-4, "high": 0.2, "log": True}}},
    "arguments max_steps 9, not 12": {"arguments": {"max_steps": 12}},
}


@pytest.mark.parametrize("words", CHANGES)
def test_values_that_cannot_be_compared_are_not_of_one_study(
    words: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever changes the trials, or the scale at which the pruner compares them. No trial runs here."""
    monkeypatch.setattr("upshift.tuning.tune.run_study", end_before_trials)
    asked = {"space": {"learning_rate": SPACE["learning_rate"]}, "arguments": {"max_steps": 9}}
    for same in ({}, {"trials": 40, "pruner": "median"}):
        with pytest.raises(OpenedError):
            searched(home, tmp_path, **asked, **same)
    with pytest.raises(RequestError, match=f"the study 'upshift' has {words}; use the same, or another --output"):
        searched(home, tmp_path, **{**asked, **CHANGES[words]})


class OpenedError(Exception):
    """The study is open, and its first trial would start."""


def end_before_trials(study: optuna.Study, *_: Any, **__: Any) -> None:
    """End as the process of a study that has a result: settings that differ are then refused."""
    study.add_trial(optuna.trial.create_trial(values=[1.0]))
    raise OpenedError


def fail_before_trials(*_: Any, **__: Any) -> None:
    raise OpenedError


@pytest.mark.parametrize("words", CHANGES)
@pytest.mark.parametrize("state", [None, "FAIL", "RUNNING"])
def test_a_study_without_a_result_takes_the_settings_of_the_corrected_command(
    state: str | None, words: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trials failed, or none began. One that runs may have a result soon."""

    def fail_in_trial(study: optuna.Study, *_: Any, **__: Any) -> None:
        if state is not None and not study.trials:
            study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState[state]))
        raise OpenedError

    monkeypatch.setattr("upshift.tuning.tune.run_study", fail_in_trial)
    asked = {"space": {"learning_rate": SPACE["learning_rate"]}, "arguments": {"max_steps": 9}}
    with pytest.raises(OpenedError):
        searched(home, tmp_path, **asked)
    if state is not None:
        (tmp_path / "trial-0").mkdir()
        (tmp_path / "trial-0" / "upshift_run.json").write_text("{}")
    with pytest.raises(RequestError if state == "RUNNING" else OpenedError):
        searched(home, tmp_path, **{**asked, **CHANGES[words]})
    assert (tmp_path / "trial-0").exists() == (state == "RUNNING")


def test_a_folder_without_a_trial_takes_another_study(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command names a wrong study, and fails before its first trial."""
    monkeypatch.setattr("upshift.tuning.tune.run_study", fail_before_trials)
    asked = {"space": {"learning_rate": [1e-3]}, "arguments": {"max_steps": 9}}
    for name in ("wrong", "right"):
        with pytest.raises(OpenedError):
            searched(home, tmp_path, **asked, study_name=name)
    assert json.loads((tmp_path / "upshift_study.json").read_text())["study"] == "right"
    (tmp_path / "trial-0").mkdir()
    with pytest.raises(RequestError, match="has the models of the study 'right'"):
        searched(home, tmp_path, **asked, study_name="wrong")


def test_another_model_at_the_same_path_is_not_of_the_same_study(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With muP and without it: the check of muP, and the losses, are those of the first model."""
    monkeypatch.setattr("upshift.tuning.tune.run_study", end_before_trials)
    monkeypatch.setattr("upshift.tuning.tune.check_transfer", lambda *arguments: None)  # it takes steps of the models
    model = tmp_path / "model"
    for name, mup in (("plain", {}), ("mup", {"mup_width": 16})):
        asked = {"space": {"learning_rate": [1e-3, 1e-2]}, "output": tmp_path / name, "from_config": True, **mup}
        LlamaConfig(**NARROW, num_hidden_layers=2).save_pretrained(model)
        for _ in range(2):
            with pytest.raises(OpenedError):
                tune(str(model), str(home / "data.jsonl"), **asked)
        LlamaConfig(**NARROW, num_hidden_layers=3).save_pretrained(model)
        words = "has config num_hidden_layers 2, not 3" if not mup else "narrow is another model than"
        with pytest.raises(RequestError, match=words):
            tune(str(model), str(home / "data.jsonl"), **asked)


def test_several_objectives_and_trials_at_once(home: Path) -> None:
    space = {"learning_rate": [1e-3, 1e-2], "global_batch": [2, 8]}
    both = searched(home, home / "both", space=space, objective=("eval_loss", "time"), jobs=2, trials=4)
    assert both.objectives == {"eval_loss": "minimize", "time": "minimize"} and len(both.trials) == 4
    for row in both.best:
        better = [
            one for one in both.trials if one.values and row.values and all(one.values[n] < row.values[n] for n in row.values)
        ]
        assert not better
    page = home / "page.html"
    write_study_page(page, both)
    shown, said = opened(page, home / "profile")
    assert not said and shown.count('class="main-svg"') >= 5 and "Pareto" in shown


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"objective": ("accuracy",)}, "objective 'accuracy' is not possible; give one or several of eval_loss, time"),
        ({"pruner": "best"}, "pruner 'best' is not one of halving"),
        ({"max_cost": 1.0}, "--max-cost needs the machine's price: add --price-per-hour"),
        ({"max_hours": float("nan")}, "--max-hours nan is not possible; give 0 or more"),
        ({"price_per_hour": float("inf")}, "--price-per-hour inf is not possible"),
        ({"seed": -1}, "^seed: must be at least 0"),
        ({"arguments": {"learning_rate": 0.0}}, "^learning_rate: must be above 0"),
        ({"epochs": float("inf")}, "^epochs: must be a finite number"),
        ({"global_batch": 0}, "^global_batch: must be above 0"),
        ({"jobs": 2, "fixed": ("num_processes=2",)}, "a trial of several ranks takes all cores"),
        ({"arguments": {"eval_steps": 2}}, "eval_steps is not for the trials of a search"),
        ({"space": {"eval_steps": [2, 3]}}, "'eval_steps' is not a hyper-parameter that is searched"),
        ({"space": {"epochs": [1, 2]}}, "epochs of the space would have no effect, because max_steps replaces it"),
        ({"space": {"epochs": [1], "max_steps": [2, 3]}, "arguments": {}}, "epochs of the space would have no effect"),
        (
            {"space": {"max_steps": [2, 3]}},
            "max_steps is 9 for all trials, and the space has values for it; leave one of them out",
        ),
        ({"space": {"sequence_length": [16, 32]}}, "sequence_length is 32 for all trials"),
        ({"space": {"global_batch": [2, 4]}, "global_batch": 16}, "global_batch is 16 for all trials"),
        ({"space": {"learning_rate": [0.0]}}, "the space: learning_rate: must be above 0"),
        ({"space": {"global_batch": [4096]}, "trials": 1}, "no trial came to its end: .*use a global batch of at most"),
    ],
)
def test_what_is_refused(more: dict[str, Any], words: str, home: Path, tmp_path: Path) -> None:
    with pytest.raises((RequestError, JobFailed), match=words):
        searched(home, tmp_path, **more)


TWO_VALUES: dict[str, tuple[Any, Any]] = {
    "lr_scheduler_type": ("linear", "cosine"), "adam_epsilon": (1e-8, 1e-6), "warmup_ratio": (0.25, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_value_of_a_space_reaches_its_trial(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values of each name that a space takes: the trial's plan, or its arguments, are others."""
    jobs: list[str] = []

    def prepare(request: TrainRequest, host: Any) -> tuple[Any, int]:
        def job(arguments: Arguments, **more: Any) -> str:
            return f"{request} {arguments} {more['evaluate_at_steps']}"

        return SimpleNamespace(job=job, data=None), request.max_steps or 9

    monkeypatch.setattr("upshift.tuning.jobs.prepare_run", prepare)
    runner = TrialRunner(TrainRequest(model="m", data="d"), tmp_path, {"seed": 1}, evaluations=3, deciding=(1,))
    pool: Any = SimpleNamespace(lease=lambda: nullcontext(SimpleNamespace(run=lambda job, data, on_event: jobs.append(job))))
    runner._servers = pool
    first, second = TWO_VALUES.get(name, (0.25, 0.5) if name in _FLOATS else (3, 4))
    for value in (first, second, first):
        space = make_space({name: [value]})
        runner.run(StudyTrial(0, None, lambda loss, number: None), space.fixed)
    assert jobs[0] == jobs[2] != jobs[1]


def test_a_study_of_a_hundred_trials(tmp_path: Path) -> None:
    """30 would not fit, 5 crash, the rest say their loss at once: results are right and this process does not grow."""
    study = new_study(tmp_path)

    def run(asked: StudyTrial) -> list[float]:
        kind, value = asked.trial.suggest_int("kind", 0, 99), asked.trial.suggest_float("x", -1, 1)
        if asked.number % 10 < 3:
            raise NothingFits(f"{kind} GiB")
        if asked.number % 20 == 7:
            raise JobFailed("died")
        return [value * value]

    before = psutil.Process().memory_info().rss
    run_study(study, run, trials=100)
    states = [trial.state.name for trial in study.trials]
    assert (states.count("PRUNED"), states.count("FAIL"), states.count("COMPLETE")) == (30, 5, 65)
    assert study.best_value == min(trial.values[0] for trial in study.trials if trial.values)
    assert [reason_of(study.trials[number]) for number in (0, 7)][1] == "died"
    assert reason_of(study.trials[0]).startswith("not started: ")
    assert psutil.Process().memory_info().rss < before * 1.02 + 2**20


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([float("nan")], "its objective is not a number"),
        ([1.0, 2.0], "its objective gave 2 values, and the study has 1 directions"),
        (ValueError("of the user's"), "of the user's"),
    ],
)
def test_values_that_are_none_are_a_row_with_its_reason(values: list[float] | ValueError, words: str, tmp_path: Path) -> None:
    """Optuna lets such a trial fail as if its process had been killed: it would be run again, and again."""
    study, asked_for = new_study(tmp_path), []

    def run(asked: StudyTrial) -> list[float]:
        asked_for.append(asked.number)
        assert len(asked_for) < 9
        if asked.number:
            return [1.0]
        if isinstance(values, ValueError):
            raise values
        return values

    run_study(study, run, trials=3, catch=(ValueError,))
    assert asked_for == [0, 1, 2] and words in reason_of(study.trials[0])


def new_study(folder: Path) -> optuna.Study:
    return open_study(
        name="s", storage=None, folder=folder, directions=("minimize",), pruner="none", seed=0, identity={"model": "m"}
    )


def test_a_killed_study_runs_its_trial_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed within a trial; another one takes the study over, counts it once and runs it again."""
    child = subprocess.Popen([sys.executable, "-c", HANGING, str(tmp_path)])
    wait(lambda: (tmp_path / "study.db").exists() and any(trial.params for trial in new_study(tmp_path).trials))
    child.kill()
    child.wait()
    monkeypatch.setattr("upshift.tuning.storage.GRACE_SECONDS", 1)
    time.sleep(2)
    study = new_study(tmp_path)
    run_study(study, lambda asked: [asked.trial.suggest_float("x", 0, 1)], trials=3)
    assert count_finished(study) == 3 and [reason_of(trial) for trial in study.trials if trial.state.name == "FAIL"] == [
        "its process was killed; run again"
    ]
    killed, *_, again = study.trials
    assert any(trial.params == killed.params for trial in study.trials[1:]) and again.state.name == "COMPLETE"


HANGING = """
import sys, time
from pathlib import Path
from upshift.tuning.study import open_study, run_study

def hang(asked):
    asked.trial.suggest_float("x", 0, 1)
    time.sleep(600)

study = open_study(
    name="s", storage=None, folder=Path(sys.argv[1]), directions=("minimize",), pruner="none", seed=0, identity={"model": "m"}
)
run_study(study, hang, trials=3)
"""


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("backend", ["optuna", "wandb", "ray"])
def test_hyperparameter_search(backend: str, tmp_path: Path, warm_processes: WarmProcesses) -> None:
    """A user's script; its model_init, callback and data go to the trials' processes."""
    alone = os.environ | {"WANDB_MODE": "offline", "RAY_USAGE_STATS_ENABLED": "0"}
    ended = warm_processes.run(HP_SCRIPT, backend, tmp_path / "out", timeout=300, cwd=tmp_path, environment=alone)
    assert ended.returncode == 0, ended.stderr[-3000:]
    best = json.loads(ended.stdout.partition(FOUND)[2].splitlines()[0])
    assert 0 < best["objective"] < 4.2 and set(best["hyperparameters"]) == {"learning_rate", "per_device_train_batch_size"}
    if backend == "wandb":
        assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 3
    if backend != "ray":
        count = 2 if backend == "optuna" else 3  # the grid has two points
        assert (tmp_path / "out" / "study.db").is_file() and (tmp_path / "out" / "told").read_text().count("begin") == count
    if backend == "optuna":  # its sampler and its pruner, in the trials' processes
        study = optuna.load_study(study_name="hyperparameter_search", storage=f"sqlite:///{tmp_path / 'out' / 'study.db'}")
        assert {trial.params["learning_rate"]: trial.state.name for trial in study.trials} == {1e-6: "PRUNED", 3e-2: "COMPLETE"}
    if backend == "ray":
        assert "[Exploit] Cloning trial" in ended.stdout + ended.stderr


def reads_loss(measured: dict[str, float]) -> float:
    return measured["eval_loss"]


def test_a_search_goes_on_with_none_but_its_own_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshift.tuning.trainer_study._run_trial", lambda recipe, servers, asked: [1.0 / (1 + asked.number)])
    trainer = make_trainer(tmp_path, [])

    def search(**other: Any) -> Any:
        asked = {"hp_space": {"learning_rate": [1e-3, 1e-2]}, "compute_objective": reads_loss, "n_trials": 2}
        return trainer.hyperparameter_search(backend="optuna", **asked | other)

    assert search().run_id == "1" and search(n_trials=3).run_id == "2"
    for other, words in (
        ({"direction": "maximize"}, "has direction minimize, not maximize; use the same, or another study_name="),
        ({"hp_space": {"learning_rate": [1e-3, 1.0]}}, "has hp_space "),
        ({"compute_objective": lambda measured: measured["eval_accuracy"]}, "has compute_objective 'reads_loss.eval_loss.', not"),
    ):
        with pytest.raises(RequestError, match=words):
            search(**other)
    drawn = [lambda trial, high=high: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, high)} for high in (1e-3, 1.0)]
    assert search(hp_space=drawn[0], study_name="drawn").run_id == "1"
    with pytest.raises(RequestError, match=r"has hp_space .*high=0.001.*, not .*high=1.0"):
        search(hp_space=drawn[1], study_name="drawn")


def test_searches_that_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [])
    for asked, words in (
        ({"backend": "sigopt"}, "SigOpt.*use backend='optuna'"),
        ({"backend": "ax"}, "'ax' is not one of optuna, ray, wandb"),
        ({"backend": "optuna", "direction": "down"}, "'down' is not minimize or maximize"),
        ({"backend": "wandb"}, "add report_to="),
        ({"backend": "optuna", "storage": optuna.storages.InMemoryStorage()}, "a storage in memory"),
    ):
        with pytest.raises(RequestError, match=words):
            trainer.hyperparameter_search(n_trials=1, **asked)
    trainer._upshift_made_with[1]["data_collator"] = threading.Lock()
    with pytest.raises(RequestError, match="cannot go there"):
        trainer.hyperparameter_search(n_trials=1, backend="optuna")


def evaluated_steps(folder: Path, *, steps: dict[str, Any], pruner: Any, values: dict[str, Any] | None = None) -> list[int]:
    """Run one trial in this process, as its own process does. Return the steps at which Optuna got an evaluation."""
    trainer = make_trainer(folder, [], **steps)
    study = optuna.create_study(pruner=pruner)

    def hp_space(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2), **(values or {})}

    trainer.hp_space = hp_space
    trainer.compute_objective = lambda measured: measured["eval_loss"]
    trainer.hp_name = None
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.objective = None
    skip_unread_evaluations(trainer, study)
    trial = study.ask()
    with suppress(optuna.TrialPruned):
        trainer.train(trial=trial)
    return sorted(study.get_trials()[0].intermediate_values)


def test_a_search_by_epochs_is_pruned_where_the_same_search_by_steps_is(tmp_path: Path) -> None:
    """Also if the number of steps, or what reads evaluations, is one of the searched values."""
    halving = make_pruner("halving", 9)
    by_steps = {"max_steps": 12, "eval_steps": 1}
    by_epochs = {"max_steps": -1, "num_train_epochs": 1.5, "eval_steps": 1}  # 32 rows in batches of 4: 12 steps
    assert evaluated_steps(tmp_path / "a", steps=by_steps, pruner=halving) == [1, 3, 9, 12]
    assert evaluated_steps(tmp_path / "b", steps=by_epochs, pruner=halving) == [1, 3, 9, 12]
    searched_steps = {"max_steps": 12}
    stale = {"max_steps": 2, "eval_steps": 1}
    assert evaluated_steps(tmp_path / "c", steps=stale, pruner=halving, values=searched_steps) == [1, 3, 9, 12]
    reads = {"max_steps": 4, "eval_steps": 1, "metric_for_best_model": "eval_loss"}
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau"}
    assert evaluated_steps(tmp_path / "d", steps=reads, pruner=NopPruner(), values=plateau) == [1, 2, 3, 4]
    assert evaluated_steps(tmp_path / "e", steps=reads, pruner=NopPruner()) == [4]
    assert evaluated_steps(tmp_path / "f", steps=by_epochs, pruner=ThresholdPruner(upper=0.0)) == [1]


def test_the_command_for_the_whole_model_trains_as_the_best_trial_did(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With searched values, those that the space fixes, and the options of the search, each as exact as it was."""
    space = make_space({"learning_rate": [1e-3, 1.2345678e-3], "warmup_steps": 3, "adam_beta2": [0.95, 0.99], "global_batch": 4})
    row = TrialRow(
        number=0, state="complete", values={"eval_loss": 1.0}, parameters={"learning_rate": 1.2345678e-3, "adam_beta2": 0.95},
        seconds=1.0, steps=3, reason="",
    )  # fmt: skip
    growth = Growth(widths=(8, 16), with_mup=1.0, without=3.0)

    def searched_already(*arguments: Any, **options: Any) -> TuneResult:
        return TuneResult(
            study="s", storage="x", objectives={"eval_loss": "minimize"}, best=(row,), trials=(row,), seconds=1.0,
            fixed_parameters=space.fixed, mup_base=str(tmp_path / "a b" / "narrow"), mup_check=growth,
        )  # fmt: skip

    monkeypatch.setattr("upshift.tuning.tune.tune", searched_already)
    (tmp_path / "space.yaml").write_text("learning_rate: [0.1]\n")
    LlamaConfig().save_pretrained(tmp_path / "a model")
    (tmp_path / "it's data").write_text("text")
    monkeypatch.chdir(tmp_path)
    words = ["tune", "a model", "--data", "it's data", "--space", str(tmp_path / "space.yaml"), "--from-config", "-o", "o"]
    options = [
        "--sequence-length", "32", "--max-steps", "7", "--text-column", "body", "--seed", "5", "--nproc", "2", "--set",
        "precision=fp32", "--allow", "bf16-weights", "--long-rows", "cut",
    ]  # fmt: skip
    done = CliRunner().invoke(app, [*words, "--mup-width", "8", *options])
    assert done.exit_code == 0, done.output
    command = next(line for line in done.output.splitlines() if line.startswith("The whole model: "))
    typed = shlex.split(command.removeprefix("The whole model: upshift train "))
    asked = ["a model", "--data", "it's data", "--from-config", "--mup-base", str(tmp_path / "a b" / "narrow"), *options]
    asked += ["--learning-rate", "1.2345678e-3", "--warmup-steps", "3", "--global-batch", "4"]
    requests = [train_command.request_of(move_flags_to_set(train_command.parse(words))) for words in (typed, asked)]
    assert sorted(requests[0].fixed) == sorted(requests[1].fixed)
    assert requests[0].changed(fixed=()) == requests[1].changed(fixed=())
    assert "And adam_beta2=0.95: by upshift.train(..., arguments=)" in done.output
