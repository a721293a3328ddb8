"""Run ZeRO 2 and 3 by torch's fully_shard: data-parallel ranks divide weights, gradients and optimizer state, layer by layer.

Gradients are summed and not averaged, because each rank has its share of the mean loss of the global batch. fp32 weights are
gathered in the precision in which the plan computes, so the layers cast nothing. Gradients are summed in fp32.

If a rank runs out of memory in a micro-batch, the others wait for it in the next exchange. OomCatchUp keeps them from waiting
for ever. The rank repeats the micro-batch with a few of its tokens: it skips the exchanges that are already done, and takes part
in the others. The result is useless. At the end of the step all ranks learn of the failure, drop their gradients, and repeat the
step with smaller micro-batches.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, TypeVar

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


def shard_weights(model: nn.Module, mesh: Mesh) -> None:
    """Shard the weights in place, and move them onto the plan's device.

    Weights become DTensors. Outside of a forward or backward pass each rank has its rows of them.
    """
    plan = mesh.plan
    fsdp_mesh = mesh.fsdp_mesh
    policy = precision_policy(plan)
    keeps_weights = plan.layout.fully_shard == "gradients"
    for experts in expert_modules(model, mesh):
        assert mesh.expert_mesh is not None
        fully_shard(experts, reshard_after_forward=not keeps_weights, mesh=mesh.expert_mesh["replicas"], mp_policy=policy)
    for _, stack in find_stacks(model):
        for layer in stack:
            for part in (*modules_of_other_dtypes(layer), layer):
                fully_shard(part, reshard_after_forward=not keeps_weights, mesh=fsdp_mesh, mp_policy=policy)
    root = fully_shard(
        model, reshard_after_forward=False, mesh=fsdp_mesh, mp_policy=policy
    )  # the backward pass starts with it at once
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    root.set_reduce_scatter_unused_params(True)  # micro-batches of different ranks may use different parameters


def trained_dtypes(module: nn.Module) -> Counter[torch.dtype]:
    """Return how many trained parameters of each dtype a module has."""
    return Counter(parameter.dtype for parameter in module.parameters() if parameter.requires_grad)


def modules_of_other_dtypes(layer: nn.Module) -> list[nn.Module]:
    """Return the largest modules within a layer whose trained weights have another dtype than most of the layer's.

    LoRA is fp32, and a module that is trained whole beside it has the dtype of the base. torch sums the gradients of all modules
    that it shards together in one dtype, so these modules are sharded on their own.
    """
    dtypes = trained_dtypes(layer)
    if len(dtypes) < 2:
        return []
    ((most_frequent, _),) = dtypes.most_common(1)
    return list(_modules_without(most_frequent, layer))


def _modules_without(dtype: torch.dtype, module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        dtypes = trained_dtypes(child)
        if len(dtypes) == 1 and dtype not in dtypes and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        elif set(dtypes) != {dtype}:
            yield from _modules_without(dtype, child)


def weights_of_two_dtypes(model: nn.Module) -> str | None:
    """Return the path of a trained weight that cannot be sharded, or None.

    It has another dtype than the weights with which torch would shard it, and no module of its own.
    """
    sharded_together: list[nn.Module] = [layer for _, stack in find_stacks(model) for layer in stack]
    in_layers = {id(parameter) for layer in sharded_together for parameter in layer.parameters()}
    groups: list[list[nn.Parameter]] = [[weight for weight in model.parameters() if id(weight) not in in_layers]]
    for layer in sharded_together:
        apart = {id(weight) for module in modules_of_other_dtypes(layer) for weight in module.parameters()}
        groups.append([weight for weight in layer.parameters() if id(weight) not in apart])
    for group in groups:
        dtypes = Counter(weight.dtype for weight in group if weight.requires_grad)
        if len(dtypes) > 1:
            rarest = min(dtypes, key=lambda dtype: dtypes[dtype])
            weights = {id(weight) for weight in group if weight.requires_grad and weight.dtype == rarest}
            return next(name for name, weight in model.named_parameters() if id(weight) in weights)
    return None


def precision_policy(plan: Plan) -> MixedPrecisionPolicy:
    """Return the dtypes in which weights are gathered and gradients are summed."""
    dtype = COMPUTE_DTYPES.get(plan.precision)
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def set_last_micro_batch(model: nn.Module, plan: Plan, *, last: bool) -> None:
    """Tell fully_shard, before a micro-batch, whether it is the last one of the step.

    In the last one gradients are summed over replicas, and ranks that keep whole weights through the backward pass free them.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_all_reduce(last)
    if plan.layout.fully_shard == "gradients":
        model.set_reshard_after_backward(last)


def reshard_weights(model: nn.Module) -> None:
    """Free the gathered weights after a forward pass that no backward pass follows."""
    for module in sharded_modules(model):
        module.reshard()


