"""Cut a model down to one rank's part, and say which layouts cannot run, in general or for this model.

``parallelize`` divides the model by depth first, then within layers. fully_shard divides among data-parallel ranks last of all,
when activation checkpointing and compilation of the layers are set up (prepare.py).

A plan that a model declares may not fit its modules: a view may have the number of heads of the whole model, or features may
meet in a part of a layer that the plan divides differently. Names do not show this, but running the divided layers does.
``Rehearsals`` runs one rank's first forward pass before any rank exists, on fake tensors, in a process group that answers every
exchange at once. One layer of each kind runs, and it takes no memory.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from upshift.errors import MissingInternal, RequestError
from upshift.importing import quiet_logger
from upshift.internals.torch_names import EXCHANGES, FAKE_STORE, FAKE_TENSOR_MODE, OUTSIDE_MODES
from upshift.models.adapter import base_of
from upshift.models.build import build_model, choose_class, cut_stacks, sample_inputs
from upshift.models.source import ModelSource
from upshift.models.tracing.segments import fake_masks
from upshift.planning.layout import Layout, divisors
from upshift.planning.plan import ALONE, Plan
from upshift.planning.search.constraints import layout_conflict
from upshift.text import one_line
from upshift.training.distributed.context_parallel import why_not_context_parallel
from upshift.training.distributed.expert_parallel import shard_experts, why_not_expert_parallel
from upshift.training.distributed.fsdp import weights_of_two_dtypes
from upshift.training.distributed.mesh import Mesh, init_mesh
from upshift.training.distributed.pipeline_stage import cut_stage, stage_modules, why_not_pipeline_parallel
from upshift.training.distributed.tensor_parallel import INSTEAD, shard_tensors, why_not_tensor_parallel


def why_cannot_run(plan: Plan, model: nn.Module | None = None) -> str | None:
    """Return why a plan cannot run, or None if it can. Without ``model``, check only what no model can run."""
    if plan.layout == ALONE:
        return None
    problem = _why_impossible(plan) or _missing_exchange()
    if problem is None and model is not None:
        checks = (
            why_not_pipeline_parallel,
            why_not_tensor_parallel,
            why_not_expert_parallel,
            why_not_context_parallel,
            why_not_fully_shard,
        )
        problem = next(filter(None, (check(model, plan) for check in checks)), None)
    return problem


def _missing_exchange() -> str | None:
    """Return a message about an operator for exchanges that this torch version lacks, or None."""
    try:
        for operation in EXCHANGES:
            operation.get()
    except MissingInternal as missing:
        return str(missing)
    return None


def _why_impossible(plan: Plan) -> str | None:
    """Return why no model can run with the plan's layout, or None."""
    layout = plan.layout
    if plan.num_processes % layout.ranks_per_replica:
        return (
            f"num_processes={plan.num_processes} is no multiple of the {layout.ranks_per_replica} ranks that work on the same "
            "sequences (tensor_parallel x context_parallel x pipeline_parallel); use degrees whose product divides it"
        )
    same_weights = plan.data_parallel * layout.context_parallel  # ranks that have the same weights
    if layout.fully_shard != "no" and (layout.shard_size == 1 or same_weights % layout.shard_size):
        valid = ", ".join(map(str, divisors(same_weights)[1:]))
        instead = f"use one of {valid}" if valid else "use fully_shard=no"
        return (
            f"fully_shard={layout.fully_shard} divides among shard_size={layout.shard_size} of {same_weights} ranks "
            f"with the same weights; {instead}"
        )
    return layout_conflict(plan)


