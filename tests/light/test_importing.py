"""A context of imports moves what large libraries make to the oldest generation, and costs nothing where little is made."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest

from upshift.importing import FEW_OBJECTS, RARELY, collecting_rarely, importing


@pytest.mark.parametrize(("made", "moves"), [(100, False), (2 * FEW_OBJECTS, True)])
def test_objects_are_moved_where_many_are_made(made: int, moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To count the frozen objects visits each of them, and a command that imports nothing new need not wait for that."""
    calls: list[str] = []

    def count() -> int:
        calls.append("count")
        return 0

    monkeypatch.setattr(gc, "get_freeze_count", count)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with importing():
        objects: list[list[int]] = [[] for _ in range(made)]
        assert not gc.isenabled() and len(objects) == made
    assert calls == (["count", "freeze", "unfreeze"] if moves else [])
    assert gc.isenabled()


def test_frozen_objects_of_the_caller_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with importing():
        objects: list[list[int]] = [[] for _ in range(2 * FEW_OBJECTS)]
        assert len(objects) == 2 * FEW_OBJECTS
    assert calls == [] and gc.isenabled()


@pytest.mark.parametrize(("chosen", "inside"), [(700, RARELY), (0, 0), (10 * RARELY, 10 * RARELY)])
@pytest.mark.parametrize("fails", [False, True])
def test_no_program_collects_more_often_than_it_chose(chosen: int, inside: int, fails: bool) -> None:
    """0 is never. The program's thresholds come back, also after an error."""
    earlier = gc.get_threshold()
    try:
        gc.set_threshold(chosen, 7, 5)
        with suppress(ValueError), collecting_rarely():
            assert gc.get_threshold()[:2] == (inside, 7)
            if fails:
                raise ValueError
        assert gc.get_threshold()[:2] == (chosen, 7)
    finally:
        gc.set_threshold(*earlier)
