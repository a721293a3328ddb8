# needs torch
"""Run a model with its head and loss in chunks of tokens, so that the logits of a whole batch are never in memory.

The unmodified model runs, but its output embedding returns ``DeferredLogits`` in place of logits. These record what the model
does to them (scaling, soft-capping, bias, shifting, flattening), and compute the loss when they reach
``torch.nn.functional.cross_entropy``. Labels, shifts and divisors are therefore the model's own. An operation that deferred
logits do not support raises ChunkedHeadError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from upshift.models.ops.linear_cross_entropy import (
    HeadLoss,
    LabelLimit,
    VocabularyShard,
    linear_cross_entropy,
    linear_token_losses,
)

Number = float  # DeferredLogits has a method of the name float


class ChunkedHeadError(RuntimeError):
    """Raised for a model with an operation between its head and its loss that cannot be computed in chunks."""


@dataclass
class HeadUses:
    """Count how often the head ran while a context was open, and how many of its results became losses."""

    heads: int = 0
    losses: int = 0
    limit: LabelLimit = field(default_factory=LabelLimit)  # of the labels of the forward pass that runs


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Logits [..., V] that are not computed yet: hidden [..., H], weight [V, H], bias [V] or None, and operations on them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    head: HeadLoss
    uses: HeadUses

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], len(self.weight)))

    @property
    def dtype(self) -> torch.dtype:
        device = self.hidden.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    def size(self, dimension: int | None = None) -> Any:
        return self.shape if dimension is None else self.shape[dimension]

    def dim(self) -> int:
        return self.ndim

    def contiguous(self) -> DeferredLogits:
        return self

    def float(self) -> DeferredLogits:
        """Return self, because the loss is always computed in fp32."""
        return self

    def to(self, *target: Any, **options: Any) -> DeferredLogits:
        """Return self for any dtype, as ``float`` does.

        Raise ChunkedHeadError for another device than that of the hidden states."""
        arguments = (*target, options.get("device"))
        devices = [torch.device(argument) for argument in arguments if isinstance(argument, str | torch.device)]
        if any(device.type != self.device.type for device in devices):
            raise ChunkedHeadError(f"the model moves its logits to {devices[0]}")
        return self

    def reshape(self, *shape: Any) -> DeferredLogits:
        """Reshape the tokens. Raise ChunkedHeadError if the vocabulary is not the last dimension afterwards."""
        *leading, last = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if last != len(self.weight):
            raise ChunkedHeadError(f"the model reshapes logits over {len(self.weight)} words to rows of {last}")
        return replace(self, hidden=self.hidden.reshape(*leading, self.hidden.shape[-1]))

    view = reshape

    def __getitem__(self, key: Any) -> DeferredLogits:
        """Select tokens. Raise ChunkedHeadError for a selection of words."""
        keys = key if isinstance(key, tuple) else (key,)
        keeps_vocabulary = keys[-1] == slice(None) if Ellipsis in keys or len(keys) >= self.ndim else True
        if not keeps_vocabulary or not all(isinstance(index, slice | type(Ellipsis)) for index in keys):
            raise ChunkedHeadError("the model takes some of the logits by other than ranges of tokens")
        return replace(self, hidden=self.hidden[key])

    def __mul__(self, factor: Any) -> DeferredLogits:
        if not isinstance(factor, int | float):
            raise ChunkedHeadError("the model multiplies its logits by a tensor")
        if self.head.cap is not None:
            return replace(self, head=self.head._replace(cap=self.head.cap * factor))
        bias = None if self.bias is None else self.bias * factor
        return replace(self, bias=bias, head=self.head._replace(scale=self.head.scale * factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        if not isinstance(divisor, int | float):
            raise ChunkedHeadError("the model divides its logits by a tensor")
        return self * (1.0 / divisor)

    def __add__(self, bias: Any) -> DeferredLogits:
        """Add a bias: one number for each word."""
        if not isinstance(bias, torch.Tensor) or bias.numel() != len(self.weight) or bias.shape[-1] != len(self.weight):
            raise ChunkedHeadError("the model adds other than one number a word to its logits")
        if self.head.cap is not None:
            raise ChunkedHeadError("the model adds to its logits after soft-capping them")
        flat_bias = bias.reshape(-1)
        return replace(self, bias=flat_bias if self.bias is None else self.bias + flat_bias)

    __radd__ = __add__

    def tanh(self) -> DeferredLogits:
        if self.head.cap is not None:
            raise ChunkedHeadError("the model soft-caps its logits twice")
        return replace(self, head=self.head._replace(cap=1.0))

    def cross_entropy(
        self,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Number = 0.0,
    ) -> torch.Tensor:
        """Return ``torch.nn.functional.cross_entropy`` of these logits [N, V] and labels [N], with label smoothing and z-loss."""
        if weight is not None or size_average is not None or reduce is not None or reduction not in ("mean", "sum"):
            raise ChunkedHeadError("the model weighs its classes, or wants one loss a token")
        if self.ndim != 2 or target.ndim != 1:
            raise ChunkedHeadError("the model's loss does not take rows of logits and one label a row")
        head = self.head._replace(ignore_index=ignore_index, label_smoothing=label_smoothing or self.head.label_smoothing)
        self.uses.losses += 1
        weight, bias, shard = _local_vocabulary(self.weight, self.bias)
        total: torch.Tensor = linear_cross_entropy(self.hidden, weight, bias, target, head, shard, self.uses.limit)
        if reduction == "sum":
            return total
        num_labels = (target != ignore_index).sum()
        return torch.where(
            num_labels > 0, total / num_labels.clamp(min=1), torch.nan
        )  # without labels: NaN, and gradients of zero

    def token_losses(self, target: torch.Tensor, *, ignore_index: int) -> torch.Tensor:
        """Return the cross entropy of each of these logits [N, V] with its label [N], 0 for ignored labels."""
        if self.ndim != 2 or target.ndim != 1 or isinstance(self.weight, DTensor):
            raise ChunkedHeadError("the model's loss does not take rows of logits and one label a row")
        self.uses.losses += 1
        head = self.head._replace(ignore_index=ignore_index)
        losses: torch.Tensor = linear_token_losses(self.hidden, self.weight, self.bias, target, head, self.uses.limit)
        return losses

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ChunkedHeadError(f"the model takes .{name} of its logits")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a function of torch that is called with deferred logits."""
        methods: dict[Any, Callable[..., Any]] = {
            nn.functional.cross_entropy: cls.cross_entropy,
            torch.tanh: cls.tanh,
            torch.Tensor.add: _swap_arguments(cls.__add__),
            torch.Tensor.mul: _swap_arguments(cls.__mul__),
        }
        if function not in methods:
            raise ChunkedHeadError(f"the model takes torch's {getattr(function, '__name__', function)} of its logits")
        return methods[function](*args, **(kwargs or {}))


