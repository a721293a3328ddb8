"""Test on a small copy of a model what padding, packing and batching rest on: a text's results depend on nothing but the text.

The copy has the model's own class, kinds of layers and settings (narrow.py), and random weights that are large enough to show
every leak. Every check runs the copy twice and compares: a row of two texts as training packs them, with the first one
changed, and each text alone; a text with padding, and without; a batch's loss, and the losses of its texts.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from upshift.errors import RequestError
from upshift.internals.transformers_names import CLASS_NAMES
from upshift.models.block_attention import set_attention
from upshift.models.build import build_model, choose_class, forget_cache
from upshift.models.describe import attention_kernels
from upshift.models.narrow import narrow_copies
from upshift.models.profile import Isolation, Objective
from upshift.models.source import ModelSource

FIRST, SECOND, PADDING = 11, 21, 5  # tokens: beyond SHORT windows, of no round number
TOLERANCE = 1e-3  # of the largest logit: fp32 sums in another order differ by some 1e-6, leaks by more than 1e-2
LOSS_TOLERANCE = 1e-4
# Kernels that need another device have something run in their place: one function makes the masks of flex attention, sdpa and
# eager; and flash attention is told of a row's texts by their positions alone.
STAND_IN, FLASH = "positions_alone", ("flash_attention_2", "flash_attention_3")
IGNORED = -100  # a label that does not count

logger = logging.getLogger(__name__)


def measure_isolation(
    config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective | None
) -> Isolation:
    """Return the result of the test. ``objective``: None if the model gives states, and no loss is needed."""
    if objective in ("seq2seq-lm", "image-classification"):
        return Isolation(reason=f"{objective} is not tested")
    reason = "no small copy of the model could be built from its config"
    with _undisturbed():
        for copy in narrow_copies(config, model_class):
            try:
                return _Probe(copy, model_class, objective).isolation()
            except Exception as error:  # a copy of such sizes may fail anywhere in a model's code; then the next one is tried
                logger.debug("%s cannot be run with these sizes", model_class.__name__, exc_info=True)
                reason = f"no small copy of the model runs: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return Isolation(reason=reason)


def test_source(source: ModelSource, *, states: bool) -> Isolation:
    """Return the result of the test for a source's model. ``states``: test the model without a head.

    Raise RequestError for a config that transformers cannot read."""
    config = source.hf_config
    if states:
        name = CLASS_NAMES.get().MODEL_MAPPING_NAMES.get(config.model_type)
        model_class = getattr(transformers, name, None) if isinstance(name, str) else None
        if model_class is None:
            return Isolation(reason=f"transformers has no one model for {config.model_type} without a head")
        return measure_isolation(config, model_class, None)
    try:
        model_class, objective = choose_class(config, source.reference)
    except RequestError as problem:
        return Isolation(reason=str(problem))
    return measure_isolation(config, model_class, objective)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep this test's random numbers apart from the user's, and hide models' advice, which is not for the user of a copy."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


class _Probe:
    """A copy of the model with random weights, and texts to run it with."""

    def __init__(self, config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective | None) -> None:
        self.model = build_model(config, model_class, dtype=torch.float32).eval()
        encoder = self.model.get_encoder() if objective is None and config.is_encoder_decoder else None
        if isinstance(encoder, PreTrainedModel):  # the encoder alone gives the states of a text
            self.model = encoder
        forget_cache(self.model)
        self._initial = [(vector, vector.detach().clone()) for vector in self.model.parameters() if vector.ndim < 2]
        _fill(self.model)
        self.objective = objective
        self._alone_results: dict[int, Tensor] = {}
        self.takes = set(inspect.signature(self.model.forward).parameters)
        self.has_loss = objective in ("causal-lm", "masked-lm")
        vocabulary = config.get_text_config().vocab_size
        named = [value for name, value in vars(config.get_text_config()).items() if name.endswith("_token_id")]
        special = {number for value in named for number in (value if isinstance(value, list) else [value])}
        plain = torch.tensor([number for number in range(vocabulary) if number not in special])
        self.pad = next((value for value in (getattr(config, "pad_token_id", None),) if isinstance(value, int)), 0)
        self.first, self.other, self.second = (plain[torch.randint(len(plain), (n,))] for n in (FIRST, FIRST, SECOND))

    def isolation(self) -> Isolation:
        """Return the result of all checks."""
        padding, padding_reason = self._padding()
        left = self._left_padding() if self.objective == "causal-lm" else ""
        splits = not self.has_loss or self._loss_splits()
        packing = self._packing_by_kernel() if self.objective == "causal-lm" else {}
        if not splits:
            packing = dict.fromkeys(packing, "the model's loss counts padding, or is no mean over texts")
        return Isolation(
            proven=True, reason="", packing=packing, padding=padding, padding_reason=padding_reason,
            left_padding=left, loss_splits=splits,
        )  # fmt: skip

    # Packing

    def _packing_by_kernel(self) -> dict[str, str]:
        has = attention_kernels(self.model)
        alike = {"flex_attention": "sdpa" if "sdpa" in has else "eager", **dict.fromkeys(FLASH, STAND_IN)}
        runs = dict.fromkeys(alike.get(kernel, kernel) for kernel in has)
        for kernel in runs:
            if kernel == STAND_IN:
                AttentionInterface.register(STAND_IN, attend_by_positions)
                AttentionMaskInterface.register(STAND_IN, flash_attention_mask)
            self._alone_results.clear()
            set_attention(self.model, kernel)
            runs[kernel] = self._packing()
        isolating = next((kernel for kernel, reason in runs.items() if not reason), None)
        if isolating is not None:
            set_attention(self.model, isolating)
            bad = self._bad_gradients(self._row(self.first)) or self._packing_at_first()
            runs = {kernel: reason or bad for kernel, reason in runs.items()}
        return {kernel: runs[alike.get(kernel, kernel)] or "" for kernel in has}

    def _packing(self) -> str:
        """Return why two texts must not share a row, or nothing."""
        if "position_ids" not in self.takes:
            return "the model takes no position_ids, which say where a text of a row begins"
        try:
            row, changed = self._packed(self.first), self._packed(self.other)
            if not _is_close(row[1], changed[1]):
                return "a text in a row reaches the one behind it"
            if not (_is_close(row[0], self._alone(self.first)) and _is_close(row[1], self._alone(self.second))):
                return "a text in a row gives other results than alone"
            return ""
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return f"a row of two texts does not run: {' '.join(str(error).split())[:120]}"

    def _packing_at_first(self) -> str:
        """Repeat the packing test with biases and gates as a new model has them.

        Where all of them are equal, a choice among them may depend on the place in the row."""
        with torch.no_grad():
            for vector, initial in self._initial:
                vector.copy_(initial)
        self._alone_results.clear()
        return self._packing()

    def _row(self, first: Tensor) -> dict[str, Tensor]:
        """Return two texts and padding that is a text of its own, as training packs them."""
        padding = first[:1].expand(PADDING)
        ids = torch.cat([first, self.second, padding])
        positions = torch.cat([torch.arange(len(part)) for part in (first, self.second, padding)])
        labels = ids.clone()
        labels[[0, len(first)]] = IGNORED
        labels[-PADDING:] = IGNORED
        return {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}

    def _packed(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of both texts of a row."""
        row = self._row(first)
        found = self._run(row["input_ids"], position_ids=row["position_ids"])[0]
        return found[: len(first)], found[len(first) : len(first) + SECOND]

    def _bad_gradients(self, inputs: dict[str, Tensor]) -> str:
        """Name the first gradient that is not a number where there is padding in a row, or return nothing."""
        self.model.zero_grad()
        self.model(**inputs).loss.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return f"with padding in a row the gradient of {name} is not a number"
        return ""

    # Padding

    def _padding(self) -> tuple[Literal["unmasked", "masked", "none"], str]:
        """Return how padding on the right of a text must be marked, and the problem if neither a mask nor no mask works."""
        if self.objective == "causal-lm" and self._is_padded_right(masked=False) and self._loss_is_same(masked=False):
            return "unmasked", ""
        if self._is_padded_right(masked=True) and (not self.has_loss or self._loss_is_same(masked=True)):
            return "masked", ""
        return "none", "padding behind a text changes its results, with a mask, too"

    def _is_padded_right(self, *, masked: bool) -> bool:
        """Return whether a short text beside a longer one in a batch gives the same results as alone."""
        ids, mask = self._batch()
        found = self._run(ids, **self._masked(mask, masked=masked))
        per_token = found.shape[:2] == ids.shape
        of_first = found[0, :FIRST] if per_token else found[0]
        return _is_close(of_first, self._alone(self.first)) and _is_close(found[1], self._alone(self.second))

    def _loss_is_same(self, *, masked: bool) -> bool:
        """Return whether more padding leaves a batch's loss unchanged."""
        losses = []
        for more in (0, PADDING):
            ids, mask = self._batch(more=more)
            losses.append(self._loss(ids, mask, masked=masked))
        return _is_close_loss(*losses)

    def _batch(self, *, more: int = 0) -> tuple[Tensor, Tensor]:
        """Return both texts and their mask, with ``more`` columns of padding beyond the longer text."""
        ids = torch.full((2, SECOND + more), self.pad)
        mask = torch.zeros_like(ids)
        for row, text in enumerate((self.first, self.second)):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        return ids, mask

    def _masked(self, mask: Tensor, *, masked: bool) -> dict[str, Tensor]:
        return {"attention_mask": mask} if masked and "attention_mask" in self.takes else {}

    def _left_padding(self) -> str:
        """Return why a text must not be padded on the left, or nothing.

        The test uses its last token, as generation goes on from it."""
        ids = torch.full((2, SECOND), self.pad)
        mask = torch.zeros_like(ids)
        for row, text in enumerate((self.first, self.second)):
            ids[row, -len(text) :] = text
            mask[row, -len(text) :] = 1
        given = self._masked(mask, masked=True)
        if "position_ids" in self.takes:
            given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        try:
            found = self._run(ids, **given)[:, -1]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return f"a batch that is padded on the left does not run: {' '.join(str(error).split())[:120]}"
        same = all(_is_close(found[row], self._alone(text)[-1]) for row, text in enumerate((self.first, self.second)))
        return "" if same else "padding on the left of a text changes its results"

    # The loss

    def _loss_splits(self) -> bool:
        """Return whether the loss of a batch is the mean of its texts' losses, weighed by their labels."""
        ids, mask = self._batch()
        both = self._loss(ids, mask, masked=True)
        total, labels = 0.0, 0
        for text in (self.first, self.second):
            count = self._num_labels(len(text))
            total += count * self._loss(text[None], torch.ones(1, len(text), dtype=torch.long), masked=False)
            labels += count
        return _is_close_loss(both, total / labels)

    def _num_labels(self, length: int) -> int:
        return length - 1 if self.objective == "causal-lm" else length

    def _loss(self, ids: Tensor, mask: Tensor, *, masked: bool) -> float:
        labels = torch.where(mask.bool(), ids, IGNORED)
        if self.objective == "causal-lm":
            labels[:, 0] = IGNORED  # as training has it, whether a class shifts labels or not
        with torch.no_grad():
            return float(self.model(input_ids=ids, labels=labels, **self._masked(mask, masked=masked)).loss)

    # Running

    def _alone(self, text: Tensor) -> Tensor:
        """Return a text's results in a batch of its own, with the attention kernel that is set."""
        key = id(text)
        if key not in self._alone_results:
            self._alone_results[key] = self._run(text[None])[0]
        return self._alone_results[key]

    def _run(self, ids: Tensor, **given: Tensor) -> Tensor:
        """Return [rows, tokens, ...] logits or states, or [rows, ...] of a model that gives each text one answer."""
        with torch.no_grad():
            output: Any = self.model(input_ids=ids, **given)
        named = ("logits", "last_hidden_state", "start_logits")
        found: Tensor = next(value for name in named if (value := getattr(output, name, None)) is not None)
        if not bool(found.isfinite().all()):
            raise ValueError("a result of the copy is not a number")
        return found


def attend_by_positions(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> Any:
    """Compute attention as flash kernels do for one row of texts, slowly.

    The text of a token is read from ``position_ids``, as far as the model's layers hand them down. A soft cap is left out: it
    is the same for a text alone."""
    positions, window = given.get("position_ids"), given.get("sliding_window")
    given.pop("softcap", None)
    if positions is not None and attention_mask is None:
        steps = torch.diff(positions, prepend=positions[:, :1] - 1)
        text = (steps != 1).cumsum(-1)
        place = torch.arange(query.shape[2])
        visible = (text[:, :, None] == text[:, None, :]) & (place[None, :] <= place[:, None])
        if window is not None:
            visible &= place[:, None] - place[None, :] < window
        attention_mask = visible[:, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **given)


def _fill(model: PreTrainedModel) -> None:
    """Draw weights that are large enough for every visible token to show in the output.

    Biases and norms change only a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.normal_()
                if module.padding_idx is not None:
                    module.weight[module.padding_idx].zero_()


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * max(float(expected.abs().max()), 1e-6))


def _is_close_loss(found: float, expected: float) -> bool:
    return abs(found - expected) <= LOSS_TOLERANCE * abs(expected)


