"""Run one setup of a generation race in the process of its engine.

Every setup follows the texts that the reference chose. So all setups compute the same logits, and the race times that."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import cycle, islice
from math import log2
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np
import transformers.modeling_utils  # noqa: F401  import once for all engines
from pydantic import Field

from upshift.errors import JobFailed
from upshift.inference.generation.engines.base import Decoder, DecoderBuild
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.text_batches import follow_texts, time_texts
from upshift.inference.race.early_stopping import MIN_CPU_SHARE, EarlyStopping, serve_race
from upshift.inference.race.types import Contest, RaceRequest, RaceResult, Run, cosines
from upshift.inference.registry import EngineSetup, build_engine
from upshift.inference.weights import engine_folder
from upshift.record import Spread
from upshift.value import Value

FOLLOWED_TOKENS = 16  # new tokens of each prompt whose logits are compared with the reference's
NO_LOGITS = np.zeros((0, 0, 0), dtype=np.float32)
TIMED_PASSES = 3
ENOUGH_SECONDS = 2.5  # no further timed pass begins after this time


class GenerationTask(Value):
    """The task of a generation race. ``new_tokens`` is the length of every answer, a power of two, so that one race
    serves all similar requests."""

    new_tokens: int
    pads: bool = Field(True, description="prompts of different lengths may share a batch; false: each prompt runs alone")

    @classmethod
    def from_options(cls, options: GenerationOptions, max_new_tokens: int | None = None, *, pads: bool = True) -> Self:
        """Return the task with the nearest power of two. If it is above ``max_new_tokens``, return the one below it."""
        power = 2 ** round(log2(options.new_tokens))
        if max_new_tokens is not None and power > max_new_tokens:
            power //= 2
        return cls(new_tokens=power, pads=pads)


class Pass(NamedTuple):
    """The logits and the times of one pass over a batch of prompts."""

    logits: np.ndarray  # [tokens, N, V]
    first_seconds: float
    step_seconds: list[float]
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        return self.first_seconds + sum(self.step_seconds)


def run_setup(request: RaceRequest, setup: EngineSetup, early_stopping: EarlyStopping) -> list[Run]:
    """Return the runs of one setup, one for each batch, or one run if the setup cannot win."""
    contest = request.contest
    sample = json.loads(request.sample.read_text())
    task = GenerationTask.from_json(contest.asked, origin="the race")
    followed_tokens = min(task.new_tokens, FOLLOWED_TOKENS)
    if setup.environment is not None:
        return _run_text_engine(request, setup, early_stopping, sample, task)
    decoder, base = _build(contest, setup)
    sample_rows = len(sample) if task.pads else 1
    expected = np.load(request.reference) if request.reference.is_file() else None
    first_passes = _follow_sample(decoder, sample, expected, followed_tokens, rows=sample_rows)
    logits = np.concatenate([one_pass.logits for one_pass in first_passes], axis=1)
    if expected is None:
        expected = logits
        np.save(request.reference, expected)
    base = _with_agreement(base, logits, expected)
    first_run = _with_times(base.changed(setup=setup.changed(batch=sample_rows)), first_passes, task.new_tokens)
    first_seconds = sum(one_pass.seconds for one_pass in first_passes)
    cpu_share = sum(one_pass.cpu_seconds for one_pass in first_passes) / (first_seconds * setup.threads)
    stopped = early_stopping.stop(first_run, cpu_share)
    if stopped is not None:
        return [first_run.changed(stopped=stopped)]
    runs: list[Run] = []
    for rows in contest.batches:
        if runs and early_stopping.is_late:
            return [*runs[:-1], runs[-1].changed(stopped="time")]
        indices = list(islice(cycle(range(len(sample))), rows))
        # Larger batches decide the race, so one pass of this batch is enough: it has shown whether the setup is too slow.
        is_one_pass_enough = (rows < contest.batches[-1] and not request.limited) or first_seconds > ENOUGH_SECONDS
        is_reused = rows == sample_rows and is_one_pass_enough and cpu_share >= MIN_CPU_SHARE
        passes = first_passes
        if not is_reused:
            passes = _time_passes(decoder, [sample[index] for index in indices], expected.argmax(2)[:, indices])
        runs.append(_with_times(base.changed(setup=setup.changed(batch=rows)), passes, task.new_tokens))
    return runs


def _build(contest: Contest, setup: EngineSetup) -> tuple[Any, Run]:
    """Return the engine of a setup, and its run with the time of loading."""
    start = time.perf_counter()
    folder = engine_folder(contest.task, contest.source, setup.engine)
    largest = setup.changed(batch=max(contest.batches))  # an engine that compiles does so for several rows too
    engine = build_engine(contest.task, setup.engine, DecoderBuild(contest.source, largest, folder))
    return engine, Run(setup=setup, load_seconds=time.perf_counter() - start, weight_bytes=engine.weight_bytes)


def _run_text_engine(
    request: RaceRequest, setup: EngineSetup, early_stopping: EarlyStopping, sample: list[list[int]], task: GenerationTask
) -> list[Run]:
    """Return the runs of a setup whose engine takes whole requests.

    Its logits take long to fetch, so they are compared in a pass of their own, and the timed passes have none. How much of the
    CPU the engine's process had is not known, so no run is stopped for being slow."""
    engine, base = _build(request.contest, setup)
    try:
        expected = np.load(request.reference)
        tokens = expected.argmax(2)
        base = _with_agreement(base, follow_texts(engine, sample, tokens), expected)
        runs: list[Run] = []
        for rows in request.contest.batches:
            prompts = list(islice(cycle(sample), rows))
            passes: list[Pass] = []
            while len(passes) < TIMED_PASSES and sum(one_pass.seconds for one_pass in passes) < ENOUGH_SECONDS:
                first_seconds, *step_seconds = time_texts(engine, prompts, len(tokens))
                passes.append(Pass(NO_LOGITS, first_seconds, step_seconds, 0.0))
            runs.append(_with_times(base.changed(setup=setup.changed(batch=rows)), passes, task.new_tokens))
            stopped = early_stopping.stop(runs[-1], 0.0)
            if stopped is not None:
                return [*runs[:-1], runs[-1].changed(stopped=stopped)]
        return runs
    finally:
        engine.close()  # before the next engine takes the memory


