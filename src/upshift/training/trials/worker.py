"""Run one trial: the plan on the real model for a few seconds, on the batches that the run will begin with.

The longest micro-batch of the run comes first: it shows what the plan allocates, and whether it fits at all. Then come whole
optimizer steps over the run's own global batches, after warm-up, so that their speed and the memory that the process holds are
those of the run. If a whole step takes too long for a trial, some of its micro-batches stand for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from upshift.models.profile import num_sides
from upshift.models.source import ModelSource, find_to_train
from upshift.planning.plan import Plan
from upshift.planning.trials.runner import TrialRequest, TrialResult, loosened, unfinished
from upshift.record import Spread
from upshift.training.arguments import Arguments
from upshift.training.batches.collate import MicroBatch
from upshift.training.batches.plan_layout import layout_for, objective_of
from upshift.training.batches.sampler import BatchSource, GlobalBatch, Position, Upcoming, evaluation_batches, look_ahead
from upshift.training.batches.user_batches import cut_stored, read_rows
from upshift.training.checkpoint.rng import seed_rng
from upshift.training.data.dataset import load_data
from upshift.training.data.tokenizer import load_tokenizer
from upshift.training.data.tokens import Sequences, TokenizedCorpus, cut_sequences
from upshift.training.distributed.mesh import Mesh, init_mesh
from upshift.training.distributed.pipeline_stage import stage_modules
from upshift.training.evaluate import evaluate
from upshift.training.held_memory import held_bytes, held_peak_bytes, limited_memory, reset_held_peak
from upshift.training.job.processes import TOKENIZER
from upshift.training.out_of_memory import is_out_of_memory
from upshift.training.prepare import (
    chunked_loss,
    compile_layers,
    compute_loss,
    configure_process,
    in_memory_bytes,
    load_or_build,
    prepare_model,
)
from upshift.training.process_group import join_processes
from upshift.training.step import WATCHED_MICRO_BATCHES, Shape, TrainStep

CHECK_SEQUENCES = 4
WARM_STEPS = 2  # a run's first steps allocate, compile and tune: as many as its own meter leaves out
MIN_TIMED, MAX_TIMED = 2, 24  # steps or micro-batches
WHOLE_STEPS_FACTOR = 4.0  # times the timed seconds that warm and timed steps may take, else micro-batches stand for them
EXPENSIVE_FACTOR = 2.0  # times the timed seconds: such a micro-batch is run once, and not under the meter
BUSY_FACTOR = 3.0  # times the timed seconds, while other programs compute
COMPILED_TOLERANCE = 0.05  # dropout draws other numbers when compiled; what a compiler breaks is larger; of 1,000 labels
SendResult = Callable[[TrialResult], None]
Measured = TypeVar("Measured")


def main(path: Path, answer: SendResult) -> None:
    request = TrialRequest.from_file(path)
    start = time.perf_counter()

    def tell(partial: TrialResult) -> None:
        """Answer with the results so far, for the case that the trial is ended at its limit."""
        answer(partial.changed(timed_out=True))

    def work(request: TrialRequest) -> TrialResult:
        return run_trial(request, tell)

    try:
        with limited_memory(request.plan.num_processes):
            result = join_processes(request.plan, work, request)
    except Exception as error:  # a trial is asked "does this run?"; every kind of no is an answer, with its words
        result = TrialResult(failure=_one_line(error), out_of_memory=is_out_of_memory(error))
    answer(result.changed(wall_seconds=time.perf_counter() - start))


@dataclass(frozen=True)
class Batches:
    """The batches that a trial computes. ``upcoming``: the global batches of the run's first steps, in the run's order."""

    upcoming: Iterator[GlobalBatch]
    ahead: Upcoming
    longest: GlobalBatch  # the one whose micro-batches hold most tokens
    largest_of_run: bool  # whether no later batch has a longer micro-batch
    checked: list[GlobalBatch]  # a few sequences, the same under every plan, whose loss is compared
    data_bytes: int = 0  # of the data that a whole run reads and so holds in memory; a trial reads little of it
    tokenizer: Any = None  # a run holds it for what it saves

    @property
    def num_check_labels(self) -> int:
        return sum(micro_batch.num_label_tokens for batch in self.checked for micro_batch in batch.micro_batches)


def run_trial(request: TrialRequest, tell: SendResult) -> TrialResult:
    """Run the plan and return the measurements. ``tell`` takes results before the end, on rank 0 alone."""
    plan = request.plan
    configure_process(plan)
    mesh = init_mesh(plan)
    base = held_bytes(plan) + bytes_left_with_parent()
    reset_held_peak(plan)
    source = find_to_train(request.model_reference, lora_rank=request.lora_rank, load_in_4bit=request.load_in_4bit)
    uncompiled = plan.changed(torch_compile="off")
    model = prepare_model(load_or_build(source, plan, from_config=request.from_config, seed=request.seed), uncompiled, mesh)
    batches = _stored_batches(request) if request.rows else _token_batches(request, source, mesh)
    check_loss = evaluate(model, plan, batches.checked)

    def complete(result: TrialResult) -> TrialResult:
        """Return the result with the measurements before the steps.

        ``check_loss`` of ``result`` is the factor by which compiling changed the loss; None before anything was compiled.
        """
        return result.changed(
            base_resident_bytes=base, check_loss=check_loss * (result.check_loss or 1.0),
            check_labels=max(batches.num_check_labels, 1),
        )  # fmt: skip

    if mesh.rank == 0:
        tell(complete(unfinished()))
    seed_rng(request.seed, 0, mesh.rank // plan.layout.tensor_parallel)
    clips = request.clips_gradients and not plan.optimizer_in_backward
    arguments = Arguments(max_steps=1000, seed=request.seed, max_grad_norm=1.0 if clips else 0.0)
    stepper = TrainStep(model, mesh, arguments, on_halved=_raise_does_not_fit)
    reset_held_peak(plan)  # loading has a prediction of its own
    return complete(Trial(stepper, batches, request, lambda rough: tell(complete(rough))).run())


def _raise_does_not_fit(largest: Shape, smaller: Shape, words: str) -> None:
    """Raise MemoryError if the plan's micro-batches do not fit. A run would go on with smaller ones."""
    raise MemoryError(f"a micro-batch of {' x '.join(map(str, largest))} tokens does not fit: {words}")


