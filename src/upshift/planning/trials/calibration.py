"""Correct predictions with earlier runs on this machine: the same plan by its own numbers, others by the median ratio.

Every run and trial appends one line with predicted and measured numbers to a file of the cache folder, which is safe to delete.
A line counts only for the host, the libraries and the formulas that it was made with. So a new version of any of them starts
without lines. A described host has no lines, because nothing ran on it.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import Field

from upshift.atomic_file import write_whole
from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.planning.cost.memory import scale_to_peak
from upshift.planning.cost.process_memory import memory_limit
from upshift.planning.cost.uncertainty import (
    MIN_RECORDS,
    Correction,
    Number,
    held_memory_spread,
    remeasured,
    transfer,
)
from upshift.planning.plan import Compile, Plan, Precision
from upshift.planning.search.ranking import COST_KEY, Candidate, Ranking, TooBig
from upshift.planning.workload import Workload
from upshift.settings import read_settings
from upshift.value import Value
from upshift.versions import installed_version

FILE_NAME = "calibration.jsonl"
FILES_WITHOUT_FORMULAS = ("__init__.py", "uncertainty.py")  # files of cost/ that do not change a predicted number
MAX_BYTES = 2**19  # the largest file, some 1,200 lines; then the newer half is kept
TRANSFERRED_NUMBERS: tuple[Number, ...] = (
    "step",
    "held",
)  # allocated memory follows from a model's own trace

logger = logging.getLogger(__name__)


class MeasuredPair(Value):
    """A number as the formulas predict it, and as it was measured."""

    predicted: float = Field(gt=0)
    measured: float = Field(gt=0)


class Sample(Value):
    """One plan that ran: seconds of a step, bytes of memory. The sample names no model, no path and no person."""

    made_with: str = Field(description="host, libraries and formulas")
    job: str = Field(description="hash of model, plan and lengths")
    precision: Precision
    torch_compile: Compile
    kind: Literal["run", "trial"]
    numbers: dict[Number, MeasuredPair]


def sample_of(
    plan: Plan, workload: Workload, kind: Literal["run", "trial"], numbers: dict[Number, tuple[float, float | None]]
) -> Sample:
    """Return a sample of a plan that ran. ``numbers``: (by formula, measured); None: not measured."""
    pairs = {
        name: MeasuredPair(predicted=predicted, measured=measured) for name, (predicted, measured) in numbers.items() if measured
    }
    return Sample(
        made_with=provenance(plan.host),
        job=job_key(plan, workload),
        precision=plan.precision,
        torch_compile=plan.torch_compile,
        kind=kind,
        numbers=pairs,
    )


def job_key(plan: Plan, workload: Workload) -> str:
    """Return a key that is the same for the same work: model, plan, and the lengths of the sequences."""
    return _job_key(plan, _lengths_key(workload))


def _job_key(plan: Plan, lengths: str) -> str:
    choices = [getattr(plan, name) for name in COST_KEY]
    return _short_hash(repr((plan.model, plan.device, plan.sequence_length, choices, lengths)))


def _lengths_key(workload: Workload) -> str:
    return _short_hash(workload.lengths.to_json()) if workload.lengths else ""


def provenance(fingerprint: str) -> str:
    """Return a key of the host, the libraries and the formulas."""
    return f"{fingerprint}-{_software()}"


@cache
def _software() -> str:
    """Return a hash of the cost formulas' source and of the versions of torch and transformers.

    Samples of other formulas or libraries do not count for these.
    """
    sources = sorted(
        path for path in (Path(__file__).parents[1] / "cost").glob("*.py") if path.name not in FILES_WITHOUT_FORMULAS
    )
    code = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in sources)
    return _short_hash(repr((code, [installed_version(name) for name in ("torch", "transformers")])))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Calibration:
    """The samples of earlier runs on a host, from which corrections follow."""

    samples: tuple[Sample, ...] = ()

    def of(self, candidate: Candidate, workload: Workload) -> Candidate:
        """Return the candidate, which the formulas predicted, corrected by the samples."""
        return self._correct(candidate, workload, _lengths_key(workload)) if self.samples else candidate

    def _correct(self, candidate: Candidate, workload: Workload, lengths: str) -> Candidate:
        assert all(basis.tier == "formula" for basis in candidate.bases.values()), "it was calibrated before"
        corrections = self._corrections(candidate, _job_key(candidate.plan, lengths))
        factors = {number: correction.factor for number, correction in corrections.items()}
        bases = {**candidate.bases, **{number: correction.basis for number, correction in corrections.items()}}
        time = candidate.time
        memory = candidate.memory
        terms = {name: seconds * factors.get("step", 1.0) for name, seconds in time.terms.items()}
        one_time = time.one_time / workload.total_steps
        seconds_before = time.total + one_time
        seconds_after = sum(terms.values()) + one_time
        return replace(
            candidate,
            memory=scale_to_peak(memory, memory.peak * factors["allocated"]) if "allocated" in factors else memory,
            resident=candidate.resident * factors.get("held", 1.0),
            time=replace(time, terms=terms),
            tokens_per_second=candidate.tokens_per_second * seconds_before / seconds_after,
            bases=bases,
        )

    def _corrections(self, candidate: Candidate, job: str) -> dict[Number, Correction]:
        samples = self._by_job.get(job, [])
        corrections: dict[Number, Correction] = {}
        numbers: tuple[Number, ...] = ("step", "allocated", "held")
        for number in numbers:
            ratios = [_ratio(sample.numbers[number]) for sample in samples if number in sample.numbers]
            correction = remeasured(number, ratios) if ratios else self._from_others(number, candidate)
            if correction is not None:
                corrections[number] = correction
        return corrections

    def _from_others(self, number: Number, candidate: Candidate) -> Correction | None:
        """Return the correction by other plans: those of the same precision and compile mode, or all if they are too few."""
        plan = candidate.plan
        key = (number, plan.precision, plan.torch_compile, plan.device)
        if key not in self._cached_corrections:
            self._cached_corrections[key] = self._median_of_others(number, candidate)
        return self._cached_corrections[key]

    def _median_of_others(self, number: Number, candidate: Candidate) -> Correction | None:
        interval = candidate.basis(number).interval
        if number not in TRANSFERRED_NUMBERS or interval is None:
            return None
        plan = candidate.plan
        similar_ratios = self._ratios.get((number, plan.precision, plan.torch_compile), ())
        ratios = similar_ratios if len(similar_ratios) >= MIN_RECORDS else self._ratios.get((number, "", ""), ())
        return transfer(interval, ratios) if ratios else None

    @cached_property
    def _cached_corrections(self) -> dict[tuple[Number, str, str, str], Correction | None]:
        """Return the cache of corrections. Thousands of plans need the same few."""
        return {}

    @cached_property
    def _by_job(self) -> dict[str, list[Sample]]:
        samples_by_job: dict[str, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            samples_by_job[sample.job].append(sample)
        return dict(samples_by_job)

    @cached_property
    def _ratios(self) -> dict[tuple[Number, str, str], tuple[float, ...]]:
        """Return one ratio for each job, by number, precision and compile mode. The key ("", "") has those of all jobs."""
        ratios_by_kind: dict[tuple[Number, str, str], list[float]] = defaultdict(list)
        for samples in self._by_job.values():
            for number in TRANSFERRED_NUMBERS:
                ratios = [_ratio(sample.numbers[number]) for sample in samples if number in sample.numbers]
                if ratios:
                    ratios_by_kind[number, samples[0].precision, samples[0].torch_compile].append(median(ratios))
                    ratios_by_kind[number, "", ""].append(median(ratios))
        return {key: tuple(sorted(ratios)) for key, ratios in ratios_by_kind.items()}

    def rerank(self, ranking: Ranking, host: Host, workload: Workload) -> Ranking:
        """Return the plans ranked by their corrected numbers. Decide again which of them fit."""
        if not self.samples:
            return ranking
        corrected = Ranking(num_unseen=ranking.num_unseen)
        lengths = _lengths_key(workload)
        for candidate in (*ranking.candidates, *ranking.too_big):
            calibrated = self._correct(candidate, workload, lengths)
            limit = memory_limit(calibrated.plan, host, risk=workload.risk, spread=held_memory_spread(calibrated.basis("held")))
            if limit is not None and calibrated.resident > limit:
                corrected.too_big.append(calibrated)
                corrected.rejected.append(TooBig(calibrated.plan, calibrated.memory, calibrated.resident, limit))
            else:
                corrected.candidates.append(calibrated)
        ranked_plans = {id(candidate.plan) for candidate in (*ranking.candidates, *ranking.too_big)}
        corrected.rejected += [entry for entry in ranking.rejected if id(entry.plan) not in ranked_plans]
        corrected.candidates.sort(key=lambda candidate: (-candidate.tokens_per_second, candidate.memory.peak))
        corrected.too_big.sort(key=lambda candidate: candidate.resident)
        return corrected


NO_RECORDS = Calibration()


def _ratio(pair: MeasuredPair) -> float:
    return pair.measured / pair.predicted


def read_calibration(host: Host) -> Calibration:
    """Return the samples of this host with these libraries and formulas.

    A line that cannot be read is skipped. A crash cut it short, or another version wrote it.
    """
    try:
        lines = _path().read_bytes().splitlines()
    except OSError:
        return NO_RECORDS
    marker = f'"made_with":"{provenance(host.fingerprint)}"'.encode()
    samples = []
    for line in lines:
        if marker not in line:
            continue
        try:
            samples.append(Sample.from_json(line))
        except RequestError:
            continue
    return Calibration(tuple(samples))


def append_samples(samples: Iterable[Sample]) -> None:
    """Append the samples to the file in one write, so that processes that write at the same time leave whole lines.

    The line before may be cut short, so a new line begins with a line break. If the cache cannot be written, no job fails.
    """
    path = _path()
    text = "".join(f"\n{sample.to_json()}\n" for sample in samples if sample.numbers)
    if not text:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            file.write(text.encode())
        if path.stat().st_size > MAX_BYTES:
            _drop_older_half(path)
    except OSError as error:
        logger.warning("what was measured was not kept in %s: %s", path, error.strerror)


def _drop_older_half(path: Path) -> None:
    """Keep the newer half of the file. A sample that another process appends meanwhile may be lost."""
    text = path.read_bytes()
    newer_half = text[text.find(b"\n", len(text) - MAX_BYTES // 2) + 1 :]
    write_whole(path, newer_half)


def _path() -> Path:
    return read_settings().cache_dir / FILE_NAME
