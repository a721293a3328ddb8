"""Rank the plans for a host, a ModelProfile and a Workload: the entry point of this package."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Any, Unpack, get_args

from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe, detect
from upshift.hardware.detect import AMD_UNUSED
from upshift.hardware.spec import Host
from upshift.hardware.torch_build import check_torch_uses_gpus
from upshift.loading.files.safetensors_header import read_header
from upshift.models.estimation.estimate import estimate_profile
from upshift.models.estimation.sizes import check_adapter, positions_in_config
from upshift.models.profile import ModelProfile, Variant
from upshift.models.sequence_length import default_length
from upshift.models.source import AdapterKeywords, AdapterOptions, ModelSource, find_model_to_train
from upshift.models.tracing.profile_model import Profiler, profile_model
from upshift.planning.analysis.explain import Reason, describe_value, reasons, sample_rejections, shadow_price
from upshift.planning.analysis.rejections import Lesson, RejectedPlan, lessons_of
from upshift.planning.analysis.tpu_programs import describe_programs
from upshift.planning.cost.time import sample_unit
from upshift.planning.plan import Plan, plain_default
from upshift.planning.program import OWN, check_program, read_program
from upshift.planning.search.feasibility import JobMemory
from upshift.planning.search.ranking import Candidate, Coster, Ranking, Rejected, TooBig, cost_plan, limit_of
from upshift.planning.search.search import search
from upshift.planning.search.simplicity import simplest_first, why_simplest
from upshift.planning.search.space import (
    WEIGHT_OFFLOAD,
    automatic_weight_places,
    check_allow,
    fixes_weight_offload,
    has_frozen_layers,
    parse_fixed,
    read_fixed,
    with_disk_rate,
)
from upshift.planning.search.variants import variants_for
from upshift.planning.trials.calibration import NO_RECORDS, Calibration, read_calibration
from upshift.planning.workload import Workload
from upshift.record import Numbers
from upshift.units import format_bytes

Progress = Callable[[int, int], None]
MAX_SHOWN_PLANS = 50
# A parameter in bf16, the two moments of AdamW in 4 bits, and no gradient that is kept: no plan for AdamW has less.
LEAST_STATE_BYTES = 3
QUANTIZED_BYTES = 0.6  # of a frozen parameter in 4 bits, with its scales and the parameters that stay in bf16
ADAPTER_SHARE = 0.8  # of the memory, which leaves room for activations
SIGNS_OF_IMAGES = ("vision", "image", "visual")  # how the fields of a config begin that says something about images

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planning:
    """The result of a request for plans."""

    host: Host
    profile: ModelProfile
    workload: Workload
    ranking: Ranking
    default: Candidate
    calibration: Calibration = NO_RECORDS  # the candidates are already corrected by it
    added: tuple[str, ...] = ()  # field=value that the planner fixed, because nothing fits without it

    @property
    def best(self) -> Plan:
        return self.ranking.candidates[0].plan

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return reasons(self.ranking)

    def reasons_for(self, plan: Plan) -> tuple[Reason, ...]:
        """Return the reasons for the choices that ``plan`` shares with the best plan.

        Trials may have chosen ``plan`` instead of the best predicted one.
        """
        return tuple(reason for reason in self.reasons if describe_value(plan, reason.choice) == reason.value)

    @property
    def preference(self) -> str | None:
        """Return why the best plan is not the one that is predicted to be the fastest; None where it is."""
        return why_simplest(self.ranking.candidates)

    @property
    def shadow_price(self) -> str | None:
        return shadow_price(self.ranking, self.host, self.workload, sample_unit(self.profile))

    @property
    def lessons(self) -> list[Lesson]:
        """Return the rejected plans that teach something, one for each reason, the fastest first."""
        best = self.ranking.candidates[0]
        coster = Coster(self.host, self.profile, self.workload)
        known = {entry.plan: entry.tokens_per_second for entry in self.ranking.too_big}

        def speed_of(entry: RejectedPlan) -> float | None:
            if not isinstance(entry, TooBig):
                return None
            speed = known.get(entry.plan)
            if speed is None:
                candidate = coster.cost(entry.plan)
                if not isinstance(candidate, Rejected):
                    speed = self.calibration.of(candidate, self.workload).tokens_per_second
            return None if speed is None else speed / best.tokens_per_second

        return lessons_of(self.ranking.rejected, best.plan, speed_of)

    def numbers(self, candidate: Candidate) -> Numbers:
        """Return a candidate's predicted numbers. FLOPs are the model's own, without those of recomputation."""
        workload = self.workload
        per_sequence = self.profile.train_flops(1, workload.sequence_length)
        share = (workload.lengths.mean / workload.lengths.sequence_length) if workload.lengths else 1.0
        flops = per_sequence * workload.global_batch * share
        return candidate.numbers(model_flops_per_step=flops, phases=self.job_memory.phase_peaks(candidate), host=self.host)

    @cached_property
    def job_memory(self) -> JobMemory:
        """Return the predictor of a job's memory by phase."""
        return JobMemory(self.host, self.profile, self.workload)

    def document(self, *, num_plans: int = MAX_SHOWN_PLANS) -> dict[str, Any]:
        """Return the JSON document of ``upshift plan --json``, with at most ``num_plans`` plans."""
        shown = self.ranking.candidates[:num_plans]
        plans: list[dict[str, Any]] = [{**self._row(candidate), "reasons": []} for candidate in shown]
        if plans:
            plans[0]["reasons"] = [reason.model_dump(mode="json") for reason in self.reasons]
        return {
            "host": self.host.model_dump(mode="json"),
            "model": self.profile.model_dump(mode="json", exclude={"steps"}),
            "workload": self.workload.model_dump(mode="json"),
            "plans": plans,
            "default": self._row(self.default),
            "rejected": [
                {"plan": rejection.plan.model_dump(mode="json"), "reason": rejection.reason}
                for rejection in sample_rejections(self.ranking.rejected)
            ],
            "preference": self.preference,
            "num_candidates": len(self.ranking.candidates),
            "num_rejected": self.ranking.num_rejected,
            "shadow_price": self.shadow_price,
        }

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "plan": candidate.plan.model_dump(mode="json"),
            "predicted": self.numbers(candidate).model_dump(mode="json"),
            "does_not_fit": self.job_memory.describe_problems(candidate),
        }