def why_not_fully_shard(model: nn.Module, plan: Plan) -> str | None:
    """Return why ranks cannot divide this model's weights and what to use instead, or None if they can.

    The model must have the dtypes in which it is trained. It may be on the meta device.
    """
    if not plan.layout.gathers:
        return None
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        return (
            f"fully_shard={plan.layout.fully_shard} gathers weights to compute with, and some of this model are quantized; "
            "use fully_shard=optimizer"
        )
    path = weights_of_two_dtypes(model)
    if path is not None:
        return (
            f"fully_shard={plan.layout.fully_shard} sums the gradients of neighbouring weights together, and {path} has another "
            "dtype than its neighbours; use fully_shard=optimizer"
        )
    return None


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Return this rank's part of ``model``, which is the same on every rank. Raise RequestError if it cannot be divided so."""
    problem = why_cannot_run(mesh.plan, model)
    if problem is not None:
        raise RequestError(problem)
    model = cut_stage(model, mesh)
    for module in stage_modules(model):
        shard_tensors(module, mesh)
        shard_experts(module, mesh)
    return model


REHEARSED_FIELDS = ("tensor_parallel", "sequence_parallel", "gather_again", "vocabulary_parallel")
ROWS = 2
WIDTH = 64
MAX_MESSAGE_LENGTH = 160  # characters of torch's message


class Rehearsals:
    """Check on fake tensors whether a model's divided layers run. Each kind of division runs once."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._problems: dict[Layout, str | None] = {}

    def why_not(self, plan: Plan) -> str | None:
        """Return why the model's layers do not run as tensor parallelism divides them, or None.

        Also return None if the undivided layers do not run on fake tensors either, because that proves nothing, or if this
        process is already a rank.
        """
        degree = plan.layout.tensor_parallel
        if degree == 1 or dist.is_initialized():
            return None
        layout = Layout(**{name: getattr(plan.layout, name) for name in REHEARSED_FIELDS})
        if layout not in self._problems:
            problem = _rehearsal_error(self.source, plan.changed(num_processes=degree, layout=layout))
            undivided = plan.changed(num_processes=1, layout=Layout())
            if problem is not None and _rehearsal_error(self.source, undivided):
                problem = None
            self._problems[layout] = problem
        problem = self._problems[layout]
        if problem is None:
            return None
        return f"tensor_parallel={degree}: the plan that the model declares does not fit its layers ({problem}); {INSTEAD}"


def _rehearsal_error(source: ModelSource, plan: Plan) -> str | None:
    """Return the error of the first forward pass of rank 0, or None if it runs."""
    config = source.hf_config
    model_class, objective = choose_class(config, source.reference)
    plan = plan.changed(device="cpu")  # where the fake tensors are; a mesh of GPUs would use CUDA, after which no trial can fork
    without_traceback = quiet_logger("torch._subclasses.fake_tensor", logging.CRITICAL)  # the error's message is enough
    with _fake_world(plan.num_processes), _real_meshes(), without_traceback:
        mesh = init_mesh(plan)
        fake = FAKE_TENSOR_MODE.get()()
        try:
            with fake_masks(masked=False), fake, torch.no_grad():
                model = build_model(config, model_class, dtype=torch.float32)
                cut_stacks(model)
                shard_tensors(model, mesh)
                width = min(plan.sequence_length, WIDTH)
                inputs = sample_inputs(base_of(model), objective, batch=ROWS, sequence=width, masked=False)
                extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
                model(**inputs, **extra)
        except Exception as error:  # of any kind: layers and torch report wrong shapes in many ways
            return one_line(error, limit=MAX_MESSAGE_LENGTH) or type(error).__name__
    return None


@contextmanager
def _fake_world(size: int) -> Iterator[None]:
    """Make this process rank 0 of a process group that exchanges nothing, while open."""
    dist.init_process_group("fake", store=FAKE_STORE.get()(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Run methods of DeviceMesh with real tensors while open. They compute ranks in tensors, and fake ones have no values."""

    def with_real_tensors(name: str) -> object:
        method = getattr(DeviceMesh, name)

        def call(*args: object, **kwargs: object) -> object:
            with OUTSIDE_MODES.get()():
                return method(*args, **kwargs)

        return call

    names = ("get_local_rank", "get_coordinate", "get_group", "__getitem__", "size")
    methods: dict[str, Any] = {name: with_real_tensors(name) for name in names}
    with mock.patch.multiple(DeviceMesh, **methods):
        yield
