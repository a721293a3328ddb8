"""Rank the plans for a host, a ModelProfile and a Workload: the entry point of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe, detect
from upshift.hardware.spec import Host
from upshift.hardware.torch_build import check_torch_uses_gpus
from upshift.models.profile import ModelProfile
from upshift.models.profile_model import profile_model
from upshift.models.source import ModelSource, find_to_train
from upshift.planning.analysis.explain import Reason, reasons, representative, shadow_price
from upshift.planning.analysis.tpu_programs import compiled_so_far
from upshift.planning.cost.time import takes
from upshift.planning.plan import Plan, plain_default
from upshift.planning.search.feasibility import WholeLife
from upshift.planning.search.ranking import Candidate, Ranking, Rejected, cost_plan, limit_of
from upshift.planning.search.search import search
from upshift.planning.search.space import (
    WEIGHT_OFFLOAD,
    asks_where_weights_wait,
    check_allow,
    has_frozen_layers,
    parse_fixed,
    read_fixed,
    unasked,
    with_disk_rate,
)
from upshift.planning.search.variants import variants_for
from upshift.planning.trials.calibration import NO_RECORDS, Calibration, read_calibration
from upshift.planning.workload import Workload
from upshift.record import Numbers
from upshift.units import format_bytes

Progress = Callable[[int, int], None]
MAX_SHOWN_PLANS = 50


@dataclass(frozen=True)
class Planning:
    """The result of a request for plans."""

    host: Host
    profile: ModelProfile
    workload: Workload
    ranking: Ranking
    default: Candidate
    calibration: Calibration = NO_RECORDS  # the candidates are already corrected by it

    @property
    def best(self) -> Plan:
        return self.ranking.candidates[0].plan

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return reasons(self.ranking)

    def reasons_for(self, plan: Plan) -> tuple[Reason, ...]:
        """Return the reasons for the choices that ``plan`` shares with the best plan.

        Trials may have put ``plan`` in its place.
        """
        return tuple(reason for reason in self.reasons if str(getattr(plan, reason.choice)) == reason.value)

    @property
    def shadow_price(self) -> str | None:
        return shadow_price(self.ranking, self.host, self.workload, takes(self.profile))

    def numbers(self, candidate: Candidate) -> Numbers:
        """Return a candidate's predicted numbers; FLOPs are the model's own, whatever the plan recomputes."""
        workload = self.workload
        per_sequence = self.profile.train_flops(1, workload.sequence_length)
        share = (workload.lengths.mean / workload.lengths.sequence_length) if workload.lengths else 1.0
        flops = per_sequence * workload.global_batch * share
        return candidate.numbers(model_flops_per_step=flops, phases=self.life.phases(candidate), host=self.host)

    @cached_property
    def life(self) -> WholeLife:
        return WholeLife(self.host, self.profile, self.workload)

    def document(self) -> dict[str, Any]:
        """Return the JSON document of ``upshift plan --json``."""
        shown = self.ranking.candidates[:MAX_SHOWN_PLANS]
        plans: list[dict[str, Any]] = [{**self._row(c), "reasons": []} for c in shown]
        if plans:
            plans[0]["reasons"] = [reason.model_dump(mode="json") for reason in self.reasons]
        return {
            "host": self.host.model_dump(mode="json"),
            "model": self.profile.model_dump(mode="json", exclude={"steps"}),
            "workload": self.workload.model_dump(mode="json"),
            "plans": plans,
            "default": self._row(self.default),
            "rejected": [
                {"plan": r.plan.model_dump(mode="json"), "reason": r.reason} for r in representative(self.ranking.rejected)
            ],
            "num_candidates": len(self.ranking.candidates),
            "num_rejected": self.ranking.num_rejected,
            "shadow_price": self.shadow_price,
        }

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "plan": candidate.plan.model_dump(mode="json"),
            "predicted": self.numbers(candidate).model_dump(mode="json"),
            "does_not_fit": self.life.does_not_fit(candidate),
        }


def find_host(on: str | None, *, probe: bool = True) -> Host:
    """Return the described host, else this machine. It is probed (and the probe cached) where its rates are needed."""
    host = detect() if on is None else describe(on)
    if on is None:
        check_torch_uses_gpus(host)
    if host.mixed_gpus:
        names = ", ".join(sorted({gpu.name for gpu in host.mixed_gpus}))
        one_kind = "hide all but one kind with CUDA_VISIBLE_DEVICES" if on is None else "plan for one kind of them"
        raise RequestError(f"{'this machine' if on is None else host.name} has different devices ({names}); {one_kind}")
    if on is not None or not probe:
        return host
    from upshift.hardware.probe_cache import measure

    return measure(host)


def plan_training(
    source: ModelSource,
    host: Host,
    workload: Workload,
    *,
    fixed: tuple[str, ...] = (),
    progress: Progress = lambda done, total: None,
    described: bool = False,
) -> Planning:
    """Rank the plan space.

    ``described``: the host is not this machine, so what ran here says nothing of it. Raises RequestError for a wrong request,
    NothingFits with the nearest plan if nothing fits.
    """
    check_device(host, source)
    host = with_disk_rate(host, source) if asks_where_weights_wait(fixed) and not described else host
    check_fixed(fixed, host, source, workload)
    calibration = NO_RECORDS if described else read_calibration(host)

    def searched(fixed: tuple[str, ...]) -> tuple[ModelProfile, Ranking]:
        profile, ranking = _search(source, host, workload, fixed, progress, calibration, selective=False)
        free = not any(f.startswith(("recompute_granularity", "activation_checkpointing", WEIGHT_OFFLOAD)) for f in fixed)
        short = not ranking.candidates or ranking.candidates[0].plan.activation_checkpointing > 0
        if short and free and profile.declares.gradient_checkpointing:
            return _search(source, host, workload, fixed, progress, calibration, selective=True)
        return profile, ranking

    profile, ranking = searched(fixed)
    if not ranking.candidates and not asks_where_weights_wait(fixed) and has_frozen_layers(profile) and source.directory:
        host = host if described else with_disk_rate(host, source)
        found = (searched((*fixed, f"{WEIGHT_OFFLOAD}={place}"))[1] for place in unasked(host))
        ranking = next((elsewhere for elsewhere in found if elsewhere.candidates), ranking)
    if not ranking.candidates:
        _refuse(ranking, host, profile, workload)
    best = ranking.candidates[0].plan
    plain = plain_default(host, profile, workload).changed(weight_offload=best.weight_offload, mup_base=best.mup_base)
    default = cost_plan(plain, host=host, profile=profile, workload=workload)
    if isinstance(default, Rejected):
        raise RequestError(f"the plain default cannot be predicted on {host.name}: {default.reason}")
    return Planning(host, profile, workload, ranking, calibration.of(default, workload), calibration)


def check_device(host: Host, source: ModelSource) -> None:
    """Raise RequestError for a host whose devices no training plan is for."""
    if host.device not in get_args(Plan.model_fields["device"].annotation):
        known = compiled_so_far(source, host)
        raise RequestError(
            f"training plans are for CPUs and CUDA devices (ROCm included); {host.name} has {host.device} devices{known}"
        )


def check_fixed(fixed: tuple[str, ...], host: Host, source: ModelSource, workload: Workload) -> None:
    """Raise RequestError for what can be refused before the model is traced: the host's devices, and --set."""
    check_device(host, source)
    read_fixed(fixed, host, workload, quantized=source.quantized_from is not None)


