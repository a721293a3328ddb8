"""Runs the real, unmodified model on fake tensors at a few (batch, sequence) points and fits its segments' polynomials.

Nothing is allocated and no accelerator is needed: the tensors are fake CPU tensors, on which fused attention keeps its
flash-like memory (on ``meta`` it would be decomposed). Inputs: a config. Ignored: kernel-internal scratch (measured below
1.1 % of the peak), torch.compile (its memory is at most the eager one).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel, masking_utils
from transformers.modeling_layers import GradientCheckpointingLayer

from upshift.errors import RequestError
from upshift.models.build import LayerStack, build_model, choose_class, cut_stacks, find_stacks, read_config, sample_inputs
from upshift.models.chunked_loss import chunked_head, why_not_chunked
from upshift.models.fit import Measurement, fit_segment, fit_single
from upshift.models.profile import (
    Declares,
    ModelProfile,
    Objective,
    Parameters,
    ParameterShape,
    Polynomial,
    Segment,
    Stack,
    StackTrace,
    StepTrace,
)
from upshift.models.recompute import recompute_layers
from upshift.models.source import ModelSource
from upshift.models.store import Variant
from upshift.models.tracker import Interval, LiveTracker

LOSS_CHUNK_TOKENS = 512  # the plan's default; chunk size moves the peak by chunk x vocabulary only
BATCHES = (2, 3)  # 1 is avoided: broadcasting makes it a special case of many kernels


class Tracer:
    """Holds one fake model per parameter dtype and measures passes of it."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.fake = FakeTensorMode()
        self.config = read_config(source)
        self.model_class, self.objective = choose_class(self.config, source.reference)
        self.stacks: list[LayerStack] = []
        self._models: dict[torch.dtype, PreTrainedModel] = {}

    def model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The cut model in ``dtype``; built once."""
        if dtype not in self._models:
            config = read_config(self.source)
            if hasattr(config, "use_cache"):
                config.use_cache = False
            with self.fake:
                model = build_model(config, self.model_class, dtype=dtype)
                self.stacks = cut_stacks(model)
            self._models[dtype] = model
        return self._models[dtype]

    def measure(self, variant: Variant, *, batch: int, sequence: int, recompute: bool, chunked: bool) -> Measurement:
        """Forward and backward twice (gradients born, then accumulated) after one untraced warm-up."""
        dtype = torch.bfloat16 if variant.precision == "bf16-pure" else torch.float32
        model = self.model(dtype)
        model.set_attn_implementation(variant.attention)
        recompute_layers(model, None if recompute else 0)
        head = chunked_head(model, chunk_tokens=LOSS_CHUNK_TOKENS) if chunked else nullcontext()
        with fake_masks(masked=variant.masked), self.fake, head, LiveTracker() as tracker:
            tracker.adopt((list(model.parameters()), list(model.buffers())))
            inputs = sample_inputs(model, self.objective, batch=batch, sequence=sequence, masked=variant.masked)
            with segment_borders(model, self.stacks, tracker) as border:
                passes = []
                for _ in range(2):
                    border("forward", 0)
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=variant.precision == "bf16"):
                        loss = model(**inputs).loss
                        tracker.release()
                    border("backward", None)
                    (loss * 0.5).backward()
                    del loss
                    tracker.border(None)
                    passes.append(tracker.intervals)
                    tracker.forget()
            model.zero_grad(set_to_none=True)
        return _collect(passes)


def _collect(passes: list[list[tuple[str, Interval]]]) -> Measurement:
    """Merge intervals of one name: a gap may be entered more than once."""
    merged: list[dict[str, Interval]] = []
    for intervals in passes:
        by_name: dict[str, Interval] = {}
        for name, interval in intervals:
            if name in by_name:
                _append(by_name[name], interval)
            else:
                by_name[name] = interval
        merged.append(by_name)
    first, second = merged
    forward = {name: interval for name, interval in second.items() if name.startswith("forward")}
    backward = {name: interval for name, interval in first.items() if name.startswith("backward")}
    accumulating = {name: interval for name, interval in second.items() if name.startswith("backward")}
    return Measurement(forward=forward, backward=backward, accumulating=accumulating)


def _append(first: Interval, second: Interval) -> None:
    """Continue ``first`` with ``second``; what another segment left in between is kept out of both."""
    shift = first.left - second.entered
    first.operators += second.operators
    first.live += [live + shift for live in second.live]
    first.left = second.left + shift
    for field in ("released", "matmul_flops", "attention_flops", "moved_bytes", "matmul_bytes", "num_kernels"):
        setattr(first, field, getattr(first, field) + getattr(second, field))


@contextmanager
def segment_borders(
    model: nn.Module, stacks: list[LayerStack], tracker: LiveTracker
) -> Iterator[Callable[[str, int | None], None]]:
    """Hooks on the layers that tell the tracker which segment runs. Yields a function that starts a phase at a gap.

    Forward borders are the layers' own entry and exit. Backward borders are the moments at which the gradient of a layer's
    output is ready; recomputation runs inside its layer's backward segment.
    """
    phase = {"name": "forward"}

    def start(name: str, gap: int | None) -> None:
        phase["name"] = name
        tracker.border(f"{name} gap {len(stacks) if gap is None else gap}")

    handles = []
    for number, stack in enumerate(stacks):
        layers = model.get_submodule(stack.path)
        for position, layer in enumerate(layers):  # type: ignore[arg-type]
            label, gap_before, gap_after = f"layer {number} {position}", f"gap {number}", f"gap {number + 1}"
            is_first, is_last = position == 0, position == len(layers) - 1  # type: ignore[arg-type]

            def enter(module: Any, args: Any, kwargs: Any, label: str = label, is_first: bool = is_first, gap: str = gap_before) -> None:
                if phase["name"] != "forward":
                    return
                if is_first:
                    _on_gradient(_first_tensor((args, kwargs)), lambda: tracker.border(f"backward {gap}"))
                tracker.border(f"forward {label}")

            def leave(module: Any, args: Any, kwargs: Any, output: Any, label: str = label, is_last: bool = is_last, gap: str = gap_after) -> None:
                if phase["name"] != "forward":
                    return
                _on_gradient(_first_tensor(output), lambda: tracker.border(f"backward {label}"))
                tracker.border(f"forward {gap}" if is_last else f"forward between {label}")

            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(layer.register_forward_hook(leave, with_kwargs=True))
    try:
        yield start
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The hidden states: the first floating tensor among a layer's arguments or results."""
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None


