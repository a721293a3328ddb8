"""Run one trial: run the plan on the real model for a few seconds, on the first batches of the run.

The longest micro-batch of the run comes first. It shows what the plan allocates, and whether it fits at all. Then whole optimizer
steps over the run's own global batches are timed after a warm-up, so their speed and the memory of the process are those of the
run. If a whole step takes too long for a trial, some of its micro-batches are timed instead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from upshift.benchmarking.meters import (
    allocated_peak,
    bytes_left_with_parent,
)
from upshift.benchmarking.timing import LoadMeter, Timing, synchronise
from upshift.errors import JobFailed
from upshift.models.adapter import base_of
from upshift.models.build import name_padding
from upshift.models.ops.sequence_loss import turn_off_dropout
from upshift.models.profile import num_sides
from upshift.models.source import ModelSource, find_model_to_train
from upshift.planning.plan import Plan
from upshift.planning.trials.runner import TrialRequest, TrialResult, loosen_tolerance, unfinished_result
from upshift.record import Spread
from upshift.text import one_line
from upshift.training.arguments import Arguments
from upshift.training.batches.collate import MicroBatch, without_pairs
from upshift.training.batches.layout import layout_for
from upshift.training.batches.model_objective import find_objective
from upshift.training.batches.sampler import BatchSource, GlobalBatch, Position, UpcomingSizes, evaluation_batches, look_ahead
from upshift.training.batches.user_batches import cut_stored_rows, read_stored_rows
from upshift.training.checkpoint.rng import seed_rng
from upshift.training.data.dataset import load_data
from upshift.training.data.tokenizer import load_tokenizer
from upshift.training.data.tokens import Sequences, TokenizedCorpus, cut_sequences
from upshift.training.distributed.mesh import Mesh, init_mesh
from upshift.training.distributed.pipeline_stage import stage_modules
from upshift.training.evaluate import evaluate
from upshift.training.forward_passes import ForwardPasses
from upshift.training.held_memory import held_bytes, held_peak_bytes, limited_memory, reset_held_peak
from upshift.training.job.processes import TOKENIZER_NAME
from upshift.training.out_of_memory import Halved, is_out_of_memory
from upshift.training.prepare import (
    chunked_loss,
    compile_layers,
    compute_loss,
    configure_process,
    in_memory_bytes,
    load_or_build,
    prepare_model,
)
from upshift.training.rank_processes import join_processes
from upshift.training.step import WATCHED_MICRO_BATCHES, TrainStep, check_finite

CHECK_SEQUENCES = 4  # sequences whose loss is compared between plans
WARM_STEPS = 2  # first steps, which allocate, compile and tune; a run's meter leaves out as many
MIN_TIMED = 2  # steps or micro-batches
MAX_TIMED = 24  # steps or micro-batches
WHOLE_STEPS_FACTOR = 4.0  # times the timed seconds: if warm and timed steps take longer, micro-batches are timed instead
EXPENSIVE_FACTOR = 2.0  # times the timed seconds: a micro-batch that takes longer runs once, and its memory is not measured
BUSY_FACTOR = 3.0  # times the timed seconds: the limit while other programs use the cores
# For 1,000 labels. Compiled dropout draws other random numbers; an error of the compiler makes a larger difference.
COMPILED_TOLERANCE = 0.05
SendResult = Callable[[TrialResult], None]
Measured = TypeVar("Measured")


def main(path: Path, answer: SendResult) -> None:
    """Run the trial of a request file, and answer with its result."""
    request = TrialRequest.from_file(path)
    start = time.perf_counter()

    def send_partial(partial: TrialResult) -> None:
        """Answer with the results so far, in case the trial is stopped at its time limit."""
        answer(partial.changed(timed_out=True))

    def work(request: TrialRequest) -> TrialResult:
        return run_trial(request, send_partial)

    try:
        # A CUDA context maps far more than it uses, which the limit would count.
        limit = limited_memory(request.plan.num_processes) if request.plan.device == "cpu" else nullcontext()
        with limit:
            result = join_processes(request.plan, work, request)
    except Exception as error:  # of any kind: the trial's answer is that the plan does not run, and why
        result = TrialResult(failure=_name_and_message(error), out_of_memory=is_out_of_memory(error))
    answer(result.changed(wall_seconds=time.perf_counter() - start))


@dataclass(frozen=True)
class Batches:
    """The batches that a trial computes."""

    upcoming: Iterator[GlobalBatch]  # global batches of the run's first steps, in their order
    ahead: UpcomingSizes  # sizes of the run's steps
    longest: GlobalBatch  # the global batch whose micro-batches hold most tokens
    largest_of_run: bool  # whether no later batch has a longer micro-batch
    checked: list[GlobalBatch]  # a few sequences, the same for every plan, whose loss is compared
    data_bytes: int = 0  # what a whole run reads into memory; a trial reads little of it
    tokenizer: Any = None  # kept in memory as a run does, which saves it
    pad_token_id: int = 0

    @property
    def num_check_labels(self) -> int:
        return sum(micro_batch.num_label_tokens for batch in self.checked for micro_batch in batch.micro_batches)


def run_trial(request: TrialRequest, send_partial: SendResult) -> TrialResult:
    """Run the plan and return the measurements. ``send_partial`` gets results before the end, only on rank 0."""
    plan = request.plan
    configure_process(plan)
    mesh = init_mesh(plan)
    base_bytes = held_bytes(plan) + bytes_left_with_parent()
    reset_held_peak(plan)
    source = find_model_to_train(request.model_reference, request.adapter, has_reward_head=request.has_reward_head)
    uncompiled = plan.changed(torch_compile="off")
    model = prepare_model(load_or_build(source, plan, from_config=request.from_config, seed=request.seed), uncompiled, mesh)
    batches = _stored_batches(request) if request.rows else _token_batches(request, source, mesh)
    if batches.longest.has_pairs:
        turn_off_dropout(model)
    if request.has_reward_head:
        name_padding(base_of(model).config, batches.pad_token_id)
    check_loss = evaluate(ForwardPasses(model, plan), batches.checked)
    check_finite(check_loss)

    def complete(result: TrialResult) -> TrialResult:
        """Add the measurements from before the steps to the result.

        ``check_loss`` of ``result`` is the factor by which compiling changed the loss, or None if nothing was compiled yet.
        """
        return result.changed(
            base_resident_bytes=base_bytes,
            check_loss=check_loss * (1.0 if result.check_loss is None else result.check_loss),
            check_labels=max(batches.num_check_labels, 1),
        )

    if mesh.rank == 0:
        send_partial(complete(unfinished_result()))
    seed_rng(request.seed, 0, mesh.rank // plan.layout.tensor_parallel)
    train_step = TrainStep(model, mesh, _arguments_of(request), on_halved=_raise_does_not_fit)
    reset_held_peak(plan)  # loading has its own prediction
    trial = Trial(train_step, batches, request, lambda rough: send_partial(complete(rough)))
    return complete(trial.run())


def _arguments_of(request: TrialRequest) -> Arguments:
    """Return the arguments of a run with the same work in each step."""
    clips = request.clips_gradients and not request.plan.optimizer_in_backward
    return Arguments(
        max_steps=1000,
        seed=request.seed,
        max_grad_norm=1.0 if clips else 0.0,
        kto_loss="kto" if request.has_kl_pass else "apo_zero_unpaired",
    )


def _raise_does_not_fit(halved: Halved) -> None:
    """Raise MemoryError, because the plan's micro-batches do not fit. A run would go on with smaller ones."""
    raise MemoryError(f"a micro-batch of {' x '.join(map(str, halved.largest))} tokens does not fit: {halved.message}")


