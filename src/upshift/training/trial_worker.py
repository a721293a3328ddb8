"""One trial: the plan on the real model for a few seconds, longest micro-batch first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from upshift.benchmarking.meters import allocated_peak, reset_resident_peak, resident_bytes, resident_peak_bytes
from upshift.benchmarking.timer import time_once
from upshift.models.profile import num_sides
from upshift.models.source import ModelSource, find_to_train
from upshift.planning.trial import TrialRequest, TrialResult, loosened
from upshift.record import Spread
from upshift.training.arguments import Arguments
from upshift.training.batches.fill import MicroBatch
from upshift.training.batches.objective import Objective
from upshift.training.batches.of_plan import layout_for, objective_of
from upshift.training.batches.source import BatchSource, GlobalBatch, evaluation_batches
from upshift.training.batches.stored_rows import cut_stored, read_rows
from upshift.training.data.tokens import Sequences, TokenizedCorpus, cut_sequences
from upshift.training.data.training_data import read_sample
from upshift.training.evaluate import evaluate
from upshift.training.host_memory import limited_memory
from upshift.training.out_of_memory import is_out_of_memory
from upshift.training.parallel.place import find_place
from upshift.training.parallel.ranks import slowest
from upshift.training.parallel.stage import modules_of
from upshift.training.prepare import compile_layers, computing, load_or_build, loss_of, prepare, set_process
from upshift.training.processes import join_processes
from upshift.training.step import Stepper
from upshift.training.weight_offload import in_memory_bytes

CHECK_SEQUENCES = 4
MIN_SAMPLES, MAX_SAMPLES = 2, 24
EXPENSIVE = 2.0  # times the timed work: such a micro-batch is run once, and not under the meter
COMPILED_TOLERANCE = 0.05  # dropout draws other numbers when compiled; what a compiler breaks is larger; of 1,000 labels


def main(path: Path, answer: Callable[[TrialResult], None]) -> None:
    request = TrialRequest.from_file(path)
    start = time.perf_counter()
    try:
        with limited_memory(request.plan.num_processes):
            result = join_processes(request.plan, run_trial, request)
    except Exception as error:  # a trial is asked "does this run?"; every kind of no is an answer, with its words
        result = TrialResult(failure=_one_line(error), out_of_memory=is_out_of_memory(error))
    answer(result.changed(wall_seconds=time.perf_counter() - start))


def run_trial(request: TrialRequest) -> TrialResult:
    plan = request.plan
    set_process(plan)
    place = find_place(plan)
    base = resident_bytes()
    reset_resident_peak()
    source = find_to_train(request.model_reference, lora_rank=request.lora_rank, load_in_4bit=request.load_in_4bit)
    uncompiled = plan.changed(torch_compile="off")
    model = prepare(load_or_build(source, plan, from_config=request.from_config, seed=request.seed), uncompiled, place)
    batch, checked = _stored_batches(request) if request.rows else _token_batches(request, source, place.data_rank)
    checked = list(checked)
    check = evaluate(model, plan, checked)
    torch.manual_seed(request.seed)
    clipping = {"max_grad_norm": 0.0} if plan.optimizer_in_backward else {}
    stepper = Stepper(model, place, Arguments(max_steps=1000, seed=request.seed, **clipping))
    result = (_measure_steps if plan.layout.pipeline_parallel > 1 else _measure)(stepper, batch, request)
    labels = sum(m.num_label_tokens for b in checked for m in b.micro_batches)
    return result.changed(base_resident_bytes=base, check_loss=check * (result.check_loss or 1.0), check_labels=max(labels, 1))


def _token_batches(request: TrialRequest, source: ModelSource, data_rank: int) -> tuple[GlobalBatch, Iterator[GlobalBatch]]:
    """(what is timed, the few sequences whose loss is checked)"""
    objective = Objective.model_validate(request.objective) if request.objective else objective_of(source)
    sequences = _sequences(request, objective)
    layout = layout_for(request.plan, objective, data_rank=data_rank)
    whole = BatchSource(
        sequences=sequences, global_batch=request.global_batch, layout=layout, objective=objective, seed=request.seed
    )
    first = replace(sequences, starts=sequences.starts[:CHECK_SEQUENCES], lengths=sequences.lengths[:CHECK_SEQUENCES])
    checked = evaluation_batches(first, global_batch=CHECK_SEQUENCES, layout=layout, objective=objective)
    return next(whole.batches()), checked


def _stored_batches(request: TrialRequest) -> tuple[GlobalBatch, Iterator[GlobalBatch]]:
    rows, how = read_rows(Path(request.rows or ""))
    few = range(min(CHECK_SEQUENCES, len(rows)))
    return cut_stored(rows, how, request.plan, range(len(rows))), iter([cut_stored(rows, how, request.plan, few)])


def _measure(stepper: Stepper, batch: GlobalBatch, request: TrialRequest) -> TrialResult:
    """Optimizer state first, then the longest micro-batch, more while time lasts, an update, and at last the allocator's
    meter, whose own memory is not the plan's. ``check_loss`` is what compiling multiplied the loss by."""
    plan, device, waits = request.plan, request.plan.device, request.plan.layout.exchanges
    chosen = _spread(batch.micro_batches, with_stand_ins=waits)

    def accumulate(micro_batch: MicroBatch) -> float:
        if plan.gradient_accumulation_steps == 1:  # then gradients are born in every micro-batch
            stepper.optimizer.zero_grad(set_to_none=True)
        return _timed(stepper, micro_batch, batch.num_label_tokens)

    def update() -> float:
        return time_once(lambda: stepper.update(torch.zeros((), device=device), 0), device=device)

    first_update = _give_birth(stepper, update)
    with computing(stepper.model, plan):
        compile_seconds, factor = 0.0, 1.0
        if plan.torch_compile != "off":
            factor, compile_seconds = _compile(stepper, chosen[0], batch.num_label_tokens)
            others = chosen[1:] if waits else {m.shape: m for m in chosen[1:]}.values()
            compile_seconds += sum(map(accumulate, others))
        # From the second micro-batch on the gradients exist: a plan that accumulates is not known by one.
        at_least = min(2, len(chosen), plan.gradient_accumulation_steps)
        micro, padded = _time_micro_batches(chosen, accumulate, at_least=at_least, seconds=request.seconds)
        update_seconds = update()
        resident = resident_peak_bytes()
        peak_bytes = None
        if max(micro) <= EXPENSIVE * request.seconds:
            with allocated_peak(device, resident_bytes=in_memory_bytes(stepper.model, stepper.optimizer)) as peak:
                for micro_batch in chosen[: min(2, plan.gradient_accumulation_steps)]:
                    accumulate(micro_batch)
                if plan.num_processes == 1:  # others need not come here, and an update waits for them
                    update()
            peak_bytes = peak.bytes
    total_padded = sum(m.num_padded_tokens for m in batch.micro_batches)
    scale = total_padded / max(padded / len(micro), 1)  # micro-batches of average size in a whole step
    average = sum(micro) / len(micro) * scale + update_seconds
    return TrialResult(
        step_seconds=Spread.of([seconds * scale + update_seconds for seconds in micro], num_warmup=1).changed(p50=average),
        update_seconds=update_seconds,
        tokens_per_second=batch.num_tokens / average,
        one_time_seconds=max(compile_seconds - sum(micro) / len(micro), 0.0) + max(first_update - update_seconds, 0.0),
        largest_micro_batch=chosen[0].shape,
        peak_bytes=peak_bytes,
        resident_bytes=resident,
        check_loss=factor,
    )


