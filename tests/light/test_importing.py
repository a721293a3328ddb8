"""A context of imports moves what large libraries make to the oldest generation, and costs nothing where little is made."""

from __future__ import annotations

import gc

import pytest

from upshift.importing import FEW_OBJECTS, importing


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
