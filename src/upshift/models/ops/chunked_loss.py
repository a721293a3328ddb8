"""Run a model's own forward pass with head and loss in chunks of tokens, so that the logits of a whole batch are never in memory.

The unmodified model runs: only its output embedding returns, in place of logits, ``DeferredLogits``, which remember what the
model does to them (scaling, soft-capping, bias, shifting, flattening) and become a loss when they reach
``torch.nn.functional.cross_entropy``. So labels, shifts and divisors are the model's, and the operations between head and loss
are found by running them. An operation that deferred logits cannot do is refused in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from upshift.models.ops.linear_cross_entropy import HeadLoss, VocabularyShard, linear_cross_entropy

Number = float  # DeferredLogits has a method of the name float


class ChunkedHeadError(RuntimeError):
    """An error for a model that does something between its head and its loss that cannot be computed in chunks."""


@dataclass
class HeadUses:
    """Counts of how often the head ran while a context was open, and how many of its results became losses."""

    heads: int = 0
    losses: int = 0


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Logits [..., V] that are not computed: hidden [..., H], weight [V, H], bias [V] or None, and the operations on them."""

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
        """Return self: the loss is computed in fp32 in any case."""
        return self

    def to(self, *target: Any, **options: Any) -> DeferredLogits:
        """Change nothing for another dtype, as ``float``.

        Raise ChunkedHeadError for another device than that of the hidden states."""
        devices = [torch.device(place) for place in (*target, options.get("device")) if isinstance(place, str | torch.device)]
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
        """Choose tokens. Raise ChunkedHeadError for a choice of words."""
        keys = key if isinstance(key, tuple) else (key,)
        whole = keys[-1] == slice(None) if Ellipsis in keys or len(keys) >= self.ndim else True
        if not whole or not all(isinstance(part, slice | type(Ellipsis)) for part in keys):
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

    def __add__(self, words: Any) -> DeferredLogits:
        """Add a number for each word, as a bias."""
        if not isinstance(words, torch.Tensor) or words.numel() != len(self.weight) or words.shape[-1] != len(self.weight):
            raise ChunkedHeadError("the model adds other than one number a word to its logits")
        if self.head.cap is not None:
            raise ChunkedHeadError("the model adds to its logits after soft-capping them")
        added = words.reshape(-1)
        return replace(self, bias=added if self.bias is None else self.bias + added)

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
        weight, bias, words = _own_words(self.weight, self.bias)
        total: torch.Tensor = linear_cross_entropy(self.hidden, weight, bias, target, head, words)
        if reduction == "sum":
            return total
        num_labels = (target != ignore_index).sum()
        return torch.where(num_labels > 0, total / num_labels.clamp(min=1), torch.nan)  # no label: NaN, and gradients of zero

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ChunkedHeadError(f"the model takes .{name} of its logits")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle a function of torch that is called with deferred logits."""
        own: dict[Any, Callable[..., Any]] = {
            nn.functional.cross_entropy: cls.cross_entropy, torch.tanh: cls.tanh,
            torch.Tensor.add: _swapped(cls.__add__), torch.Tensor.mul: _swapped(cls.__mul__),
        }  # fmt: skip
        if function not in own:
            raise ChunkedHeadError(f"the model takes torch's {getattr(function, '__name__', function)} of its logits")
        return own[function](*args, **(kwargs or {}))


def _own_words(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, VocabularyShard | None]:
    """Return this rank's part where ranks share the vocabulary. Every rank has the same number of rows."""
    if not isinstance(weight, DTensor):
        return weight, bias, None
    own = weight.to_local()
    mesh = weight.device_mesh
    words = VocabularyShard(mesh.get_group(), mesh.get_local_rank() * len(own), len(weight))
    if isinstance(bias, DTensor):
        bias = bias.to_local()
    elif bias is not None:
        bias = bias[words.first : words.first + len(own)]
    return own, bias, words


def _swapped(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a method for ``tensor + logits``, which torch passes in this order."""
    return lambda tensor, logits: method(logits, tensor)


@contextmanager
def chunked_head(model: nn.Module, *, chunk_tokens: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Iterator[HeadUses]:
    """Run ``model`` with its loss in chunks of ``chunk_tokens`` labelled tokens while the context is open.

    label_smoothing: as ``transformers.TrainingArguments.label_smoothing_factor``. z_loss: this times the mean over labels of
    logsumexp(logits) ** 2 is added. Raise ChunkedHeadError, when the model runs, if ``why_not_chunked`` has a reason.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    options = HeadLoss(chunk_tokens=chunk_tokens, label_smoothing=label_smoothing, z_loss=z_loss)
    uses = HeadUses()

    def defer(hidden: torch.Tensor) -> DeferredLogits:
        uses.heads += 1
        return DeferredLogits(hidden, head.weight, head.bias, options, uses)

    head.forward = defer
    try:
        yield uses
    finally:
        del head.forward


def why_not_chunked(model: nn.Module, inputs: dict[str, torch.Tensor]) -> str | None:
    """Return None if the loss may be computed in chunks, else the reason. Run one forward pass (fake tensors will do)."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear:
        kind = "no output embedding" if head is None else f"{type(head).__module__}.{type(head).__name__} as output embedding"
        return f"the model has {kind}, not a plain linear layer"
    try:
        with chunked_head(model, chunk_tokens=64) as uses, torch.no_grad():
            model(**inputs)
    except ChunkedHeadError as error:
        return str(error)
    return None if uses.heads == uses.losses > 0 else "the model's logits do not become its loss by cross entropy"