def _token_batches(request: TrialRequest, source: ModelSource, mesh: Mesh) -> Batches:
    """Return the run's own batches if there is data, else batches of random tokens of full length."""
    tokenizer = None
    if request.data is not None:
        data = load_data(Path(request.data))
        sequences = data.training
        objective = data.objective
        if mesh.rank == 0 and (Path(request.data) / TOKENIZER_NAME).exists():
            tokenizer = load_tokenizer(Path(request.data) / TOKENIZER_NAME)
    else:
        objective = find_objective(source)
        sequences = _random_sequences(request, num_sides(objective.kind), objective.vocab_size or 2)
    layout = layout_for(request.plan, objective, data_rank=mesh.data_rank)
    source_of_batches = BatchSource(
        sequences=sequences, global_batch=request.global_batch, layout=layout, objective=objective, seed=request.seed
    )
    first_ids = source_of_batches.sequence_ids(Position())[:CHECK_SEQUENCES]
    # Of pairs the loss of each label is compared, which shows a wrong model better. Rewards have no labels.
    compared = objective if objective.has_rewards else objective.changed(has_pairs=False, has_ratings=False)
    checked = evaluation_batches(
        sequences.select(first_ids),
        global_batch=CHECK_SEQUENCES,
        layout=layout.changed(rows_together=compared.rows_together),
        objective=compared,
    )
    ahead = look_ahead(source_of_batches, num_steps=request.total_steps)
    longest = next(source_of_batches.batches(source_of_batches.position_of_step(ahead.longest_step)))
    most_tokens = request.plan.per_device_train_batch_size * sequences.sequence_length
    largest_of_run = ahead.steps == request.total_steps or ahead.longest_tokens >= most_tokens
    share_read = 0.0
    if request.data is not None:
        share_read = min(request.total_steps * request.global_batch / len(sequences), 1.0)
    data_bytes = int(share_read * sum(array.nbytes for array in sequences.arrays.values()))
    return Batches(
        source_of_batches.batches(), ahead, longest, largest_of_run, list(checked), data_bytes, tokenizer, objective.pad_token_id
    )


