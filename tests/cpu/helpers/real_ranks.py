"""Real gloo ranks of a layout, as upshift runs them: the bytes that a steady optimizer step allocates, and those that it moves.

Cases come as JSON: a folder with a model's config, and a plan. One process imports everything, and forks a world of ranks for
each number of them; every rank writes what it found.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from exchanged_bytes import ExchangedBytes
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from upshift.benchmarking.meters import allocated_peak
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.batches.collate import MicroBatch
from upshift.training.batches.sampler import GlobalBatch, Position
from upshift.training.distributed.mesh import init_mesh
from upshift.training.prepare import prepare_model
from upshift.training.rank_processes import join_processes
from upshift.training.step import TrainStep

GLOO_THREAD = "pt_gloo_runloop"  # it holds what it sent or summed a moment longer than wait() does
LOOK_SECONDS = 5e-4
TASKS = "/proc/self/task"
VOCABULARY = 500
ops = torch.ops._c10d_functional


def a_step(case: dict[str, Any]) -> Callable[[], None]:
    plan = Plan(**case["plan"])
    place = init_mesh(plan)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(case["model"])).train()
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(_spread)
    model = prepare_model(model, plan, place)
    stepper = TrainStep(model, place, Arguments(max_steps=100, max_grad_norm=0.0))
    batch = full_batch(plan, place.data_rank, rated=case["rated"])
    return lambda: stepper.step(batch) and None


def _spread(module: Any, args: Any, routed: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Each expert gets as many tokens as any other: routes are set, not learned."""
    logits, scores, indices = routed
    return logits, scores, torch.arange(indices.numel()).remainder(logits.shape[-1]).view(indices.shape)


def full_batch(plan: Plan, data_rank: int, *, rated: bool = False) -> GlobalBatch:
    """Of sequences that fill every row. ``rated``: answers for KTO, every second one mismatched."""
    rows, width = plan.per_device_train_batch_size, plan.sequence_length
    generator = np.random.default_rng(data_rank)

    def micro_batch() -> MicroBatch:
        ids = generator.integers(3, VOCABULARY, (rows, width))
        arrays = {"input_ids": ids, "labels": ids}
        labels = rows // 2 if rated else rows * (width - 1)
        made = MicroBatch(arrays=arrays, sequence_ids=np.arange(rows), num_label_tokens=labels, num_tokens=ids.size)
        if not rated:
            return made
        return replace(made, reference=np.full(rows, -1.0, np.float32), ratings=np.ones(rows // 2, np.bool_))

    start, count = Position(), plan.gradient_accumulation_steps
    return GlobalBatch(
        position=start, next_position=start, micro_batches=tuple(micro_batch() for _ in range(count)),
        sequence_ids=np.arange(plan.global_batch), num_label_tokens=plan.global_batch * (width - 1),
        num_tokens=plan.global_batch * width,
    )  # fmt: skip


def tensors() -> dict[int, torch.Tensor]:
    """Every plain tensor that Python can see, one for each storage."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor)]
    return {tensor.untyped_storage()._cdata: tensor for tensor in found if tensor.device.type == "cpu"}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    before = tensors()
    threads = GlooThreads()
    step = a_step(case)
    with ExchangedBytes() as counted:
        step()
    threads.settle()
    held = [tensor.untyped_storage().nbytes() for key, tensor in tensors().items() if key not in before]
    with settled(threads), allocated_peak("cpu", resident_bytes=sum(held)) as peak:
        step()
        threads.settle()
    moved = [[*key, number, counted.calls[key]] for key, number in counted.bytes.items()]
    return {"peak": peak.bytes, "held": sum(held), "left": peak.left, "moved": moved}


class GlooThreads:
    """Those of this process. Each gives itself its name before it first sleeps, so one that sleeps without it is another's."""

    def __init__(self) -> None:
        self._others: set[str] = set()

    def settle(self) -> None:
        """Wait until all sleep: between the end of an exchange and that a thread runs, or waits for a core to run on.
        Twice, as a thread that waited for Python's lock sleeps, too, and runs on when it is free."""
        seen = 0
        while seen < 2:
            time.sleep(LOOK_SECONDS)
            seen = seen + 1 if self._all_sleep() else 0

    def _all_sleep(self) -> bool:
        busy = False
        for thread in set(os.listdir(TASKS)) - self._others:
            with open(f"{TASKS}/{thread}/stat") as stat:
                name, _, rest = stat.read().partition("(")[2].rpartition(")")
            sleeps = rest.split()[0] == "S"
            if name == GLOO_THREAD:
                busy |= not sleeps
            elif sleeps:
                self._others.add(thread)
        return not busy


class Settled:
    """Waits until gloo's threads have let go of what they exchanged."""

    def __init__(self, waits: Any, threads: GlooThreads) -> None:
        self._waits = waits
        self._threads = threads

    def __call__(self, *args: Any, **options: Any) -> Any:
        done = self._waits(*args, **options)
        self._threads.settle()
        return done

    def __get__(self, work: Any, kind: Any) -> Any:
        return self if work is None else functools.partial(self, work)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._waits, name)


def summed_here(tensor: torch.Tensor, operation: str, ranks: int, group: str) -> torch.Tensor:
    """Gloo sums a copy of all that is scattered, which its threads may free, where no meter sees it. Here the meter sees it."""
    whole = tensor.clone()
    dist.all_reduce(whole, group=_resolve_process_group(group))
    return whole.chunk(ranks)[dist.get_group_rank(_resolve_process_group(group), dist.get_rank())].clone()


@contextmanager
def settled(threads: GlooThreads) -> Iterator[None]:
    """What gloo's threads held is gone when a wait is over."""
    with ExitStack() as stack:
        for owner, name in ((dist.Work, "wait"), (ops, "wait_tensor"), (functional, "wait_tensor")):
            stack.enter_context(mock.patch.object(owner, name, Settled(getattr(owner, name), threads)))
        stack.enter_context(mock.patch.object(ops, "reduce_scatter_tensor", summed_here))
        yield


def run_world(cases: dict[str, Any], output: Path) -> None:
    torch.set_num_threads(1)
    found = {f"{name} rank {dist.get_rank()}": measure(case) for name, case in cases.items()}
    output.with_suffix(f".{dist.get_world_size()}-{dist.get_rank()}").write_text(json.dumps(found))


def main(given: Path, output: Path) -> None:
    gc.freeze()  # what was imported holds no tensor of a rank: ``tensors`` need not look there
    worlds: dict[int, dict[str, Any]] = {}
    for name, case in json.loads(given.read_text()).items():
        worlds.setdefault(case["plan"]["num_processes"], {})[name] = case
    for cases in worlds.values():
        child = os.fork()
        if not child:
            code = 1
            try:
                plan = Plan(**next(iter(cases.values()))["plan"])
                join_processes(plan, lambda cases: run_world(cases, output), cases)
                code = 0
            except BaseException:  # a fork must not go on as its parent
                traceback.print_exc()
            finally:
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
