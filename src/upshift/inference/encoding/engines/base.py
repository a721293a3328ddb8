"""Define the protocol of every encoding engine: batches in, arrays out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from upshift.inference.encoding.model_config import Recipe
from upshift.inference.registry import EngineSetup
from upshift.inference.tokenizer import padded_rows
from upshift.inference.weights import stored_for
from upshift.models.source import ModelSource


class Engine(Protocol):
    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, np.ndarray]]:
        """Yield each batch with token states [B, S, H], class scores [B, C], or logits of tokens [B, S, L], in fp32,
        in any order."""
        ...


class Build(NamedTuple):
    """The parts that an engine is built from. ``folder`` is the engine's own and is kept between runs. ``examples``
    are batches to calibrate on."""

    source: ModelSource
    recipe: Recipe
    setup: EngineSetup
    folder: Path
    examples: list[Batch]


def in_order(
    batches: Iterable[Batch], start: Callable[[Batch], Callable[[], np.ndarray]], *, at_once: int
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield each batch with its output, in order. ``start`` begins a batch and returns the function that waits for
    its output. ``at_once`` batches run at the same time."""
    running: deque[tuple[Batch, Callable[[], np.ndarray]]] = deque()
    for batch in batches:
        if len(running) == at_once:
            before, wait = running.popleft()
            yield before, wait()
        running.append((batch, start(batch)))
    for before, wait in running:
        yield before, wait()


def load_forward(source: ModelSource, recipe: Recipe) -> Any:
    """Return the model in fp32, or as it is quantized: a module from (ids, mask) to token states, class scores or logits of
    tokens."""
    import torch

    from upshift.loading.load import load_source

    dtype: Any = torch.float32 if stored_for(source) is None else "auto"
    run = partial(_states_of_one, recipe) if recipe.output == "embeddings" else None
    model = load_source(source, dtype=dtype, model_class=model_class(source, recipe), run=run)
    return _forward(model, recipe)


def check_encodes(source: ModelSource, recipe: Recipe) -> None:
    """Raise RequestError where the files lack weights that the answer depends on. Their headers are read, nothing else."""
    import torch

    from upshift.loading.fill import check_files
    from upshift.loading.load import build_empty

    if stored_for(source) is not None:  # in a form that its engine alone knows
        return
    embeds = recipe.output == "embeddings"
    model = build_empty(model_class(source, recipe), source.hf_config, torch.float32).eval()
    check_files(source, model, run=partial(_states_of_one, recipe) if embeds else None, all_used=not embeds)


def model_class(source: ModelSource, recipe: Recipe) -> Any:
    """Return the class that the config names, or for token states the model inside it."""
    from upshift.models.build import encoder_class, find_architecture

    config = source.hf_config
    if recipe.output == "embeddings":
        return encoder_class(config, source.reference)
    return find_architecture(config, source.reference).model_class


def _forward(model: Any, recipe: Recipe) -> Any:
    import torch

    from upshift.models.build import encoder_of

    if recipe.output == "embeddings":
        model = encoder_of(model)

    class Forward(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            result: torch.Tensor = self.model(input_ids=ids, attention_mask=mask)[0]
            return result

    return Forward().eval()


def _states_of_one(recipe: Recipe, model: Any) -> Any:
    """Return the token states of a text of two tokens."""
    import torch

    device = next(model.parameters()).device
    ids = torch.zeros((1, 2), dtype=torch.long, device=device)
    return _forward(model, recipe)(ids, None)  # a mask's values are looked at, and on the meta device it has none


class Batch(NamedTuple):
    """A batch of texts, padded on the right. ``places`` holds the positions of its texts in the input."""

    ids: np.ndarray  # [B, S] int64
    mask: np.ndarray  # [B, S] int64
    places: list[int]


def by_length(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Return the places of the texts of each batch, longest first. A padded batch has at most ``token_budget``
    tokens, or is one text."""
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(place)
        else:
            batches.append([place])
    return batches


def padded(tokens: Sequence[Sequence[int]], batches: list[list[int]], *, pad: int) -> Iterator[Batch]:
    for places in batches:
        yield Batch(*padded_rows([tokens[place] for place in places], pad=pad), places)