def _on_gradient(tensor: torch.Tensor | None, act: Callable[[], None]) -> None:
    if tensor is not None and tensor.requires_grad:
        tensor.register_hook(lambda gradient: act())


@contextmanager
def fake_masks(*, masked: bool) -> Iterator[None]:
    """transformers looks at position values to find packed rows; fake tensors have none, so it is told what they would say."""
    patch = nullcontext() if masked else mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    with patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trace_model(
    source: ModelSource, *, key: str, versions: dict[str, str], sequence_length: int, variants: tuple[Variant, ...],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ModelProfile:
    """Measure every variant and fit. Raises RequestError naming the module that cannot be traced."""
    tracer = Tracer(source)
    points = [(batch, sequence) for batch in BATCHES for sequence in trace_lengths(sequence_length)]
    try:
        model = tracer.model(torch.float32)
        reason = _chunking(tracer, points[0])
        variants = tuple(variant for variant in variants if variant.attention in attention_kernels(model))
        steps, total = [], len(variants) * len(points)
        for number, variant in enumerate(variants):
            before = number * len(points)
            steps.append(_trace_step(tracer, variant, points, reason is None, lambda done, n=before: progress(n + done, total)))
        flops = _forward_flops(tracer, points)
        kv = _kv_elements(tracer, points)
    except RequestError:
        raise
    except Exception as error:  # any operator may refuse fake tensors; the user needs the module, not the traceback
        raise RequestError(_untraceable(source, error)) from error
    return ModelProfile(
        key=key,
        model_hash=source.model_hash,
        architecture=tracer.model_class.__name__,
        model_type=tracer.config.model_type,
        objective=tracer.objective,
        versions=versions,
        vocab_size=getattr(tracer.config.get_text_config(), "vocab_size", None),
        hidden_size=getattr(tracer.config.get_text_config(), "hidden_size", None),
        max_positions=_max_positions(tracer.config),
        parameters=_parameters(tracer),
        declares=_declares(model),
        stacks=tuple(
            Stack(path=s.path, traced_layers=s.kept, assignment=s.assignment, layer_parameters=s.layer_parameters)
            for s in tracer.stacks
        ),
        steps=tuple(steps),
        sequence_range=(points[0][1], sequence_length),
        kv_elements=kv,
        chunked_loss_reason=reason or "the head is a plain linear layer that feeds the causal-LM loss unchanged",
        forward_flops=flops,
    )


def trace_lengths(sequence_length: int) -> tuple[int, int, int]:
    """Three lengths up to the one asked for; a quadratic through them is exact between them."""
    return max(sequence_length // 4, 3), max(sequence_length // 2, 5), max(sequence_length, 8)


def _trace_step(
    tracer: Tracer, variant: Variant, points: list[tuple[int, int]], chunked: bool, progress: Callable[[int], None]
) -> StepTrace:
    """Plain, with every layer recomputed where the model offers it, and with the loss in chunks where that is legal."""
    recompute = tracer.model(torch.float32).supports_gradient_checkpointing
    plain, recomputed, in_chunks = [], [], []
    for done, (batch, sequence) in enumerate(points):
        progress(done)
        plain.append(tracer.measure(variant, batch=batch, sequence=sequence, recompute=False, chunked=False))
        if recompute:
            recomputed.append(tracer.measure(variant, batch=batch, sequence=sequence, recompute=True, chunked=False))
        if chunked:
            in_chunks.append(tracer.measure(variant, batch=batch, sequence=sequence, recompute=False, chunked=True))
    progress(len(points))

    def fit(measurements: list[Measurement], names: list[str]) -> tuple[Segment, ...]:
        return tuple(fit_segment(points, measurements, name) for name in names if measurements)

    layers = [[f"layer {n} {position}" for position in range(len(stack.kept))] for n, stack in enumerate(tracer.stacks)]
    gaps = [f"gap {number}" for number in range(len(tracer.stacks) + 1)]
    return StepTrace(
        precision=variant.precision,
        attention=variant.attention,
        masked=variant.masked,
        gaps=fit(plain, gaps),
        gaps_recomputed=fit(recomputed, gaps),
        chunked_gap=next(iter(fit(in_chunks, gaps[-1:])), None),
        stacks=tuple(StackTrace(plain=fit(plain, names), recomputed=fit(recomputed, names)) for names in layers),
    )


def _chunking(tracer: Tracer, point: tuple[int, int]) -> str | None:
    model = tracer.model(torch.float32)
    with fake_masks(masked=False), tracer.fake:
        inputs = sample_inputs(model, tracer.objective, batch=point[0], sequence=point[1], masked=False)
        return why_not_chunked(model, inputs)


def _forward_flops(tracer: Tracer, points: list[tuple[int, int]]) -> Polynomial:
    """Of the model in evaluation mode with fused attention: dropout would decompose attention and hide that it is causal."""
    model = tracer.model(torch.float32)
    if "sdpa" in attention_kernels(model):
        model.set_attn_implementation("sdpa")
    recompute_layers(model, 0)
    model.eval()
    totals = []
    for batch, sequence in points:
        with fake_masks(masked=False), tracer.fake, torch.no_grad(), LiveTracker() as tracker:
            inputs = sample_inputs(model, tracer.objective, batch=batch, sequence=sequence, masked=False)
            with segment_borders(model, tracer.stacks, tracker) as border:
                border("forward", 0)
                model(**inputs)
                tracker.border(None)
        totals.append(sum(
            (interval.matmul_flops + interval.attention_flops) * _layers_like(tracer.stacks, name)
            for name, interval in tracker.intervals
        ))
    model.train()
    return fit_single(points, totals)


def _layers_like(stacks: list[LayerStack], name: str) -> int:
    """How many layers of the full model an interval's layer stands for; 1 for a gap."""
    words = name.split()
    if words[1] != "layer":
        return 1
    return stacks[int(words[2])].assignment.count(int(words[3]))


def _kv_elements(tracer: Tracer, points: list[tuple[int, int]]) -> Polynomial | None:
    model = tracer.model(torch.float32)
    if not model.can_generate():
        return None
    totals = []
    model.eval()
    for batch, sequence in points:
        with fake_masks(masked=False), tracer.fake, torch.no_grad():
            inputs = sample_inputs(model, tracer.objective, batch=batch, sequence=sequence, masked=False)
            cache = getattr(model(**inputs, use_cache=True), "past_key_values", None)
        if cache is None:
            return None
        cache = getattr(cache, "self_attention_cache", cache)
        stack = tracer.stacks[-1] if tracer.stacks else None
        per_layer = [
            sum(t.numel() for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if t is not None)
            for layer in cache.layers
        ]
        assigned = stack.assignment if stack and len(per_layer) == len(stack.kept) else range(len(per_layer))
        totals.append(sum(per_layer[index] for index in assigned))
    model.train()
    return fit_single(points, totals)


def attention_kernels(model: PreTrainedModel) -> tuple[str, ...]:
    return tuple(
        name
        for name, flag in (("sdpa", "_supports_sdpa"), ("eager", None), ("flash_attention_2", "_supports_flash_attn"))
        if flag is None or getattr(model, flag, False)
    )


def _parameters(tracer: Tracer) -> Parameters:
    """Counted on the whole model, on the meta device."""
    with torch.device("meta"):
        model = build_model(read_config(tracer.source), tracer.model_class, dtype=torch.float32)
    named = dict(model.named_parameters())
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embedding_ids = {id(p) for p in embedding.parameters()} if embedding is not None else set()
    head_ids = {id(p) for p in head.parameters()} if head is not None else set()
    paths = tuple(stack.path + "." for stack in tracer.stacks)
    parts = {"embedding": 0, "layers": 0, "head": 0, "other": 0}
    shapes: dict[tuple[int, ...], int] = {}
    for name, parameter in named.items():
        part = (
            "layers" if name.startswith(paths) else "embedding" if id(parameter) in embedding_ids
            else "head" if id(parameter) in head_ids else "other"
        )
        parts[part] += parameter.numel()
        shapes[tuple(parameter.shape)] = shapes.get(tuple(parameter.shape), 0) + 1
    return Parameters(
        total=sum(parts.values()),
        **parts,
        buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        tied=bool(embedding_ids & head_ids),
        shapes=tuple(ParameterShape(shape=shape, count=count) for shape, count in sorted(shapes.items())),
    )


def _declares(model: PreTrainedModel) -> Declares:
    import inspect

    return Declares(
        tensor_parallel_plan=dict(getattr(model, "_tp_plan", None) or getattr(model.config, "base_model_tp_plan", None) or {}),
        pipeline_parallel_plan=tuple(getattr(model.config, "base_model_pp_plan", None) or ()),
        no_split_modules=tuple(sorted(model._no_split_modules or ())),
        attention_kernels=attention_kernels(model),
        gradient_checkpointing=bool(model.supports_gradient_checkpointing),
        gradient_checkpointing_per_layer=all(
            isinstance(layer, GradientCheckpointingLayer) for _, stack in find_stacks(model) for layer in stack
        ),
        position_ids="position_ids" in inspect.signature(model.forward).parameters,
        can_generate=bool(model.can_generate()),
    )


def _max_positions(config: PretrainedConfig) -> int | None:
    text = config.get_text_config()
    value = getattr(text, "max_position_embeddings", None)
    return int(value) if isinstance(value, int) and value > 0 else None


def _untraceable(source: ModelSource, error: BaseException) -> str:
    """Name the innermost module of transformers (or of torch) that the traceback went through."""
    where, frame = "its forward", error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            where = f"{type(owner).__name__} ({frame.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno})"
        frame = frame.tb_next
    reason = " ".join(str(error).split())[:240]
    return (
        f"{source.reference!r} cannot be traced in {where}: {type(error).__name__}: {reason}; "
        f"check the config's sizes, or report this architecture (transformers {transformers.__version__})"
    )
