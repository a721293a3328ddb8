"""Run forward passes without gradients: for the held-out loss, the reference of preferences, and KTO's KL term.

If memory runs out, the micro-batches are halved, and the pass is repeated like a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from upshift.planning.plan import Plan
from upshift.training.batches.collate import MicroBatch
from upshift.training.distributed.fsdp import OomCatchUp, reshard_weights
from upshift.training.distributed.mesh import all_reduce_max
from upshift.training.loop.events import FailedPass
from upshift.training.out_of_memory import BatchHalving, Halved, OnHalved, halve, stand_in

Result = TypeVar("Result")


class ForwardPasses:
    """Compute micro-batches without gradients. If memory runs out, halve them, and use the smaller ones from then on.

    The micro-batches of training stay as they are. ``catch_up`` is the object of the training step that lets a rank catch up with
    the others after it ran out of memory. If it is None, and ranks exchange tensors in a pass, the pass cannot be repeated.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        catch_up: OomCatchUp | None = None,
        on_failure: Callable[[], None] = lambda: None,
        on_halved: OnHalved = lambda halved: None,
    ) -> None:
        self.model = model
        self.plan = plan
        self._catch_up = catch_up
        self._running: FailedPass
        self._halving = BatchHalving[MicroBatch](
            halve=self._halve,
            size=lambda micro_batch: micro_batch.num_padded_tokens,
            restart=self._free_cache,
            on_failure=on_failure,
            on_halved=lambda old, new, message: on_halved(Halved(old.shape, new.shape, message, self._running)),
            equalize=self._add_stand_ins,
        )

    @property
    def halvings(self) -> int:
        """Return how many times the micro-batches were halved."""
        return self._halving.count

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        compute: Callable[[MicroBatch], Result],
        *,
        of: FailedPass,
        begin: Callable[[], None] = lambda: None,
    ) -> list[Result]:
        """Return the results of ``compute`` on the micro-batches in order, each of which may be one of several parts.

        Micro-batches that do not count run only if ranks exchange tensors. ``of`` names the pass for messages. The function
        ``begin`` is called before each try.
        """
        self._running = of

        def compute_all(parts: list[MicroBatch]) -> list[Result]:
            begin()
            running = [part for part in parts if self.runs(part)]
            last = len(running) - 1
            results = [self._compute(part, compute, last=number == last) for number, part in enumerate(running)]
            reshard_weights(self.model)
            if self._catch_up is not None:
                self._catch_up.agree()
            return results

        with torch.no_grad():
            return self._halving.run(micro_batches, compute_all)

    def runs(self, micro_batch: MicroBatch) -> bool:
        """Return whether the micro-batch is computed: it counts, or ranks exchange tensors meanwhile."""
        return bool(micro_batch.num_label_tokens or self.plan.layout.exchanges)

    def _compute(self, part: MicroBatch, compute: Callable[[MicroBatch], Result], *, last: bool) -> Result:
        result = compute(part) if self._catch_up is None else self._catch_up.run(part, compute, last=last)
        if self.plan.layout.fully_shard == "weights":
            # A forward pass leaves the weights outside of the layers gathered, and a backward pass would free them. A second try
            # begins without them. So the first one has to begin without them too, or the ranks gather unequally often.
            reshard_weights(self.model)
        return result

    def _halve(self, micro_batch: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
        can_repeat = self._catch_up is not None or not self.plan.layout.exchanges
        return halve(micro_batch) if can_repeat else None

    def _add_stand_ins(self, parts: list[MicroBatch]) -> list[MicroBatch]:
        """Return the parts, with stand-ins so that ranks in lockstep have equally many."""
        if self._catch_up is None:
            return parts
        missing = all_reduce_max(len(parts), self.plan) - len(parts)
        return parts + [stand_in(parts[-1])] * missing

    def _free_cache(self) -> None:
        if self.plan.device == "cuda":
            torch.cuda.empty_cache()
