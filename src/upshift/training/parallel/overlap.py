"""Sum gradients over plain data-parallel ranks on devices while the backward pass makes those of earlier layers.

Gradients live in flat buckets, the last layers first. Each bucket is summed when it is whole (Li et al. 2020, PyTorch
Distributed, section 3.2.3). On CPUs the sum waits for the end (gradients.py): the cores that would do it compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from upshift.planning.plan import Plan
from upshift.training.out_of_memory import halve, is_out_of_memory
from upshift.training.parallel.agreement import Agreement
from upshift.training.parallel.gradients import buckets
from upshift.training.parallel.place import Place

BUCKET_ELEMENTS = 25 * 2**18  # 25 MiB in fp32, as torch's DistributedDataParallel has them


def overlaps(plan: Plan) -> bool:
    layout = plan.layout
    plain = layout.fully_shard == "no" and not layout.exchanges
    return plan.device == "cuda" and layout.overlap and plain and plan.num_processes > 1


class Overlap:
    """A step with overlapped sums. ``run`` and ``agree`` work as in KeepPace.

    A rank that runs out of memory while others sum takes part with the gradients it has, and all ranks do the step again.
    """

    def __init__(
        self, model: nn.Module, place: Place, *, on_failure: Callable[[], None], halve: Callable[[Any], object] = halve
    ) -> None:
        assert place.mesh is not None
        self.place, self.group = place, place.mesh.get_group("replicas")
        self.agreement = Agreement(place, on_failure=on_failure, halve=halve)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = buckets(((parameter, parameter) for parameter in reversed(trained)), elements=BUCKET_ELEMENTS)
        self._buckets = [[parameter for parameter, _ in bucket] for bucket in found]
        self._flat: list[torch.Tensor] = []
        self.summed = False  # the gradients are those of all ranks
        self._missing: list[int] | None = None  # gradients, of each bucket, in the last backward pass
        self._works: list[Any] = []
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(partial(self._born, number))

    def run(self, micro_batch: Any, compute: Callable[[Any], torch.Tensor], *, last: bool) -> torch.Tensor:
        if self._buckets[0][0].grad is None:
            self._make_gradients()
        if not last:
            return compute(micro_batch)
        self._missing = [len(bucket) for bucket in self._buckets]
        share = torch.zeros((), device=self.place.plan.device)
        try:
            share = compute(micro_batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.agreement.ran_out(error, micro_batch)
        self._missing = [0] * len(self._buckets)  # a weight without a gradient counts as zero
        self._send()
        for work in self._works:
            work.wait()
        self._missing, self._works, self.summed = None, [], True
        return share

    def agree(self) -> None:
        self.agreement.agree()

    def forget(self) -> None:
        """Forget the buckets together with the gradients, once these are used or dropped."""
        self._flat, self.summed = [], False

    def _make_gradients(self) -> None:
        self.forget()
        for bucket in self._buckets:
            flat = torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            self._flat.append(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)

    def _born(self, number: int, parameter: torch.Tensor) -> None:
        if self._missing is not None:
            self._missing[number] -= 1
            self._send()

    def _send(self) -> None:
        """Start the sums of whole buckets, in the same order on all ranks."""
        assert self._missing is not None
        while len(self._works) < len(self._flat) and not self._missing[len(self._works)]:
            self._works.append(dist.all_reduce(self._flat[len(self._works)], group=self.group, async_op=True))
