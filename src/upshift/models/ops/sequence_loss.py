# needs torch
"""Compute the loss of each sequence of a micro-batch, where a model computes only the mean over all labels.

Check the models whose losses, or whose rewards, are those of single sequences.

The unmodified model runs, but ``torch.nn.functional.cross_entropy`` returns one loss for each label while it runs. Labels, shifts
and the form of the logits are therefore the model's own, and so is a head that is computed in chunks (chunked_loss.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import RequestError
from upshift.models.build import build_model, choose_class, disable_cache, name_padding
from upshift.models.isolation.small_copy import narrow_copies
from upshift.models.ops.chunked_loss import DeferredLogits
from upshift.models.source import ModelSource

TOLERANCE = 1e-4  # share of the losses; fp32 sums in another order differ by about 1e-6, and other losses by far more
CHECKED_ROWS = 2
DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
CHECKED_LENGTH = 12
SHORT_LENGTH = 7  # tokens of the row that has padding


class SequenceLossError(RuntimeError):
    """Raised for a model whose loss is not one cross entropy over all labels."""


def sequence_losses(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the summed loss of the labels of each row [rows] in fp32: minus the log-probability of the row's labels.

    ``inputs``: the model's keyword arguments, with labels [rows, length]. Raise SequenceLossError for another loss.
    """
    rows = len(inputs["labels"])
    with _losses_of_tokens():
        losses = model(**inputs).loss
    if losses is None or losses.ndim != 1 or len(losses) % rows or len(losses) == rows:
        raise SequenceLossError("the model does not compute its loss as one cross entropy over all labels")
    sums: torch.Tensor = losses.reshape(rows, -1).sum(1)
    return sums


def turn_off_dropout(model: nn.Module) -> None:
    """Set every probability of dropout in the model to 0. In training mode it then computes what it computes in evaluation.

    A model in evaluation mode would not recompute its layers. ``why_no_sequence_losses`` tests that no dropout is left.
    """
    for module in model.modules():
        if isinstance(module, DROPOUT_MODULES):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def _losses_of_tokens() -> Iterator[None]:
    """Make cross_entropy return the loss of each label [N] while open, whatever reduction is requested."""
    original = functional.cross_entropy

    def cross_entropy_of_tokens(
        logits: torch.Tensor | DeferredLogits, target: torch.Tensor, *args: Any, ignore_index: int = -100, **options: Any
    ) -> torch.Tensor:
        if args or options.get("weight") is not None or options.get("label_smoothing"):
            raise SequenceLossError("the model's loss is not the plain log-probability of its labels")
        if isinstance(logits, DeferredLogits):
            return logits.token_losses(target, ignore_index=ignore_index)
        return original(logits.float(), target, ignore_index=ignore_index, reduction="none")

    functional.cross_entropy = cross_entropy_of_tokens  # type: ignore[assignment]  # it takes the same arguments
    try:
        yield
    finally:
        functional.cross_entropy = original


def check_sequence_losses(source: ModelSource, objective: str) -> None:
    """Raise RequestError for a model whose loss of each answer cannot be computed. ``objective``: its name, for messages."""
    config = source.hf_config
    model_class, kind = choose_class(config, source.reference)
    if kind != "causal-lm":
        raise RequestError(
            f"--objective {objective} is for causal language models, and {source.reference!r} is of the kind {kind}; leave it "
            "out, or use a causal language model"
        )
    problem = why_no_sequence_losses(config, model_class)
    if problem is not None:
        raise RequestError(f"--objective {objective} is not for {source.reference!r}: {problem}; use another model")


def why_no_sequence_losses(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    """Return why the losses of sequences cannot be computed from the model's own, or None if they can.

    A small copy of the model is run. Its losses must be those that follow from its logits: label i + 1 is predicted at place i.
    """
    return _problem_of_copies(config, model_class, _compare_losses)


def _problem_of_copies(
    config: PretrainedConfig, model_class: type[PreTrainedModel], compare: Callable[[PreTrainedModel, int], str | None]
) -> str | None:
    """Return the answer of ``compare`` for the smallest copy of the model that runs. It takes the copy and its vocabulary."""
    reason = "no small copy of it could be built from its config"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for small_config in narrow_copies(config, model_class):
            try:
                model = build_model(small_config, model_class, dtype=torch.float32).eval()
                disable_cache(model)
                return compare(model, small_config.get_text_config().vocab_size)
            except Exception as error:  # a copy of these sizes may fail anywhere in the model's code; then try the next one
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return reason


def check_rewards(source: ModelSource) -> None:
    """Raise RequestError for a model with a reward head whose rewards depend on padding, or on dropout that cannot be off."""
    config = source.hf_config
    model_class, _ = choose_class(config, source.reference)
    problem = _problem_of_copies(config, model_class, _compare_rewards)
    if problem is not None:
        raise RequestError(f"--objective reward is not for {source.reference!r}: {problem}; use another model")


def _compare_rewards(model: PreTrainedModel, vocab_size: int) -> str | None:
    """Return None if a text has one reward, which is the same without padding and while the model is trained."""
    name_padding(model.config)
    input_ids = torch.randint(1, vocab_size, (CHECKED_ROWS, CHECKED_LENGTH))
    pad_token_id: Any = model.config.get_text_config().pad_token_id
    input_ids[input_ids == pad_token_id] = (pad_token_id + 1) % vocab_size
    attention_mask = torch.ones_like(input_ids)
    input_ids[1, SHORT_LENGTH:] = pad_token_id
    attention_mask[1, SHORT_LENGTH:] = 0
    rewards = model(input_ids=input_ids, attention_mask=attention_mask).logits
    if rewards.shape != (CHECKED_ROWS, 1):
        return f"it gives {CHECKED_ROWS} texts results of the shape {tuple(rewards.shape)}"
    alone = model(input_ids=input_ids[1:, :SHORT_LENGTH]).logits
    if not torch.allclose(rewards[1:], alone, rtol=TOLERANCE, atol=TOLERANCE * float(rewards.abs().max())):
        return "padding changes its rewards"
    model.train()
    turn_off_dropout(model)
    if not torch.allclose(rewards, model(input_ids=input_ids, attention_mask=attention_mask).logits, rtol=TOLERANCE):
        return "in training it computes other rewards than in evaluation, and its dropout cannot be turned off"
    return None


def _compare_losses(model: PreTrainedModel, vocab_size: int) -> str | None:
    """Return None if the losses of two rows are the log-probabilities of their labels, else what they are instead."""
    input_ids = torch.randint(1, vocab_size, (CHECKED_ROWS, CHECKED_LENGTH))
    labels = input_ids.clone()
    labels[0, :5] = -100
    labels[1, :3] = -100
    inputs = {"input_ids": input_ids, "labels": labels}
    losses = sequence_losses(model, inputs)
    log_probabilities = torch.log_softmax(model(input_ids=input_ids).logits.float(), dim=-1)[:, :-1]
    expected = log_probabilities.gather(2, input_ids[:, 1:, None]).squeeze(2) * (labels[:, 1:] != -100)
    if not torch.allclose(losses, -expected.sum(1), rtol=TOLERANCE):
        return "its loss is not the log-probability of its labels alone"
    model.train()
    turn_off_dropout(model)
    if not torch.allclose(losses, sequence_losses(model, inputs), rtol=TOLERANCE):
        return "in training it computes other log-probabilities than in evaluation, and its dropout cannot be turned off"
    return None
