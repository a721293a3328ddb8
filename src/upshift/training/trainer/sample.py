"""Draw a few batches of the user's own data before training without disturbing it."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from upshift.planning.lengths import LengthHistogram
from upshift.planning.packing import round_up
from upshift.training.batches.collated import Batch, CollatedRows
from upshift.training.checkpoint.rng import undisturbed_rng
from upshift.training.data.tokens import histogram_of

MAX_EXAMPLES = 512
MIN_GLOBAL_BATCHES = 4
MAX_SECONDS = 10.0  # of drawing
WIDTH_MULTIPLE = 8


@dataclass(frozen=True)
class Sample:
    batches: list[Batch]  # as the collator gives them, each of the user's per-device size
    seconds_per_batch: float

    def rows(self, num_batches: int, *, encoder_decoder: bool, shifts_labels: bool) -> CollatedRows:
        """Return the rows of the first ``num_batches`` batches. Raise NotRows if they are not made of rows."""
        return CollatedRows(self.batches[:num_batches], encoder_decoder=encoder_decoder, shifts_labels=shifts_labels)


class NoSample(ValueError):
    """The data cannot be looked at, or not without using it up. The message says why."""


def draw_sample(loader: Any, *, accumulation: int) -> Sample:
    """Return a sample of ``trainer.get_train_dataloader()``.

    Raise NoSample for data that can be read once only, and for batches that are not made of examples and a collator.
    """
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    batch_size, sampler = getattr(loader, "batch_size", None), getattr(loader, "batch_sampler", None)
    if dataset is None or collate is None or batch_size is sampler is None:
        raise NoSample("the data loader does not make its batches of examples with a collator")
    size = batch_size or getattr(sampler, "batch_size", None) or 1
    wanted = min(max(MIN_GLOBAL_BATCHES * accumulation * size, MAX_EXAMPLES // 2), max(MAX_EXAMPLES, accumulation * size))
    batches: list[Batch] = []
    start = time.perf_counter()
    with undisturbed_rng():
        examples = _examples(dataset, wanted)
        while chunk := list(islice(examples, size)):
            batch = collate(chunk)
            if not isinstance(batch, Mapping):
                raise NoSample(f"the collator gives a {type(batch).__name__}, and no names to its tensors")
            batches.append(dict(batch))
            if time.perf_counter() - start > MAX_SECONDS and len(batches) >= accumulation:
                break
    if not batches:
        raise NoSample("the training data is empty")
    return Sample(batches, (time.perf_counter() - start) / len(batches))


def _examples(dataset: Any, count: int) -> Iterator[Any]:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        chosen = np.linspace(0, len(dataset) - 1, num=min(count, len(dataset))).astype(int).tolist()
        random.Random(0).shuffle(chosen)  # data may be sorted by length
        return (dataset[index] for index in chosen)
    try:
        dataset = copy.deepcopy(dataset)  # what it reads from may be used up
    except Exception as error:  # whatever an object of the script's raises when it is copied
        words = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise NoSample(f"the training data cannot be copied, and reading it would use it up ({words})") from None
    examples = iter(dataset)
    if examples is iter(dataset):
        raise NoSample("the training data gives one iterator, which can be read once only")
    return islice(examples, count)


def histogram(rows: CollatedRows) -> LengthHistogram:
    """Return the lengths of the longer side of each row. The sequence length is the longest, rounded up."""
    lengths = [max(pair) for pair in zip(rows.lengths, rows.target_lengths, strict=True)]
    return histogram_of(np.array(lengths), round_up(max(*lengths, WIDTH_MULTIPLE), WIDTH_MULTIPLE))
