"""One rank of a world too large for this machine: the bytes that a steady optimizer step allocates, as PyTorch and transformers
share a model. All other ranks are fake, and so are the tensors, whose storages are counted. Real ranks of upshift's own
(real_ranks.py) allocate the same. Cases come as JSON, one process runs them all.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from real_ranks import full_batch, tensors
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM

from upshift.internals.torch_names import tree_leaves
from upshift.models.tracing.op_counter import LiveTracker
from upshift.models.tracing.segments import fake_masks
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.distributed.fsdp import set_last_micro_batch
from upshift.training.distributed.mesh import Mesh, init_mesh
from upshift.training.distributed.weight_update import sum_gradients_over_job
from upshift.training.prepare import compute_loss, prepare_model
from upshift.training.step import TrainStep

Step = Callable[[], None]


def a_step(case: dict[str, Any], place: Mesh) -> Step:
    """As Stepper does one, but for the numbers that it reads: fake tensors have none."""
    plan = place.plan
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(case["model"])).train()
    with mock.patch.object(nn.Module, "to", lambda module, device: module):  # fakes are there, and cannot be swapped
        stepper = TrainStep(prepare_model(model, plan, place), place, Arguments(max_steps=100, max_grad_norm=0.0))
    batch = full_batch(plan, place.data_rank)

    def step() -> None:
        for micro_batch in batch.micro_batches:
            last = micro_batch is batch.micro_batches[-1]
            set_last_micro_batch(stepper.model, plan, last=last)
            loss = compute_loss(stepper.model, plan, micro_batch)
            (loss.float() * 0.5).backward()
        sum_gradients_over_job(stepper.optimizer, stepper.model, place, summed=plan.layout.gathers)
        stepper.optimizer.step()
        stepper.optimizer.zero_grad(set_to_none=True)

    return step


def made(case: dict[str, Any], place: Mesh) -> tuple[Step, list[torch.Tensor]]:
    """The step of the job, run once, and what the rank holds between two of them."""
    before = tensors()
    step = a_step(case, place)
    step()
    return step, [tensor for key, tensor in tensors().items() if key not in before]


class FakeRank(LiveTracker):
    """Counts fake storages, also those that fully_shard resizes; not the tensors of whole size that DTensors are planned with."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._apart = 0, 0

    def _add(self, tensor: torch.Tensor) -> None:
        if not self._apart and tensor.device.type == "cpu":
            super()._add(tensor)
            self.peak = max(self.peak, self.live_bytes)

    def _handle(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        return super()._handle(function, args, kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        resize, plan = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage._cdata in self._storages:
                self.live_bytes += size - self._storages[storage._cdata]
                self._storages[storage._cdata] = size
                self.peak = max(self.peak, self.live_bytes)
            return result

        def planned(*args: Any, **kwargs: Any) -> Any:
            self._apart += 1
            try:
                return plan(*args, **kwargs)
            finally:
                self._apart -= 1

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", planned),
            self,
        ):
            yield


def measure_fake(case: dict[str, Any]) -> dict[str, float]:
    place = init_mesh(Plan(**case["plan"]))
    with FakeTensorMode(allow_non_fake_inputs=True), fake_masks(masked=False):
        step, held = made(case, place)
        tracker = FakeRank()
        tracker.adopt(held)
        held_bytes = tracker.live_bytes
        with tracker.watching():
            step()
    return {"peak": tracker.peak, "held": held_bytes, "left": tracker.live_bytes - held_bytes}


def leave_fakes(*names: str) -> None:
    """Meshes are made of numbers that must be known: these methods of theirs compute outside the fake mode."""
    for name in names:
        plain = DeviceMesh.__dict__[name]
        kind = type(plain) if isinstance(plain, staticmethod | classmethod) else None
        setattr(DeviceMesh, name, (kind or (lambda function: function))(_real(plain.__func__ if kind else plain)))


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def run_fake(cases: dict[str, Any]) -> dict[str, Any]:
    leave_fakes("__init__", "__getitem__", "_get_slice_mesh_layout", "_create_sub_mesh", "get_coordinate")
    found = {}
    for name, case in cases.items():
        for rank in case["ranks"]:
            dist.init_process_group("fake", rank=rank, world_size=case["plan"]["num_processes"], store=FakeStore())
            found[f"{name} rank {rank}"] = measure_fake(case)
            dist.destroy_process_group()
    return found


def leave(code: int) -> NoReturn:
    """Gloo's threads abort a process that ends as usual."""
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """CASES, OUTPUT."""
    path, output = sys.argv[1:]
    torch.set_num_threads(1)
    gc.freeze()  # what was imported holds no tensor of a rank: ``tensors`` need not look there
    Path(output).write_text(json.dumps(run_fake(json.loads(Path(path).read_text()))))
    leave(0)


if __name__ == "__main__":
    main()
