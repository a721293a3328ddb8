"""Studies that begin with others', that several processes share, whose trials have several ranks, and where they are kept."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from searching_trainer import make_trainer
from test_tune import CHEAP, home, new_study, searched  # noqa: F401  home is a fixture
from typer.testing import CliRunner

from upshift.cli.main import app
from upshift.errors import RequestError
from upshift.tuning import trainer
from upshift.tuning.storage import best_points, database_url, enqueue_warm_start, open_database, open_storage
from upshift.tuning.study import open_study

RATE = FloatDistribution(1e-4, 1e-1, log=True)


@pytest.fixture(scope="module")
def shared(home: Path) -> tuple[str, str, Path]:  # noqa: F811
    """Two processes with one command: what each said, the first of them to a terminal."""
    (home / "space.yaml").write_text("learning_rate: {low: 1e-3, high: 1e-1, log: true}\n")
    command = [
        "tune", str(home / "llama"), "--data", str(home / "data.jsonl"), "--space", str(home / "space.yaml"), "--from-config",
        "-o", str(home / "shared"), "--trials", "4", "--max-steps", "9", "--evaluations", "3", "--pruner", "none",
        "--sequence-length", "32", "--price-per-hour", "3600", "--html", str(home / "page.html"),
        *(word for one in CHEAP for word in ("--set", one)),
    ]  # fmt: skip
    terminal, other_end = pty.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(terminal, shown), daemon=True)
    reader.start()
    words = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    with subprocess.Popen(
        [sys.executable, "-m", "upshift.cli.main", *command], stdout=subprocess.PIPE, stderr=other_end, env=words, text=True
    ) as process:
        deadline = time.monotonic() + 200
        while b"running" not in b"".join(shown) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)  # this process has imported everything, and would be done before the other begins
        mine = CliRunner().invoke(app, command)
        output, _ = process.communicate(timeout=300)
    os.close(other_end)
    reader.join(timeout=10)
    assert process.returncode == 0 and mine.exit_code == 0, (b"".join(shown)[-2000:], mine.output[-2000:])
    return output, b"".join(shown).decode(errors="replace"), home


def read_all(terminal: int, into: list[bytes]) -> None:
    try:
        while piece := os.read(terminal, 65536):
            into.append(piece)
    except OSError:  # Linux's word for a terminal whose other end is closed
        pass


def test_two_processes_share_a_study(shared: tuple[str, str, Path]) -> None:
    """None of the trials is run twice; one may be too many, where both ask at the same instant."""
    output, live, home = shared  # noqa: F811
    study = optuna.load_study(study_name="upshift", storage=f"sqlite:///{home / 'shared' / 'study.db'}")
    assert 4 <= len(study.trials) <= 5 and {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert len({trial.params["learning_rate"] for trial in study.trials}) == len(study.trials)
    kept = {path.name for path in (home / "shared").glob("trial-*")}
    assert kept == {f"trial-{study.best_trial.number}"}
    assert "Best trial of" in output and "cost " in output
    assert "running" in live and "learning_rate=" in live  # the table, while trials ran
    page = (home / "page.html").read_text()
    assert "cost" in page and "at 3,600 an hour" in page


def test_what_a_dashboard_reads(shared: tuple[str, str, Path]) -> None:
    """optuna-dashboard asks a storage for its studies and trials, and draws their values."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{shared[2] / 'shared' / 'study.db'}")
    (summary,) = optuna.get_all_study_summaries(storage)
    assert summary.study_name == "upshift" and summary.n_trials >= 4 and summary.best_trial is not None
    assert all(trial.values and trial.params for trial in storage.get_all_trials(summary._study_id))


def test_trials_of_two_ranks_give_what_one_gives(shared: tuple[str, str, Path]) -> None:
    """The best point of another study, tried first, in two ranks: the same loss."""
    home = shared[2]  # noqa: F811
    earlier = optuna.load_study(study_name="upshift", storage=f"sqlite:///{home / 'shared' / 'study.db'}").best_trial
    space = {"learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}}
    found = searched(
        home, home / "ranks", space=space, trials=1, warm_start=[str(home / "shared")], fixed=(*CHEAP, "num_processes=2"),
        arguments={"max_steps": 9, "seed": 42}, global_batch=8,
    )  # fmt: skip
    (row,) = found.best
    assert row.parameters == earlier.params and row.values is not None
    assert row.values["eval_loss"] == pytest.approx(earlier.value, rel=1e-5)


def earlier_study(folder: Path, trials: list[tuple[dict[str, Any], float]]) -> str:
    study = optuna.create_study(study_name="other", storage=open_storage(None, folder))
    for params, value in trials:
        kinds = {"rate": FloatDistribution(1e-6, 10.0), "kind": CategoricalDistribution(("a", "b", "c"))}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions={name: kinds[name] for name in params}, value=value)
        )
    return str(folder)


