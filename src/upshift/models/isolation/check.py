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
from transformers import AttentionInterface, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from upshift.errors import RequestError
from upshift.internals.transformers_names import CLASS_NAMES
from upshift.models.build import build_model, choose_class, disable_cache, encoder_of
from upshift.models.describe import attention_kernels
from upshift.models.isolation.small_copy import narrow_copies
from upshift.models.kv_cache import NAMES, with_cache
from upshift.models.ops.block_attention import set_attention
from upshift.models.profile import Isolation, Objective
from upshift.models.source import ModelSource

FIRST_LENGTH = 11  # tokens: beyond SHORT windows, of no round number
SECOND_LENGTH = 21
PADDING_LENGTH = 5
LAST_TOKENS = 2  # tokens that are computed one at a time, behind the others
TOLERANCE = 1e-3  # of the largest logit: fp32 sums in another order differ by some 1e-6, leaks by more than 1e-2
LOSS_TOLERANCE = 1e-6  # fp32 sums in another order differ by up to 2.6e-7, router losses by 1.6e-6 (jamba) and more
# Kernels that need another device have something run in their place: one function makes the masks of flex attention, sdpa and
# eager; and flash attention is told of a row's texts by their positions alone.
FLASH_SUBSTITUTE = "positions_alone"
FLASH = ("flash_attention_2", "flash_attention_3")
IGNORED = -100  # a label that does not count

logger = logging.getLogger(__name__)


