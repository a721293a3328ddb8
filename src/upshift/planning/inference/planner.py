"""Rank the inference plans for a host, a ModelProfile and an InferenceWorkload: the entry point of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.models.profile_model import profile_model
from upshift.models.source import ModelSource
from upshift.planning.cost.time import takes
from upshift.planning.explain import Reason
from upshift.planning.inference.explain import reasons, representative
from upshift.planning.inference.numbers import InferenceNumbers, numbers_of
from upshift.planning.inference.rank import Candidate, Ranking, rank, too_big, too_slow
from upshift.planning.inference.space import parse_fixed, read_fixed
from upshift.planning.inference.workload import InferenceWorkload

PROFILE_LENGTH = 128  # tokens; nothing that inference plans take from a profile depends on it
MAX_SHOWN_PLANS = 50
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class InferencePlanning:
    """The result of a request for inference plans."""

    host: Host
    profile: ModelProfile
    workload: InferenceWorkload
    ranking: Ranking

    @property
    def best(self) -> Candidate:
        return self.ranking.candidates[0]

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return reasons(self.ranking)

    def numbers(self, candidate: Candidate) -> InferenceNumbers:
        return numbers_of(candidate, self.host)

    def document(self) -> dict[str, Any]:
        """Return the JSON document of ``upshift plan --generate --json``."""
        plans: list[dict[str, Any]] = [
            {"plan": c.plan.model_dump(mode="json"), "predicted": numbers_of(c, self.host).model_dump(mode="json"), "reasons": []}
            for c in self.ranking.candidates[:MAX_SHOWN_PLANS]
        ]
        plans[0]["reasons"] = [reason.model_dump(mode="json") for reason in self.reasons]
        return {
            "host": self.host.model_dump(mode="json"),
            "model": self.profile.model_dump(mode="json", exclude={"steps"}),
            "workload": self.workload.model_dump(mode="json"),
            "plans": plans,
            "rejected": [
                {"plan": r.plan.model_dump(mode="json"), "reason": r.reason} for r in representative(self.ranking.rejected)
            ],
            "num_candidates": len(self.ranking.candidates),
            "num_rejected": len(self.ranking.rejected),
        }


def plan_inference(
    source: ModelSource,
    host: Host,
    workload: InferenceWorkload,
    *,
    fixed: tuple[str, ...] = (),
    progress: Progress = lambda done, total: None,
) -> InferencePlanning:
    """Rank the plan space.

    Raises RequestError for a wrong request, NothingFits with the nearest plan if nothing fits or answers fast enough.
    """
    if source.adapter is not None:
        raise RequestError(f"{source.reference!r} has an adapter; merge it into its model first, then plan for the merged one")
    read_fixed(fixed, host, workload)  # before the seconds that tracing takes
    profile = profile_model(source, sequence_length=PROFILE_LENGTH, variants=(), progress=progress)
    return plan_profile(profile, host, workload, fixed)


def plan_profile(
    profile: ModelProfile, host: Host, workload: InferenceWorkload, fixed: tuple[str, ...] = ()
) -> InferencePlanning:
    """Rank the plan space of a model that has a profile already. Raises the same errors as ``plan_inference``."""
    _check(profile, host, workload, fixed)
    ranking = rank(host, profile, workload, fixed=parse_fixed(fixed, host, profile, workload))
    if not ranking.candidates:
        _refuse(ranking, host, workload)
    return InferencePlanning(host, profile, workload, ranking)


def _check(profile: ModelProfile, host: Host, workload: InferenceWorkload, fixed: tuple[str, ...]) -> None:
    if host.mixed_gpus:
        names = ", ".join(sorted({gpu.name for gpu in host.mixed_gpus}))
        raise RequestError(f"{host.name} has different devices ({names}); plan for one kind of them")
    if workload.task == "generate" and profile.objective == "seq2seq-lm":
        two = "encodes prompts with one stack and generates with another"
        raise RequestError(f"{profile.architecture} {two}, which is not planned yet; plan its encoder with --encode")
    if profile.max_positions is not None and workload.longest > profile.max_positions:
        what = "--prompt-length + --output-length" if workload.task == "generate" else "--sequence-length"
        raise RequestError(
            f"{what} {workload.longest} is longer than the model's {profile.max_positions} positions; "
            f"use at most {profile.max_positions}"
        )
    if takes(profile) == "images":
        asked = f"--{workload.task}"
        raise RequestError(f"{profile.architecture} takes images, and {asked} plans for tokens; leave {asked} out")
    if workload.task == "encode":
        return
    if workload.output_length < 1:
        raise RequestError("--output-length 0 generates nothing; use 1 or more, or --encode")
    if not profile.declares.can_generate or not profile.cache:
        raise RequestError(f"{profile.architecture} does not generate with a cache of keys and values; plan it with --encode")
    if workload.concurrency is not None and any(entry.startswith("max_concurrency=") for entry in fixed):
        raise RequestError("--concurrency and --set max_concurrency both say how many sequences there are; give one of them")


def _refuse(ranking: Ranking, host: Host, workload: InferenceWorkload) -> None:
    if ranking.too_slow:
        nearest = ranking.too_slow[0]
        raise NothingFits(
            f"no plan for {host.name} answers fast enough; the nearest has {too_slow(nearest, workload)}: "
            f"{nearest.plan.label()}; use looser limits, a lower --concurrency, "
            "--allow fp8-weights,int8-weights,int4-weights, or faster devices"
        )
    if ranking.too_big:
        nearest = ranking.too_big[0]
        shorter = "--prompt-length and --output-length" if workload.task == "generate" else "--sequence-length"
        raise NothingFits(
            f"nothing fits on {host.name}; the nearest plan {too_big(nearest)}: {nearest.plan.label()}; use a shorter {shorter}, "
            "fewer requests at once, --allow fp8-weights,int8-weights,int4-weights,fp8-kv,int8-kv, or larger or more devices"
        )
    reason = ranking.rejected[0].reason if ranking.rejected else "no combination of choices is legal"
    raise RequestError(f"no plan for {host.name}: {reason}")
