"""Rank the plans for a host, a ModelProfile and a Workload: the entry point of this package."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack, get_args

from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe, detect
from upshift.hardware.catalog.lookup import names_with_more
from upshift.hardware.detect import AMD_UNUSED
from upshift.hardware.spec import Host
from upshift.hardware.torch_build import check_torch_uses_gpus
from upshift.loading.files.safetensors_header import read_header
from upshift.models.estimation.estimate import estimate_profile
from upshift.models.estimation.sizes import check_adapter, positions_in_config
from upshift.models.profile import ModelProfile, Variant
from upshift.models.sequence_length import default_length
from upshift.models.source import QLORA, AdapterKeywords, AdapterOptions, ModelSource, find_model_to_train
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
# The options that are tried if nothing fits.
LORA_RANK = 16
LEANER = ("bf16-weights", "8bit-optimizer")  # --allow: their plans need less memory
LEAST_LENGTH = 128  # tokens
HALVINGS = 7  # of the length and of the batch
MAX_ADVICE = 3  # options in a message
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
    with_advice: bool = True,
) -> Planning:
    """Rank the plan space.

    ``described``: the host is not this machine, so earlier runs here do not count. ``profiler``: makes the model's profile.
    ``with_advice``: if nothing fits, search for options with which a plan fits. Raise RequestError for a wrong request, and
    NothingFits with the nearest plan and these options if nothing fits.
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
        advise = partial(_advice, Problem(source, host, workload), profile, fixed=fixed, described=described)
        _raise_nothing_fits(ranking, host, workload, advise if with_advice else str)
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
            f"training plans are for CPUs and CUDA devices (ROCm included); {host.name} has {host.device} devices; plan "
            "inference on them with --generate or --encode, or training on the CPU of such a machine by leaving out --on "
            f"there{programs}"
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


def _raise_nothing_fits(ranking: Ranking, host: Host, workload: Workload, advise: Callable[[], str]) -> None:
    """Raise NothingFits with the smallest plan and advice, or RequestError if no plan can run in any memory."""
    if (phase := ranking.phase_problem) is not None:
        raise NothingFits(f"nothing fits on {host.name}: of the best plan {phase}; {advise()}")
    if not ranking.too_big:
        raise RequestError(f"no plan for {host.name}: {_commonest_reason(ranking)}")
    nearest = ranking.too_big[0]
    limit = limit_of(nearest, host, workload) or 0.0
    in_16_bits = min((entry.resident for entry in ranking.too_big if entry.plan.precision in ("bf16", "fp16")), default=0.0)
    is_full = nearest.plan.precision in ("fp32", "tf32") and in_16_bits > nearest.resident
    why = f" (copies in 16 bits add {format_bytes(in_16_bits - nearest.resident)})" if is_full else ""
    raise NothingFits(
        f"nothing fits in the {format_bytes(limit)} usable on {host.name}; the nearest plan needs "
        f"{format_bytes(nearest.resident)}: {nearest.plan.label()}{why}; {advise()}"
    )


def _advice(problem: Problem, profile: ModelProfile, *, fixed: tuple[str, ...], described: bool) -> str:
    """Return the options with which a plan fits, by the sizes in the config if they say enough, else by the model's trace."""
    can_estimate = True
    try:
        choose_profiler(problem.source, quick=True)(problem.source, sequence_length=LEAST_LENGTH, variants=())
    except RequestError:
        can_estimate = False

    def numbers_of(changed: Problem) -> str:
        make_profile = choose_profiler(changed.source, quick=True) if can_estimate else lambda *_, **__: profile
        planned = plan_training(*changed, fixed=fixed, described=True, profiler=make_profile, with_advice=False)
        best = planned.ranking.candidates[0]
        return f"{format_bytes(best.resident)}, {best.tokens_per_second:,.0f} {sample_unit(profile)}/s"

    advice = _checked_advice(problem, _changes(problem, described=described, can_estimate=can_estimate), numbers_of)
    if can_estimate:
        return advice
    untried = [kind[-1].words for kind in _changes(problem, described=False, can_estimate=True)[:2] if kind]
    return f"{advice}; not tried, because it needs another trace: {', '.join(untried)}" if untried else advice


class Problem(NamedTuple):
    """Hold what plans are searched for."""

    source: ModelSource
    host: Host
    workload: Workload


class Change(NamedTuple):
    """Hold options that may make a plan fit, and what they change. ``host``: the name of a described one."""

    words: str
    workload: Mapping[str, Any] = {}
    host: str | None = None
    adapter: AdapterOptions | None = None

    def apply(self, problem: Problem) -> Problem:
        """Return the changed problem. Raise RequestError if the change is not possible."""
        source, host, workload = problem
        return Problem(
            source if self.adapter is None else _with_adapter(source, self.adapter),
            host if self.host is None else describe(self.host),
            workload.changed(**self.workload),
        )


