# needs torch
"""Test on a small copy of an encoder-decoder that the loss of a batch is the mean of the losses of its texts.

The copy is in training mode without dropout, because a mixture of experts may hold fewer tokens in training than in evaluation.
A text is a source for the encoder and labels for the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from upshift.models.build import build_model, disable_cache
from upshift.models.config import padding_of
from upshift.models.isolation.small_copy import plain_token_ids, randomize_weights
from upshift.models.ops.sequence_loss import turn_off_dropout
from upshift.models.profile import Isolation

SAME_LENGTH = (16, 16)
CHANGED_LABEL = 5  # the position of the label that is changed
EVEN = ((24, 16), (24, 16), (24, 16))  # tokens of the sources, and of the labels
UNEVEN = ((11, 17), (24, 7), (17, 16))
MORE_PADDING = 7  # columns
LOSS_TOLERANCE = 1e-6  # fp32 sums in another order differ by up to 3e-7
PADDING_TOLERANCE = 1e-4  # leaks of padding differ by more than 1e-3
IGNORED = -100

Text = tuple[Tensor, Tensor]


def measure_seq2seq(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> Isolation:
    """Return the result of the test for a config of a small copy. Errors of the model's code are not caught.

    A loss that padding changes does not split either: texts alone have no padding."""
    probe = _Probe(config, model_class)
    if not probe.reads_labels():
        return Isolation(proven=True, reason="", loss_shifts=False)
    even = probe.texts(EVEN)
    uneven = probe.texts(UNEVEN)
    padded = probe.loss(uneven)
    splits = (
        _is_close(probe.loss(even), probe.mean_loss(even), LOSS_TOLERANCE)
        and _is_close(padded, probe.mean_loss(uneven), PADDING_TOLERANCE)
        and _is_close(padded, probe.loss(uneven, more_padding=MORE_PADDING), PADDING_TOLERANCE)
    )
    return Isolation(proven=True, reason="", loss_splits=splits)


class _Probe:
    """A small copy of the model with random weights."""

    def __init__(self, config: PretrainedConfig, model_class: type[PreTrainedModel]) -> None:
        self._model = build_model(config, model_class, dtype=torch.float32)
        disable_cache(self._model)
        turn_off_dropout(self._model)
        randomize_weights(self._model)
        self._plain_ids = plain_token_ids(config)
        self._padding = padding_of(config.get_text_config()) or 0
        text = self.texts([SAME_LENGTH])
        if self.loss(text) != self.loss(text):  # something random is left, such as the noise of a router
            self._model.eval()

    def reads_labels(self) -> bool:
        """Return whether the decoder predicts a label from the labels before it, and not from the source alone."""
        source, labels = self.texts([SAME_LENGTH])[0]
        changed = labels.clone()
        changed[CHANGED_LABEL] = self._plain_ids[self._plain_ids != labels[CHANGED_LABEL]][0]
        with torch.no_grad():
            logits, others = (self._model(input_ids=source[None], labels=row[None]).logits[0] for row in (labels, changed))
        return not torch.equal(logits[CHANGED_LABEL + 1 :], others[CHANGED_LABEL + 1 :])

    def texts(self, lengths: Sequence[tuple[int, int]]) -> list[Text]:
        """Return random texts with these numbers of source tokens and labels."""
        return [(self._random_tokens(source), self._random_tokens(labels)) for source, labels in lengths]

    def _random_tokens(self, length: int) -> Tensor:
        return self._plain_ids[torch.randint(len(self._plain_ids), (length,))]

    def loss(self, texts: Sequence[Text], *, more_padding: int = 0) -> float:
        """Return the loss of a batch with padding on the right, which a mask marks, and ``more_padding`` columns of it."""
        sources = [source for source, _ in texts]
        inputs = {
            "input_ids": _pad(sources, self._padding, more_padding),
            "labels": _pad([labels for _, labels in texts], IGNORED, more_padding),
        }
        if len({len(source) for source in sources}) > 1 or more_padding:
            inputs["attention_mask"] = _pad([torch.ones_like(source) for source in sources], 0, more_padding)
        with torch.no_grad():
            loss = float(self._model(**inputs).loss)
        if not math.isfinite(loss):
            raise ValueError("the loss of the copy is not a number")
        return loss

    def mean_loss(self, texts: Sequence[Text]) -> float:
        """Return the mean of the losses of the texts alone, weighted by their labels."""
        counts = [len(labels) for _, labels in texts]
        total = sum(count * self.loss([text]) for count, text in zip(counts, texts, strict=True))
        return total / sum(counts)


def _pad(rows: Sequence[Tensor], padding: int, more: int) -> Tensor:
    """Return the rows as one tensor [rows, width], with ``more`` columns than the longest row."""
    padded = torch.full((len(rows), max(len(row) for row in rows) + more), padding)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _is_close(actual: float, expected: float, tolerance: float) -> bool:
    return abs(actual - expected) <= tolerance * abs(expected)