def find_host(name: str | None, *, probe: bool = True) -> Host:
    """Return the described host, or this machine if ``name`` is None.

    ``probe``: measure the rates of this machine, or read them from the cache.
    """
    host = detect() if name is None else describe(name)
    if name is None:
        check_torch_uses_gpus(host)
        if host.origin["gpu"].startswith(AMD_UNUSED):
            logger.warning("GPUs: %s", host.origin["gpu"])
    if host.mixed_gpus:
        names = ", ".join(sorted({gpu.name for gpu in host.mixed_gpus}))
        one_kind = "hide all but one kind with CUDA_VISIBLE_DEVICES" if name is None else "plan for one kind of them"
        raise RequestError(f"{'this machine' if name is None else host.name} has different devices ({names}); {one_kind}")
    if name is not None or not probe:
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
    profiler: Profiler = profile_model,
) -> Planning:
    """Rank the plan space.

    ``described``: the host is not this machine, so earlier runs here do not count. ``profiler``: makes the model's profile. Raise
    RequestError for a wrong request, and NothingFits with the nearest plan if nothing fits.
    """
    check_device(host, source)
    if fixes_weight_offload(fixed) and not described:
        host = with_disk_rate(host, source)
    check_program(workload.program, host, has_adapter=source.adapter is not None, has_images=source.images_per_row > 0)
    check_fixed(fixed, host, source, workload)
    is_here = not described and workload.program == OWN
    calibration = read_calibration(host) if is_here else NO_RECORDS
    make_profile = partial(profiler, source, sequence_length=workload.sequence_length, progress=progress)

    def search_with(fixed: tuple[str, ...]) -> tuple[ModelProfile, Ranking]:
        profile, ranking = _search(make_profile, host, workload, fixed, calibration, selective=False)
        deciding = ("recompute_granularity", "activation_checkpointing", WEIGHT_OFFLOAD)
        is_recomputation_free = not any(assignment.startswith(deciding) for assignment in fixed)
        is_memory_short = not ranking.candidates or ranking.candidates[0].plan.activation_checkpointing > 0
        can_choose = profile.declares.gradient_checkpointing and len(workload.runs_in.granularities) > 1
        if is_memory_short and is_recomputation_free and can_choose and not profile.is_estimated:
            return _search(make_profile, host, workload, fixed, calibration, selective=True)
        return profile, ranking

    added: tuple[str, ...] = ()
    profile, ranking = search_with(fixed)
    if not ranking.candidates and not fixes_weight_offload(fixed) and has_frozen_layers(profile) and source.directory:
        host = host if described else with_disk_rate(host, source)
        for place in automatic_weight_places(host):
            _, with_offload = search_with((*fixed, f"{WEIGHT_OFFLOAD}={place}"))
            if with_offload.candidates:
                ranking = with_offload
                added = (f"{WEIGHT_OFFLOAD}={place}",)
                break
    if not ranking.candidates:
        _raise_nothing_fits(ranking, host, profile, workload)
    best = ranking.candidates[0].plan
    plain = plain_default(host, profile, workload).changed(weight_offload=best.weight_offload, mup_base=best.mup_base)
    default = _cost_default(plain, host, profile, workload, calibration)
    return Planning(host, profile, workload, ranking, default, calibration, added)


