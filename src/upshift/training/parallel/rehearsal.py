"""Run one rank's first forward pass before any rank is there: on fake tensors, in a world that answers every exchange at once.

A plan that a model declares may not fit its modules: a view may have the number of heads of the whole model, or features may
meet in a part of a layer which the plan divides differently. Names do not show this; running the divided layers does. A layer
of each kind runs, and no memory is needed.
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
from torch.distributed.device_mesh import DeviceMesh

from upshift.internals.torch_names import FAKE_STORE, FAKE_TENSOR_MODE, OUTSIDE_MODES
from upshift.models.adapter import base_of
from upshift.models.build import build_model, choose_class, cut_stacks, sample_inputs
from upshift.models.measure import fake_masks
from upshift.models.source import ModelSource
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.training.parallel.place import find_place
from upshift.training.parallel.tensor import INSTEAD, divide_tensors

OF_LAYERS = ("tensor_parallel", "sequence_parallel", "gather_again", "vocabulary_parallel")
ROWS, WIDTH = 2, 64
WORDS = 160  # of torch's


class Rehearsals:
    """The results of rehearsing one model: each kind of division runs once."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._problems: dict[Layout, str | None] = {}

    def reason_not(self, plan: Plan) -> str | None:
        """Return why the layers of the model do not run as ranks of tensor parallelism divide them, or None.

        Return None also if the undivided layers do not run on fake tensors, which says nothing, and if this process is a rank
        already.
        """
        degree = plan.layout.tensor_parallel
        if degree == 1 or dist.is_initialized():
            return None
        kept = Layout(**{name: getattr(plan.layout, name) for name in OF_LAYERS})
        if kept not in self._problems:
            problem = _fails(self.source, plan.changed(num_processes=degree, layout=kept))
            alone = plan.changed(num_processes=1, layout=Layout())
            self._problems[kept] = None if problem is None or _fails(self.source, alone) else problem
        problem = self._problems[kept]
        if problem is None:
            return None
        return f"tensor_parallel={degree}: the plan that the model declares does not fit its layers ({problem}); {INSTEAD}"


def _fails(source: ModelSource, plan: Plan) -> str | None:
    config = source.hf_config
    model_class, objective = choose_class(config, source.reference)
    with _fake_world(plan.num_processes), _meshes_are_real(), _without_traceback():
        place = find_place(plan)
        fake = FAKE_TENSOR_MODE.get()()
        try:
            with fake_masks(masked=False), fake, torch.no_grad():
                model = build_model(config, model_class, dtype=torch.float32)
                cut_stacks(model)
                divide_tensors(model, place)
                width = min(plan.sequence_length, WIDTH)
                inputs = sample_inputs(base_of(model), objective, batch=ROWS, sequence=width, masked=False)
                extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
                model(**inputs, **extra)
        except Exception as error:  # whatever the layers, or torch, say of the shapes they meet
            return " ".join(str(error).split())[:WORDS] or type(error).__name__
    return None


@contextmanager
def _fake_world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FAKE_STORE.get()(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _without_traceback() -> Iterator[None]:
    """Silence torch's log of an operator that refuses the shapes: the error's own words are enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _meshes_are_real() -> Iterator[None]:
    """Run methods of meshes outside of fake tensors: they count ranks in tensors, and a fake tensor has no numbers."""

    def outside(name: str) -> object:
        own = getattr(DeviceMesh, name)

        def call(*args: object, **kwargs: object) -> object:
            with OUTSIDE_MODES.get()():
                return own(*args, **kwargs)

        return call

    names = ("get_local_rank", "get_coordinate", "get_group", "__getitem__", "size")
    methods: dict[str, Any] = {name: outside(name) for name in names}
    with mock.patch.multiple(DeviceMesh, **methods):
        yield