def test_a_warm_start(tmp_path: Path) -> None:
    """Best first; what this space has not is left out, and a study that goes on is not begun again."""
    place = earlier_study(
        tmp_path / "a",
        [({"rate": 0.01, "kind": "c"}, 3.0), ({"rate": 5.0, "kind": "a"}, 1.0), ({"rate": 0.02, "kind": "b"}, 2.0)],
    )
    study = new_study(tmp_path)
    space = {"rate": RATE, "kind": CategoricalDistribution(("a", "b")), "more": RATE}
    for _ in range(2):
        enqueue_warm_start(study, [place], space)
    assert [trial.system_attrs["fixed_params"] for trial in study.trials] == [
        {"kind": "a"}, {"rate": 0.02, "kind": "b"}, {"rate": 0.01},
    ]  # fmt: skip
    study = optuna.create_study()
    for given, words in (
        (str(tmp_path / "none"), "no output folder of an earlier search"),
        (earlier_study(tmp_path / "b", []), "has no trial that came to its end"),
        (place, "within this space .other."),
    ):
        with pytest.raises(RequestError, match=words):
            enqueue_warm_start(study, [given], {"other": RATE})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql+psycopg2://me:secret@host/db", "driver of its database: run  pip install 'psycopg2-binary'"),
        ("mysql+pymysql://me:secret@host/db", "pip install 'PyMySQL'"),
        ("mongo://me:secret@host/db", "write sqlite:///PATH, postgresql://"),
        ("sqlite:////no/such/folder/study.db", "cannot be opened: .*unable to open"),
    ],
)
def test_storages_that_cannot_be_opened(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for driver in ("psycopg2", "pymysql"):
        monkeypatch.setitem(sys.modules, driver, None)  # as if it were not installed
    with pytest.raises(RequestError, match=words) as raised:
        open_database(url)
    assert "secret" not in str(raised.value)


def test_a_file_is_opened_as_what_it_is(tmp_path: Path) -> None:
    """SQLite's file by its path, as the command prints it, to go on with and to start from; a journal; and nothing else."""
    folder = earlier_study(tmp_path / "a", [({"rate": 0.01}, 1.0)])
    path = str(tmp_path / "a" / "study.db")
    assert database_url(path) == f"sqlite:///{path}"
    journal = open_storage(str(tmp_path / "new" / "journal"), tmp_path)
    optuna.create_study(study_name="in the journal", storage=journal)
    for storage, name in ((path, "other"), (str(tmp_path / "new" / "journal"), "in the journal")):
        assert [study.study_name for study in open_storage(storage, tmp_path).get_all_studies()] == [name]
    for source in (folder, path, f"sqlite:///{path}"):
        study = optuna.create_study()
        enqueue_warm_start(study, [source], {"rate": RATE})
        assert [trial.system_attrs["fixed_params"] for trial in study.trials] == [{"rate": 0.01}]


@pytest.mark.parametrize("content", [b"one\n", b"1\n", b"{}\n", b"[]\n", b"\xff\xfe\n", b'{"op_code":0}\n', b"null\n{}\n"])
def test_files_that_are_no_storage_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for open_it in (lambda: open_storage(str(path), tmp_path), lambda: best_points(str(path), optuna.create_study(), {})):
        with pytest.raises(RequestError, match="neither SQLite nor a journal of Optuna; write sqlite:///PATH"):
            open_it()
    assert path.read_bytes() == content
    with pytest.raises(RequestError, match=r"is a folder; give a file, such as .*study\.db"):
        open_storage(str(tmp_path), tmp_path)
    with pytest.raises(RequestError, match=r"inside cannot be opened: .*; write sqlite:///PATH"):
        open_storage(str(path / "inside"), tmp_path)


def test_a_population_keeps_its_own_rates() -> None:
    """A trial that goes on from another's checkpoint takes its place in the schedule, and not its learning rate."""

    def made(rate: float) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=rate, weight_decay=rate)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)

    def step(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
        optimizer.step()
        schedule.step()

    other, own = made(0.1), made(0.5)
    for _ in range(4):
        step(*other)
    values = [{name: value for name, value in group.items() if name != "params"} for group in own[0].param_groups]
    for mine, theirs in zip(own, other, strict=True):
        mine.load_state_dict(theirs.state_dict())
    trainer.keep_hyperparameters(*own, values)
    assert own[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.6) and own[0].param_groups[0]["weight_decay"] == 0.5
    step(*own)
    assert own[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.5)


def test_a_study_is_begun_by_several_at_once(tmp_path: Path) -> None:
    """All make its tables; Optuna alone looks before it makes each, and most of them fail."""
    for number in range(5):
        together = threading.Barrier(4)

        def begin(_: int, url: str = f"sqlite:///{tmp_path / str(number)}.db", together: threading.Barrier = together) -> int:
            together.wait()
            return len(open_database(url).get_all_studies())

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(begin, range(4))) == [0] * 4