def _random_sequences(request: TrialRequest, sides: int, vocab_size: int) -> Sequences:
    """Return sequences of random tokens. ``sides`` is 2 for an encoder and a decoder, else 1."""
    length = request.plan.sequence_length * sides
    generator = np.random.default_rng(request.seed)
    count = max(request.global_batch, CHECK_SEQUENCES)
    documents = [generator.integers(0, vocab_size, size=length).astype(np.int32) for _ in range(count)]
    return cut_sequences(TokenizedCorpus.from_documents(documents), length)


def _stored_batches(request: TrialRequest) -> Batches:
    """Return the global batches that the stored rows make. These rows, already collated, are a sample of the run's rows."""
    rows, schema = read_stored_rows(Path(request.rows or ""))
    size = min(request.global_batch, len(rows))
    starts = range(0, len(rows) - size + 1, size)
    stored = [cut_stored_rows(rows, schema, request.plan, range(start, start + size)) for start in starts]
    sizes = [sorted((micro_batch.num_padded_tokens for micro_batch in batch.micro_batches), reverse=True) for batch in stored]
    longest = max(range(len(stored)), key=lambda number: sizes[number][:2])
    ahead = UpcomingSizes(
        steps=len(stored),
        longest_step=longest,
        longest_tokens=sizes[longest][0],
        num_tokens=statistics.fmean(batch.num_tokens for batch in stored),
        num_padded_tokens=statistics.fmean(map(sum, sizes)),
    )
    checked = cut_stored_rows(rows, schema, request.plan, range(min(CHECK_SEQUENCES, len(rows))))
    return Batches(cycle(stored), ahead, stored[longest], False, [checked])


