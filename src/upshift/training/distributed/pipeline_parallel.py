"""Run the micro-batches of a step through the stages of a pipeline, by the schedules of torch.distributed.pipelining.

Torch's own stages need micro-batches of one shape. Here each micro-batch may have its own shape, as in batches of mixed lengths.
All ranks of a pipeline read the same micro-batches, so they know the shapes. The dtype of hidden states is sent once, before
the first of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

from upshift.errors import UpshiftError
from upshift.internals.torch_names import PIPELINE_SCHEDULE, PIPELINE_STAGE, SCHEDULE_BACKWARD, SCHEDULE_STEP
from upshift.planning.plan import Plan
from upshift.training.batches.collate import MicroBatch, to_tensors
from upshift.training.distributed.context_parallel import padded_width
from upshift.training.distributed.pipeline_stage import Stage, stage_modules
from upshift.training.prepare import (
    autocast,
    chunked_loss,
    no_cache,
    offload_activations,
    without_search_for_packed_rows,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of hidden states; the index is sent
Scale = Callable[[torch.Tensor], torch.Tensor]


class OneForwardOneBackward(Schedule1F1B):
    """Torch's 1F1B schedule without its check, which rejects fewer micro-batches than stages although the order works."""

    def __init__(self, stage: PipelineStage, micro_batches: int, **options: Any) -> None:
        PIPELINE_SCHEDULE.get().__init__(self, stage, micro_batches, **options)

    def _get_pipeline_order(self) -> None:
        """Do nothing: torch uses this order only for drawings."""


SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": OneForwardOneBackward,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
SINGLE_STAGE_SCHEDULES = ("gpipe", "1f1b")  # the others take a list of stages