def _token_batches(request: TrialRequest, source: ModelSource, mesh: Mesh) -> Batches:
    """Return the run's own batches if there is data, else batches of random tokens, all of full length."""
    tokenizer = None
    if request.data is not None:
        data = load_data(Path(request.data))
        sequences = data.training
        objective = data.objective
        if mesh.rank == 0 and (Path(request.data) / TOKENIZER).exists():
            tokenizer = load_tokenizer(Path(request.data) / TOKENIZER)
    else:
        objective = objective_of(source)
        sequences = _random_sequences(request, num_sides(objective.kind), objective.vocab_size or 2)
    layout = layout_for(request.plan, objective, data_rank=mesh.data_rank)
    run = BatchSource(
        sequences=sequences, global_batch=request.global_batch, layout=layout, objective=objective, seed=request.seed
    )
    few = run.sequence_ids(Position())[:CHECK_SEQUENCES]
    first = replace(sequences, starts=sequences.starts[few], lengths=sequences.lengths[few])
    checked = evaluation_batches(first, global_batch=CHECK_SEQUENCES, layout=layout, objective=objective)
    ahead = look_ahead(run, num_steps=request.total_steps)
    longest = next(run.batches(run.position_of_step(ahead.longest_step)))
    full = request.plan.per_device_train_batch_size * sequences.sequence_length
    largest = ahead.steps == request.total_steps or ahead.longest_tokens >= full
    share = min(request.total_steps * request.global_batch / len(sequences), 1.0) if request.data is not None else 0.0
    data_bytes = int(share * sum(array.nbytes for array in sequences.arrays.values()))
    return Batches(run.batches(), ahead, longest, largest, list(checked), data_bytes, tokenizer)


def _random_sequences(request: TrialRequest, sides: int, vocab_size: int) -> Sequences:
    length = request.plan.sequence_length * sides
    generator = np.random.default_rng(request.seed)
    count = max(request.global_batch, CHECK_SEQUENCES)
    documents = [generator.integers(0, vocab_size, size=length).astype(np.int32) for _ in range(count)]
    return cut_sequences(TokenizedCorpus.from_documents(documents), length)