def _with_agreement(run: Run, logits: np.ndarray, expected: np.ndarray) -> Run:
    """Return the run with the agreement of its logits with the reference's, both [tokens, N, V]."""
    width = expected.shape[-1]
    cosine = cosines(logits.reshape(-1, width), expected.reshape(-1, width))
    return run.changed(
        largest_difference=float(np.abs(logits - expected).max() / max(float(np.abs(expected).max()), 1.0)),
        worst_cosine=float(cosine.min()),
        median_cosine=float(np.median(cosine)),
        same_tokens=float((logits.argmax(2) == expected.argmax(2)).mean()),
    )


def _follow_sample(
    decoder: Decoder, sample: list[list[int]], expected: np.ndarray | None, count: int, *, rows: int
) -> list[Pass]:
    """Run the sample once, ``rows`` prompts at a time. Return the pass of each batch.

    ``expected`` are the logits [count, N, V] whose likeliest tokens are followed. None: generate the likeliest tokens."""
    tokens = None if expected is None else expected.argmax(2)
    starts = range(0, len(sample), rows)
    return [
        _follow(decoder, sample[start : start + rows], None if tokens is None else tokens[:, start : start + rows], count)
        for start in starts
    ]


def _follow(decoder: Decoder, prompts: list[list[int]], tokens: np.ndarray | None, count: int) -> Pass:
    """Run one pass of ``count`` tokens per prompt. ``tokens`` [count, N] are the tokens to follow. None: generate the
    likeliest tokens."""
    decoder.keep([])
    cpu_start = time.process_time()
    start = time.perf_counter()
    logits = [decoder.admit(prompts)]
    ends = [time.perf_counter()]
    for step in range(count - 1):
        logits.append(decoder.step(logits[-1].argmax(1) if tokens is None else tokens[step]))
        ends.append(time.perf_counter())
    cpu_seconds = time.process_time() - cpu_start
    stacked = np.stack(logits)
    if np.isnan(stacked).any():
        raise JobFailed("its logits are not numbers")
    return Pass(stacked, ends[0] - start, list(np.diff(ends)), cpu_seconds)


def _time_passes(decoder: Decoder, prompts: list[list[int]], tokens: np.ndarray) -> list[Pass]:
    """Run passes over ``tokens`` [tokens, N] until there are enough, or enough time has passed."""
    passes: list[Pass] = []
    while len(passes) < TIMED_PASSES and sum(one_pass.seconds for one_pass in passes) < ENOUGH_SECONDS:
        passes.append(_follow(decoder, prompts, tokens, len(tokens)))
    return passes


def _with_times(run: Run, passes: list[Pass], new_tokens: int) -> Run:
    """Return the run with the seconds of ``new_tokens`` tokens. The steps that did not run count as long as the median
    step."""
    steps = [median(one_pass.step_seconds or [0.0]) for one_pass in passes]
    seconds = [one_pass.first_seconds + step * (new_tokens - 1) for one_pass, step in zip(passes, steps, strict=True)]
    spread = Spread.of(seconds, num_warmup=1)
    return run.changed(
        seconds=spread,
        per_second=run.setup.batch * new_tokens / spread.p50,
        first_seconds=median(one_pass.first_seconds for one_pass in passes),
        step_seconds=median(steps),
    )


def main(path: Path, answer: Callable[[RaceResult], None]) -> None:
    serve_race(path, answer, run_setup)