class PipelineStage:
    """A stage for torch's schedules that allocates hidden states when they come. ``make_torch_stage`` adds torch's base class."""

    # Attributes of the base class.
    submod: nn.Module
    stage_index: int
    device: torch.device
    group: dist.ProcessGroup
    is_first: bool
    is_last: bool
    fwd_cache: dict[int, tuple[Any, list[torch.Tensor]]]
    bwd_cache: dict[int, tuple[torch.Tensor | None, ...]]
    clear_runtime_states: Callable[[], None]
    _stage_meta: Any
    _resolve_peer_global_rank: Callable[[int], int]

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        stage: Any = module.pipeline_stage
        self.stage: Stage = stage
        super().__init__(  # type: ignore[call-arg]  # the base's
            module, self.stage.index, self.stage.count, torch.device(plan.device), self.stage.group
        )
        self._plan = plan
        self._stage_meta.inputs = () if self.is_first else (None,)
        self.args_recv_info = {0: ()}
        self._shapes: list[tuple[int, ...]] = []
        self._received: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, torch.Tensor] = {}
        self._dtype: torch.dtype | None = None  # the dtype of the received hidden states; None until it is received
        self._has_sent_dtype = False
        self._dtype_sending: dist.Work | None = None  # held until it is sent: gloo drops operations that nobody holds

    def expect(self, shapes: list[tuple[int, int]], *, has_backward: bool) -> None:
        """Prepare for micro-batches of these shapes (rows, tokens in a row)."""
        self.clear_runtime_states()
        self.chunks = len(shapes)
        self.has_backward = has_backward
        layout = self._plan.layout
        widths = [padded_width(width, layout) // layout.context_parallel for _, width in shapes]
        self._shapes = [self.stage.hidden_shape(rows, width) for (rows, _), width in zip(shapes, widths, strict=True)]

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss in the last stage, and hidden states in the others."""
        if not self.is_first:
            self.stage.received = args[0]
        if not self.is_last:
            kwargs = {name: value for name, value in kwargs.items() if name != "labels"}
        offloading = offload_activations(self.submod) if self._plan.activation_offload else contextlib.nullcontext()
        searching = without_search_for_packed_rows(kwargs, self._plan)
        with autocast(self._plan), offloading, no_cache(self.submod), searching:
            output = self.submod(**kwargs)
        result: torch.Tensor = output.loss if self.is_last else output
        return result

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        if self._dtype is None:
            number = torch.zeros((), dtype=torch.long, device=self.device)
            dist.recv(number, self._peer(-1), self.group)
            self._dtype = DTYPES[int(number)]
        buffer = torch.empty(self._shapes[fwd_chunk_id], dtype=self._dtype, device=self.device)
        self._received[fwd_chunk_id] = buffer
        return [dist.P2POp(dist.irecv, buffer, self._peer(-1), self.group)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        (hidden,), _ = self.fwd_cache[fwd_chunk_id]
        if not self._has_sent_dtype:
            number = torch.tensor(DTYPES.index(hidden.dtype), device=self.device)
            self._dtype_sending = dist.isend(number, self._peer(1), self.group)
            self._has_sent_dtype = True
        return [dist.P2POp(dist.isend, hidden.detach().contiguous(), self._peer(1), self.group)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        (hidden,), _ = self.fwd_cache[bwd_chunk_id]
        buffer = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self._gradients[bwd_chunk_id] = buffer
        return [dist.P2POp(dist.irecv, buffer, self._peer(1), self.group)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        assert gradient is not None
        return [dist.P2POp(dist.isend, gradient.contiguous(), self._peer(-1), self.group)]

    def _peer(self, step: int) -> int:
        return self._resolve_peer_global_rank(self.stage_index + step)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        return (self._received.pop(fwd_chunk_id).requires_grad_(self.has_backward and torch.is_grad_enabled()),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[torch.Tensor, ...]:
        return (self._gradients.pop(bwd_chunk_id),)

    def wait_for_sends(self) -> None:
        """Wait, after a run, until the dtype is sent."""
        if self._dtype_sending is not None:
            self._dtype_sending.wait()
            self._dtype_sending = None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)  # type: ignore[misc]  # the base's

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: micro-batches differ in shape (see ``expect``)."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: micro-batches differ in shape (see ``expect``)."""

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        return ()


def make_torch_stage(module: nn.Module, plan: Plan) -> Any:
    return type("PipelineStageOfRank", (PipelineStage, PIPELINE_STAGE.get()), {})(module, plan)


@contextlib.contextmanager
def unwrap_stage_errors() -> Iterator[None]:
    """Raise the error of a stage itself. Torch wraps it in an error that lists every tensor's shape."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, (UpshiftError, RuntimeError, MemoryError)):
            raise error.__cause__ from None
        raise


class Pipeline:
    """Run the stages of this rank together with those of the other ranks of its pipeline."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        """Make the stages of ``model``, which ``cut_stage`` returned and ``prepare_model`` prepared."""
        self.plan = plan
        self.modules = stage_modules(model)
        self.stages = [make_torch_stage(module, plan) for module in self.modules]
        self.has_loss = self.stages[-1].is_last
        self._schedules: dict[int, Any] = {}
        self._scale: Scale = lambda loss: loss
        self._total = torch.zeros((), device=plan.device)

    def gradients(
        self, micro_batches: Sequence[MicroBatch], num_label_tokens: int, scale: Scale = lambda loss: loss
    ) -> torch.Tensor:
        """Run the forward and backward passes of all micro-batches. Return their share of the global batch's mean loss.

        Only the last stage has the loss; the others return zero. ``scale`` is applied to a loss before its backward pass.
        """
        self._scale = scale
        self._run(micro_batches, num_label_tokens, has_backward=True)
        return self._total

    def losses(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return the sum of the losses over labels. It is zero except in the last stage."""
        with torch.no_grad():
            self._run(micro_batches, 1, has_backward=False)
        return self._total

    def _run(self, micro_batches: Sequence[MicroBatch], num_label_tokens: int, *, has_backward: bool) -> None:
        micro_batches = self._fill_rounds(micro_batches)
        schedule = self._schedule(len(micro_batches))
        SCHEDULE_BACKWARD.put(schedule, has_backward)
        for stage in self.stages:
            stage.expect([micro_batch.shape for micro_batch in micro_batches], has_backward=has_backward)
        self._total = torch.zeros((), device=self.plan.device)
        inputs = [to_tensors(_with_labels(micro_batch), self.plan.device) for micro_batch in micro_batches]
        shares = [micro_batch.num_label_tokens / max(num_label_tokens, 1) for micro_batch in micro_batches]
        with self._chunked_losses(), unwrap_stage_errors():
            SCHEDULE_STEP.of(schedule)(None, inputs, shares, return_outputs=False)
        for stage in self.stages:
            stage.wait_for_sends()

    @contextlib.contextmanager
    def _chunked_losses(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module, stage in zip(self.modules, self.stages, strict=True):
                if stage.is_last:
                    stack.enter_context(chunked_loss(module, self.plan))
            yield

    def _fill_rounds(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches, filled up to whole rounds with copies of the smallest one that do not count.

        Schedules of several stages take micro-batches in rounds of one size.
        """
        filled = list(micro_batches)
        if self.plan.layout.pipeline_schedule not in SINGLE_STAGE_SCHEDULES:
            filling = replace(min(filled, key=lambda micro_batch: micro_batch.num_padded_tokens), num_label_tokens=0)
            while len(filled) % max(1, len(filled) // self.plan.layout.pipeline_parallel):
                filled.append(filling)
        return filled

    def _schedule(self, micro_batches: int) -> Any:
        if micro_batches not in self._schedules:
            name = self.plan.layout.pipeline_schedule
            stages: Any = self.stages[0] if name in SINGLE_STAGE_SCHEDULES else self.stages
            self._schedules[micro_batches] = SCHEDULES[name](stages, micro_batches, loss_fn=self._loss, scale_grads=False)
        return self._schedules[micro_batches]

    def _loss(self, loss: torch.Tensor, share: float) -> torch.Tensor:
        counted = loss.float() * share
        self._total += counted.detach()
        return self._scale(counted)


def _with_labels(micro_batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch, with labels if it has none.

    A micro-batch without labels only keeps ranks in step. Its loss does not count, but it must be a number.
    """
    if micro_batch.num_label_tokens:
        return micro_batch
    labels = micro_batch.arrays["labels"]
    return replace(micro_batch, arrays={**micro_batch.arrays, "labels": labels * 0})