class Trial:
    """Run and measure the steps of a plan. ``send_rough`` gets a rough result before the final one is measured."""

    def __init__(
        self,
        train_step: TrainStep,
        batches: Batches,
        request: TrialRequest,
        send_rough: SendResult,
        *,
        meter: LoadMeter | None = None,
    ) -> None:
        self.train_step = train_step
        self.batches = batches
        self.request = request
        self.send_rough = send_rough
        self.plan: Plan = train_step.plan
        self.meter = meter or LoadMeter()
        self.exchanges = self.plan.layout.exchanges  # whether ranks wait for each other within a micro-batch

    def run(self) -> TrialResult:
        """Measure the longest micro-batches, then whole steps, or micro-batches if steps take too long."""
        first_update = self._time_first_update()
        update = self._time(self._update)
        if self.plan.layout.pipeline_parallel > 1:  # its micro-batches overlap, so only whole steps can be timed
            for module in stage_modules(self.train_step.model):
                compile_layers(module, self.plan)
            return self._measure_whole_steps(update.calm_seconds, first_update.seconds - update.seconds)
        longest = self.batches.longest
        one_time_seconds = max(first_update.seconds - update.seconds, 0.0)
        with chunked_loss(self.train_step.model, self.plan):
            factor, compile_seconds = self._compile(longest)
            one_time_seconds += compile_seconds
            self._drop_gradients()
            timings = []
            for micro_batch in self._longest_micro_batches():
                timings.append(self._time_longest(micro_batch))
                expected_seconds = self._send_rough_result(timings[-1], update, one_time_seconds, factor)
            self._drop_gradients()
            if len(timings) == 1 and timings[0].calm_seconds <= EXPENSIVE_FACTOR * self.request.seconds:
                timings.append(self._time_longest(longest.micro_batches[0]))
                expected_seconds = self._send_rough_result(timings[-1], update, one_time_seconds, factor)
                self._drop_gradients()
        if expected_seconds * (WARM_STEPS + MIN_TIMED) <= WHOLE_STEPS_FACTOR * self.request.seconds:
            result = self._measure_whole_steps(update.calm_seconds, one_time_seconds)
        else:
            result = self._measure_micro_batches(timings[-1], one_time_seconds)
        return result.changed(check_loss=factor)

    def _longest_micro_batches(self) -> tuple[MicroBatch, ...]:
        """Return the longest micro-batch of the run and the next one, during which gradients exist. A run measures as many."""
        return self.batches.longest.micro_batches[:WATCHED_MICRO_BATCHES]

    def _time_longest(self, micro_batch: MicroBatch) -> Timing:
        return self._time(lambda: self._accumulate(micro_batch, self.batches.longest.num_label_tokens))

    def _send_rough_result(self, timing: Timing, update: Timing, one_time_seconds: float, factor: float) -> float:
        """Send the result that one of the longest micro-batches allows, and return the seconds of a step by it.

        The first of these micro-batches is cold: it allocates, and libraries prepare their kernels for new shapes. The result
        that the second one allows replaces its result.
        """
        share = self.batches.ahead.num_padded_tokens / self.batches.ahead.longest_tokens
        expected_seconds = timing.calm_seconds * share + update.calm_seconds
        if self.train_step.mesh.rank == 0:
            result = TrialResult(
                rough=True,
                step_seconds=Spread.of([expected_seconds]),
                check_loss=factor,
                tokens_per_second=self.batches.ahead.num_tokens / expected_seconds,
                one_time_seconds=one_time_seconds,
                largest_micro_batch=self.batches.longest.micro_batches[0].shape,
                largest_of_run=self.batches.largest_of_run,
                resident_bytes=self._held_bytes(),
            )
            self.send_rough(result)
        return expected_seconds

    def _held_bytes(self) -> int:
        """Return the most bytes that a separate process would hold. On a CPU it also imports libraries and reads the data."""
        plan = self.request.plan
        if plan.device == "cuda":
            return held_peak_bytes(plan)
        return held_peak_bytes(plan) + bytes_left_with_parent() + self.batches.data_bytes

    def _measure_whole_steps(self, update_seconds: float, one_time_seconds: float) -> TrialResult:
        """Measure optimizer steps over the run's own batches."""
        warm = [self._time_step() for _ in range(WARM_STEPS)]
        timed: list[tuple[Timing, GlobalBatch]] = []
        while self._needs_more([timing for timing, _ in timed]):
            timed.append(self._time_step())
        chosen = _undisturbed(timed)
        seconds = statistics.fmean(timing.calm_seconds for timing, _ in chosen)
        padded = self._largest_of_ranks(statistics.fmean(batch.num_padded_tokens for _, batch in chosen))
        # The run's steps have more or fewer tokens than these few, padding included. An update takes the same time in all.
        scale = self.batches.ahead.num_padded_tokens / max(padded, 1.0)
        average = max(seconds - update_seconds, 0.0) * scale + min(update_seconds, seconds)
        one_time_seconds += sum(max(timing.seconds - seconds, 0.0) for timing, _ in warm)
        samples = [timing.calm_seconds * average / seconds for timing, _ in chosen]
        resident = self._held_bytes()
        peak = self._allocated_peak() if seconds <= EXPENSIVE_FACTOR * self.request.seconds else None
        timings = [timing for timing, _ in chosen]
        return self._result(average, samples, update_seconds, one_time_seconds, timings, resident, peak, scale)

    def _measure_micro_batches(self, longest_timing: Timing, one_time_seconds: float) -> TrialResult:
        """Measure some micro-batches of a step, and an update.

        ``longest_timing`` is that of the last of the longest micro-batches.
        """
        batch = next(self.batches.upcoming)
        has_ranks = self.plan.num_processes > 1  # all ranks must time equally many micro-batches
        chosen = _sample_by_size(batch.micro_batches, with_stand_ins=has_ranks)
        timed: list[tuple[Timing, int]] = []
        is_expensive = longest_timing.calm_seconds > EXPENSIVE_FACTOR * self.request.seconds

        def accumulate(micro_batch: MicroBatch) -> Timing:
            if self.plan.gradient_accumulation_steps == 1:  # then every micro-batch allocates its gradients
                self._drop_gradients()
            return self._time(lambda: self._accumulate(micro_batch, batch.num_label_tokens))

        with chunked_loss(self.train_step.model, self.plan):
            if self.plan.torch_compile != "off" and not is_expensive:  # compile for shapes that are new
                new_shapes = chosen
                if not has_ranks:
                    new_shapes = list({micro_batch.shape: micro_batch for micro_batch in chosen}.values())
                one_time_seconds += sum(accumulate(micro_batch).seconds for micro_batch in new_shapes)
            if is_expensive:  # use its timing for all micro-batches
                timed.append((longest_timing, self._longest_micro_batches()[-1].num_padded_tokens))
            while not is_expensive and self._needs_more([timing for timing, _ in timed]):
                micro_batch = chosen[len(timed) % len(chosen)]
                timed.append((accumulate(micro_batch), micro_batch.num_padded_tokens))
            update = self._time(self._update)
        picked = _undisturbed(timed)
        seconds = sum(timing.calm_seconds for timing, _ in picked)
        padded = self._largest_of_ranks(sum(tokens for _, tokens in picked))
        scale = self.batches.ahead.num_padded_tokens / max(padded, 1.0) * len(picked)
        average = seconds / len(picked) * scale + update.calm_seconds
        samples = [timing.calm_seconds * scale + update.calm_seconds for timing, _ in picked]
        resident = self._held_bytes()
        peak = None if is_expensive else self._allocated_peak()
        timings = [timing for timing, _ in picked]
        return self._result(average, samples, update.calm_seconds, one_time_seconds, timings, resident, peak, scale)

    def _result(
        self,
        average: float,
        samples: list[float],
        update_seconds: float,
        one_time_seconds: float,
        timings: list[Timing],
        resident: int,
        peak: int | None,
        scale: float,
    ) -> TrialResult:
        total_seconds = sum(timing.seconds for timing in timings)
        return TrialResult(
            busy=all(timing.busy for timing in timings),
            waited_share=sum(timing.waited for timing in timings) / total_seconds if total_seconds else 0.0,
            cpu_seconds=statistics.fmean(timing.cpu_seconds for timing in timings) * scale,
            step_seconds=Spread.of(samples, num_warmup=WARM_STEPS).changed(p50=average),
            update_seconds=update_seconds,
            tokens_per_second=self.batches.ahead.num_tokens / average,
            one_time_seconds=max(one_time_seconds, 0.0),
            largest_micro_batch=self.batches.longest.micro_batches[0].shape,
            largest_of_run=self.batches.largest_of_run,
            peak_bytes=peak,
            resident_bytes=resident,
            check_loss=1.0,
        )

    def _needs_more(self, timed: list[Timing]) -> bool:
        """Return whether to time another step or micro-batch. If other programs use the cores, wait for undisturbed ones."""
        seconds = self.request.seconds
        undisturbed = [timing for timing in timed if not timing.busy]
        spent = sum(timing.seconds for timing in timed)
        if len(timed) < MIN_TIMED:
            return True
        if len(timed) >= MAX_TIMED or spent >= BUSY_FACTOR * seconds:
            return False
        return len(undisturbed) < MIN_TIMED or sum(timing.seconds for timing in undisturbed) < seconds

    def _time_step(self) -> tuple[Timing, GlobalBatch]:
        """Time one optimizer step, with the making of its batch as a run counts it. Return the timing and the batch."""
        batches: list[GlobalBatch] = []

        def work() -> None:
            batch = next(self.batches.upcoming)
            self.train_step.step(batch)
            batches.append(batch)

        return self._time(work), batches[0]

    def _time(self, work: Callable[[], object]) -> Timing:
        """Time the work of all ranks: the seconds of the slowest rank, and the processor time of all."""
        device = self.plan.device
        synchronise(device)

        def synchronised_work() -> None:
            work()
            synchronise(device)

        timing = self.meter.time(synchronised_work)
        if self.plan.num_processes == 1:
            return timing
        slowest = torch.tensor([timing.seconds, timing.waited], dtype=torch.float64, device=device)
        total = torch.tensor([timing.cpu_seconds], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        seconds = float(slowest[0])
        cpu_seconds = float(total[0])
        # The other ranks of this trial do not count as other programs.
        foreign = timing.other_cores - (cpu_seconds - timing.cpu_seconds) / max(seconds, 1e-9)
        foreign_cores = torch.tensor([foreign], dtype=torch.float64, device=device)
        dist.all_reduce(foreign_cores, op=dist.ReduceOp.MAX)
        return Timing(seconds, cpu_seconds, float(slowest[1]), max(float(foreign_cores[0]), 0.0))

    def _largest_of_ranks(self, number: float) -> float:
        """Return the largest number of all ranks, because they wait for the rank with the most work."""
        if self.plan.num_processes == 1:
            return number
        largest = torch.tensor(number, dtype=torch.float64, device=self.plan.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def _accumulate(self, micro_batch: MicroBatch, num_label_tokens: int) -> None:
        self.train_step.compute_mismatched(micro_batch)
        self.train_step.accumulate(micro_batch, num_label_tokens, last=self.exchanges)
        if self.exchanges:
            self.train_step.agree()

    def _update(self) -> None:
        self.train_step.update(torch.zeros((), device=self.plan.device))

    def _drop_gradients(self) -> None:
        self.train_step.forget_gradients()

    def _time_first_update(self) -> Timing:
        """Time an update with zero gradients, which allocates the optimizer's state and changes no weight."""
        for parameter in self.train_step.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return self._time(self._update)

    def _allocated_peak(self) -> int | None:
        """Run the longest micro-batches, and return the peak of the bytes that the allocator hands out.

        Call it last: the meter itself takes memory, which does not belong to the plan.
        """
        plan = self.plan
        longest = self.batches.longest
        resident = in_memory_bytes(self.train_step.model, self.train_step.optimizer)
        if plan.layout.pipeline_parallel > 1:
            with allocated_peak(plan.device, resident_bytes=resident) as peak:
                self.train_step.step(longest)
            return peak.bytes
        with chunked_loss(self.train_step.model, plan), allocated_peak(plan.device, resident_bytes=resident) as peak:
            for micro_batch in self._longest_micro_batches():
                self._accumulate(micro_batch, longest.num_label_tokens)
            if plan.num_processes == 1:  # with several ranks an update waits for all, and some may not measure
                self._update()
        return peak.bytes

    def _compile(self, batch: GlobalBatch) -> tuple[float, float]:
        """Compile the layers. Return the ratio of compiled to eager loss of one micro-batch, and the seconds.

        The ratio is 1 if the losses are equal within the tolerance for dropout.
        """
        train_step = self.train_step
        plan = self.plan
        micro_batch = without_pairs(batch.micro_batches[0])
        if plan.torch_compile == "off":
            return 1.0, 0.0
        with torch.no_grad():
            eager = float(compute_loss(train_step.model, plan, micro_batch))
        start = time.perf_counter()
        compile_layers(train_step.model, plan)
        train_step.compute_mismatched(batch.micro_batches[0])
        share = float(train_step.accumulate(micro_batch, batch.num_label_tokens, last=self.exchanges))
        if self.exchanges:
            train_step.agree()
        compiled = share * batch.num_label_tokens / max(micro_batch.num_label_tokens, 1)
        factor = loss_factor(compiled, eager, loosen_tolerance(COMPILED_TOLERANCE, micro_batch.num_label_tokens))
        return factor, time.perf_counter() - start


def loss_factor(compiled: float, eager: float, tolerance: float) -> float:
    """Return the ratio of two losses, or 1 if they are equal within ``tolerance``, a share of the eager loss.

    Raise JobFailed for a loss that is not finite, and if only the eager loss is 0: no factor makes another loss of it."""
    check_finite(eager)
    check_finite(compiled)
    if abs(compiled - eager) <= tolerance * abs(eager):
        return 1.0
    if eager == 0.0:
        raise JobFailed(f"the loss of a micro-batch is 0, and {compiled:.3g} with compiled layers; use torch_compile=off")
    return compiled / eager


def _undisturbed(timed: list[tuple[Timing, Measured]]) -> list[tuple[Timing, Measured]]:
    """Return the timings that other programs did not disturb, or all if there are too few."""
    undisturbed = [pair for pair in timed if not pair[0].busy]
    return undisturbed if len(undisturbed) >= MIN_TIMED else timed


def _sample_by_size(micro_batches: tuple[MicroBatch, ...], *, with_stand_ins: bool) -> list[MicroBatch]:
    """Return at most four micro-batches of evenly spread sizes, the largest first."""
    usable = [micro_batch for micro_batch in micro_batches if micro_batch.num_label_tokens or with_stand_ins]
    ordered = sorted(usable, key=lambda micro_batch: -micro_batch.num_padded_tokens)
    if len(ordered) <= 4:
        return ordered or list(micro_batches[:1])
    return [ordered[round(index * (len(ordered) - 1) / 3)] for index in range(4)]


def _name_and_message(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
