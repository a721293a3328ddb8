"""Estimate how sure a predicted number is: by formula alone, corrected by other runs here, or measured here.

An interval bounds measured over predicted. It narrows from the formula's interval to the spread of the ratios that earlier runs
left. The formula's interval counts as MIN_RECORDS records, so there is no jump at the first record.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from upshift.hardware.spec import Host
from upshift.planning.cost.process_memory import HELD_SPREAD
from upshift.planning.cost.rates import SUSTAINED
from upshift.planning.plan import Plan
from upshift.planning.program import OWN, ProgramName
from upshift.record import Basis

Number = Literal["step", "allocated", "held"]
MIN_RECORDS = 3  # plans measured here before their median is trusted whole; with fewer, the prediction stays nearer the formula
INTERVAL_SIGMAS = 2.0  # half an interval, in standard deviations
SIGMAS_OF_MEDIAN = 1.4826  # a normal distribution's standard deviation over its median absolute deviation

STEP_INTERVAL = (0.6, 1.6)  # docs/accuracy.md: 0.87 to 2.14 on one machine, 80 % within this
# 5 and 95 % of the errors of published runs on GPUs, each source predicted by factors that did not see it and counted once, those
# of the program twice (benchmarks/cases/leave_one_out.py). A source that the interval did not see lies in it as often as
# docs/accuracy_published.md says. No published run is one of Upshift's own.
GPU_STEP_INTERVALS: Mapping[ProgramName, tuple[float, float]] = {
    "upshift": (0.66, 1.55),
    **dict.fromkeys(("transformers", "axolotl", "llama-factory"), (0.42, 1.58)),
    "torchtitan": (0.68, 1.61),
    "megatron": (0.67, 1.54),
}
# How much a chip's factors differ from the mean of others, as a logarithm, with 5 % above and 5 % below: 1.645 times the standard
# deviation that benchmarks/cases/leave_one_out.py counts with.
NEW_CHIP_SPREAD = 1.645 * 0.25
# The longest step over the predicted one among the published rows of GeForce cards that gather weights over PCIe
# (cost/network.py).
GEFORCE_LINK_HIGH = 2.8
# Live tensors of an eager step: 0.1 % (docs/accuracy.md), 5.6 % too much for adamw_torch (docs/log.md), 3.5 % among ranks
# (tests/cpu). Temporaries of compiled layers are predicted as if nothing were fused: 25 % too much for GPT-2 (tests/cpu).
ALLOCATED_INTERVAL = (0.94, 1.04)
COMPILED_ALLOCATED_INTERVAL = (0.75, 1.04)
# What a quick plan adds to both ends of an interval.
ESTIMATED_FACTORS: dict[Number, tuple[float, float]] = {"step": (0.9, 1.1), "allocated": (0.9, 1.1), "held": (0.9, 1.1)}
# A plan that ran here, when it runs again. Step: on shared two-core machines (docs/log.md). Held: the peak of one more process.
AGAIN_INTERVALS: dict[Number, tuple[float, float]] = {"step": (0.8, 1.25), "allocated": (0.99, 1.01), "held": (0.9, 1.15)}
# Held memory where micro-batches differ in size and freed memory stays with the process. Each size leaves holes in the heap: 40
# steps of a GPT-2 held 1.5 times what its trial of 5 steps held (docs/log.md). Above it, the run gives the holes back
# (training/held_memory.py).
VARYING_HELD_INTERVAL = (0.9, 1.6)


@dataclass(frozen=True)
class Correction:
    """The factor for a formula's number, and how sure the corrected number is."""

    factor: float
    basis: Basis


def formula_interval(number: Number, plan: Plan, *, varies: bool = False) -> tuple[float, float]:
    """Return the interval of measured over predicted before anything ran on the host.

    ``varies``: the run's micro-batches differ in width.
    """
    if number == "step":
        return GPU_STEP_INTERVALS[OWN] if plan.device == "cuda" else STEP_INTERVAL
    if number == "allocated":
        return COMPILED_ALLOCATED_INTERVAL if plan.torch_compile != "off" else ALLOCATED_INTERVAL
    half = INTERVAL_SIGMAS * HELD_SPREAD[plan.device]
    leaves_holes = varies and plan.device == "cpu" and plan.host_memory == "keep"
    return math.exp(-half), VARYING_HELD_INTERVAL[1] if leaves_holes else math.exp(half)