def _checked_advice(problem: Problem, kinds: Sequence[Sequence[Change]], numbers_of: Callable[[Problem], str]) -> str:
    """Return the options with which a plan fits, each with its numbers. Name a smaller model if only more devices would do.

    ``kinds``: the changes of each kind, the mildest first, devices last. ``numbers_of``: returns those of the best plan."""

    def check(*changes: Change) -> str | None:
        changed = problem
        try:
            for change in changes:
                changed = change.apply(changed)
            return f"{' '.join(change.words for change in changes)} ({numbers_of(changed)})"
        except (RequestError, NothingFits):
            return None

    def first(tries: Iterable[Sequence[Change]]) -> list[str]:
        return list(filter(None, [next(filter(None, (check(*changes) for changes in tries)), None)]))

    *alone, devices = kinds
    strongest = [kind[-1] for kind in alone if kind]
    found = [text for kind in alone for text in first([change] for change in kind)]
    found = found or first(strongest[:number] for number in range(2, len(strongest) + 1))
    adapter = [] if found else alone[0][-1:]
    more = first(changes for change in devices for changes in ([change], [*adapter, change]))
    if found:
        return f"what is predicted to fit: {', or '.join([*found, *more][:MAX_ADVICE])}"
    larger = "a machine with more memory" if problem.host.device == "cpu" else "a larger device"
    return f"no other option that was tried fits; use a smaller model or {larger}{''.join(f', or {text}' for text in more)}"


def _changes(problem: Problem, *, described: bool, can_estimate: bool) -> list[list[Change]]:
    """Return the changes of each kind that may make a plan fit. ``can_estimate``: other adapters and lengths need no trace."""
    source, host, workload = problem
    together = workload.rows_together
    is_length_free = can_estimate and workload.lengths is None and not source.images_per_row
    lengths = [workload.sequence_length >> power for power in range(1, HALVINGS)] if is_length_free else []
    batches = [workload.global_batch // together >> power for power in range(1, HALVINGS)]
    allow = tuple(dict.fromkeys((*workload.allow, *LEANER)))
    allowing = Change(f"--allow {','.join(allow)}", {"allow": allow})
    unclipped = Change(f"{allowing.words} --max-grad-norm 0", {"allow": allow, "clips_gradients": False})
    return [
        _adapter_changes(source, workload) if can_estimate else [],
        [Change(f"--sequence-length {tokens}", {"sequence_length": tokens}) for tokens in lengths if tokens >= LEAST_LENGTH],
        [Change(f"--global-batch {rows}", {"global_batch": rows * together}) for rows in batches if rows],
        [allowing, unclipped],
        [Change(f"--on {shlex.quote(name)}", host=name) for name in names_with_more(host)] if described else [],
    ]


def _adapter_changes(source: ModelSource, workload: Workload) -> list[Change]:
    """Return LoRA for a model that is trained whole, and frozen weights in 4 bits."""
    if not workload.runs_in.takes_adapters or "quantization_config" in source.config:
        return []
    four_bits = AdapterOptions(lora_rank=LORA_RANK, load_in_4bit=True)
    if source.adapter is not None:
        return [Change("--load-in-4bit", adapter=four_bits)]
    lora = f"--lora-rank {LORA_RANK}"
    return [Change(lora, adapter=AdapterOptions(lora_rank=LORA_RANK)), Change(f"{lora} --load-in-4bit", adapter=four_bits)]


def _with_adapter(source: ModelSource, options: AdapterOptions) -> ModelSource:
    """Return the source with an adapter, or with the frozen weights below its own adapter in 4 bits."""
    if source.adapter is not None:
        return source.changed(config=source.config | {"quantization_config": QLORA}, quantized_from=source.base_dtype)
    adapted = find_model_to_train(source.reference, options)
    if adapted.config.get("architectures") != source.config.get("architectures"):
        raise RequestError(f"{source.reference!r} has another head than its files; no adapter is suggested")
    return adapted.changed(images_per_row=source.images_per_row)


def _commonest_reason(ranking: Ranking) -> str:
    """Return why most plans cannot run. Too little memory counts only if there is no other reason: other plans need less."""
    reasons = [entry.reason for entry in ranking.rejected if isinstance(entry, Rejected)]
    reasons = reasons or [entry.reason for entry in ranking.rejected] or ["no combination of choices is legal"]
    return Counter(reasons).most_common(1)[0][0]


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
