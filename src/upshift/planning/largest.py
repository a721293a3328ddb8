"""Find the longest sequence, the largest micro-batch or the deepest model that fits a host, and its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from pydantic import Field

from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host, stated_memory
from upshift.planning.calibration import NO_RECORDS, Calibration
from upshift.planning.cost.time import Takes, takes
from upshift.planning.counterfactual import Trace
from upshift.planning.growing import Batch, Depth, Sequence, Way, What, why_none
from upshift.planning.lengths import LengthHistogram
from upshift.planning.plan import Plan
from upshift.planning.variants import variants_for
from upshift.planning.workload import Workload
from upshift.record import Numbers
from upshift.value import Value


class Largest(Value):
    what: What
    takes: Takes = Field("tokens", description="what the model is given: predicted.tokens_per_second counts these")
    value: int = Field(description="tokens of a sequence, sequences of a micro-batch, or layers of the deepest stack")
    parameters: int = Field(description="of the model; of the deepened one where that was asked for")
    plan: Plan
    predicted: Numbers
    limited_by: str = Field(description="what the next step would need")


def find_largest(
    what: str,
    host: Host,
    workload: Workload,
    *,
    fixed: tuple[str, ...],
    trace: Trace,
    lengths_at: Callable[[int], LengthHistogram | None] | None = None,
    calibration: Calibration = NO_RECORDS,
) -> Largest:
    """Return the largest size that fits.

    ``lengths_at``: the lengths of the data, cut at so many tokens; None: if sequences grow, all are as long as the longest.
    Raises RequestError for another ``what`` or a host of unknown memory, NothingFits if not even the smallest size fits.
    """
    ways: dict[str, type[Way]] = {"sequence": Sequence, "batch": Batch, "model": Depth}
    if what not in ways:
        raise RequestError(f"--largest {what!r} is not known; use one of {', '.join(get_args(What))}, such as --largest sequence")
    if stated_memory(host.gpu or host.cpu) is None:
        example = "describe it, as in --on epyc-9654-768gb"
        raise RequestError(f"--largest {what} needs the memory of {host.name}, which is unknown; {example}")
    if what == "sequence" and lengths_at is None:
        workload = workload.changed(lengths=None)
    profile = trace(workload.sequence_length, variants_for(host, workload, fixed))
    if what == "sequence" and takes(profile) == "images":
        raise RequestError(
            f"--largest sequence asks for tokens, and {profile.architecture} takes images; use --largest batch or --largest model"
        )
    way = ways[what](host, workload, fixed, trace, profile, lengths_at, calibration)
    first, *others = way.sharings()
    best, sharing = way.largest(first, above=way.step(first)), first
    for other in others:
        larger = (best // way.step(other) + 1) * way.step(other)
        if larger <= way.ceiling and way.fits(larger, other):
            best, sharing = way.largest(other, above=larger), other
    if best == 0:
        smallest = way.ranking(way.step(sharing), sharing)
        raise NothingFits(f"not even {way.step(sharing)} {way.unit} fit {host.name}: {why_none(smallest, host, workload)}")
    return _answer(way, best, sharing)


def _answer(way: Way, size: int, sharing: int | None) -> Largest:
    profile, workload = way.posed(size)
    best = way.ranking(size, sharing).candidates[0]
    mean = workload.lengths.mean / workload.lengths.sequence_length if workload.lengths else 1.0
    flops = profile.train_flops(1, workload.sequence_length) * workload.global_batch * mean
    return Largest(
        what=way.what,
        takes=takes(profile),
        value=size,
        parameters=profile.parameters.total,
        plan=best.plan,
        predicted=best.numbers(model_flops_per_step=flops, host=way.host),
        limited_by=way.beyond(size + way.step(sharing), sharing),
    )
