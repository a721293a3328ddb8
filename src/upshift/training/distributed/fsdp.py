"""Run ZeRO 2 and 3 by torch's fully_shard: data-parallel ranks divide weights, gradients and optimizer state, layer by layer.

Gradients are summed, not averaged: each rank has its share of the mean loss of the global batch. fp32 weights are gathered in
the precision that the plan computes in, so that nothing is cast in the layers. Gradients are summed in fp32.

Keep a rank of fully_shard in pace after it ran out of memory in a micro-batch, so that no other rank waits for it forever.

The others wait in the next gather or sum. The rank begins the micro-batch anew with a few of its tokens. It leaves out the
exchanges that were done, and takes part in those that were not. The result is worth nothing: at the end of the step all
ranks learn of the failure, drop their gradients and do the step again in smaller micro-batches.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from upshift.errors import MissingInternal
from upshift.internals.lookup import Internal
from upshift.internals.torch_names import FSDP_GATHER, FSDP_SUM
from upshift.models.build import find_stacks
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.training.distributed.expert_parallel import expert_modules
from upshift.training.distributed.mesh import Mesh, OomAgreement
from upshift.training.out_of_memory import halve, is_out_of_memory, shrink_to_few_tokens

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}


def shard_weights(model: nn.Module, place: Mesh) -> None:
    """Shard the weights in place, and move them onto the plan's device.

    Weights become DTensors. Outside of a pass each rank has its rows of them.
    """
    plan = place.plan
    mesh = place.sharing
    policy = precision_policy(plan)
    keeps = plan.layout.fully_shard == "gradients"
    for experts in expert_modules(model, place):
        assert place.experts is not None
        fully_shard(experts, reshard_after_forward=not keeps, mesh=place.experts["replicas"], mp_policy=policy)
    for _, stack in find_stacks(model):
        for layer in stack:
            fully_shard(layer, reshard_after_forward=not keeps, mesh=mesh, mp_policy=policy)
    root = fully_shard(model, reshard_after_forward=False, mesh=mesh, mp_policy=policy)  # the backward pass begins there at once
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    root.set_reduce_scatter_unused_params(True)  # ranks' micro-batches may use different ones


def precision_policy(plan: Plan) -> MixedPrecisionPolicy:
    dtype = COMPUTE_DTYPES.get(plan.precision)
    return MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def set_last_micro_batch(model: nn.Module, plan: Plan, *, last: bool) -> None:
    """Tell fully_shard before a micro-batch whether it is the last one of the step.

    Only then are gradients summed over replicas. Only then do ranks that keep whole weights through the backward pass let go
    of them.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(last)
    if plan.layout.fully_shard == "gradients":
        model.set_reshard_after_backward(last)


def reshard_weights(model: nn.Module) -> None:
    """Drop weights that are whole after a pass without a backward pass."""
    for module in sharded_modules(model):
        module.reshard()


logger = logging.getLogger(__name__)


def can_catch_up(layout: Layout) -> bool:
    """Return whether a rank that runs out of memory can keep pace with the others.

    The ranks must exchange weights and gradients alone. These exchanges have the same size for every micro-batch. If this
    torch no longer has the names by which they are counted, the function warns once and returns False: a rank that runs out of
    memory then ends the run.
    """
    if not (layout.gathers and layout.ranks_per_replica == 1 and layout.expert_parallel == 1):
        return False
    return _missing_internal() is None


@cache
def _missing_internal() -> str | None:
    for name in (FSDP_GATHER, FSDP_SUM):
        try:
            name.get()
        except MissingInternal as error:
            logger.warning("%s. The run goes on without it: a rank that runs out of memory ends the run", error)
            return str(error)
    return None


class ExchangeCount:
    """A count of the exchanges of one kind in a micro-batch: those done, and those that a second try leaves out."""

    def __init__(self, *, on_caught_up: Callable[[], None] = lambda: None) -> None:
        self.done = 0
        self.left_out = 0
        self._on_caught_up = on_caught_up

    def begin(self) -> None:
        self.done = self.left_out = 0

    def begin_again(self, *, exchanges: bool = True) -> None:
        """Begin a second try, which leaves out the exchanges of the first. ``exchanges``: False leaves out all of them."""
        self.done, self.left_out = 0, self.done if exchanges else sys.maxsize
        if not self.left_out:
            self._on_caught_up()

    def leaves_out(self) -> bool:
        self.done += 1
        if self.done > self.left_out:
            self.left_out = 0
            return False
        if self.done == self.left_out:
            self._on_caught_up()
        return True


class SkippableExchange:
    """An exchange of fully_shard that is left out if the other ranks did it already."""

    def __init__(self, counted: ExchangeCount) -> None:
        self.counted = counted

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if self.counted.leaves_out():
            output_tensor.zero_()  # any numbers would do, but not NaN
            return None
        exchange: Any = super()
        return exchange.__call__(output_tensor, input_tensor, *args, **options)


def counted_exchange(exchange: Internal, counted: ExchangeCount) -> Any:
    """Return torch's own exchange, with a count of its calls."""
    return type("CountedExchange", (SkippableExchange, exchange.get()), {})(counted)


class OomCatchUp:
    """The means by which one rank keeps pace.

    ``halve`` and ``fewest`` make a part of the step's work smaller. By default a part is a MicroBatch.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Mesh,
        *,
        on_failure: Callable[[], None],
        halve: Callable[[Any], object] = halve,
        fewest: Callable[[Any], Any] = shrink_to_few_tokens,
    ) -> None:
        self.model = model
        self.place = place
        self._fewest = fewest
        self.agreement = OomAgreement(place, on_failure=on_failure, halve=halve)
        self._number, self._last = 0, False  # of the micro-batch in its step
        self._gathers = ExchangeCount()
        self._sums = ExchangeCount(on_caught_up=lambda: set_last_micro_batch(model, place.plan, last=self._last))
        for module in sharded_modules(model):
            module.set_custom_all_gather(counted_exchange(FSDP_GATHER, self._gathers))
            module.set_custom_reduce_scatter(counted_exchange(FSDP_SUM, self._sums))

    def run(self, micro_batch: Any, compute: Callable[[Any], torch.Tensor], *, last: bool) -> torch.Tensor:
        """Compute a micro-batch, or a few of its tokens once memory ran out. ``compute`` does the forward and backward pass."""
        self._number = self._number + 1
        self._last = last
        self._gathers.begin()
        self._sums.begin()
        set_last_micro_batch(self.model, self.place.plan, last=last)
        if self.agreement.words is not None:
            return compute(self._fewest(micro_batch))
        try:
            return compute(micro_batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.agreement.ran_out(error, micro_batch)
        # Here and not above: the exception held the tensors of the try that failed.
        root: Any = self.model  # an FSDPModule since shard_weights
        root.reset_iter_state()
        root.set_requires_all_reduce(False)
        keeps = self.place.plan.layout.fully_shard == "gradients"  # since the first micro-batch others have all weights
        self._gathers.begin_again(exchanges=self._number == 1 or not keeps)
        self._sums.begin_again()
        return compute(self._fewest(micro_batch))

    def agree(self) -> None:
        """Raise Agreed on all ranks, at the end of a step, if one of them ran out of memory."""
        self._number = 0
        self.agreement.agree()