def with_default(planning: Planning, *, rows: int, accumulation: int) -> Planning:
    """Return the planning with a plain default that computes ``rows`` at once, ``accumulation`` times a step."""
    plain = planning.default.plan.changed(per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation)
    default = _cost_default(plain, planning.host, planning.profile, planning.workload, planning.calibration)
    return replace(planning, default=default)


def _cost_default(plain: Plan, host: Host, profile: ModelProfile, workload: Workload, calibration: Calibration) -> Candidate:
    default = cost_plan(plain, host=host, profile=profile, workload=workload)
    if isinstance(default, Rejected):
        raise RequestError(f"the plain default cannot be predicted on {host.name}: {default.reason}")
    return calibration.of(default, workload)


def check_device(host: Host, source: ModelSource) -> None:
    """Raise RequestError for a host with devices for which there are no training plans."""
    if host.device not in get_args(Plan.model_fields["device"].annotation):
        programs = describe_programs(source, host)
        raise RequestError(
            f"training plans are for CPUs and CUDA devices (ROCm included); {host.name} has {host.device} devices{programs}"
        )


def check_fixed(fixed: tuple[str, ...], host: Host, source: ModelSource, workload: Workload) -> None:
    """Raise RequestError for wrong devices or a wrong --set, as far as they can be checked before the model is traced."""
    check_device(host, source)
    read_fixed(fixed, host, workload, quantized=source.quantized_from is not None)


def calibrate_and_filter(
    ranking: Ranking,
    host: Host,
    profile: ModelProfile,
    workload: Workload,
    calibration: Calibration,
    *,
    num_plans: int = MAX_SHOWN_PLANS,
) -> Ranking:
    """Rank the plans again by their calibrated numbers, with the simplest first of those that cannot be told from the fastest.

    The first ``num_plans`` of them fit in every phase of the job.
    """
    calibrated = calibration.rerank(ranking, host, workload)
    job_memory = JobMemory(host, profile, workload)
    return simplest_first(job_memory.drop_unfitting(calibrated, num_plans=num_plans), host, job_memory.fits)


def _search(
    make_profile: Callable[..., ModelProfile],
    host: Host,
    workload: Workload,
    fixed: tuple[str, ...],
    calibration: Calibration,
    *,
    selective: bool,
) -> tuple[ModelProfile, Ranking]:
    profile = make_profile(variants=variants_for(host, workload, fixed, selective=selective))
    ranking = search(host, profile, workload, fixed=parse_fixed(fixed, host, profile, workload))
    if profile.is_estimated:
        calibration = NO_RECORDS  # it corrects what a trace gives
    return profile, calibrate_and_filter(ranking, host, profile, workload, calibration)


def _raise_nothing_fits(ranking: Ranking, host: Host, profile: ModelProfile, workload: Workload) -> None:
    larger = "a larger device" if host.device == "cpu" else "a larger device or more of them"
    roomier = f"a shorter --sequence-length or {larger}" if sample_unit(profile) == "tokens" else larger
    if (phase := ranking.phase_problem) is not None:
        raise NothingFits(f"nothing fits on {host.name}: of the best plan {phase}; use {roomier}")
    if not ranking.too_big:
        raise RequestError(f"no plan for {host.name}: {_commonest_reason(ranking)}")
    nearest = ranking.too_big[0]
    limit = limit_of(nearest, host, workload) or 0.0
    adapters = _adapter_options(profile, host, workload, limit)
    advice = _advice_for_states(nearest.plan, profile, host, limit, adapters)
    advice = advice or f"use {adapters}{_leaner_options(nearest.plan, workload)}{roomier}"
    raise NothingFits(
        f"nothing fits in the {format_bytes(limit)} usable on {host.name}; the nearest plan needs "
        f"{format_bytes(nearest.resident)}: {nearest.plan.label()}; {advice}"
    )