def measure_isolation(config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective | None) -> Isolation:
    """Return the result of the test. ``objective``: None if the model gives states, and no loss is needed."""
    if objective in ("seq2seq-lm", "image-classification"):
        return Isolation(reason=f"{objective} is not tested")
    reason = "no small copy of the model could be built from its config"
    by_token = ""
    left = ""
    with _undisturbed():
        for copy in narrow_copies(config, model_class):
            try:
                probe = _Probe(copy, model_class, objective)
                by_token, left = probe.generation()  # a model without a loss generates, too
                return probe.isolation().model_copy(update={"by_token": by_token, "left_padding": left})
            except Exception as error:  # a copy of such sizes may fail anywhere in a model's code; then the next one is tried
                logger.debug("%s cannot be run with these sizes", model_class.__name__, exc_info=True)
                reason = f"no small copy of the model runs: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return Isolation(reason=reason, by_token=by_token, left_padding=left)


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
        disable_cache(self.model)
        if objective is None:
            self.model = encoder_of(self.model)
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
        self.first, self.other, self.second = (
            plain[torch.randint(len(plain), (n,))] for n in (FIRST_LENGTH, FIRST_LENGTH, SECOND_LENGTH)
        )

    def isolation(self) -> Isolation:
        """Return the result of the checks for training and encoding."""
        padding, padding_reason = self._padding()
        splits = not self.has_loss or self._loss_splits()
        packing = self._packing_by_kernel() if self.objective == "causal-lm" else {}
        if not splits:
            packing = dict.fromkeys(packing, "the model's loss counts padding, or is no mean over texts")
        return Isolation(
            proven=True, reason="", packing=packing, padding=padding, padding_reason=padding_reason, loss_splits=splits,
            loss_shifts=self.objective != "causal-lm" or self._loss_shifts(),
        )  # fmt: skip

    # Packing

    def _packing_by_kernel(self) -> dict[str, str]:
        has = attention_kernels(self.model)
        alike = {"flex_attention": "sdpa" if "sdpa" in has else "eager", **dict.fromkeys(FLASH, FLASH_SUBSTITUTE)}
        runs = dict.fromkeys(alike.get(kernel, kernel) for kernel in has)
        for kernel in runs:
            if kernel == FLASH_SUBSTITUTE:
                AttentionInterface.register(FLASH_SUBSTITUTE, attend_by_positions)
                AttentionMaskInterface.register(FLASH_SUBSTITUTE, flash_attention_mask)
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
            row = self._packed(self.first)
            changed = self._packed(self.other)
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
        padding = first[:1].expand(PADDING_LENGTH)
        ids = torch.cat([first, self.second, padding])
        positions = torch.cat([torch.arange(len(part)) for part in (first, self.second, padding)])
        labels = ids.clone()
        labels[[0, len(first)]] = IGNORED
        labels[-PADDING_LENGTH:] = IGNORED
        return {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}

    def _packed(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of both texts of a row."""
        row = self._row(first)
        found = self._run(row["input_ids"], position_ids=row["position_ids"])[0]
        return found[: len(first)], found[len(first) : len(first) + SECOND_LENGTH]

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
        of_first = found[0, :FIRST_LENGTH] if per_token else found[0]
        return _is_close(of_first, self._alone(self.first)) and _is_close(found[1], self._alone(self.second))

    def _loss_is_same(self, *, masked: bool) -> bool:
        """Return whether more padding leaves a batch's loss unchanged."""
        losses = []
        for more in (0, PADDING_LENGTH):
            ids, mask = self._batch(more=more)
            losses.append(self._loss(ids, mask, masked=masked))
        return _is_close_loss(*losses)

    def _batch(self, *, more: int = 0) -> tuple[Tensor, Tensor]:
        """Return both texts and their mask, with ``more`` columns of padding beyond the longer text."""
        ids = torch.full((2, SECOND_LENGTH + more), self.pad)
        mask = torch.zeros_like(ids)
        for row, text in enumerate((self.first, self.second)):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        return ids, mask

    def _masked(self, mask: Tensor, *, masked: bool) -> dict[str, Tensor]:
        return {"attention_mask": mask} if masked and "attention_mask" in self.takes else {}

    # Generation

    def generation(self) -> tuple[str, str]:
        """Return why a text must not be generated token by token with a cache of keys and values, and why it must not be padded
        on the left as one of a batch, or nothing."""
        if self.objective != "causal-lm":
            return "", ""
        whole = self._alone(self.second)
        if not _is_close(self._run(self.second[None, :-LAST_TOKENS])[0], whole[:-LAST_TOKENS]):
            return "a token's results depend on the tokens behind it", ""
        if self.takes.isdisjoint(NAMES):
            return "the model takes no cache of keys and values", ""
        by_token = self._stepwise([self.second], "a text gives other results token by token than whole")
        if by_token:
            return by_token, ""
        return "", self._stepwise([self.first, self.second], "padding on the left of a text changes its results")

    def _stepwise(self, texts: list[Tensor], otherwise: str) -> str:
        """Return a problem, or nothing if the texts as one batch, the last tokens one at a time, give what each does alone."""
        width = max(len(text) for text in texts)
        ids = torch.full((len(texts), width), self.pad)
        mask = torch.zeros(len(texts), width, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, -len(text) :] = text
            mask[row, -len(text) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = []
        start = 0
        kept = with_cache(self.model, DynamicCache())
        try:
            for end in range(width - LAST_TOKENS, width + 1):
                given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
                given = {name: value for name, value in given.items() if name in self.takes} | kept
                found.append(self._run(ids[:, start:end], **given)[:, -1])
                start = end
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            return f"with a cache {len(texts)} texts do not run: {' '.join(str(error).split())[:120]}"
        last = torch.stack(found, dim=1)
        same = all(_is_close(last[row], self._alone(text)[-len(found) :]) for row, text in enumerate(texts))
        return "" if same else otherwise

    # The loss

    def _loss_splits(self) -> bool:
        """Return whether the loss of a batch is the mean of its texts' losses, weighed by their labels."""
        ids, mask = self._batch()
        both = self._loss(ids, mask, masked=True)
        total = 0.0
        labels = 0
        for text in (self.first, self.second):
            count = self._num_labels(len(text))
            total += count * self._loss(text[None], torch.ones(1, len(text), dtype=torch.long), masked=False)
            labels += count
        return _is_close_loss(both, total / labels)

    def _loss_shifts(self) -> bool:
        """Return whether a label's loss is that of the place before it, where the first label of a text counts for nothing."""
        losses = []
        for token in (int(self.second.min()), int(self.second.max())):
            labels = torch.full((1, SECOND_LENGTH), IGNORED)
            labels[0, 0] = token
            with torch.no_grad():
                losses.append(float(self.model(input_ids=self.second[None], labels=labels).loss))
        return not all(map(math.isfinite, losses)) or _is_close_loss(*losses)

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

    def _run(self, ids: Tensor, **given: Any) -> Tensor:
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
    positions = given.get("position_ids")
    window = given.get("sliding_window")
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
    """Draw weights that are large enough for every visible token to show in the output, padding among them: what files have for
    it need not be zero.

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


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * max(float(expected.abs().max()), 1e-6))


def _is_close_loss(found: float, expected: float) -> bool:
    return abs(found - expected) <= LOSS_TOLERANCE * abs(expected)
