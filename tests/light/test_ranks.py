"""What launchers say of a rank."""

from __future__ import annotations

import pytest

from upshift.errors import RequestError
from upshift.settings import RANK_NAMES, Ranks, read_ranks


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*(name for row in RANK_NAMES for name in row), "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT"]:
        monkeypatch.delenv(name, raising=False)


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
