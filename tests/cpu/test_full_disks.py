"""A disk that is full under a cache, or under temporary files: one line, no traceback, and the work goes on where it can."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint import _mount
from test_train import home  # noqa: F401  a fixture

from upshift.disk_full import full_disk, keep
from upshift.errors import JobFailed

PATIENCE_SECONDS = 300


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own with no byte free."""
    path = tmp_path / "full"
    reason = _mount(path, "1m")
    if reason is not None:
        pytest.skip(f"a small disk cannot be mounted here: {reason}")
    try:
        with (path / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        assert shutil.disk_usage(path).free == 0
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def upshift(*words: object, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "upshift.cli.main", *map(str, words)]
    env = {**os.environ, "UPSHIFT_CACHE": str(cache), "COLUMNS": "300", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_SECONDS, check=False)
    assert "Traceback" not in done.stderr and "Traceback" not in done.stdout, done.stderr
    return done


def test_what_is_found_in_errors() -> None:
    full_one = OSError(errno.ENOSPC, "No space left on device", "/x/y")
    assert full_disk(full_one) == "No space left on device: /x/y"
    assert full_disk(RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert full_disk(RuntimeError("(sqlite3.OperationalError) database or disk is full"))
    for other in (OSError(errno.EACCES, "Permission denied"), ValueError("no"), KeyboardInterrupt()):
        assert full_disk(other) is None
    try:
        try:
            raise full_one
        except OSError as error:
            raise RuntimeError("backend compiler failed") from error
    except RuntimeError as error:
        assert full_disk(error) == "No space left on device: /x/y"
    circle = ValueError("a")
    circle.__context__ = circle
    assert full_disk(circle) is None


def test_a_cache_goes_without(full: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not keep("the numbers are", full / "folder" / "numbers.json", "x" * 10_000)
    assert "the numbers are not kept" in caplog.text and "UPSHIFT_CACHE names another folder" in caplog.text
    assert not list(full.rglob("numbers.json*"))


def test_planning_with_a_full_cache(full: Path, home: Path) -> None:  # noqa: F811
    done = upshift("plan", home / "llama", "--sequence-length", 32, "--global-batch", 4, cache=full)
    assert done.returncode == 0, done.stderr
    assert "not kept" in done.stderr and "No space left on device" in done.stderr


def test_an_engine_whose_files_have_no_room(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's own words for it, in a line; nothing of what was begun stays on the disk."""
    openvino = pytest.importorskip("openvino")
    from openvino import opset13

    from upshift.inference import engines
    from upshift.inference.openvino_model import make

    def export() -> object:
        given = opset13.parameter([1, 600], np.float32)
        weights = opset13.constant(np.ones((600, 600), np.float32))
        return openvino.Model([opset13.matmul(given, weights, False, False)], [given])

    (full / "filler").write_bytes(bytes(600_000))  # room for the .xml alone
    monkeypatch.setattr(engines, "_named", lambda *names: lambda build: make(full / "fp32.xml", export, None))
    with pytest.raises(JobFailed, match=r"the files that openvino makes of the model could not be written \(.*UPSHIFT_CACHE"):
        engines.build_engine("encode", "openvino", None)
    assert sorted(path.name for path in full.iterdir() if path.suffix != ".lock") == ["filler"]


def test_training_with_a_full_output(full: Path, home: Path, tmp_path: Path) -> None:  # noqa: F811
    (full / "filler").write_bytes(b"")
    (full / "filler").write_bytes(bytes(600_000))
    done = upshift(
        "train", home / "llama", "--from-config", "--data", home / "data.jsonl", "--sequence-length", 32, "--global-batch", 8,
        "--max-steps", 3, "--save-steps", 1, "--trial-seconds", 0, "-o", full / "run", cache=tmp_path / "cache",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("upshift: checkpoint-") or "final model" in last or "full" in last, last
    assert "loadable" in last or "no earlier checkpoint" in last


def test_temporary_files_on_a_full_disk(full: Path, home: Path, tmp_path: Path) -> None:  # noqa: F811
    done = upshift(
        "train", home / "llama", "--from-config", "--data", home / "data.jsonl", "--sequence-length", 32, "--global-batch", 8,
        "--max-steps", 1, "--trial-seconds", 0, "-o", tmp_path / "run", cache=tmp_path / "cache", TMPDIR=str(full),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "space" in done.stderr and "TMPDIR" in done.stderr
