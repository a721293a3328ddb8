"""Define the protocol of every encoding engine: batches of token ids in, arrays out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from upshift.inference.encoding.model_config import EncodingConfig
from upshift.inference.registry import EngineName, EngineSetup
from upshift.inference.tokenizer import padded_rows
from upshift.inference.weights import engine_folder, stored_for
from upshift.models.source import ModelSource

# A token of a pair is its id plus SEGMENT times the number of its segment, so that a row stays a list of integers.
SEGMENT = 2**32


class Engine(Protocol):
    """An engine that encodes."""

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yield each batch with its output in fp32: token states [B, S, H], class scores [B, C], logits of tokens [B, S, L], or
        weights of the vocabulary [B, V].

        The batches come in any order."""
        ...


class EncoderBuild(NamedTuple):
    """The parts that an encoding engine is built from.

    ``folder`` holds the engine's own files between runs. ``examples`` are batches to calibrate on."""

    source: ModelSource
    config: EncodingConfig
    setup: EngineSetup
    folder: Path
    examples: list[Batch]


def run_in_order(
    batches: Iterable[Batch], start_batch: Callable[[Batch], Callable[[], np.ndarray]], *, concurrent: int
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield each batch with its output, in the order of the batches.

    ``start_batch`` starts a batch, and returns the function that waits for its output. ``concurrent`` batches run at the
    same time."""
    pending: deque[tuple[Batch, Callable[[], np.ndarray]]] = deque()
    for batch in batches:
        if len(pending) == concurrent:
            oldest, wait = pending.popleft()
            yield oldest, wait()
        pending.append((batch, start_batch(batch)))
    for oldest, wait in pending:
        yield oldest, wait()


def gives_states(config: EncodingConfig) -> bool:
    """Return whether the results follow from the token states of the encoder, and not from a head of the model."""
    return config.output in ("embeddings", "token vectors")


def load_forward(source: ModelSource, config: EncodingConfig) -> Any:
    """Return the model in fp32, or as it is quantized: a module from the inputs of ``input_names`` to token states, class
    scores or logits of tokens."""
    import torch

    from upshift.loading.load import load_source

    dtype: Any = torch.float32 if stored_for(source) is None else "auto"
    forward_once = partial(_encode_two_tokens, config)
    all_used = not gives_states(config)
    model = load_source(source, dtype=dtype, model_class=model_class(source, config), run=forward_once, all_used=all_used)
    return _forward_module(model, config)


def load_forward_part(source: ModelSource, config: EncodingConfig, dtype: Any) -> Any:
    """Return the module of ``load_forward`` with this rank's part of the weights, in a dtype of torch."""
    from upshift.inference.tensor_parallel import load_part

    return _forward_module(load_part(source, model_class(source, config), dtype), config)


def build_empty_encoder(source: ModelSource, config: EncodingConfig) -> Any:
    """Return the model without weights, on the meta device."""
    import torch

    from upshift.loading.load import build_empty

    return build_empty(model_class(source, config), source.hf_config, torch.float32).eval()


def check_encodes(source: ModelSource, config: EncodingConfig) -> None:
    """Raise RequestError if the files lack weights that the results depend on. Only the headers of the files are read."""
    from upshift.loading.fill_model import check_files

    if stored_for(source) is not None:  # a format that only one engine reads
        return
    model = build_empty_encoder(source, config)
    check_files(source, model, run=partial(_encode_two_tokens, config), all_used=not gives_states(config))


def model_class(source: ModelSource, encoding_config: EncodingConfig) -> Any:
    """Return the class that the model's config names, or for embeddings the encoder inside it."""
    from upshift.models.build import encoder_class, find_architecture

    model_config = source.hf_config
    if gives_states(encoding_config):
        return encoder_class(model_config, source.reference)
    return find_architecture(model_config, source.reference).model_class


def _forward_module(model: Any, config: EncodingConfig) -> Any:
    import torch

    from upshift.models.build import disable_cache, encoder_of

    if gives_states(config):
        model = encoder_of(model)
    disable_cache(model)  # a decoder would copy keys and values that nobody reads, and OpenVINO cannot convert its cache

    class Forward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = self.model(input_ids=ids, attention_mask=mask)[0]
            return result

    class PairForward(Forward):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None, segments: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            result: torch.Tensor = self.model(input_ids=ids, attention_mask=mask, token_type_ids=segments)[0]
            return result

    class SparseForward(Forward):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            logits = super().forward(ids, mask)
            weights = (logits if mask is None else logits * mask.unsqueeze(-1)).relu().log1p()
            if config.log1p_twice:
                weights = weights.log1p()
            return weights.amax(1) if config.sparse_pooling == "max" else weights.sum(1)

    if config.output == "sparse vectors":
        return SparseForward().eval()
    return (PairForward() if config.segments else Forward()).eval()


def input_names(config: EncodingConfig) -> tuple[str, ...]:
    """Return the names of the inputs of ``load_forward``'s module."""
    return ("ids", "mask", "segments") if config.segments else ("ids", "mask")


def export_folder(source: ModelSource, config: EncodingConfig, engine: EngineName) -> Path:
    """Return the folder of an engine's converted files. A model that is converted with other inputs has another one."""
    folder = engine_folder("encode", source, engine)
    if config.segments:
        return folder / "segments"
    if config.output == "sparse vectors":
        return folder / f"sparse-{config.sparse_pooling}{'-twice' if config.log1p_twice else ''}"
    return folder


def _encode_two_tokens(config: EncodingConfig, model: Any) -> Any:
    """Return the states, scores or weights of a text of two tokens."""
    import torch

    device = next(model.parameters()).device
    ids = torch.zeros((1, 2), dtype=torch.long, device=device)
    segments = [ids] if config.segments else []
    return _forward_module(model, config)(ids, None, *segments)  # without a mask: the meta device has no values to read


class Batch(NamedTuple):
    """A batch of texts, padded on the right. ``indices`` holds the positions of its texts in the input.

    ``segments`` says of which text of a pair each token is. None: the model is not told."""

    ids: np.ndarray  # [B, S] int64
    mask: np.ndarray  # [B, S] int64
    indices: list[int]
    segments: np.ndarray | None = None  # [B, S] int64

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the inputs of ``load_forward``'s module, in the order of ``input_names``."""
        return (self.ids, self.mask) if self.segments is None else (self.ids, self.mask, self.segments)


def batch_by_length(lengths: Sequence[int], max_tokens: int, *, border: int | None = None) -> list[list[int]]:
    """Return the indices of the texts of each batch, the longest texts first.

    A batch has at most ``max_tokens`` tokens with padding, or is a single text. Texts of up to ``border`` tokens are never
    batched with longer ones: with longrope, a longer text would change their vectors."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        longest = lengths[batches[-1][0]] if batches else 0
        crosses = border is not None and lengths[index] <= border < longest
        if batches and not crosses and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pad_batches(
    tokens: Sequence[Sequence[int]], batches: list[list[int]], *, pad: int, segments: bool = False
) -> Iterator[Batch]:
    """Yield each batch of texts, padded to its longest text. ``batches`` holds the indices of the texts.

    With ``segments``, each token is its id plus SEGMENT times its segment, and the two are separated. A token that is stored
    as -1 - id is one that no token attends to."""
    for indices in batches:
        ids, mask = padded_rows([tokens[index] for index in indices], pad=pad)
        if (ids < 0).any():
            mask[ids < 0] = 0
            ids = np.where(ids < 0, -1 - ids, ids)
        yield Batch(ids % SEGMENT, mask, indices, ids // SEGMENT) if segments else Batch(ids, mask, indices)
