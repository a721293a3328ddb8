# needs torch
"""Test on a small copy of a model that a text's results depend only on the text, as padding, packing and batching require.

The copy has the model's class, kinds of layers and settings (see small_copy.py), and random weights that are large enough to
show every leak. Each check runs the copy twice and compares the results:

- a packed row of two texts, the same row with another first text, and each text on its own
- a text with and without padding
- a batch's loss and the losses of its texts
- a short text beside a long one and alone, if the config states few positions (see position_limit.py)
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from upshift.errors import RequestError
from upshift.models.build import (
    build_model,
    choose_class,
    disable_cache,
    encoder_class,
    encoder_of,
    find_architecture,
    is_causal_class,
    name_padding,
)
from upshift.models.config import padding_of
from upshift.models.describe import attention_kernels
from upshift.models.isolation.layer_drop import drops_layers
from upshift.models.isolation.memory_shortage import raise_if_out_of_memory
from upshift.models.isolation.position_limit import exact_tokens
from upshift.models.isolation.seq2seq import measure_seq2seq
from upshift.models.isolation.small_copy import narrow_copies, plain_token_ids, randomize_weights
from upshift.models.isolation.token_ids import missing_token_ids
from upshift.models.kv_cache import NAMES, has_states, mask_of_pass, states_cache, with_cache
from upshift.models.ops.block_attention import set_attention
from upshift.models.profile import Isolation, Objective
from upshift.models.source import ModelSource
from upshift.models.tasks import FEATURES, writes_text

FIRST_LENGTH = 11  # tokens; longer than SHORT_WINDOW, and no round number
SECOND_LENGTH = 21
PADDING_LENGTH = 5
# Texts are encoded by models without such a head. Their shortest text is not measured, which takes seconds of a deep model.
LANGUAGE_MODEL_OBJECTIVES = ("causal-lm", "masked-lm", "seq2seq-lm")
ENOUGH_LENGTHS = 8  # in a row that are computed; then longer texts are, too
SHORT_LENGTHS = range(1, 41)  # tokens of texts that a model may be unable to compute
LAST_TOKENS = 2  # tokens that are computed one at a time, after the others
TOLERANCE = 1e-3  # share of the largest logit; fp32 sums in another order differ by about 1e-6, leaks by more than 1e-2
LOSS_TOLERANCE = 1e-6  # fp32 sums in another order differ by up to 2.6e-7, router losses by 1.6e-6 (jamba) or more
# Kernels that need another device are tested by a substitute. Flex attention has the same masks as sdpa and eager. Flash
# attention finds a row's texts by their positions only, as attend_by_positions does.
FLASH_SUBSTITUTE = "positions_alone"
FLASH = ("flash_attention_2", "flash_attention_3")
IGNORED = -100  # a label that does not count
LEFT_PADDING_LEAKS = "padding on the left of a text changes its results"

logger = logging.getLogger(__name__)


def measure_isolation(config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective | None) -> Isolation:
    """Return the result of the test. ``objective`` is None if the model outputs hidden states and needs no loss."""
    try:
        isolation = _measure_rows(config, model_class, objective)
    except MemoryError:
        reason = "the test ran out of memory"
        return Isolation(reason=reason, left_padding=f"it was not tested: {reason}", short_of_memory=True)
    if objective is None or not drops_layers(config, model_class):
        return isolation
    return isolation.model_copy(update={"drops_layers": True})


def _measure_rows(config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective | None) -> Isolation:
    """Return which tokens of a row or a batch reach a text."""
    if objective == "image-classification":
        return Isolation(reason=f"{objective} is not tested")
    reason = "no small copy of the model could be built from its config"
    by_token = ""
    reads_ahead = False
    left: str | None = None  # not tested
    shortest = 1
    with _isolated_randomness():
        for small_config in narrow_copies(config, model_class):
            if objective == "sequence-classification" and small_config.num_labels == 1:
                name_padding(small_config)  # as a run of a reward model does
            missing = missing_token_ids(small_config, model_class, objective) if objective is not None else ()
            if missing:
                return Isolation(reason="a training step needs token ids that are not set", missing_token_ids=missing)
            try:
                if objective == "seq2seq-lm":
                    return measure_seq2seq(small_config, model_class)
                probe = _Probe(small_config, model_class, objective)
                by_token, left, reads_ahead = probe.generation_problems()  # first: a model without a loss can generate, too
                if objective not in LANGUAGE_MODEL_OBJECTIVES:
                    shortest = _shortest_text(config, model_class, objective) or probe.shortest_text() or 1
                isolation = probe.isolation()
                limit = exact_tokens(config, small_config, partial(_is_length_independent, model_class, objective))
                measured = {"shortest": shortest, "exact_tokens": limit}
                return isolation.model_copy(
                    update={"by_token": by_token, "reads_ahead": reads_ahead, "left_padding": left, **measured}
                )
            except Exception as error:  # a copy of these sizes may fail anywhere in the model's code; then try the next one
                raise_if_out_of_memory(error)
                logger.debug("%s cannot be run with these sizes", model_class.__name__, exc_info=True)
                reason = f"no small copy of the model runs: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if left is None:
        left = f"it was not tested: {reason}"
    return Isolation(reason=reason, by_token=by_token, reads_ahead=reads_ahead, left_padding=left, shortest=shortest)


def test_source(source: ModelSource, *, states: bool) -> Isolation:
    """Return the result of the test for a source's model, or for the model without its head if ``states``.

    Raise RequestError for a config that transformers cannot read."""
    config = source.hf_config
    if states:
        class_names = FEATURES.classes_of(config.model_type)
        model_class = getattr(transformers, class_names[0], None) if len(class_names) == 1 else None
        if model_class is None:  # transformers has none for this model_type, or several
            try:
                model_class = encoder_class(config, source.reference)
            except RequestError as problem:
                return Isolation(reason=str(problem))
        return measure_isolation(config, model_class, None)
    architecture = find_architecture(config, source.reference)
    model_class = architecture.model_class
    if architecture.objective is None and writes_text(model_class) and not config.is_encoder_decoder:
        return measure_isolation(config, model_class, "causal-lm")  # a model that reads images too is tested with texts alone
    try:
        model_class, objective = choose_class(config, source.reference)
    except RequestError as problem:
        return Isolation(reason=str(problem))
    return measure_isolation(config, model_class, objective)


def _is_length_independent(
    model_class: type[PreTrainedModel], objective: Objective | None, small_config: PretrainedConfig
) -> bool:
    """Return whether a short text gives the same results beside a long one as alone, in a model of this config."""
    return _Probe(small_config, model_class, objective).is_length_independent()


def _shortest_text(config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective | None) -> int | None:
    """Return the number of tokens from which on the model computes every text. None: it does not run without values.

    Layers that pool tokens need some, the more the deeper the model is, so a copy with fewer layers does not say it."""
    with torch.no_grad(), torch.device("meta"):
        model = build_model(config, model_class, dtype=torch.float32).eval()
        disable_cache(model)
        if objective is None:
            model = encoder_of(model)
        return _first_length(lambda length: model(input_ids=torch.ones(1, length, dtype=torch.long)))


def _first_length(run: Callable[[int], object]) -> int | None:
    """Return the first of SHORT_LENGTHS from which on ``run`` raises no error, or None if there is none."""
    first = 1
    for length in SHORT_LENGTHS:
        try:
            run(length)
        except Exception as error:  # each class fails in its own way on a text that is too short for it
            raise_if_out_of_memory(error)
            logger.debug("%d tokens are not computed: %s", length, error)
            first = length + 1
        if length == first + ENOUGH_LENGTHS - 1:
            return first
    return None


@contextmanager
def _isolated_randomness() -> Iterator[None]:
    """Leave the user's random state unchanged while the context is open, and hide warnings about the copy."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


