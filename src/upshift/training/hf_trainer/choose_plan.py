"""Choose the Trainer's plan from the live model, the user's arguments and a sample of the data.

If no plan can be made, the user's own settings run, and the choice states the reason. The sample is a few batches of the
user's data. Drawing it does not disturb the training.
"""

from __future__ import annotations

import copy
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
from torch import nn
from torch.utils.data import BatchSampler, IterableDataset
from transformers import PreTrainedModel

from upshift.errors import RequestError, UpshiftError
from upshift.hardware.spec import Host
from upshift.internals.torch_names import dispatch_mode
from upshift.models.adapter import base_of, planned_part
from upshift.models.build import has_own_loss
from upshift.models.describe import attention_kernels
from upshift.models.isolation.layer_drop import drops_layers
from upshift.models.live_model import source_of
from upshift.models.profile_cache import isolation_of
from upshift.models.source import ModelSource
from upshift.planning.cost.process_memory import USABLE_SHARE
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Attention, Plan
from upshift.planning.planner import Planning, plan_training, with_default
from upshift.planning.search.constraints import why_no_layer_drop, why_not_isolated
from upshift.planning.search.ranking import Candidate
from upshift.planning.search.space import check_allow, parse_value
from upshift.planning.trials.runner import TrialRequest
from upshift.planning.trials.select import Proof, Tried, after_trial
from upshift.planning.trials.store import proof_path, remove_plan
from upshift.planning.workload import LengthHistogram, Workload, round_up
from upshift.record import Numbers
from upshift.training.batches.generated_rows import GENERATES
from upshift.training.batches.stand_ins import WholeRows
from upshift.training.batches.user_batches import Batch, CutSettings, RowBatch, write_stored_rows
from upshift.training.checkpoint.rng import preserved_rng
from upshift.training.data.tokens import histogram_of
from upshift.training.hf_trainer.arguments import OPT_IN_FIELDS
from upshift.training.hf_trainer.loss_split import Split
from upshift.training.hf_trainer.loss_state import DataWatch, StateSnapshot
from upshift.training.trials.trials import recall_earlier_proof, reject_plans, try_plans
from upshift.units import GIB

MAX_EXAMPLES = 512
MIN_GLOBAL_BATCHES = 4
MAX_DRAWING_SECONDS = 10.0
WIDTH_MULTIPLE = 8


@dataclass(frozen=True)
class Sample:
    """A few batches of the training data."""

    batches: list[Batch]  # from the collator, each of the user's per-device size
    seconds_per_batch: float
    why_no_workers: str = ""  # why other processes may not draw batches

    def rows(self, num_batches: int, *, encoder_decoder: bool, shifts_labels: bool) -> RowBatch:
        """Return the rows of the first ``num_batches`` batches. Raise InseparableRows if a batch is not made of rows."""
        return RowBatch(self.batches[:num_batches], encoder_decoder=encoder_decoder, shifts_labels=shifts_labels)


class NoSample(ValueError):
    """An error: the data cannot be read, or reading would use it up. The message gives the reason."""