def _stored_batches(request: TrialRequest) -> Batches:
    """Return as many global batches as the collated rows make, which are a sample of the run's rows."""
    rows, how = read_rows(Path(request.rows or ""))
    size = min(request.global_batch, len(rows))
    starts = range(0, len(rows) - size + 1, size)
    stored = [cut_stored(rows, how, request.plan, range(start, start + size)) for start in starts]
    sizes = [sorted((micro_batch.num_padded_tokens for micro_batch in batch.micro_batches), reverse=True) for batch in stored]
    longest = max(range(len(stored)), key=lambda number: sizes[number][:2])
    ahead = Upcoming(
        steps=len(stored), longest_step=longest, longest_tokens=sizes[longest][0],
        num_tokens=statistics.fmean(batch.num_tokens for batch in stored), num_padded_tokens=statistics.fmean(map(sum, sizes)),
    )  # fmt: skip
    few = range(min(CHECK_SEQUENCES, len(rows)))
    return Batches(cycle(stored), ahead, stored[longest], False, [cut_stored(rows, how, request.plan, few)])


class Trial:
    """The steps of a plan and their measurement. ``tell`` takes a rough result before the steady ones are there."""

    def __init__(
        self, stepper: TrainStep, batches: Batches, request: TrialRequest, tell: SendResult, *, meter: LoadMeter | None = None
    ) -> None:
        self.stepper = stepper
        self.batches = batches
        self.request = request
        self.tell = tell
        self.plan: Plan = stepper.plan
        self.meter = meter or LoadMeter()
        self.waits = self.plan.layout.exchanges  # ranks wait for each other within a micro-batch

    def run(self) -> TrialResult:
        first_update = self._give_birth()
        update = self._timed(self._update)
        if self.plan.layout.pipeline_parallel > 1:  # its micro-batches overlap, so only whole steps tell their time
            for module in stage_modules(self.stepper.model):
                compile_layers(module, self.plan)
            return self._whole_steps(update.calm_seconds, first_update.seconds - update.seconds)
        longest = self.batches.longest
        with chunked_loss(self.stepper.model, self.plan):
            factor, compile_seconds = self._compile(longest)
            self._drop_gradients()
            looks = [self._look(micro_batch) for micro_batch in self._most_at_once()]
            self._drop_gradients()
        once = compile_seconds + first_update.seconds - update.seconds
        share = self.batches.ahead.num_padded_tokens / self.batches.ahead.longest_tokens
        expected = looks[0].calm_seconds * share + update.calm_seconds
        if self.train_step.mesh.rank == 0:
            self.tell(self._rough(expected, once).changed(check_loss=factor))
        if expected * (WARM_STEPS + MIN_TIMED) <= WHOLE_STEPS_FACTOR * self.request.seconds:
            result = self._whole_steps(update.calm_seconds, once)
        else:
            result = self._micro_batches(looks[-1], once)
        return result.changed(check_loss=factor)

    def _most_at_once(self) -> tuple[MicroBatch, ...]:
        """Return the longest micro-batch of the run and the next one, at which gradients exist. A run watches as many."""
        return self.batches.longest.micro_batches[:WATCHED_MICRO_BATCHES]

    def _look(self, micro_batch: MicroBatch) -> Timing:
        return self._timed(lambda: self._accumulate(micro_batch, self.batches.longest.num_label_tokens))

    def _rough(self, expected: float, once: float) -> TrialResult:
        return TrialResult(
            rough=True, step_seconds=Spread.of([expected]), tokens_per_second=self.batches.ahead.num_tokens / expected,
            one_time_seconds=max(once, 0.0), largest_micro_batch=self.batches.longest.micro_batches[0].shape,
            largest_of_run=self.batches.largest_of_run, resident_bytes=self._held_bytes(),
        )  # fmt: skip

    def _held_bytes(self) -> int:
        """Return the most bytes that a separate process would hold. On a CPU it imports libraries and reads data itself."""
        plan = self.request.plan
        beside = 0 if plan.device == "cuda" else bytes_left_with_parent() + self.batches.data_bytes
        return held_peak_bytes(plan) + beside

    def _whole_steps(self, update_seconds: float, once: float) -> TrialResult:
        """Measure optimizer steps over the run's own batches."""
        warm = [self._step() for _ in range(WARM_STEPS)]
        timed: list[tuple[Timing, GlobalBatch]] = []
        while self._goes_on([timing for timing, _ in timed]):
            timed.append(self._step())
        chosen = _undisturbed(timed)
        seconds = statistics.fmean(timing.calm_seconds for timing, _ in chosen)
        padded = self._agreed(statistics.fmean(_num_padded_tokens(batch) for _, batch in chosen))
        # The run's steps hold more or fewer tokens than these few, padding included; an update takes as long in all of them.
        scale = self.batches.ahead.num_padded_tokens / max(padded, 1.0)
        average = max(seconds - update_seconds, 0.0) * scale + min(update_seconds, seconds)
        once += sum(max(timing.seconds - seconds, 0.0) for timing, _ in warm)
        samples = [timing.calm_seconds * average / seconds for timing, _ in chosen]
        resident = self._held_bytes()
        peak = self._allocated_peak() if seconds <= EXPENSIVE_FACTOR * self.request.seconds else None
        return self._result(average, samples, update_seconds, once, [timing for timing, _ in chosen], resident, peak, scale)

    def _micro_batches(self, look: Timing, once: float) -> TrialResult:
        """Measure some of a step's micro-batches, and an update. ``look``: the timing of the last of the longest ones."""
        batch = next(self.batches.upcoming)
        several = self.plan.num_processes > 1  # all of them time as many micro-batches
        chosen = _sample_by_size(batch.micro_batches, with_stand_ins=several)
        timed: list[tuple[Timing, int]] = []
        expensive = look.calm_seconds > EXPENSIVE_FACTOR * self.request.seconds

        def accumulate(micro_batch: MicroBatch) -> Timing:
            if self.plan.gradient_accumulation_steps == 1:  # then gradients are born in every micro-batch
                self._drop_gradients()
            return self._timed(lambda: self._accumulate(micro_batch, batch.num_label_tokens))

        with chunked_loss(self.stepper.model, self.plan):
            if self.plan.torch_compile != "off" and not expensive:  # shapes that were not compiled yet
                shapes = chosen if several else list({micro_batch.shape: micro_batch for micro_batch in chosen}.values())
                once += sum(accumulate(micro_batch).seconds for micro_batch in shapes)
            if expensive:  # it stands for all
                timed.append((look, self._most_at_once()[-1].num_padded_tokens))
            while not expensive and self._goes_on([timing for timing, _ in timed]):
                micro_batch = chosen[len(timed) % len(chosen)]
                timed.append((accumulate(micro_batch), micro_batch.num_padded_tokens))
            update = self._timed(self._update)
        picked = _undisturbed(timed)
        seconds = sum(timing.calm_seconds for timing, _ in picked)
        padded = self._agreed(sum(tokens for _, tokens in picked))
        scale = self.batches.ahead.num_padded_tokens / max(padded, 1.0) * len(picked)
        average = seconds / len(picked) * scale + update.calm_seconds
        samples = [timing.calm_seconds * scale + update.calm_seconds for timing, _ in picked]
        resident = self._held_bytes()
        peak = None if expensive else self._allocated_peak()
        timings = [timing for timing, _ in picked]
        return self._result(average, samples, update.calm_seconds, once, timings, resident, peak, scale)

    def _result(
        self, average: float, samples: list[float], update_seconds: float, once: float, timings: list[Timing], resident: int,
        peak: int | None, scale: float,
    ) -> TrialResult:  # fmt: skip
        whole = sum(timing.seconds for timing in timings)
        return TrialResult(
            busy=all(timing.busy for timing in timings),
            waited_share=sum(timing.waited for timing in timings) / whole if whole else 0.0,
            cpu_seconds=statistics.fmean(timing.cpu_seconds for timing in timings) * scale,
            step_seconds=Spread.of(samples, num_warmup=WARM_STEPS).changed(p50=average), update_seconds=update_seconds,
            tokens_per_second=self.batches.ahead.num_tokens / average, one_time_seconds=max(once, 0.0),
            largest_micro_batch=self.batches.longest.micro_batches[0].shape, largest_of_run=self.batches.largest_of_run,
            peak_bytes=peak, resident_bytes=resident, check_loss=1.0,
        )  # fmt: skip

    def _goes_on(self, timed: list[Timing]) -> bool:
        """Return whether to time another step or micro-batch. If other programs compute, go on until some are undisturbed."""
        seconds = self.request.seconds
        calm = [timing for timing in timed if not timing.busy]
        spent = sum(timing.seconds for timing in timed)
        if len(timed) < MIN_TIMED:
            return True
        if len(timed) >= MAX_TIMED or spent >= BUSY_FACTOR * seconds:
            return False
        return len(calm) < MIN_TIMED or sum(timing.seconds for timing in calm) < seconds

    def _step(self) -> tuple[Timing, GlobalBatch]:
        """Time one optimizer step and the making of its batch, as a run counts them, and return the batch, too."""
        stepped: list[GlobalBatch] = []

        def work() -> None:
            batch = next(self.batches.upcoming)
            self.stepper.step(batch)
            stepped.append(batch)

        return self._timed(work), stepped[0]

    def _timed(self, work: Callable[[], object]) -> Timing:
        """Time work of all ranks: the seconds of the slowest rank, and the processor time of all."""
        device = self.plan.device
        synchronise(device)

        def whole() -> None:
            work()
            synchronise(device)

        timing = self.meter.time(whole)
        if self.plan.num_processes == 1:
            return timing
        worst = torch.tensor([timing.seconds, timing.waited], dtype=torch.float64, device=device)
        total = torch.tensor([timing.cpu_seconds], dtype=torch.float64, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        seconds = float(worst[0])
        cpu = float(total[0])
        others = timing.other_cores - (cpu - timing.cpu_seconds) / max(seconds, 1e-9)  # the other ranks are no strangers
        beside = torch.tensor([others], dtype=torch.float64, device=device)
        dist.all_reduce(beside, op=dist.ReduceOp.MAX)
        return Timing(seconds, cpu, float(worst[1]), max(float(beside[0]), 0.0))

    def _agreed(self, number: float) -> float:
        """Return the largest number of all ranks, because they wait for the rank that has most to do."""
        if self.plan.num_processes == 1:
            return number
        found = torch.tensor(number, dtype=torch.float64, device=self.plan.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def _accumulate(self, micro_batch: MicroBatch, num_label_tokens: int) -> None:
        self.stepper.accumulate(micro_batch, num_label_tokens, last=self.waits)
        if self.waits:
            self.stepper.agree()

    def _update(self) -> None:
        self.stepper.update(torch.zeros((), device=self.plan.device), 0)

    def _drop_gradients(self) -> None:
        self.stepper.forget_gradients()

    def _give_birth(self) -> Timing:
        """Time an update with zero gradients, which makes the optimizer's state and moves no weight."""
        for parameter in self.stepper.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return self._timed(self._update)

    def _allocated_peak(self) -> int | None:
        """Run the longest micro-batches under the allocator's meter, whose own memory is not the plan's."""
        plan = self.plan
        longest = self.batches.longest
        resident = in_memory_bytes(self.stepper.model, self.stepper.optimizer)
        if plan.layout.pipeline_parallel > 1:
            with allocated_peak(plan.device, resident_bytes=resident) as peak:
                self.stepper.step(longest)
            return peak.bytes
        with chunked_loss(self.stepper.model, plan), allocated_peak(plan.device, resident_bytes=resident) as peak:
            for micro_batch in self._most_at_once():
                self._accumulate(micro_batch, longest.num_label_tokens)
            if plan.num_processes == 1:  # others need not come here, and an update waits for them
                self._update()
        return peak.bytes

    def _compile(self, batch: GlobalBatch) -> tuple[float, float]:
        """Compile the layers, and return (compiled over eager loss of one micro-batch, seconds).

        The ratio is 1 if the losses agree as far as dropout lets them.
        """
        stepper = self.stepper
        plan = self.plan
        micro_batch = batch.micro_batches[0]
        if plan.torch_compile == "off":
            return 1.0, 0.0
        with torch.no_grad():
            eager = float(compute_loss(stepper.model, plan, micro_batch))
        start = time.perf_counter()
        compile_layers(stepper.model, plan)
        share = float(stepper.accumulate(micro_batch, batch.num_label_tokens, last=self.waits))
        if self.waits:
            stepper.agree()
        ratio = share * batch.num_label_tokens / max(micro_batch.num_label_tokens, 1) / eager
        tolerance = loosened(COMPILED_TOLERANCE, micro_batch.num_label_tokens)
        return (1.0 if abs(ratio - 1.0) < tolerance else ratio), time.perf_counter() - start


def _num_padded_tokens(batch: GlobalBatch) -> int:
    return sum(micro_batch.num_padded_tokens for micro_batch in batch.micro_batches)


def _undisturbed(timed: list[tuple[Timing, Measured]]) -> list[tuple[Timing, Measured]]:
    """Return the timings that other programs did not disturb if they are enough, else all."""
    calm = [pair for pair in timed if not pair[0].busy]
    return calm if len(calm) >= MIN_TIMED else timed


def _sample_by_size(micro_batches: tuple[MicroBatch, ...], *, with_stand_ins: bool) -> list[MicroBatch]:
    """Return at most four micro-batches: the largest first, then evenly through the sizes."""
    ordered = sorted((m for m in micro_batches if m.num_label_tokens or with_stand_ins), key=lambda m: -m.num_padded_tokens)
    if len(ordered) <= 4:
        return ordered or list(micro_batches[:1])
    return [ordered[round(index * (len(ordered) - 1) / 3)] for index in range(4)]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