def _timed(stepper: Stepper, micro_batch: MicroBatch, num_label_tokens: int) -> float:
    """Seconds; of the slowest rank where they wait for each other, so that all go on or none."""
    plan = stepper.plan
    waits = plan.layout.exchanges
    seconds = time_once(lambda: stepper.accumulate(micro_batch, num_label_tokens, last=waits), device=plan.device)
    if not waits:
        return seconds
    stepper.agree()
    return slowest(seconds, plan)


def _measure_steps(stepper: Stepper, batch: GlobalBatch, request: TrialRequest) -> TrialResult:
    """Of a pipeline: its micro-batches overlap, so only whole steps tell their time."""
    plan, device = stepper.plan, request.plan.device

    def update() -> float:
        return time_once(lambda: stepper.update(torch.zeros((), device=device), 0), device=device)

    first_update = _give_birth(stepper, update)
    update_seconds = update()
    for module in modules_of(stepper.model):
        compile_layers(module, plan)
    samples: list[float] = []
    while len(samples) < MIN_SAMPLES or (sum(samples[1:]) < request.seconds and len(samples) < MAX_SAMPLES):
        samples.append(slowest(time_once(lambda: stepper.step(batch), device=device), plan))
    resident = resident_peak_bytes()
    with allocated_peak(device, resident_bytes=in_memory_bytes(stepper.model, stepper.optimizer)) as peak:
        stepper.step(batch)
    average = sum(samples[1:]) / len(samples[1:])
    return TrialResult(
        step_seconds=Spread.of(samples, num_warmup=1).changed(p50=average),
        update_seconds=update_seconds,
        tokens_per_second=batch.num_tokens / average,
        one_time_seconds=max(samples[0] - average, 0.0) + max(first_update - update_seconds, 0.0),
        largest_micro_batch=max(batch.micro_batches, key=lambda micro_batch: micro_batch.num_padded_tokens).shape,
        peak_bytes=peak.bytes,
        resident_bytes=resident,
        check_loss=1.0,
    )


