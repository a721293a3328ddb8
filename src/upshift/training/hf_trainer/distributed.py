"""Make the Trainer one of several ranks that share the model by the plan's layout, in place of the wrappers of accelerate.

transformers gives each rank its batches, gathers the results of evaluation, and logs once. This module handles the rest: the
shards of the weights on each rank, the shards that each optimizer updates, and the norm of the gradients of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from upshift.errors import JobFailed, NothingFits, RequestError, UpshiftError
from upshift.hardware.spec import Host
from upshift.internals.transformers_names import FSDP_MANAGED
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Plan
from upshift.planning.planner import find_host
from upshift.training.checkpoint.rng import preserved_rng
from upshift.training.distributed.fsdp import reshard_weights, shard_weights, sharded_modules
from upshift.training.distributed.mesh import Mesh, init_mesh
from upshift.training.distributed.parallelize import parallelize
from upshift.training.distributed.weight_update import (
    agree_on_overflow,
    clip_all_gradients,
    drop_gradients,
    find_unused,
    make_update_sharding,
    sum_gradients_over_job,
)
from upshift.training.hf_trainer.arguments import extract_fsdp, local_ranks, use_cpu_with_ranks
from upshift.training.hf_trainer.loss_split import has_batch_statistics
from upshift.training.hf_trainer.patching import LibraryTrainer
from upshift.training.hf_trainer.step import StepExchange, gather_objects, to_host
from upshift.training.optimizers.sharded import ShardedOptimizer, UpdateSharding

T = TypeVar("T")


def choose_on_rank_0(choose: Callable[[], T]) -> T:
    """Call ``choose`` on rank 0 and return its result on every rank. All ranks call this function together.

    If ``choose`` raises an error, raise it on every rank. The random number generators stay the same on all ranks.
    """
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            with preserved_rng():
                message = [choose()]
        except UpshiftError as error:
            kind = type(error) if type(error) in (RequestError, NothingFits) else JobFailed
            message = [kind(str(error))]
        except Exception as error:  # the other ranks must not wait for a result that never comes
            dist.broadcast_object_list([JobFailed(f"rank 0: {type(error).__name__}: {error}")])
            raise
    dist.broadcast_object_list(message)
    if isinstance(message[0], UpshiftError):
        raise message[0]
    return message[0]  # type: ignore[no-any-return]


class DistributedTraining(LibraryTrainer):
    """A mix-in of transformers' Trainer classes for several ranks. ``PlannedTraining`` inherits from it."""

    args: Any
    model: Any
    optimizer: Any
    accelerator: Any
    _upshift_mesh: Mesh | None = None  # set by the first training
    _upshift_requested_layout: Layout = ALONE  # requested by TrainingArguments

    if TYPE_CHECKING:

        @property
        def _upshift_has_own_step(self) -> bool: ...
        def _upshift_plain_optimizer(self) -> Any: ...

    def __init__(self, *arguments: Any, **named: Any) -> None:
        positional = list(arguments)
        training_arguments = positional[1] if len(positional) > 1 else named.get("args")
        if training_arguments is not None:
            use_cpu_with_ranks(training_arguments)
            training_arguments, self._upshift_requested_layout = extract_fsdp(training_arguments)
            if len(positional) > 1:
                positional[1] = training_arguments
            else:
                named["args"] = training_arguments
        super().__init__(*positional, **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._upshift_has_ranks:
            self.accelerator.prepare_model = partial(self._upshift_prepare_without_ddp, self.accelerator.prepare_model)

    def _upshift_prepare_without_ddp(self, prepare: Any, model: nn.Module, *arguments: Any, **named: Any) -> Any:
        """Prepare autocast and compilation.

        Add DistributedDataParallel only if the script's own training_step runs the backward pass.
        """
        without_ddp = not self._upshift_has_own_step or isinstance(model, FSDPModule)
        return prepare(model, *arguments, **{"evaluation_mode": without_ddp, **named})

    @property
    def _upshift_has_ranks(self) -> bool:
        return bool(self.args.world_size > 1)

    def _upshift_host(self, *, probe: bool) -> Host:
        """Return the host of all ranks.

        Other hosts are assumed to have as many ranks and the same devices, because the ranks of transformers tell no more.
        """
        host = find_host(None, probe=probe)
        world_size = self.args.world_size
        if world_size == 1:
            return host.one_device()
        num_local = local_ranks()
        if 0 < num_local < host.gpus_per_node:
            host = host.one_device() if num_local == 1 else host.changed(gpus_per_node=num_local)
        return host.changed(num_nodes=world_size // num_local) if world_size > num_local else host

    # The model

    @property
    def _upshift_is_divided(self) -> bool:
        """Return whether ranks have divided the model, so that it is no longer the model that the script made."""
        return self._upshift_mesh is not None and self._upshift_mesh.plan.layout.exchanges

    def _upshift_divide_model(self, plan: Plan) -> None:
        """Divide the model before activation checkpointing and compilation are set up.

        All ranks call this function together. A model is divided once, because this cannot be undone.
        """
        if self._upshift_mesh is not None and self._upshift_mesh.plan.layout == plan.layout:
            self._upshift_mesh = replace(self._upshift_mesh, plan=plan)
            return
        self._upshift_mesh = init_mesh(plan)
        if plan.num_processes > 1:
            self._upshift_model_class = type(self.model)
            parallelize(self.model, self._upshift_mesh)

    def _upshift_shard_model(self) -> None:
        """Shard the weights, after activation checkpointing and compilation are set up."""
        mesh = self._upshift_mesh
        if mesh is None or not mesh.plan.layout.gathers or isinstance(self.model, FSDPModule):
            return
        shard_weights(self.model, mesh)
        if self._upshift_has_own_step:  # as in transformers, each rank's loss is not divided by the number of ranks
            for module in sharded_modules(self.model):
                module.set_gradient_divide_factor(float(self.args.world_size))
        if hasattr(self.model, "generate"):
            register_fsdp_forward_method(self.model, "generate")
            FSDP_MANAGED.put(self.model, True)  # transformers then generates the same number of tokens on every rank

    def _upshift_broadcast_statistics(self) -> None:
        """Broadcast rank 0's running means and variances, as DistributedDataParallel does in each step."""
        if self._upshift_has_ranks and self.args.ddp_broadcast_buffers is not False and has_batch_statistics(self.model):
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)

    # The update

    def _upshift_update_sharding(self) -> UpdateSharding | None:
        """Return which shards of the weights this rank's optimizer updates, or None with one process."""
        if self._upshift_mesh is None or self._upshift_mesh.device_mesh is None:
            return None
        return make_update_sharding(self.model, self._upshift_mesh)

    def _upshift_shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the same optimizer over this rank's shards, if the rank has shards of the weights."""
        sharding = None if isinstance(optimizer, ShardedOptimizer) else self._upshift_update_sharding()
        if sharding is None:
            return optimizer
        optimizer_class: Any = type(optimizer)
        return ShardedOptimizer(
            [dict(group) for group in optimizer.param_groups], lambda groups: optimizer_class(groups), sharding
        )

    def _upshift_sum_gradients(self, exchange: StepExchange) -> None:
        if self._upshift_mesh is not None and self._upshift_mesh.device_mesh is not None:
            optimizer = self._upshift_plain_optimizer()
            sum_gradients_over_job(optimizer, self.model, self._upshift_mesh, summed=exchange.summed, is_used=exchange.is_used)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if not self._upshift_has_ranks:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return self._upshift_clip_and_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if not self._upshift_has_ranks:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        return self._upshift_clip_and_norm(float("inf")) if grad_norm is None else grad_norm

    def _upshift_clip_and_norm(self, max_norm: float) -> float:
        """Clip the gradients of all ranks to ``max_norm``. Return their norm before."""
        assert self._upshift_mesh is not None
        optimizer = self._upshift_plain_optimizer()
        scaler = getattr(self.accelerator, "scaler", None)
        if self._upshift_has_own_step and isinstance(optimizer, ShardedOptimizer):
            drop_gradients(optimizer, find_unused(optimizer, self.model, self._upshift_mesh))
            optimizer.take_gradients()
        self.accelerator.unscale_gradients(self.optimizer)
        if scaler is not None:
            agree_on_overflow(scaler, optimizer, self._upshift_mesh)
        return float(clip_all_gradients(optimizer, self.model, self._upshift_mesh, max_norm))

    # Evaluation

    @contextlib.contextmanager
    def _upshift_predicting_together(self) -> Iterator[None]:
        """Let ranks of tensor parallelism predict all of their batches together, one after the other, while open."""
        mesh = self._upshift_mesh
        predicts_together = mesh is not None and mesh.plan.layout.tensor_parallel > 1
        if mesh is not None and predicts_together:
            predict = self.prediction_step
            self.prediction_step = partial(_predict_all_batches, predict, mesh)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if predicts_together:
                del self.prediction_step
            reshard_weights(self.model)


def _predict_all_batches(predict: Any, mesh: Mesh, model: nn.Module, inputs: Any, *arguments: Any, **named: Any) -> Any:
    """Predict the batches of all ranks of tensor parallelism. Return the result for this rank's batch."""
    results = [predict(model, batch, *arguments, **named) for batch in gather_objects(to_host(inputs), mesh)]
    return results[mesh.tensor_rank]