def enqueue(study: optuna.Study) -> None:
    study.enqueue_trial({"learning_rate": 1e-3})


def describe(study: optuna.Study) -> None:
    study.set_user_attr("notes", "mine")


@pytest.mark.parametrize("fill", [enqueue, describe])
@pytest.mark.parametrize("is_upshifts", [False, True])
def test_what_a_user_put_into_a_study_is_not_deleted(
    fill: Callable[[optuna.Study], None], is_upshifts: bool, tmp_path: Path
) -> None:
    """``upshift tune`` with other settings, and a search with another direction. ``is_upshifts``: a command made the study."""
    storage = f"sqlite:///{tmp_path / 'mine.db'}"
    options: dict[str, Any] = {"name": "s", "storage": storage, "folder": tmp_path, "pruner": "none", "seed": 0}
    if is_upshifts:
        open_study(**options, directions=("minimize",), identity={"model": "wrong"})
    study = optuna.create_study(study_name="s", storage=storage, direction="minimize", load_if_exists=True)
    fill(study)
    before = (study.user_attrs.get("notes"), [trial.system_attrs for trial in study.trials])
    trainer = make_trainer(tmp_path, [])
    with pytest.raises(RequestError, match="has direction minimize, not maximize"):
        trainer.hyperparameter_search(
            backend="optuna",
            n_trials=1,
            hp_space={"learning_rate": [1e-3]},
            direction="maximize",
            study_name="s",
            storage=storage,
        )
    if is_upshifts:
        with pytest.raises(RequestError, match="has model 'wrong', not 'right'"):
            open_study(**options, directions=("minimize",), identity={"model": "right"})
    after = optuna.load_study(study_name="s", storage=storage)
    assert (after.user_attrs.get("notes"), [trial.system_attrs for trial in after.trials]) == before


def test_a_warm_start_does_not_keep_the_settings_of_a_wrong_command(tmp_path: Path) -> None:
    earlier = optuna.create_study(study_name="s", storage=f"sqlite:///{tmp_path / 'study.db'}")
    space = {"learning_rate": FloatDistribution(1e-4, 1e-2)}
    earlier.add_trial(optuna.trial.create_trial(params={"learning_rate": 1e-3}, distributions=space, value=1.0))
    options: dict[str, Any] = {"name": "s", "storage": None, "folder": tmp_path / "new", "pruner": "none", "seed": 0}
    study = open_study(**options, directions=("minimize",), identity={"model": "wrong"})
    enqueue_warm_start(study, [str(tmp_path)], space)
    assert [trial.state.name for trial in study.trials] == ["WAITING"]
    assert not open_study(**options, directions=("minimize",), identity={"model": "right"}).trials


def test_a_second_study_does_not_take_the_folder_of_one_that_runs(
    home: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first has no trial yet. Another process of the same study may run beside it, and the folder is free afterwards."""
    space = {"learning_rate": [1e-3]}
    began: list[str] = []

    def begin_another(study: optuna.Study, *_: Any, **__: Any) -> None:
        began.append(study.study_name)
        if began == ["first"]:
            with pytest.raises(RequestError, match="is now used by the study 'first', kept there; .* give another --output"):
                searched(home, tmp_path, space=space, study_name="second")
            with pytest.raises(RequestError, match="is now used by the study 'first'"):
                searched(home, tmp_path, space=space, study_name="first", storage=f"sqlite:///{tmp_path / 'other.db'}")
            with pytest.raises(StopIteration):
                searched(home, tmp_path, space=space, study_name="first")
        raise StopIteration

    monkeypatch.setattr("upshift.tuning.tune.run_study", begin_another)
    for name in ("first", "second"):
        with pytest.raises(StopIteration):
            searched(home, tmp_path, space=space, study_name=name)
    assert began == ["first", "first", "second"]