def draw_sample(loader: Any, *, accumulation: int, watch: DataWatch | None = None) -> Sample:
    """Return a sample of the batches of ``trainer.get_train_dataloader()``.

    Raise NoSample for data that can be read only once, and for batches that the collator does not make of examples. ``watch``
    looks for a device that draws batches, and refuses exchanges with other ranks.
    """
    dataset = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    batch_size = getattr(loader, "batch_size", None)
    sampler = getattr(loader, "batch_sampler", None)
    if dataset is None or collate is None or batch_size is sampler is None:
        raise NoSample("the data loader does not make its batches of examples with a collator")
    size = batch_size or getattr(sampler, "batch_size", None) or 1
    fewest = max(MIN_GLOBAL_BATCHES * accumulation * size, MAX_EXAMPLES // 2)
    num_examples = min(fewest, max(MAX_EXAMPLES, accumulation * size))
    batches: list[Batch] = []
    start = time.perf_counter()
    try:
        with preserved_rng(), dispatch_mode(watch.run) if watch is not None else nullcontext():
            for chunk in _draw_chunks(dataset, sampler, size, num_examples):
                batch = collate(chunk)
                if not isinstance(batch, Mapping):
                    raise NoSample(f"the collator gives a {type(batch).__name__}, and no names to its tensors")
                batches.append(dict(batch))
                if time.perf_counter() - start > MAX_DRAWING_SECONDS and len(batches) >= accumulation:
                    break
    except RuntimeError:
        if watch is None or not watch.exchanges:
            raise
        raise NoSample("drawing a batch exchanges data with other ranks, and one rank alone draws the sample") from None
    if not batches:
        raise NoSample("the training data is empty")
    why_no_workers = _why_no_workers(dataset, watch.device if watch is not None else "")
    return Sample(batches, (time.perf_counter() - start) / len(batches), why_no_workers)


def _why_no_workers(dataset: Any, device: str) -> str:
    """Return why other processes may not draw batches, or "". ``device`` draws them, beside the CPU."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return "each worker would read a stream from its start and repeat its rows"
    return f"batches are made on {device}, which a forked worker cannot use" if device else ""


def _draw_chunks(dataset: Any, sampler: Any, size: int, count: int) -> Iterator[list[Any]]:
    """Return the examples of some batches, ``count`` examples in all.

    A sampler that makes batches in a way of its own alone knows which examples may share one: those of one of several data sets.
    """
    own_batches = _copy_own_batches(sampler, dataset)
    if own_batches is not None and hasattr(dataset, "__getitem__"):
        return ([dataset[index] for index in indices] for indices in islice(own_batches, math.ceil(count / size)))
    examples = _draw_examples(dataset, count)
    return iter(lambda: list(islice(examples, size)), [])


def _copy_own_batches(sampler: Any, dataset: Any) -> Any | None:
    """Return a copy of a sampler of batches, whose state stays as it is, or None if any examples may share a batch.

    They may where torch's BatchSampler cuts an order of examples. accelerate's samplers of ranks hold another one.
    """
    inner = sampler
    while isinstance(inner, BatchSampler) and isinstance(held := getattr(inner, "batch_sampler", None), BatchSampler):
        inner = held
    if inner is None or getattr(type(inner), "__iter__", None) is BatchSampler.__iter__:
        return None
    shared = {id(part): part for part in (dataset, *getattr(dataset, "datasets", ()))}  # the examples are not copied
    try:
        return copy.deepcopy(inner, shared)
    except Exception as error:  # copying an object of the script may raise anything
        message = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise NoSample(f"the sampler of batches cannot be copied, and drawing from it would change the run ({message})") from None


def _draw_examples(dataset: Any, count: int) -> Iterator[Any]:
    """Return ``count`` examples spread over the data set, or the first ones of data without an index.

    Raise NoSample if reading would use up the data.
    """
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        indices = np.linspace(0, len(dataset) - 1, num=min(count, len(dataset))).astype(int).tolist()
        random.Random(0).shuffle(indices)  # data may be sorted by length
        return (dataset[index] for index in indices)
    try:
        dataset = copy.deepcopy(dataset)  # reading may use up its source
    except Exception as error:  # copying an object of the script may raise anything
        message = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise NoSample(f"the training data cannot be copied, and reading it would use it up ({message})") from None
    examples = iter(dataset)
    if examples is iter(dataset):
        raise NoSample("the training data gives one iterator, which can be read once only")
    return islice(examples, count)


def draw_prompts(dataset: Any) -> list[Any]:
    """Return examples of a data set of prompts, which stays as it is. Raise NoSample if reading would use it up."""
    state = StateSnapshot(dataset=dataset)
    try:
        return list(_draw_examples(dataset, MAX_EXAMPLES))
    finally:
        state.restore()


def length_histogram(rows: RowBatch) -> LengthHistogram:
    """Return the lengths of the longer side of each row. The sequence length is the longest one, rounded up."""
    lengths = [max(pair) for pair in zip(rows.lengths, rows.target_lengths, strict=True)]
    return histogram_of(np.array(lengths), round_up(max(*lengths, WIDTH_MULTIPLE), WIDTH_MULTIPLE))


TRIAL_SHARE = 0.05  # share of the run's predicted time that trials may take
LONG_RUN_SHARE = 0.02  # share of a long run, if that is more than the usual minute
MIN_LONG_TRIAL_SECONDS = 60.0
LONGEST_TRIAL_SECONDS = 300.0
MIN_TRIAL_SECONDS = 8.0  # enough for the plain default and one other plan
MIN_DRAWING_SHARE = 0.01  # share of a step; below it no worker is worth its cost
WORKER_HEADROOM = 2.0  # batches drawn over batches used, so that the device does not wait for a slow batch
SHORT_RUN_SECONDS = 30.0  # tracing a model takes about this long


@dataclass(frozen=True)
class PlanRequest:
    """The input of ``choose``."""

    model: nn.Module
    sample: Sample
    split: Split
    rows: RowBatch  # the rows of the whole sample
    global_batch: int  # rows per optimizer step
    accumulation: int  # how many of the collator's batches make a step
    total_steps: int
    fixed: tuple[str, ...]
    allow: tuple[str, ...]
    trial_seconds: float | None  # limit; None: by the length of the run
    device: str
    clips_gradients: bool
    memory_limit_gib: float | None  # limit of the process, or the device; None: the free memory
    host: Host  # the devices of all ranks
    why_not: Callable[[Plan], str | None]  # returns why the model, or the Trainer, cannot run a plan
    keeps_batches: bool = False  # the script's code computes whole batches; ``sample`` and ``rows`` stand in for them


@dataclass(frozen=True)
class Choice:
    """The plan that runs. ``planning`` is None if the user's own settings or a given plan run.

    ``reason`` says why these run, or why the batches stay whole.
    """

    plan: Plan
    reason: str = ""
    planning: Planning | None = None
    candidate: Candidate | None = None
    proof: Proof | None = None
    proof_file: Path | None = None
    is_given: bool = False  # the user gave the plan
    covers: str = ""  # what the predicted or measured numbers cover, if that is not the whole step
    num_workers: int = 0  # processes that draw batches
    loading: str = ""  # the reason for this number

    @property
    def predicted(self) -> Numbers | None:
        return self.planning.numbers(self.candidate) if self.planning and self.candidate else None

    @property
    def free_bytes(self) -> float | None:
        """Return the bytes of memory that were free on the device when the plan was made, or None if unknown."""
        host = self.planning.host if self.planning else None
        if host is None:
            return None
        device = host.gpu if self.plan.device == "cuda" else host.cpu
        return device.free_memory_bytes if device else None


@dataclass(frozen=True)
class PlannedState:
    """The user's options for the plan, and the plan that the last training chose."""

    plan: Plan | None  # the plan to run, if the user gave one
    fixed: tuple[str, ...]  # fields of the plan, as "field=value"
    allow: tuple[str, ...]  # changes of the mathematics that the plan may make
    trial_seconds: float | None  # None: by the length of the run
    memory_limit_gib: float | None  # None: all free memory
    last_choice: tuple[Choice, Split] | None = None

    @property
    def is_demanded(self) -> bool:
        """Return whether the user set options that only a plan can meet. Then it is an error if no plan can be made."""
        return bool(self.plan is not None or self.fixed or self.allow or self.memory_limit_gib is not None)

    def check(self) -> None:
        """Raise RequestError for options beside a given plan, which would have no effect."""
        others = {"fixed": self.fixed, "allow": self.allow, "memory_limit_gib": self.memory_limit_gib}
        useless = [name for name, value in others.items() if value not in ((), None)]
        if self.plan is not None and useless:
            raise RequestError(f"{useless[0]} is for a plan that Upshift chooses, and plan= is given; leave one of the two out")


def as_tuple(values: str | Sequence[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)


def shrink_micro_batch(choice: Choice, *, rows: int) -> Choice:
    """Return the choice with smaller micro-batches after a step ran out of memory.

    ``rows`` is the largest micro-batch that may fit. The old plan is removed from the cache, so that the next run does not
    start with it.
    """
    batch = choice.plan.per_device_train_batch_size
    global_batch = choice.plan.global_batch
    smaller = next((size for size in range(min(rows, batch), 0, -1) if global_batch % size == 0), 1)
    if choice.proof_file is not None:
        remove_plan(choice.proof_file, choice.plan)
    plan = choice.plan.changed(per_device_train_batch_size=smaller, gradient_accumulation_steps=global_batch // smaller)
    return replace(choice, plan=plan)


def plain_plan(
    host: Host,
    *,
    device: str,
    batch: int,
    accumulation: int,
    sequence_length: int = 1,
    num_processes: int = 1,
    layout: Layout = ALONE,
) -> Plan:
    """Return a plan that describes the user's own settings. It cuts no batch and changes nothing."""
    return Plan(
        device="cuda" if device == "cuda" else "cpu",
        host=host.fingerprint,
        model="",
        sequence_length=sequence_length,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        num_processes=num_processes,
        layout=layout,
        threads_per_process=host.cpu.usable_cores if host.cpu else 1,
    )


def choose(request: PlanRequest, *, on_trial: Callable[[Tried], None] = lambda tried: None) -> Choice:
    """Return the plan to run. Raise RequestError if the model cannot be planned for, and NothingFits if no plan fits."""
    lengths = length_histogram(request.rows)
    source = source_of(request.model, allows_other_forward=request.keeps_batches)
    allow = check_allow(request.allow)
    workload = Workload(
        sequence_length=lengths.sequence_length,
        global_batch=request.global_batch,
        lengths=lengths.unless_full() if request.split.trims else None,
        total_steps=request.total_steps,
        allow=allow,
        clips_gradients=request.clips_gradients,
    )
    fixed = request.fixed
    if not request.split.flattens:
        refuse_other_values(fixed, {"packing": "False"}, request.split.why_not_flat)
        fixed = (*without_fields(fixed, "packing"), "packing=False")
    host = limit_memory(request.host, request.memory_limit_gib)
    planning = plan_training(source, host, workload, fixed=tuple(dict.fromkeys(fixed)))
    planning = reject_plans(planning, request.why_not, by_recomputation=request.keeps_batches)
    if request.keeps_batches:  # then the plain Trainer computes the same rows at once
        best = planning.best
        planning = with_default(planning, rows=best.per_device_train_batch_size, accumulation=best.gradient_accumulation_steps)
    trial_seconds = _trial_seconds(planning, request)
    path = _proof_path(planning, request, fixed)
    proof = _prove(source, planning, request, fixed, path, trial_seconds, on_trial) if trial_seconds else None
    candidate = after_trial(proof.chosen, planning) if proof else planning.ranking.candidates[0]
    drawing_seconds = request.sample.seconds_per_batch * request.accumulation
    num_cores = planning.host.cpu.usable_cores if planning.host.cpu else 1
    num_workers, loading = count_workers(
        drawing_seconds,
        candidate.time.total,
        device=request.device,
        num_cores=num_cores,
        why_none=request.sample.why_no_workers,
    )
    return Choice(
        plan=Plan.model_validate(candidate.plan.model_dump()),
        planning=planning,
        candidate=candidate,
        proof=proof,
        proof_file=path if proof else None,
        num_workers=num_workers,
        loading=loading,
    )


STAND_INS_COVER = (
    "this speed and memory count only the training of the model, with the model's own loss; a reference model, other rows of a "
    "batch or other parts of the script's loss would cost more"
)


def what_stand_ins_cover(model: nn.Module, whole: WholeRows) -> str:
    """Return the words that say what the numbers of a plan cover for batches that stay whole."""
    part = planned_part(model)
    if part is model:
        return STAND_INS_COVER
    base = base_of(part)
    name = type(base).__name__
    loss = "with its own loss" if has_own_loss(base) else "below a small head"
    again = f" and {whole.num_untrained} texts of a batch that it computes without gradients" if whole.num_untrained else ""
    return f"this speed and memory count only the training of {name} {loss}; the script's loss{again} would cost more"


WHOLE_LOGITS = {"loss_chunk_tokens": "0"}  # of a run whose logits Upshift cannot leave out


def whole_batch_fields(
    fixed: tuple[str, ...], *, num_rows: int, accumulation: int, own_step: bool, reason: str
) -> tuple[str, ...]:
    """Return the fixed fields of a plan that leaves batches whole.

    Args:
        fixed: the user's fields, as ``field=value`` assignments.
        num_rows: the rows of one batch.
        accumulation: the batches of one optimizer step.
        own_step: the script's training_step runs for each batch.
        reason: why the batches stay whole.

    Raises RequestError for a field of the user that needs other batches or another step.
    """
    required = {
        "per_device_train_batch_size": str(num_rows),
        "gradient_accumulation_steps": str(accumulation),
        "packing": "False",
    }
    if own_step:
        required |= WHOLE_LOGITS | dict.fromkeys(OPT_IN_FIELDS, "False")
    refuse_other_values(fixed, required, f"batches of {num_rows} rows stay whole, because {reason}")
    return (*without_fields(fixed, *required), *(f"{name}={value}" for name, value in required.items()))


def without_fields(fixed: tuple[str, ...], *names: str) -> tuple[str, ...]:
    """Return the ``field=value`` assignments of all other fields."""
    return tuple(assignment for assignment in fixed if assignment.partition("=")[0] not in names)


def refuse_other_values(fixed: tuple[str, ...], required: Mapping[str, str], reason: str) -> None:
    """Raise RequestError for a fixed field with another value than the required one. ``reason`` says why it is required."""
    for assignment in fixed:
        name, _, text = assignment.partition("=")
        if name in required and parse_value(name, text, option="fixed") != parse_value(name, required[name]):
            raise RequestError(f"{assignment} is not possible: {reason}; use {name}={required[name]}")


def plan_fields(plan: Plan) -> tuple[str, ...]:
    """Return the fields of a plan that whole_batch_fields and refuse_contradictions check, as ``field=value`` assignments."""
    carried_out = ("precision", "optim", "torch_compile", "activation_checkpointing", "recompute_granularity")
    batches = ("per_device_train_batch_size", "gradient_accumulation_steps", "packing")
    names = (*batches, *WHOLE_LOGITS, *OPT_IN_FIELDS, *carried_out)
    return tuple(f"{name}={getattr(plan, name)}" for name in names)


def why_not_for_whole_batches(plan: Plan, num_layers: int, reason: str) -> str | None:
    """Return why a plan that leaves batches whole for a reason cannot be this one, or None.

    A script's loss may switch activation checkpointing off for a reference model, and then on for all layers. It may also
    replace the model's forward, so only layers are compiled.
    """
    recomputes_all = plan.activation_checkpointing == num_layers and plan.recompute_granularity == "full"
    if plan.activation_checkpointing and not recomputes_all:
        return "the script's loss may switch activation checkpointing of all layers, so a plan recomputes all layers or none"
    if plan.torch_compile != "off" and reason == GENERATES:
        return "generation calls the same layers for each token, and compiled layers would be compiled again for other lengths"
    if plan.torch_compile == "model":
        return "the script's loss may call the model in several ways, so only layers are compiled"
    return None


def restrict_to_isolation(split: Split, model: nn.Module) -> Split:
    """Return ``split`` without the options under which the model's architecture lets rows influence each other.

    The architecture is tested with other weights, because the weights of this model may hide an influence.
    """
    try:
        isolation = isolation_of(source_of(model))
    except RequestError as error:
        return replace(split, flattens=False, drops_mask=False, why_not_flat=str(error))
    reasons = [isolation.why_not_packed(kernel) for kernel in get_args(Attention)]
    if all(reasons):
        split = replace(split, flattens=False, why_not_flat=next(reason for reason in reasons if reason))
    return replace(split, drops_mask=split.drops_mask and isolation.padding == "unmasked", isolation=isolation)


def check_plan(plan: Plan, split: Split, model: nn.Module) -> None:
    """Raise RequestError if the model cannot run the user's plan, or if texts of a row would influence each other."""
    reason = why_not_of_model(plan, base_of(model))
    if reason is None and plan.packing and not split.flattens:
        reason = split.why_not_flat
    if reason is None and split.isolation is not None:
        reason = why_not_isolated(split.isolation, plan)
    if reason is not None:
        raise RequestError(f"the given plan is not possible: {reason}")


def why_not_of_model(plan: Plan, base: nn.Module) -> str | None:
    """Return which field of a plan this model of transformers does not have and what it has, or None."""
    if not isinstance(base, PreTrainedModel):
        return None
    kernels = attention_kernels(base)
    if plan.attention not in kernels:
        return f"attention={plan.attention} is not for {type(base).__name__}; use one of {', '.join(kernels)}"
    if plan.activation_checkpointing and not base.supports_gradient_checkpointing:
        recomputed = f"activation_checkpointing={plan.activation_checkpointing}"
        return f"{recomputed} is not for {type(base).__name__}, which recomputes no layers; use activation_checkpointing=0"
    return None


def check_layer_drop(plan: Plan, model: nn.Module) -> None:
    """Raise RequestError if ranks would wait for each other in layers that each of them leaves out at random."""
    problem = why_no_layer_drop(plan)
    base = base_of(model)
    if problem is not None and isinstance(base, PreTrainedModel) and drops_layers(base.config, type(base)):
        raise RequestError(problem)


def limit_memory(host: Host, memory_limit_gib: float | None) -> Host:
    """Return the host with its free memory limited. None: no limit."""
    if memory_limit_gib is None:
        return host
    name = "gpu" if host.gpu else "cpu"
    device = getattr(host, name)
    limit = memory_limit_gib * GIB / USABLE_SHARE
    free = device.free_memory_bytes
    return host.changed(**{name: device.changed(free_memory_bytes=int(min(limit, free) if free else limit))})


def _trial_seconds(planning: Planning, request: PlanRequest) -> float:
    """Return the time for trials. It is 0 if it would be too short to compare two plans."""
    run_seconds = planning.default.time.total * request.total_steps
    limit = request.trial_seconds
    if limit is None:
        limit = min(max(MIN_LONG_TRIAL_SECONDS, LONG_RUN_SHARE * run_seconds), LONGEST_TRIAL_SECONDS)
    seconds = min(limit, TRIAL_SHARE * run_seconds)
    return seconds if seconds >= min(MIN_TRIAL_SECONDS, limit) else 0.0


def _prove(
    source: ModelSource,
    planning: Planning,
    request: PlanRequest,
    fixed: tuple[str, ...],
    path: Path,
    seconds: float,
    on_trial: Callable[[Tried], None],
) -> Proof:
    """Return an earlier proof of the same planning, or try plans on the sample for ``seconds``."""
    earlier_proof = recall_earlier_proof(planning, path)
    if earlier_proof is not None:
        return earlier_proof
    with tempfile.TemporaryDirectory(prefix="upshift-sample-") as name:
        folder = Path(name)
        reference = folder / "model.json"
        source.write(reference)
        rows = write_stored_rows(folder, request.sample.batches, _row_format(request))
        trial = TrialRequest(
            model_reference=str(reference),
            from_config=True,
            plan=planning.default.plan,
            global_batch=request.global_batch,
            seconds=seconds,
            limit_seconds=seconds,
            rows=str(rows),
            total_steps=request.total_steps,
            clips_gradients=request.clips_gradients,
        )
        limit = request.memory_limit_gib * GIB if request.memory_limit_gib is not None else None
        return try_plans(planning, path, trial, seconds=seconds, tried=on_trial, limit_bytes=limit, fixed=fixed)


def _proof_path(planning: Planning, request: PlanRequest, fixed: tuple[str, ...]) -> Path:
    limit = () if request.memory_limit_gib is None else (f"memory_limit_gib={request.memory_limit_gib:g}",)
    return proof_path(planning, fixed=(*fixed, *limit), from_config=True)


def _row_format(request: PlanRequest) -> CutSettings:
    rows = request.rows
    return CutSettings(
        encoder_decoder=rows.encoder_decoder,
        shifts_labels=rows.shifts_labels,
        unit=request.split.unit or "rows",
        trims=request.split.trims,
        drops_mask=request.split.drops_mask,
        structure=rows.structure,
    )


def count_workers(
    drawing_seconds: float, step_seconds: float, *, device: str, num_cores: int, why_none: str = ""
) -> tuple[int, str]:
    """Return how many processes draw batches, and the reason.

    ``drawing_seconds`` and ``step_seconds`` are the times of one global batch. ``why_none`` says why no worker may draw one.
    """
    share = drawing_seconds / step_seconds
    message = f"drawing a global batch takes {1000 * drawing_seconds:.1f} ms, {share:.1%} of a step"
    if device == "cpu":
        return 0, f"{message}; the step itself keeps every core busy, so workers would only take from it"
    if why_none:
        return 0, f"{message}; {why_none}"
    if share < MIN_DRAWING_SHARE:
        return 0, message
    return min(math.ceil(WORKER_HEADROOM * share), max(num_cores - 1, 1)), f"{message}; workers draw while the device computes"


def short_run_reason(seconds: float) -> str:
    return f"the whole run takes some {seconds:.0f} s, less than planning it would"


def no_plan_reason(error: UpshiftError) -> str:
    return f"no plan: {error}"
