"""Find the objective of a model: the loss that it is trained with, and the batches that this loss needs."""

from __future__ import annotations

from typing import Any

from upshift.errors import RequestError
from upshift.models.build import choose_class
from upshift.models.profile_cache import check_token_ids, isolation_of
from upshift.models.source import ModelSource
from upshift.training.batches.objective import Objective, objective_for


def find_objective(source: ModelSource, *, tokenizer: Any = None, has_rewards: bool = False) -> Objective:
    """Return the model's objective. Without a tokenizer, as in trials on random tokens, a masked-lm masks with token 0.

    ``has_rewards`` allows a classifier of texts, whose output is a reward.
    """
    config = source.hf_config
    model_class, kind = choose_class(config, source.reference)
    if kind not in ("causal-lm", "masked-lm", "seq2seq-lm") and not (has_rewards and kind == "sequence-classification"):
        raise RequestError(
            f"{source.reference!r} trains on {kind}, and text is for causal-lm, masked-lm and seq2seq-lm; give such a model, or "
            "rows with what it learns to upshift train"
        )
    vocab_size = config.get_text_config().vocab_size
    if tokenizer is None:
        objective = Objective(kind=kind, vocab_size=vocab_size, mask_token_id=0 if kind == "masked-lm" else None)
    else:
        objective = objective_for(kind, tokenizer, vocab_size=vocab_size)
    isolation = isolation_of(source)
    check_token_ids(source, isolation)
    if not isolation.loss_shifts and kind == "seq2seq-lm":
        raise RequestError(
            f"{source.reference!r} cannot be trained on labels alone: {model_class.__name__} does not make the decoder's inputs "
            "from them; use transformers.Trainer with decoder_input_ids"
        )
    if not isolation.loss_shifts and (isolation.reads_ahead or not isolation.proven):
        raise RequestError(
            f"{source.reference!r} cannot be trained on next tokens: a token of {model_class.__name__} also reads the tokens "
            "behind it, so that it has seen the next one; use transformers.Trainer with inputs and labels of your own"
        )
    return objective.changed(padding=isolation.padding, loss_splits=isolation.loss_splits, loss_shifts=isolation.loss_shifts)
