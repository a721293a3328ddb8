"""A disk that is full under a cache, or under temporary files: one line, no traceback, and the work goes on where it can."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint import _mount
from test_train import a_job, home, prepared  # noqa: F401  fixtures

from upshift.cli import main as command_line
from upshift.disk_full import disk_full_message, write_cache_file
from upshift.errors import JobFailed
from upshift.training.data.dataset import TrainingData
from upshift.training.job.processes import job_folder, read_result, run_from_folder


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


def test_what_is_found_in_errors() -> None:
    full_one = OSError(errno.ENOSPC, "No space left on device", "/x/y")
    assert disk_full_message(full_one) == "No space left on device: /x/y"
    assert disk_full_message(RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert disk_full_message(RuntimeError("(sqlite3.OperationalError) database or disk is full"))
    for other in (OSError(errno.EACCES, "Permission denied"), ValueError("no"), KeyboardInterrupt()):
        assert disk_full_message(other) is None
    try:
        try:
            raise full_one
        except OSError as error:
            raise RuntimeError("backend compiler failed") from error
    except RuntimeError as error:
        assert disk_full_message(error) == "No space left on device: /x/y"
    circle = ValueError("a")
    circle.__context__ = circle
    assert disk_full_message(circle) is None


def test_a_cache_goes_without(full: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not write_cache_file("the numbers are", full / "folder" / "numbers.json", "x" * 10_000)
    assert "the numbers are not kept" in caplog.text and "UPSHIFT_CACHE names another folder" in caplog.text
    assert not list(full.rglob("numbers.json*"))


def full_compiler(**_: object) -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/torchinductor/x.cpp")
    except OSError as error:
        raise RuntimeError("backend='inductor' raised:\nmany lines") from error


def test_a_command_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it wrote, and whichever library did."""
    monkeypatch.setattr(command_line, "app", full_compiler)
    monkeypatch.setattr(sys, "argv", ["upshift", "encode"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and "No space left on device: /tmp/torchinductor/x.cpp" in line and "TMPDIR" in line

    def other(**_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(command_line, "app", other)
    with pytest.raises(OSError):
        command_line.main()


def test_the_process_of_a_job_says_it_in_words(
    home: Path, prepared: Callable[[str], TrainingData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    job = a_job(home, tmp_path / "run")
    with job_folder(job, prepared("llama")) as folder:
        run_from_folder(folder, lambda *given: full_compiler(), lambda event: None)
        with pytest.raises(JobFailed, match=r"No space left on device: .*x.cpp.*there is no earlier checkpoint; free some space"):
            read_result(folder, 0, interrupted=False)


def test_an_engine_whose_files_have_no_room(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's own words for it, in a line; nothing of what was begun stays on the disk."""
    openvino = pytest.importorskip("openvino")
    from openvino import opset13

    from upshift.inference import registry
    from upshift.inference.openvino_runtime import make_model_file

    def export() -> object:
        given = opset13.parameter([1, 600], np.float32)
        weights = opset13.constant(np.ones((600, 600), np.float32))
        return openvino.Model([opset13.matmul(given, weights, False, False)], [given])

    (full / "filler").write_bytes(bytes(600_000))  # room for the .xml alone
    path = full / "fp32.xml"
    monkeypatch.setattr(registry, "_import_attribute", lambda *names: lambda build: make_model_file(path, export, None))
    with pytest.raises(JobFailed, match=r"the files that openvino makes of the model could not be written \(.*UPSHIFT_CACHE"):
        registry.build_engine("encode", "openvino", None)
    assert sorted(path.name for path in full.iterdir() if path.suffix != ".lock") == ["filler"]