def _compile(stepper: Stepper, micro_batch: MicroBatch, num_label_tokens: int) -> tuple[float, float]:
    """(compiled over eager loss of one micro-batch, or 1 where they agree as far as dropout lets them; seconds)."""
    with torch.no_grad():
        eager = float(loss_of(stepper.model, stepper.plan, micro_batch))
    start = time.perf_counter()
    compile_layers(stepper.model, stepper.plan)
    waits = stepper.plan.layout.exchanges
    share = float(stepper.accumulate(micro_batch, num_label_tokens, last=waits))
    if waits:
        stepper.agree()
    stepper.optimizer.zero_grad(set_to_none=True)
    ratio = share * num_label_tokens / max(micro_batch.num_label_tokens, 1) / eager
    tolerance = loosened(COMPILED_TOLERANCE, micro_batch.num_label_tokens)
    return (1.0 if abs(ratio - 1.0) < tolerance else ratio), time.perf_counter() - start


def _give_birth(stepper: Stepper, update: Callable[[], float]) -> float:
    """An update with zero gradients makes the optimizer's state and moves no weight; returns its seconds."""
    for parameter in stepper.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return update()


def _time_micro_batches(
    chosen: list[MicroBatch], accumulate: Callable[[MicroBatch], float], *, at_least: int, seconds: float
) -> tuple[list[float], int]:
    """Seconds of each timed micro-batch, and the tokens, padding included, that they held."""
    samples: list[float] = []
    padded = 0
    while len(samples) < MAX_SAMPLES:
        if len(samples) >= at_least and samples[0] > EXPENSIVE * seconds:
            break
        if len(samples) >= MIN_SAMPLES and sum(samples) >= seconds * (1 if len(samples) >= len(chosen) else 2):
            break
        micro_batch = chosen[len(samples) % len(chosen)]
        samples.append(accumulate(micro_batch))
        padded += micro_batch.num_padded_tokens
    return samples, padded


def _spread(micro_batches: tuple[MicroBatch, ...], *, with_stand_ins: bool) -> list[MicroBatch]:
    """At most four micro-batches: the largest first, then evenly through the sizes."""
    ordered = sorted((m for m in micro_batches if m.num_label_tokens or with_stand_ins), key=lambda m: -m.num_padded_tokens)
    if len(ordered) <= 4:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / 3)] for index in range(4)]


def _sequences(request: TrialRequest, objective: Objective) -> Sequences:
    length = request.plan.sequence_length * num_sides(objective.kind)
    if request.sample is not None:
        return read_sample(Path(request.sample), length)
    generator = np.random.default_rng(request.seed)
    count = max(request.global_batch, CHECK_SEQUENCES)
    documents = [generator.integers(0, objective.vocab_size or 2, size=length).astype(np.int32) for _ in range(count)]
    return cut_sequences(TokenizedCorpus.from_documents(documents), length)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
