"""What a race remembers: no failure that may pass, no file that cannot be read, no wrong agreement of empty texts."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upshift.atomic_file import sync_and_rename
from upshift.errors import JobFailed, RequestError
from upshift.fork_server import ChildExit
from upshift.hardware import describe
from upshift.inference import registry
from upshift.inference.race import race as race_module
from upshift.inference.race.early_stopping import serve_race
from upshift.inference.race.policy import RACE_SECONDS, RacePolicy
from upshift.inference.race.types import Contest, Limits, Quality, RaceRequest, RaceResult, Run, cosines
from upshift.inference.registry import EngineSetup
from upshift.models.source import ModelSource
from upshift.planning.analysis import tpu_programs
from upshift.planning.trials.store import remove_plan
from upshift.record import Spread

NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="an engine's file imports torch, which is not installed")
SETUP = EngineSetup(engine="torch", precision="fp32", threads=1, batch=1)
ANSWERED = Run(setup=SETUP, seconds=Spread.of([0.5]), per_second=2.0, largest_difference=0.0, worst_cosine=1.0)


def request_in(folder: Path, *setups: EngineSetup) -> RaceRequest:
    weights = folder / "model.safetensors"
    if not weights.exists():  # a later change would make them other weights
        weights.touch()
    source = ModelSource(reference="m", directory=folder, config={"model_type": "bert"})
    contest = Contest(task="encode", source=source, asked="{}", pad=0, batches=(1,), hint="throughput")
    return RaceRequest(contest=contest, setups=setups, sample=folder / "sample.json", reference=folder / "reference.npy")


def is_remembered(run: Run) -> bool:
    return RacePolicy("exact", Limits(), 1.0).is_final([ANSWERED, run], (), RACE_SECONDS)


@pytest.mark.parametrize(
    ("error", "remembered"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("basic_ios: No space left on device"), False),
        (MemoryError(), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), False),
        (RuntimeError("std::bad_alloc"), False),
        (ValueError("no such kernel"), True),
        (ImportError("libx.so: cannot open shared object file"), True),
    ],
)
def test_a_failure_of_a_full_disk_or_memory_is_not_remembered(tmp_path: Path, error: Exception, remembered: bool) -> None:
    def fail(*_: object) -> list[Run]:
        raise error

    (tmp_path / "request.json").write_text(request_in(tmp_path, SETUP).to_json())
    results: list[RaceResult] = []
    serve_race(tmp_path / "request.json", results.append, fail)
    (run,) = results[0].runs
    assert run.failure is not None and is_remembered(run) is remembered


@pytest.mark.parametrize(
    ("exit_", "remembered"),
    [
        ({"timed_out": True, "signal": 9}, False),
        ({"timed_out": False, "signal": 9}, False),  # the system had no memory left
        ({"timed_out": False, "signal": 7}, False),  # no room for a page of a mapped file
        ({"timed_out": False, "exit": 1, "last_words": "terminate called after throwing 'std::bad_alloc'"}, False),
        ({"timed_out": False, "signal": 11}, True),
        ({"timed_out": False, "exit": 7}, True),
    ],
)
def test_the_end_of_a_process_is_remembered_unless_it_is_temporary(
    tmp_path: Path, exit_: dict[str, object], remembered: bool
) -> None:
    ended = ChildExit(**{"signal": None, "exit": None, "last_words": "", **exit_})

    class Server:
        def ask(self, *_: object, **__: object) -> Iterator[ChildExit]:
            yield ended

    (run,) = race_module.stream_runs(Server(), request_in(tmp_path, SETUP))  # type: ignore[arg-type]
    assert isinstance(run, Run) and run.failure is not None and is_remembered(run) is remembered


def race_in(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    quality: Quality = "exact",
    *,
    difference: float = 0.0,
    engine: str | None = None,
    failure: str | None = None,
) -> race_module.Race:
    """Race two engines that are made up. ``difference``: to the reference, of all engines. ``failure``: of all but torch."""

    def answer(_: object, request: RaceRequest) -> Iterator[Run]:
        for setup in request.setups:
            if failure is not None and setup.engine != "torch":
                yield Run(setup=setup, failure=failure)
            else:
                yield ANSWERED.changed(setup=setup, largest_difference=difference)

    monkeypatch.setattr(race_module, "is_available", lambda setup: setup.engine in ("torch", "openvino"))
    monkeypatch.setattr(race_module, "check_room", lambda *room: None)
    monkeypatch.setattr(race_module, "stream_runs", answer)
    monkeypatch.setenv("UPSHIFT_CACHE", str(folder / "cache"))
    policy = RacePolicy(quality, Limits(), 1.0, engine=engine)
    contest = request_in(folder).contest
    return race_module.race(contest, describe("epyc-7763"), [[1, 2]], policy, forecast=lambda: lambda setup: 1.0)


@NEEDS_TORCH
@pytest.mark.parametrize("content", ["", '{"runs": [', json.dumps({"runs": [], "of_another_version": 1})])
def test_a_race_file_that_cannot_be_read_is_replaced(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = race_in(tmp_path, monkeypatch)
    assert first.file is not None and race_in(tmp_path, monkeypatch).recalled
    first.file.write_text(content)
    other = first.file.with_name("0.5.json")
    other.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert not race_in(tmp_path, monkeypatch).recalled
    assert str(first.file) in caplog.text and str(other) in caplog.text and "racing again" in caplog.text
    assert race_in(tmp_path, monkeypatch).recalled and not other.exists()


@NEEDS_TORCH
def test_a_message_names_only_an_engine_that_the_user_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="^no setup is within --quality exact .*allow less, or delete") as refused:
        race_in(tmp_path, monkeypatch, difference=1.0)
    assert "None" not in str(refused.value)


@NEEDS_TORCH
def test_an_engine_that_fails_is_no_matter_of_quality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = r"^the model does not run in --engine openvino here \(fp32 RuntimeError: no; .*use another engine, or delete"
    with pytest.raises(RequestError, match=text):
        race_in(tmp_path, monkeypatch, 0.9, engine="openvino", failure="RuntimeError: no")


class Odd(Exception):  # noqa: N818  of a library
    pass


@pytest.mark.parametrize("name", sorted(name for name, spec in registry.ENGINES.items() if spec.libraries != ("torch",)))
@pytest.mark.parametrize("error", [RuntimeError("[json.exception.302]\ntype must be string"), OSError("odd"), Odd("a\nb")])
def test_the_error_of_a_library_that_loads_a_model_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, error: Exception
) -> None:
    def load(build: object) -> object:
        raise error

    monkeypatch.setattr(registry, "_import_attribute", lambda *names: load)
    task = next(iter(registry.ENGINES[name].factories))
    with pytest.raises(JobFailed, match=f"the engine {name} does not load the model .* delete {tmp_path}") as refused:
        registry.build_engine(task, name, SimpleNamespace(folder=tmp_path))
    assert "\n" not in str(refused.value) and type(error).__name__ in str(refused.value)


VECTORS = st.lists(st.lists(st.sampled_from([0.0, 1e-9, -1.0, 3.0]), min_size=3, max_size=3), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(left=VECTORS, scale=st.sampled_from([1e-9, 1.0, 1e9]))
def test_every_vector_agrees_with_itself_also_one_of_zeros(left: list[list[float]], scale: float) -> None:
    vectors = np.array(left, dtype=np.float32) * np.float32(scale)
    assert np.allclose(cosines(vectors, vectors.copy()), 1.0, atol=1e-6)
    zeros = np.zeros_like(vectors)
    assert (cosines(vectors, zeros) == np.where(np.abs(vectors).sum(1) == 0.0, 1.0, 0.0)).all()


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_converted_model_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, is_folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "writing-model"
    path = tmp_path / "model"
    (temporary / "parts").mkdir(parents=True) if is_folder else temporary.write_text("weights")
    files = [temporary / "config.json", temporary / "parts" / "model.bin"] if is_folder else [temporary]
    for file in files:
        file.write_text("weights")
    on_the_disk: set[int] = set()

    def sync(descriptor: int) -> None:
        assert not path.exists()
        on_the_disk.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    inodes = {file.stat().st_ino for file in files}
    sync_and_rename(temporary, path)
    assert path.exists() and not temporary.exists() and on_the_disk == inodes


def test_a_proof_that_cannot_be_read_is_removed_when_a_plan_fails(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"  # of a race of plans
    path.write_text('{"tried": [')
    remove_plan(path, None)  # type: ignore[arg-type]  # no plan is compared
    assert not path.exists()


def test_a_row_of_a_tpu_program_that_cannot_be_read_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    (tmp_path / tpu_programs.FILE_NAME).write_text('{"kind": "trai\n\n')
    assert tpu_programs.stored_programs(request_in(tmp_path).contest.source, "tpu-v5e") == []
