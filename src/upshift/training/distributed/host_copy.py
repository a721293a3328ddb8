"""Bring numbers from a device to the host without letting the host wait before it needs them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from upshift.planning.plan import Plan


class HostCopy:
    """Copy some numbers to the host, and read them later. Until then the host does not wait for a GPU."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        self._copied: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        """Return the numbers. Wait until the device has computed and copied them."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers


class LateMax:
    """Find the largest number of all ranks in each step. A GPU's host reads it one step late, when it waits for nothing."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._previous: HostCopy | None = None

    def exchange(self, number: int) -> int:
        """Return the largest number that the ranks passed in the call before, or 0 in the first one. All ranks call it."""
        largest = torch.full((1,), float(number), device=self._plan.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        previous = self._previous
        self._previous = HostCopy(largest)
        return 0 if previous is None else int(previous.read()[0])