class UsedWeights:
    """Record which weights of a sharded model get a gradient from this rank's backward passes in a step.

    fully_shard gives every weight of a module a gradient if the module runs: zero for a weight that no rank used. An optimizer
    would decay such a weight, and change its moments. The record is of the gathered weights, which exist from the first forward
    pass of their module on.
    """

    def __init__(self, model: nn.Module) -> None:
        self._used: set[nn.Parameter] = set()
        self._watched: set[nn.Module] = set()
        self._shards = dict(model.named_parameters())
        for path, module in model.named_modules():
            if isinstance(module, FSDPModule):
                sharded: Any = module  # torch types an FSDPModule as no module
                sharded.register_forward_pre_hook(torch.compiler.disable(partial(self._watch, path)))

    def __contains__(self, shard: object) -> bool:
        return shard in self._used

    def clear(self) -> None:
        self._used.clear()

    def _watch(self, path: str, module: nn.Module, _: object) -> None:
        """Watch the gathered weights of a module. fully_shard's own hook, which gathers them, runs before this one."""
        if module in self._watched:
            return
        self._watched.add(module)
        for name, gathered in module.named_parameters(prefix=path):
            shard = self._shards[name]
            if gathered is not shard and gathered.requires_grad:  # the weights of a module within it are gathered later
                gathered.register_post_accumulate_grad_hook(partial(self._record, shard))

    def _record(self, shard: nn.Parameter, _: torch.Tensor) -> None:
        self._used.add(shard)


logger = logging.getLogger(__name__)
Computed = TypeVar("Computed")


def can_catch_up(layout: Layout) -> bool:
    """Return whether a rank that ran out of memory can catch up with the others.

    It can if the ranks exchange only weights and gradients, because these exchanges have the same size in every micro-batch. If
    this torch version lacks the internal names by which they are counted, warn once and return False: a rank that runs out of
    memory then ends the run.
    """
    if not (layout.gathers and layout.ranks_per_replica == 1 and layout.expert_parallel == 1):
        return False
    return _missing_internal() is None


@cache
def _missing_internal() -> str | None:
    """Return a message about the internal name that this torch version lacks, or None. Log the message once."""
    for name in (FSDP_GATHER, FSDP_SUM):
        try:
            name.get()
        except MissingInternal as error:
            logger.warning("%s. The run goes on without it: a rank that runs out of memory ends the run", error)
            return str(error)
    return None


class ExchangeCount:
    """Count the exchanges of one kind in a micro-batch: those done, and those that a second try skips."""

    def __init__(self, *, on_caught_up: Callable[[], None] = lambda: None) -> None:
        self.num_done = 0
        self.num_skipped = 0
        self._on_caught_up = on_caught_up

    def begin(self) -> None:
        self.num_done = 0
        self.num_skipped = 0

    def begin_second_try(self, *, skip_all: bool = False) -> None:
        """Begin a second try. It skips the exchanges that the first one did, or all of them if ``skip_all``."""
        self.num_skipped = sys.maxsize if skip_all else self.num_done
        self.num_done = 0
        if not self.num_skipped:
            self._on_caught_up()

    def count_and_check_skip(self) -> bool:
        """Count one exchange. Return whether it must be skipped."""
        self.num_done += 1
        if self.num_done > self.num_skipped:
            self.num_skipped = 0
            return False
        if self.num_done == self.num_skipped:
            self._on_caught_up()
        return True


class SkippableExchange:
    """An exchange of fully_shard that is skipped if the other ranks did it already."""

    def __init__(self, count: ExchangeCount) -> None:
        self.count = count

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if self.count.count_and_check_skip():
            output_tensor.zero_()  # any number will do, except NaN
            return None
        exchange: Any = super()
        return exchange.__call__(output_tensor, input_tensor, *args, **options)


def counted_exchange(exchange: Internal, count: ExchangeCount) -> Any:
    """Return torch's own exchange, whose calls are counted in ``count``."""
    return type("CountedExchange", (SkippableExchange, exchange.get()), {})(count)


class OomCatchUp:
    """Let a rank that ran out of memory catch up with the exchanges of the others.

    ``halve`` and ``shrink`` make a part of the step's work smaller. By default a part is a MicroBatch.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        on_failure: Callable[[], None],
        halve: Callable[[Any], object] = halve,
        shrink: Callable[[Any], Any] = shrink_to_few_tokens,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self._shrink = shrink
        self.agreement = OomAgreement(mesh, on_failure=on_failure, halve=halve)
        self._number = 0  # the micro-batch's number in its step, from 1
        self._is_last = False  # the micro-batch is the last one of its step
        self._gathers = ExchangeCount()
        self._sums = ExchangeCount(on_caught_up=lambda: set_last_micro_batch(model, mesh.plan, last=self._is_last))
        for module in sharded_modules(model):
            module.set_custom_all_gather(counted_exchange(FSDP_GATHER, self._gathers))
            module.set_custom_reduce_scatter(counted_exchange(FSDP_SUM, self._sums))

    def run(self, micro_batch: Any, compute: Callable[[Any], Computed], *, last: bool) -> Computed:
        """Compute a micro-batch, or only a few of its tokens after memory ran out in this step.

        ``compute`` runs the forward and the backward pass, or a forward pass alone.
        """
        self._number += 1
        self._is_last = last
        self._gathers.begin()
        self._sums.begin()
        set_last_micro_batch(self.model, self.mesh.plan, last=last)
        if self.agreement.message is not None:
            return compute(self._shrink(micro_batch))
        try:
            return compute(micro_batch)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self.agreement.record_out_of_memory(error, micro_batch)
        # Not in the except block: there the exception still holds the tensors of the failed try.
        root: Any = self.model  # shard_weights has made it an FSDPModule
        root.reset_iter_state()
        root.set_requires_all_reduce(False)
        keeps_weights = self.mesh.plan.layout.fully_shard == "gradients"  # others gather in the first micro-batch only
        self._gathers.begin_second_try(skip_all=self._number != 1 and keeps_weights)
        self._sums.begin_second_try()
        return compute(self._shrink(micro_batch))

    def agree(self) -> None:
        """Raise OomOnSomeRank on all ranks, at the end of a step, if one of them ran out of memory."""
        self._number = 0
        self.agreement.agree()
