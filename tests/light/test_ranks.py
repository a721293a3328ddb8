"""What launchers say of a rank."""

from __future__ import annotations

import json
import sys

import pytest

from upshift.cli.main import main
from upshift.errors import RequestError
from upshift.settings import RANK_NAMES, Ranks, read_ranks, read_tensorflow_cluster

NUMBERS = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*(name for row in RANK_NAMES for name in row), *NUMBERS, "SLURM_STEP_ID", "MASTER_ADDR"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text", ["abc", "", "-1", "1.0", "99999"])
@pytest.mark.parametrize("variable", [*NUMBERS])
def test_a_variable_that_is_no_number_of_its_kind_is_one_line(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (NUMBERS | {variable: text}).items():
        monkeypatch.setenv(name, value)
    if text == "99999" and variable in ("WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        assert read_ranks() is not None
        return
    with pytest.raises(RequestError, match=f"^the environment variable {variable}={text} is no number from [^\n]*$"):
        read_ranks()


def test_a_command_that_does_not_train_runs_with_any_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.setattr(sys, "argv", ["upshift", "plan", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 and "RANK" not in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "text"), [("WORLD_SIZE", "1"), ("LOCAL_RANK", "-1")])
def test_a_variable_that_says_one_process_is_no_launcher(variable: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    assert read_ranks() is None


@pytest.mark.parametrize("missing", [("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("RANK", "WORLD_SIZE"), ("RANK", "LOCAL_RANK")])
def test_a_variable_without_the_others_is_named(missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*RANK_NAMES[0]} - {*missing}:
        monkeypatch.setenv(name, NUMBERS[name])
    with pytest.raises(RequestError, match=f"set without {' and '.join(missing)}"):
        read_ranks()


def test_the_local_rank_of_another_launcher_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, and the local rank by Slurm's name alone."""
    for name, value in (("PMI_RANK", "3"), ("PMI_SIZE", "4"), ("SLURM_LOCALID", "1")):
        monkeypatch.setenv(name, value)
    ranks = read_ranks()
    assert ranks is not None and ranks.local_rank == 1


def test_the_launchers_own_local_rank_counts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job script may export LOCAL_RANK before srun, which passes it to all tasks."""
    for name, value in (*zip(RANK_NAMES[3], ("3", "4", "1"), strict=True), ("SLURM_STEP_ID", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    ranks = read_ranks()
    assert ranks is not None and ranks.local_rank == 1


def test_a_single_task_of_mpirun_inside_a_step_of_slurm_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for names, numbers in ((RANK_NAMES[1], ("0", "1", "0")), (RANK_NAMES[3], ("0", "8", "0"))):
        for name, value in zip(names, numbers, strict=True):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert read_ranks() is None


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_a_cluster_that_is_no_json_object_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(RequestError, match="TF_CONFIG is no"):
        read_tensorflow_cluster()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {}}))
    assert read_tensorflow_cluster() == {"cluster": {}}


@pytest.mark.parametrize("row", RANK_NAMES, ids=lambda row: row[0])
def test_each_launcher_is_understood(row: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_ranks() is None
    for name, value in zip(row, ("3", "4", "1"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("MASTER_PORT", "29500")
    if row[0] == "SLURM_PROCID":
        assert read_ranks() is None, "a script of sbatch is no rank"
        monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert read_ranks() == Ranks(rank=3, size=4, local_rank=1, address="first", port=29500)


def test_torchruns_own_name_of_no_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(RANK_NAMES[0], ("0", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    for said, understood in (("none", None), ("job-7", "job-7")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", said)
        ranks = read_ranks()
        assert ranks is not None and ranks.launch == understood


@pytest.mark.parametrize("row", RANK_NAMES, ids=lambda row: row[0])
def test_a_single_task_of_srun_or_mpirun_has_no_others_to_meet(
    row: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip((*row, "SLURM_STEP_ID"), ("0", "1", "0", "0"), strict=True):
        monkeypatch.setenv(name, value)
    assert (read_ranks() is not None) == (row[0] == "RANK")  # torchrun may start its only rank again


def test_ranks_without_an_address_are_told_what_to_set() -> None:
    with pytest.raises(RequestError, match="rank 1 of 2, .* set MASTER_ADDR .* and MASTER_PORT"):
        Ranks(rank=1, size=2, local_rank=0, address=None, port=None).meeting_point()