def _adapter_options(profile: ModelProfile, host: Host, workload: Workload, limit: float) -> str:
    """Return the options of an adapter with which a model that is trained whole would fit, with a comma; empty where none would.

    ``limit``: bytes that a process may use.
    """
    parameters = profile.parameters
    if parameters.trainable < parameters.total or not workload.runs_in.takes_adapters:
        return ""
    room = ADAPTER_SHARE * limit
    if 2 * parameters.total < room * host.num_devices:
        return "--lora-rank 16, "
    return "--lora-rank 16 --load-in-4bit, " if QUANTIZED_BYTES * parameters.total < room else ""


def _advice_for_states(plan: Plan, profile: ModelProfile, host: Host, limit: float, adapters: str) -> str:
    """Return what to do where weights and AdamW's state are too large however they are stored and divided.

    Empty where they are not. ``limit``: bytes that a process may use. ``adapters``: options with which the model would fit.
    """
    parameters = profile.parameters
    frozen = parameters.total - parameters.trainable - parameters.quantized
    least = LEAST_STATE_BYTES * parameters.trainable + 2 * frozen + parameters.quantized_bytes
    if limit <= 0 or "adamw" not in plan.optim or least <= limit * host.num_devices:
        return ""
    larger = "a larger device" if host.device == "cpu" else f"at least {ceil(least / limit)} such devices, or larger ones"
    instead = f"{adapters}or " if adapters else ""
    return f"its weights and AdamW's state alone take at least {format_bytes(least)}; use {instead}{larger}"


def _commonest_reason(ranking: Ranking) -> str:
    """Return why most plans cannot run. Too little memory counts only if there is no other reason: other plans need less."""
    reasons = [entry.reason for entry in ranking.rejected if isinstance(entry, Rejected)]
    reasons = reasons or [entry.reason for entry in ranking.rejected] or ["no combination of choices is legal"]
    return Counter(reasons).most_common(1)[0][0]


def _leaner_options(plan: Plan, workload: Workload) -> str:
    """Return the options that make a plan smaller and that it could run with, each with a comma; empty where there are none.

    Ranks that divide the model save no quantized state in parts, and update nothing in the backward pass.
    """
    program = workload.runs_in
    leaner = {"bf16-weights": ("precision", "bf16-weights"), "8bit-optimizer": ("optim", "adamw_bnb_8bit")}
    names = [name for name, choice in leaner.items() if program.has(*choice) and name not in workload.allow]
    if plan.num_processes > 1:
        names = [name for name in names if name != "8bit-optimizer"]
    options = f"--allow {','.join((*workload.allow, *names))}, " if names else ""
    if plan.num_processes == 1 and workload.clips_gradients and program.has("optimizer_in_backward", True):
        options += "--max-grad-norm 0 (updates in the backward pass), "
    return f"{options}or " if options else ""


def plan(
    model: str | Path,
    *,
    sequence_length: int,
    global_batch: int,
    on: str | None = None,
    allow: tuple[str, ...] = (),
    fixed: tuple[str, ...] = (),
    total_steps: int = 1000,
    max_grad_norm: float = 1.0,
    images: int | None = None,
    risk: float | None = None,
    program: str | None = None,
    quick: bool = False,
    **adapter: Unpack[AdapterKeywords],
) -> Planning:
    """Return ranked training plans for a model on a host.

    Args:
        on: a described host such as "1xh100"; None: this machine.
        max_grad_norm: 0 means that gradients are not clipped, so that a plan may update weights in the backward pass.
        images: in each row; None: 1 if the model is no language model by itself, such as LLaVA, and else 0.
        risk: the accepted probability of running out of memory; None: 5 % of the memory stays free.
        program: that trains, such as "torchtitan"; None: Upshift, or transformers' Trainer for rows with images.
        quick: estimate from the sizes in the model's config, without a trace. It takes a second.
        adapter: fields of ``AdapterOptions``: lora_rank, lora_alpha, lora_dropout, lora_target, lora_modules_to_save,
            lora_rslora, lora_dora, load_in_4bit.
    """
    if not max_grad_norm >= 0:
        raise RequestError(f"max_grad_norm={max_grad_norm} is no length to clip gradients to; use 0 (no clipping) or more")
    workload = Workload.from_fields(
        {
            "sequence_length": sequence_length,
            "global_batch": global_batch,
            "allow": check_allow(allow),
            "total_steps": total_steps,
            "clips_gradients": max_grad_norm > 0,
            "risk": risk,
        }
    )
    source = find_source(model, AdapterOptions.from_fields(dict(adapter)), images=images, quick=quick)
    workload = workload.changed(program=read_program(program, has_images=source.images_per_row > 0))
    if quick and source.images_per_row:
        raise RequestError("quick=True does not work with images; leave it out, or plan rows of text alone with images=0")
    if quick:
        check_length_in_config(source, sequence_length)
    profiler = choose_profiler(source, quick=quick)
    return plan_training(source, find_host(on), workload, fixed=fixed, described=on is not None, profiler=profiler)


