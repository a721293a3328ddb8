"""Make the Trainer one of several ranks that share the model by the plan's layout, in place of accelerate's wrappers.

transformers gives each rank its batches, gathers what evaluation returns, and logs once. This module does what a layout
changes: which rank has which part of a weight, which parts each optimizer updates, and the norm of all ranks' gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from upshift.internals.transformers_names import FSDP_MANAGED
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Plan
from upshift.training.distributed.fsdp import reshard_weights, shard_weights, sharded_modules
from upshift.training.distributed.mesh import Mesh, init_mesh
from upshift.training.distributed.parallelize import parallelize
from upshift.training.distributed.weight_update import (
    agree_on_overflow,
    clip_all_gradients,
    make_update_sharding,
    sum_gradients_over_job,
)
from upshift.training.hf_trainer.arguments import join_ranks, take_fsdp
from upshift.training.hf_trainer.loss_split import has_batch_statistics
from upshift.training.hf_trainer.patching import LibraryTrainer
from upshift.training.hf_trainer.step import gathered_objects, on_host
from upshift.training.optimizers.sharded import ShardedOptimizer, UpdateSharding


class SharedTraining(LibraryTrainer):
    """A mix-in of transformers' Trainer classes, below ``PlannedTraining``."""

    args: Any
    model: Any
    optimizer: Any
    accelerator: Any
    _upshift_place: Mesh | None = None  # from the first training on, where there are several ranks
    _upshift_requested_layout: Layout = ALONE  # by TrainingArguments

    if TYPE_CHECKING:

        @property
        def _upshift_steps_by_batch(self) -> bool: ...
        def _upshift_plain_optimizer(self) -> Any: ...

    def __init__(self, *arguments: Any, **named: Any) -> None:
        given = list(arguments)
        found = given[1] if len(given) > 1 else named.get("args")
        if found is not None:
            join_ranks(found)
            found, self._upshift_requested_layout = take_fsdp(found)
            if len(given) > 1:
                given[1] = found
            else:
                named["args"] = found
        super().__init__(*given, **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._upshift_has_ranks:
            self.accelerator.prepare_model = partial(self._upshift_prepare_model_alone, self.accelerator.prepare_model)

    def _upshift_prepare_model_alone(self, prepare: Any, model: nn.Module, *arguments: Any, **named: Any) -> Any:
        """Prepare autocast and compilation. Add DistributedDataParallel if the script's own training_step goes backward."""
        plain = not self._upshift_steps_by_batch or isinstance(model, FSDPModule)
        return prepare(model, *arguments, **{"evaluation_mode": plain, **named})

    @property
    def _upshift_has_ranks(self) -> bool:
        return bool(self.args.world_size > 1)

    # The model

    @property
    def _upshift_is_divided(self) -> bool:
        """Return whether ranks have divided the model, so that it is no longer what the script made."""
        return self._upshift_place is not None and self._upshift_place.plan.layout.exchanges

    def _upshift_divide_model(self, plan: Plan) -> None:
        """Divide the model before layers recompute and are compiled. All ranks call it once, because there is no way back."""
        if self._upshift_place is not None and self._upshift_place.plan.layout == plan.layout:
            self._upshift_place = Mesh(
                plan,
                self._upshift_place.rank,
                self._upshift_place.device_mesh,
                self._upshift_place.context_mesh,
                self._upshift_place.expert_mesh,
            )
            return
        self._upshift_place = init_mesh(plan)
        if plan.num_processes > 1:
            self._upshift_model_class = type(self.model)
            parallelize(self.model, self._upshift_place)

    def _upshift_shard_model(self) -> None:
        """Shard the weights after layers recompute and are compiled."""
        place = self._upshift_place
        if place is None or not place.plan.layout.gathers or isinstance(self.model, FSDPModule):
            return
        shard_weights(self.model, place)
        if self._upshift_steps_by_batch:  # each rank's loss is whole, as transformers has it, and no share of the job's
            for module in sharded_modules(self.model):
                module.set_gradient_divide_factor(float(self.args.world_size))
        if hasattr(self.model, "generate"):
            register_fsdp_forward_method(self.model, "generate")
            FSDP_MANAGED.put(self.model, True)  # transformers then generates as many tokens on every rank

    def _upshift_broadcast_statistics(self) -> None:
        """Broadcast rank 0's running means and variances, as DistributedDataParallel does at each step."""
        if self._upshift_has_ranks and self.args.ddp_broadcast_buffers is not False and has_batch_statistics(self.model):
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)

    # The update

    def _upshift_division(self) -> UpdateSharding | None:
        return (
            make_update_sharding(self.model, self._upshift_place)
            if self._upshift_place is not None and self._upshift_place.device_mesh is not None
            else None
        )

    def _upshift_optimizer_of_parts(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the same optimizer over this rank's parts, if the rank has only parts."""
        division = None if isinstance(optimizer, ShardedOptimizer) else self._upshift_division()
        if division is None:
            return optimizer
        kind: Any = type(optimizer)
        return ShardedOptimizer([dict(group) for group in optimizer.param_groups], lambda groups: kind(groups), division)

    def _upshift_sum_gradients(self, *, summed: bool) -> None:
        if self._upshift_place is not None and self._upshift_place.device_mesh is not None:
            sum_gradients_over_job(self._upshift_plain_optimizer(), self.model, self._upshift_place, summed=summed)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if not self._upshift_has_ranks:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return self._upshift_clip_and_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if not self._upshift_has_ranks:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        return self._upshift_clip_and_norm(float("inf")) if grad_norm is None else grad_norm

    def _upshift_clip_and_norm(self, most: float) -> float:
        assert self._upshift_place is not None
        optimizer, scaler = self._upshift_plain_optimizer(), getattr(self.accelerator, "scaler", None)
        if self._upshift_steps_by_batch and isinstance(optimizer, ShardedOptimizer):
            optimizer.take_gradients()
        self.accelerator.unscale_gradients(self.optimizer)
        if scaler is not None:
            agree_on_overflow(scaler, optimizer, self._upshift_place)
        return clip_all_gradients(optimizer, self.model, self._upshift_place, most)

    # Evaluation

    @contextlib.contextmanager
    def _upshift_predict_in_step(self) -> Iterator[None]:
        """Let ranks of tensor parallelism predict the batches of all of them, one after the other, while open."""
        place = self._upshift_place
        shares = place is not None and place.plan.layout.tensor_parallel > 1
        if place is not None and shares:
            own = self.prediction_step
            self.prediction_step = partial(_predict_together, own, place)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if shares:
                del self.prediction_step
            reshard_weights(self.model)


def _predict_together(own: Any, place: Mesh, model: nn.Module, inputs: Any, *arguments: Any, **named: Any) -> Any:
    answers = [own(model, one, *arguments, **named) for one in gathered_objects(on_host(inputs), place)]
    return answers[place.tensor_rank]