class _Probe:
    """A copy of the model with random weights, and texts to run it with."""

    def __init__(self, config: PretrainedConfig, model_class: type[PreTrainedModel], objective: Objective | None) -> None:
        if objective == "sequence-classification":
            name_padding(config)
        self.model = build_model(config, model_class, dtype=torch.float32).eval()
        disable_cache(self.model)
        if objective is None:
            self.model = encoder_of(self.model)
        self._initial = [(vector, vector.detach().clone()) for vector in self.model.parameters() if vector.ndim < 2]
        randomize_weights(self.model)
        self.objective = objective
        self._alone_results: dict[int, Tensor] = {}
        self.parameters = set(inspect.signature(self.model.forward).parameters)
        self.has_loss = objective in ("causal-lm", "masked-lm")
        self.generates = objective == "causal-lm" or is_causal_class(model_class) and objective is not None
        plain_ids = plain_token_ids(config)
        self.pad_token = padding_of(config.get_text_config()) or 0
        self.first, self.changed_first, self.second = (
            plain_ids[torch.randint(len(plain_ids), (length,))] for length in (FIRST_LENGTH, FIRST_LENGTH, SECOND_LENGTH)
        )

    def isolation(self) -> Isolation:
        """Return the result of the checks for training and encoding."""
        padding, padding_reason = self._padding_kind()
        splits = not self.has_loss or self._has_mean_loss()
        packing = self._packing_by_kernel() if self.objective == "causal-lm" else {}
        if not splits:
            packing = dict.fromkeys(packing, "the model's loss counts padding, or is no mean over texts")
        return Isolation(
            proven=True, reason="", packing=packing, padding=padding, padding_reason=padding_reason, loss_splits=splits,
            loss_shifts=self.objective != "causal-lm" or self._has_shifted_loss(),
        )  # fmt: skip

    def shortest_text(self) -> int | None:
        """Return the number of tokens from which on the copy computes every text, or None if it computes no short one."""

        def run(length: int) -> None:
            text = self.second[None, :length]
            self._run(text, **self._mask_argument(torch.ones_like(text), masked=True))

        return _first_length(run)

    # Packing

    def _packing_by_kernel(self) -> dict[str, str]:
        """Return, for each attention kernel of the model, why two texts must not share a row, or an empty text."""
        kernels = attention_kernels(self.model)
        substitutes = {"flex_attention": "sdpa" if "sdpa" in kernels else "eager", **dict.fromkeys(FLASH, FLASH_SUBSTITUTE)}
        reasons = dict.fromkeys(substitutes.get(kernel, kernel) for kernel in kernels)
        for kernel in reasons:
            if kernel == FLASH_SUBSTITUTE:
                AttentionInterface.register(FLASH_SUBSTITUTE, attend_by_positions)
                AttentionMaskInterface.register(FLASH_SUBSTITUTE, flash_attention_mask)
            self._alone_results.clear()
            set_attention(self.model, kernel)
            reasons[kernel] = self._packing_problem()
        isolating_kernel = next((kernel for kernel, reason in reasons.items() if not reason), None)
        if isolating_kernel is not None:
            set_attention(self.model, isolating_kernel)
            problem = self._gradient_problem(self._packed_row(self.first)) or self._initial_packing_problem()
            reasons = {kernel: reason or problem for kernel, reason in reasons.items()}
        return {kernel: reasons[substitutes.get(kernel, kernel)] or "" for kernel in kernels}

    def _packing_problem(self) -> str:
        """Return why two texts must not share a row under the kernel that is set, or an empty text."""
        if "position_ids" not in self.parameters:
            return "the model takes no position_ids, which say where a text of a row begins"
        try:
            row = self._packed_results(self.first)
            changed = self._packed_results(self.changed_first)
            if not _is_close(row[1], changed[1]):
                return "a text in a row reaches the one behind it"
            separate = (self._separate_results(self.first), self._separate_results(self.second))
            if not (_is_close(row[0], separate[0]) and _is_close(row[1], separate[1])):
                return "a text in a row gives other results than alone"
            return ""
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise_if_out_of_memory(error)
            return f"a row of two texts does not run: {' '.join(str(error).split())[:120]}"

    def _initial_packing_problem(self) -> str:
        """Repeat the packing test with the initial biases and gates of a new model.

        If these are all equal, a choice among them may depend on the position in the row."""
        with torch.no_grad():
            for vector, initial in self._initial:
                vector.copy_(initial)
        self._alone_results.clear()
        return self._packing_problem()

    def _packed_row(self, first: Tensor) -> dict[str, Tensor]:
        """Return a row as training packs it: two texts, and padding as a third text."""
        padding = first[:1].expand(PADDING_LENGTH)
        ids = torch.cat([first, self.second, padding])
        positions = torch.cat([torch.arange(len(text)) for text in (first, self.second, padding)])
        labels = ids.clone()
        labels[[0, len(first)]] = IGNORED
        labels[-PADDING_LENGTH:] = IGNORED
        return {"input_ids": ids[None], "position_ids": positions[None], "labels": labels[None]}

    def _packed_results(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of the two texts of a packed row."""
        row = self._packed_row(first)
        results = self._run(row["input_ids"], position_ids=row["position_ids"])[0]
        return results[: len(first)], results[len(first) : len(first) + SECOND_LENGTH]

    def _gradient_problem(self, inputs: dict[str, Tensor]) -> str:
        """Return a text that names the first gradient that is not finite for a row with padding, or an empty text."""
        self.model.zero_grad()
        self.model(**inputs).loss.backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return f"with padding in a row the gradient of {name} is not a number"
        return ""

    # Padding

    def _padding_kind(self) -> tuple[Literal["unmasked", "masked", "none"], str]:
        """Return whether padding on the right of a text needs a mask, and the problem if it is wrong with a mask, too."""
        is_causal = self.objective == "causal-lm"
        if is_causal and self._right_padding_is_harmless(masked=False) and self._loss_ignores_padding(masked=False):
            return "unmasked", ""
        if self._right_padding_is_harmless(masked=True) and (not self.has_loss or self._loss_ignores_padding(masked=True)):
            return "masked", ""
        return "none", "padding behind a text changes its results, with a mask, too"

    def _right_padding_is_harmless(self, *, masked: bool) -> bool:
        """Return whether each text of a batch with padding gives the same results as on its own."""
        ids, mask = self._batch()
        results = self._run(ids, **self._mask_argument(mask, masked=masked))
        per_token = results.shape[:2] == ids.shape
        first_results = results[0, :FIRST_LENGTH] if per_token else results[0]
        if not _is_close(first_results, self._separate_results(self.first)):
            return False
        return _is_close(results[1], self._separate_results(self.second))

    def is_length_independent(self) -> bool:
        """Return whether a short text gives the same results beside a long one as alone."""
        alone = self._separate_results(self.first)
        ids, mask = self._batch()
        results = self._run(ids, **self._mask_argument(mask, masked=True))
        beside = results[0, :FIRST_LENGTH] if results.shape[:2] == ids.shape else results[0]
        return _is_close(beside, alone)

    def _loss_ignores_padding(self, *, masked: bool) -> bool:
        """Return whether more padding leaves a batch's loss unchanged."""
        losses = []
        for extra in (0, PADDING_LENGTH):
            ids, mask = self._batch(extra=extra)
            losses.append(self._loss(ids, mask, masked=masked))
        return _is_close_loss(*losses)

    def _batch(self, *, extra: int = 0) -> tuple[Tensor, Tensor]:
        """Return both texts as a batch, and their mask, with ``extra`` columns of padding after the longer text."""
        ids = torch.full((2, SECOND_LENGTH + extra), self.pad_token)
        mask = torch.zeros_like(ids)
        for row, text in enumerate((self.first, self.second)):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        return ids, mask

    def _mask_argument(self, mask: Tensor, *, masked: bool) -> dict[str, Tensor]:
        return {"attention_mask": mask} if masked and "attention_mask" in self.parameters else {}

    # Generation

    def generation_problems(self) -> tuple[str, str, bool]:
        """Return why text must not be generated token by token with a cache, why texts must not be padded on the left, and
        whether a token's results depend on the tokens behind it.

        An empty text means that it may."""
        if not self.generates:
            return "", "", False
        results = self._separate_results(self.second)
        if not _is_close(self._run(self.second[None, :-LAST_TOKENS])[0], results[:-LAST_TOKENS]):
            return "a token's results depend on the tokens behind it", self._generated_padding_problem(), True
        by_token = ""
        if self._generate_differs(results[-1]):
            by_token = "transformers' generate() gives the model other inputs than the text so far"
        elif self.parameters.isdisjoint(NAMES):
            by_token = "the model takes no cache of keys and values"
        else:
            by_token = self._stepwise_problem([self.second], "a text gives other results token by token than whole")
        if by_token:  # then transformers' generate() runs the model
            return by_token, self._generated_padding_problem(), False
        return "", self._stepwise_problem([self.first, self.second], LEFT_PADDING_LEAKS), False

    def _generated_padding_problem(self) -> str:
        """Return why transformers' generate() must not pad texts of the model on the left, or an empty text."""
        width = len(self.second)
        padded = torch.cat([torch.full((width - len(self.first),), self.pad_token), self.first])
        mask = torch.ones(2, width, dtype=torch.long)
        mask[0, : width - len(self.first)] = 0
        try:
            together = self._generated_logits(torch.stack([padded, self.second]), mask)
            alone = [self._generated_logits(text[None], torch.ones_like(text[None])) for text in (self.first, self.second)]
        except Exception as error:  # each class fails in its own way
            raise_if_out_of_memory(error)
            return f"transformers' generate() does not run with padding: {' '.join(str(error).split())[:120]}"
        is_same = all(_is_close(together[row], text[0]) for row, text in enumerate(alone))
        return "" if is_same else LEFT_PADDING_LEAKS

    def _generated_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the logits [rows, tokens, V] of the first tokens that generate() chooses, the same ones for each row."""
        options = GenerationConfig(
            max_new_tokens=LAST_TOKENS + 1,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=self.pad_token,
        )
        token = int(self.second[0])
        output: Any = self.model.generate(
            ids, attention_mask=mask, generation_config=options, prefix_allowed_tokens_fn=lambda row, text: [token]
        )
        return torch.stack(output.logits, dim=1)

    def _generate_differs(self, expected: Tensor) -> bool:
        """Return whether the model's generate() chooses a text's next token from other logits than ``expected`` [V].

        A class may prepare its inputs in its own way, as XLM does, which appends a token."""
        options = GenerationConfig(
            max_new_tokens=1, do_sample=False, num_beams=1, use_cache=False, return_dict_in_generate=True, output_logits=True,
            pad_token_id=self.pad_token,
        )  # fmt: skip
        ids = self.second[None]
        try:
            output: Any = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        except Exception as error:  # transformers does not generate with every class, and each fails in its own way
            raise_if_out_of_memory(error)
            logger.debug("%s does not generate: %s", type(self.model).__name__, error)
            return False
        return not _is_close(output.logits[0][0], expected)

    def _stepwise_problem(self, texts: list[Tensor], problem: str) -> str:
        """Run the texts as one batch with a cache, the last tokens one at a time, and compare with each text on its own.

        Return ``problem`` if the results differ, an error's text if they cannot be run, else an empty text."""
        width = max(len(text) for text in texts)
        ids = torch.full((len(texts), width), self.pad_token)
        mask = torch.zeros(len(texts), width, dtype=torch.long)
        for row, text in enumerate(texts):
            ids[row, -len(text) :] = text
            mask[row, -len(text) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        results = []
        start = 0
        config = self.model.config
        cache = states_cache(config) if has_states(config) else DynamicCache()
        cache_arguments = with_cache(self.model, DynamicCache() if cache is None else cache)
        try:
            for end in range(width - LAST_TOKENS, width + 1):
                pass_mask = mask[:, :end] if cache is None else mask_of_pass(cache, mask[:, :end], end - start)
                arguments = {"attention_mask": pass_mask, "position_ids": positions[:, start:end]}
                arguments = {name: value for name, value in arguments.items() if name in self.parameters} | cache_arguments
                results.append(self._run(ids[:, start:end], **arguments)[:, -1])
                start = end
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise_if_out_of_memory(error)
            return f"with a cache {len(texts)} texts do not run: {' '.join(str(error).split())[:120]}"
        last = torch.stack(results, dim=1)
        is_same = all(_is_close(last[row], self._separate_results(text)[-len(results) :]) for row, text in enumerate(texts))
        return "" if is_same else problem

    # The loss

    def _has_mean_loss(self) -> bool:
        """Return whether the loss of a batch is the mean of its texts' losses, weighted by their labels."""
        ids, mask = self._batch()
        batch_loss = self._loss(ids, mask, masked=True)
        total = 0.0
        labels = 0
        for text in (self.first, self.second):
            count = self._num_labels(len(text))
            total += count * self._loss(text[None], torch.ones(1, len(text), dtype=torch.long), masked=False)
            labels += count
        return _is_close_loss(batch_loss, total / labels)

    def _has_shifted_loss(self) -> bool:
        """Return whether the loss shifts labels by one position, so that a text's first label does not count."""
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
            labels[:, 0] = IGNORED  # as in training, whether the model's class shifts labels or not
        with torch.no_grad():
            return float(self.model(input_ids=ids, labels=labels, **self._mask_argument(mask, masked=masked)).loss)

    # Running

    def _separate_results(self, text: Tensor) -> Tensor:
        """Return a text's results in a batch of its own under the attention kernel that is set, from a cache if possible."""
        key = id(text)
        if key not in self._alone_results:
            self._alone_results[key] = self._run(text[None])[0]
        return self._alone_results[key]

    def _run(self, ids: Tensor, **arguments: Any) -> Tensor:
        """Return the logits or states [rows, tokens, ...], or [rows, ...] if the model gives one answer for each text."""
        with torch.no_grad():
            output: Any = self.model(input_ids=ids, **arguments)
        output_names = ("logits", "last_hidden_state", "start_logits")
        result: Tensor = next(value for name in output_names if (value := getattr(output, name, None)) is not None)
        if not bool(result.isfinite().all()):
            raise ValueError("a result of the copy is not a number")
        return result


def attend_by_positions(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """Compute attention as flash kernels do for one row of texts, but slowly.

    A token's text follows from ``position_ids``, if the model's layers pass them on. A soft cap is left out, because it does not
    depend on other texts."""
    positions = kwargs.get("position_ids")
    window = kwargs.get("sliding_window")
    kwargs.pop("softcap", None)
    if positions is not None and attention_mask is None:
        position_steps = torch.diff(positions, prepend=positions[:, :1] - 1)
        text_index = (position_steps != 1).cumsum(-1)
        positions_in_row = torch.arange(query.shape[2])
        is_visible = (text_index[:, :, None] == text_index[:, None, :]) & (positions_in_row[None, :] <= positions_in_row[:, None])
        if window is not None:
            is_visible &= positions_in_row[:, None] - positions_in_row[None, :] < window
        attention_mask = is_visible[:, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    return bool((actual - expected).abs().max() <= TOLERANCE * max(float(expected.abs().max()), 1e-6))


def _is_close_loss(actual: float, expected: float) -> bool:
    return abs(actual - expected) <= LOSS_TOLERANCE * abs(expected)