def choose_profiler(source: ModelSource, *, quick: bool) -> Profiler:
    """Return what makes the model's profile: a trace, or with ``quick`` the sizes in its config.

    Raise RequestError for an adapter that a quick plan has no formulas for.
    """
    if not quick:
        return profile_model
    check_adapter(source)
    shapes = shapes_in_files(source)

    def estimate(
        source: ModelSource,
        *,
        sequence_length: int,
        variants: tuple[Variant, ...],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> ModelProfile:
        return estimate_profile(source, sequence_length=sequence_length, shapes=shapes)

    return estimate


def shapes_in_files(source: ModelSource) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the model's safetensors files, from their headers. Empty: there are none."""
    if source.directory is None:
        return {}
    files = sorted(source.directory.glob("model*.safetensors"))
    return {tensor.name: tensor.shape for file in files for tensor in read_header(file).tensors}


def length_in_config(source: ModelSource, length: int | None) -> int:
    """Return the length of sequences: the user's, or the default. Raise RequestError for more tokens than the config has."""
    if length is None:
        return default_length(positions_in_config(source))
    check_length_in_config(source, length)
    return length


def check_length_in_config(source: ModelSource, length: int) -> None:
    """Raise RequestError for more tokens than the config has positions for."""
    limit = positions_in_config(source)
    if limit is not None and length > limit:
        problem = f"a sequence length of {length} is longer than the {limit} positions in the config"
        raise RequestError(f"{problem}; use at most {limit}")


def find_source(
    model: str | Path, adapter: AdapterOptions, *, has_reward_head: bool = False, images: int | None = 0, quick: bool = False
) -> ModelSource:
    """Return the source to plan for, with its adapter, its reward head, and the images of each row.

    ``images``: None means 1 for a model that is no language model by itself, such as LLaVA, and else 0. Raise RequestError if
    the model lacks a module that the options name. ``quick``: modules are not looked up, as a quick plan takes no names.
    """
    source = find_model_to_train(model, adapter, has_reward_head=has_reward_head)
    number = int(_needs_images(source)) if images is None else images
    if number < 0:
        raise RequestError(f"images={number} is no number of images in a row; use 0 or more")
    source = source.changed(images_per_row=number) if number else source
    if adapter.names_modules and not quick:
        from upshift.models.adapter import check_module_names  # imports torch, without which a cached model is planned faster

        check_module_names(source, adapter)
    return source


def _needs_images(source: ModelSource) -> bool:
    """Return whether transformers lists the model's class for images with text, and for no loss of texts alone."""
    if not any(name.startswith(SIGNS_OF_IMAGES) for name in source.config):
        return False
    from upshift.models.build import find_architecture  # imports torch, without which a cached model is planned faster
    from upshift.models.tasks import inputs_of

    architecture = find_architecture(source.hf_config, source.reference)
    task = architecture.task
    reads_images = "image" in inputs_of(architecture.model_class)
    return architecture.objective is None and task is not None and task.name == "image-text-to-text" and reads_images


def read_plan(path: Path, *, host: Host, source: ModelSource) -> Plan:
    """Read a plan from a file: a single Plan, or the best of a document written by ``upshift plan --json``.

    Raise RequestError for an unknown key, and for a plan made for another model or other hardware.
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
    plan = Plan.from_json(json.dumps(document), origin=str(path))
    if plan.host != host.fingerprint:
        raise RequestError(f"plan {path} was made for other hardware ({plan.host}; this is {host.fingerprint}); plan again here")
    if plan.model != source.model_hash:
        raise RequestError(
            f"plan {path} was made for another model ({plan.model}; this is {source.model_hash}); plan again for it"
        )
    return plan