def as_here(
    ranking: Ranking,
    host: Host,
    profile: ModelProfile,
    workload: Workload,
    calibration: Calibration,
    *,
    enough: int = MAX_SHOWN_PLANS,
) -> Ranking:
    """Rank the plans by what they are expected to do on this machine.

    The first ``enough`` of them fit in every phase of the job.
    """
    return WholeLife(host, profile, workload).fitting(calibration.ranked(ranking, host, workload), enough=enough)


def _search(
    source: ModelSource, host: Host, workload: Workload, fixed: tuple[str, ...], progress: Progress, calibration: Calibration,
    *, selective: bool,
) -> tuple[ModelProfile, Ranking]:  # fmt: skip
    profile = profile_model(
        source,
        sequence_length=workload.sequence_length,
        variants=variants_for(host, workload, fixed, selective=selective),
        progress=progress,
    )
    ranking = search(host, profile, workload, fixed=parse_fixed(fixed, host, profile, workload))
    return profile, as_here(ranking, host, profile, workload, calibration)


def _refuse(ranking: Ranking, host: Host, profile: ModelProfile, workload: Workload) -> None:
    roomier = "a shorter --sequence-length or a larger device" if takes(profile) == "tokens" else "a larger device"
    if (phase := ranking.in_another_phase) is not None:
        raise NothingFits(f"nothing fits on {host.name}: of the best plan {phase}; use {roomier}")
    if not ranking.too_big:
        reason = ranking.rejected[0].reason if ranking.rejected else "no combination of choices is legal"
        raise RequestError(f"no plan for {host.name}: {reason}")
    nearest = ranking.too_big[0]
    limit = limit_of(nearest, host, workload) or 0.0
    raise NothingFits(
        f"nothing fits in the {format_bytes(limit)} usable on {host.name}; the nearest plan needs "
        f"{format_bytes(nearest.resident)}: {nearest.plan.label()}; use "
        f"--allow bf16-weights,8bit-optimizer, --max-grad-norm 0 (updates in the backward pass), or {roomier}"
    )


def plan(
    model: str,
    *,
    sequence_length: int,
    global_batch: int,
    on: str | None = None,
    allow: tuple[str, ...] = (),
    fixed: tuple[str, ...] = (),
    total_steps: int = 1000,
    lora_rank: int | None = None,
    load_in_4bit: bool = False,
) -> Planning:
    """Return ranked training plans for a model on a host.

    ``on``: a described host such as "1xh100"; None: this machine. ``lora_rank``: of LoRA around every linear layer but the head.
    ``load_in_4bit``: keep the weights below LoRA in NF4.
    """
    workload = Workload(
        sequence_length=sequence_length, global_batch=global_batch, allow=check_allow(allow), total_steps=total_steps
    )
    source = find_to_train(model, lora_rank=lora_rank, load_in_4bit=load_in_4bit)
    return plan_training(source, find_host(on), workload, fixed=fixed, described=on is not None)


def read_plan(path: Path, *, host: Host, source: ModelSource) -> Plan:
    """Read the plan of a file: one Plan, or the best of a document written by ``upshift plan --json``.

    Raises RequestError for an unknown key, and for a plan made for another model or other hardware.
    """
    import json

    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise RequestError(
            f"cannot read plan {path}: {error.strerror}; write one with  upshift plan ... --json > {path.name}"
        ) from None
    except ValueError as error:
        raise RequestError(
            f"plan {path} is not valid JSON ({error}); write one with  upshift plan ... --json > {path.name}"
        ) from None
    if isinstance(document, dict) and isinstance(document.get("plans"), list) and document["plans"]:
        document = document["plans"][0]["plan"]
    found = Plan.from_json(json.dumps(document), origin=str(path))
    if found.host != host.fingerprint:
        raise RequestError(f"plan {path} was made for other hardware ({found.host}; this is {host.fingerprint}); plan again here")
    if found.model != source.model_hash:
        raise RequestError(
            f"plan {path} was made for another model ({found.model}; this is {source.model_hash}); plan again for it"
        )
    return found