def step_interval(program: ProgramName, host: Host, *, exchanges: bool = False) -> tuple[float, float]:
    """Return the interval of a step's time in a program. It is wider on GPUs for which no factors were fitted.

    ``exchanges``: ranks exchange weights or activations within a micro-batch. On GeForce cards a host's PCIe then decides.
    """
    if host.device != "cuda" or host.gpu is None:
        return STEP_INTERVAL
    low, high = GPU_STEP_INTERVALS[program]
    if host.gpu.compute_capability in SUSTAINED:
        return low, high
    low, high = (math.exp(sign * math.hypot(math.log(end), NEW_CHIP_SPREAD)) for sign, end in ((-1, low), (1, high)))
    is_measured = host.measured is not None and bool(host.measured.gpu_exchanges)
    by_board = exchanges and host.gpu.is_geforce and host.has_pcie_peers and not is_measured
    return low, max(high, GEFORCE_LINK_HIGH) if by_board else high


def formula_basis(number: Number, plan: Plan, *, varies: bool = False) -> Basis:
    """Return the basis of a number that no run has corrected. ``varies``: the run's micro-batches differ in width."""
    return Basis(tier="formula", interval=formula_interval(number, plan, varies=varies))


def estimated_bases(traced: Mapping[Number, Basis]) -> dict[Number, Basis]:
    """Return the bases of the numbers of a model that was estimated from its sizes: wider intervals than those of a trace.

    ``traced``: the bases of the same numbers, predicted from a trace.
    """
    bases: dict[Number, Basis] = {}
    for number, (lower, upper) in ESTIMATED_FACTORS.items():
        low, high = traced[number].interval or (1.0, 1.0)
        bases[number] = Basis(tier="formula", interval=(low * lower, high * upper))
    return bases


def remeasured(number: Number, ratios: Sequence[float]) -> Correction:
    """Return the correction of a plan that ran before, with the same model on the same host.

    ``ratios``: measured over formula, at least one.
    """
    log_median = median(sorted(math.log(ratio) for ratio in ratios))
    interval = _interval(AGAIN_INTERVALS[number], [math.log(ratio) - log_median for ratio in ratios], num_fitted=1)
    return Correction(math.exp(log_median), Basis(tier="measured", interval=interval, num_records=len(ratios)))


def transfer(interval: tuple[float, float], ratios: Sequence[float]) -> Correction:
    """Return the correction that other plans or models on the host suggest.

    ``ratios``: measured over formula, one for each plan. ``interval``: the formula's own.
    """
    trust = min(len(ratios) / MIN_RECORDS, 1.0)
    log_shift = trust * median(sorted(math.log(ratio) for ratio in ratios))
    spread = _interval(interval, [math.log(ratio) - log_shift for ratio in ratios], num_fitted=0)
    return Correction(math.exp(log_shift), Basis(tier="transferred", interval=spread, num_records=len(ratios)))


def held_memory_spread(basis: Basis) -> float:
    """Return the standard deviation of held memory, measured over predicted, that an interval stands for."""
    low, high = basis.interval or (1.0, 1.0)
    return max(-math.log(low), math.log(high)) / INTERVAL_SIGMAS


def _interval(prior: tuple[float, float], deviations: Sequence[float], *, num_fitted: int) -> tuple[float, float]:
    """Return ``prior`` narrowed by the median deviation: one run beside a busy neighbour must not widen the interval.

    ``num_fitted``: the number of deviations that do not count, because their median was fitted to them.
    """
    spread = INTERVAL_SIGMAS * SIGMAS_OF_MEDIAN * median(sorted(abs(deviation) for deviation in deviations))
    count = len(deviations) - num_fitted
    low, high = (math.sqrt((MIN_RECORDS * math.log(bound) ** 2 + count * spread**2) / (MIN_RECORDS + count)) for bound in prior)
    return math.exp(-low), math.exp(high)