def _local_vocabulary(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, VocabularyShard | None]:
    """Return this rank's rows of weight and bias if ranks share the vocabulary. Every rank has the same number of rows."""
    if not isinstance(weight, DTensor):
        return weight, bias, None
    local_weight = weight.to_local()
    mesh = weight.device_mesh
    shard = VocabularyShard(mesh.get_group(), mesh.get_local_rank() * len(local_weight), len(weight))
    if isinstance(bias, DTensor):
        bias = bias.to_local()
    elif bias is not None:
        bias = bias[shard.first : shard.first + len(local_weight)]
    return local_weight, bias, shard


def _swap_arguments(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a method for ``tensor + logits``, whose operands torch passes in this order."""
    return lambda tensor, logits: method(logits, tensor)


@contextmanager
def chunked_head(model: nn.Module, *, chunk_tokens: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Iterator[HeadUses]:
    """Compute the loss of ``model`` in chunks of ``chunk_tokens`` labelled tokens while the context is open.

    label_smoothing: as ``transformers.TrainingArguments.label_smoothing_factor``. z_loss: the factor of an added loss, the mean
    over labels of logsumexp(logits) ** 2. The model raises ChunkedHeadError when it runs if ``why_not_chunked`` has a reason.
    """
    head = _output_embedding(model)
    options = HeadLoss(chunk_tokens=chunk_tokens, label_smoothing=label_smoothing, z_loss=z_loss)
    uses = HeadUses()

    def defer(hidden: torch.Tensor) -> DeferredLogits:
        uses.heads += 1
        return DeferredLogits(hidden, head.weight, head.bias, options, uses)

    head.forward = defer
    head.upshift_label_limit = uses.limit
    try:
        yield uses
    finally:
        del head.forward
        del head.upshift_label_limit


@contextmanager
def labels_counted(model: nn.Module, num_labels: int, *, positions: int) -> Iterator[None]:
    """Tell a head in chunks, while open, how many labels of a forward pass count at most, of how many with the ignored ones.

    The head then does not ask a GPU, for which the host would wait.
    """
    limit = getattr(_output_embedding(model), "upshift_label_limit", None)
    if limit is None:
        yield
        return
    limit.labels = num_labels
    limit.positions = positions
    try:
        yield
    finally:
        limit.labels = None


def _output_embedding(model: nn.Module) -> Any:
    """Return the module that computes the logits, or None. If peft's modules_to_save has the head, return the copy that is
    trained."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    copies = getattr(head, "modules_to_save", None)
    return head if head is None or copies is None else copies[head.active_adapters[0]]


def why_not_chunked(model: nn.Module, inputs: dict[str, torch.Tensor]) -> str | None:
    """Return why the loss cannot be computed in chunks, or None if it can. Run one forward pass (fake tensors will do)."""
    head = _output_embedding(model)
    if type(head) is not nn.Linear:
        description = "no output embedding"
        if head is not None:
            description = f"{type(head).__module__}.{type(head).__name__} as output embedding"
        return f"the model has {description}, not a plain linear layer"
    try:
        with chunked_head(model, chunk_tokens=64) as uses, torch.no_grad():
            model(**inputs)
    except ChunkedHeadError as error:
        return str(error)
    return None if uses.heads == uses.losses > 0 else "the model's logits do not become its loss by cross entropy"
