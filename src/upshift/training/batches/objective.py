"""Define what a model learns to predict from a sequence: which tokens are inputs, which are labels, and how many labels count.

A label of -100 does not count. Random choices depend on (seed, epoch, sequence) and not on the layout.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.models.profile import labelled_share
from upshift.planning.workload import RowsTogether
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.data.tokens import Sequences
from upshift.value import Value

MASK_TOKEN_SHARE = 0.8  # of the chosen tokens; BERT, https://arxiv.org/abs/1810.04805, section 3.1
RANDOM_TOKEN_SHARE = 0.1

Kind = Literal["causal-lm", "masked-lm", "seq2seq-lm", "sequence-classification"]  # the last one: of rewards


class Objective(Value):
    """The objective of a training, with the token ids that it needs."""

    kind: Kind = "causal-lm"
    pad_token_id: int = 0
    mask_token_id: int | None = None  # for masked-lm only, as are the next three
    special_token_ids: tuple[int, ...] = ()  # never masked
    vocab_size: int | None = None  # the range of random replacements
    mask_probability: float = labelled_share("masked-lm")
    # For causal-lm: what padding on the right of a text needs (models/isolation/check.py). none: all texts of a micro-batch have
    # the same length.
    padding: Literal["unmasked", "masked", "none"] = "unmasked"
    # Sequences 2 i and 2 i + 1 are two answers, and the model learns to prefer the first one: by DPO, or by the rewards of a
    # sequence-classification.
    has_pairs: bool = False
    # With has_pairs: the model learns whether sequence 2 i is good or bad, by KTO. Sequence 2 i + 1 is its prompt with the answer
    # of another row (data/tokens.py), of which nothing is learned.
    has_ratings: bool = False
    # For causal-lm: whether the model shifts the labels itself, so that each place predicts the label of the next one. If not,
    # Upshift shifts the labels of the rows.
    loss_shifts: bool = True
    loss_splits: bool = True  # False: the loss of a batch does not follow from its parts, so it cannot be halved

    @property
    def rows_together(self) -> RowsTogether:
        """Return the number of sequences that stay in one micro-batch."""
        return 2 if self.has_pairs else 1

    @property
    def has_rewards(self) -> bool:
        """Return whether the model gives each sequence one number, its reward."""
        return self.kind == "sequence-classification"

    @property
    def needs_reference(self) -> bool:
        """Return whether answers are compared with what the model before the training makes of them."""
        return self.has_pairs and not self.has_rewards

    @property
    def examples(self) -> str:
        """Return what a global batch is counted in, for messages."""
        if self.has_ratings:
            return "rated completions"
        return "pairs" if self.has_pairs else "sequences"

    @property
    def name(self) -> str:
        """Return the objective as the command line names it."""
        if not self.has_pairs:
            return self.kind
        if self.has_ratings:
            return "kto"
        return "reward" if self.has_rewards else "dpo"

    def check_masks(self) -> None:
        """Check that tokens can be masked, for data without labels. Raise RequestError if they cannot."""
        if self.kind == "masked-lm" and (self.mask_token_id is None or self.vocab_size is None):
            raise RequestError(
                f"objective masked-lm needs mask_token_id ({self.mask_token_id}) and vocab_size ({self.vocab_size}); "
                "use a tokenizer that has a mask token, data with a column labels, or objective causal-lm"
            )

    def num_labels(self, sequences: Sequences, sequence_ids: NDArray[np.int64], *, seed: int, epoch: int) -> int:
        """Return the number of labels that count, of pairs or of ratings. The loss of a global batch is divided by it."""
        if self.has_pairs:
            return len(sequence_ids) // 2
        lengths = sequences.lengths[sequence_ids]
        if self.kind == "causal-lm" or sequences.labels is not None:
            return int(self.counted_labels(sequences, sequence_ids).sum())
        if self.kind == "seq2seq-lm":
            return int((lengths - lengths // 2).sum())
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        tokens = sequences.tokens[np.repeat(sequences.starts[sequence_ids], lengths) + positions]
        bits = _token_bits(np.repeat(_sequence_keys(sequence_ids, seed=seed, epoch=epoch), lengths), positions)
        return int(np.count_nonzero(self._is_chosen(tokens, bits)))

    def mean_answer_tokens(self, sequences: Sequences, sequence_ids: NDArray[np.int64] | None = None) -> float:
        """Return the mean number of labels of the chosen answers, at least 1. It is 1 for other objectives.

        ``sequence_ids``: of the pairs. None: of all.
        """
        if self.name != "dpo":
            return 1.0
        if sequence_ids is None:
            sequence_ids = np.arange(len(sequences))
        return max(float(sequences.num_labels(sequence_ids[0::2], first=1).mean()), 1.0)

    def counted_labels(self, sequences: Sequences, sequence_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many labels each sequence has, if they are not drawn. A causal model does not predict the first token."""
        return sequences.num_labels(sequence_ids, first=1 if self.kind == "causal-lm" else 0)

    def mask_tokens(
        self,
        input_ids: NDArray[np.int64],
        real: NDArray[np.bool_],
        sequence_ids: NDArray[np.int64],
        *,
        seed: int,
        epoch: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and labels of masked-lm for rows of one sequence each. ``real`` is False on padding."""
        assert self.mask_token_id is not None and self.vocab_size is not None
        keys = _sequence_keys(sequence_ids, seed=seed, epoch=epoch)
        bits = _token_bits(keys[:, None], np.arange(input_ids.shape[1])[None, :])
        chosen = self._is_chosen(input_ids, bits) & real
        labels = np.where(chosen, input_ids, IGNORED)
        draw = (bits >> np.uint64(24)) & np.uint64(0xFFFF)
        masked = chosen & (draw < int(MASK_TOKEN_SHARE * 2**16))
        random = chosen & ~masked & (draw < int((MASK_TOKEN_SHARE + RANDOM_TOKEN_SHARE) * 2**16))
        inputs = np.where(masked, self.mask_token_id, input_ids)
        replacement = ((bits & np.uint64(0xFFFFFF)) % np.uint64(self.vocab_size)).astype(np.int64)
        return np.where(random, replacement, inputs), labels

    def _is_chosen(self, tokens: NDArray[Any], bits: NDArray[np.uint64]) -> NDArray[np.bool_]:
        chosen = (bits >> np.uint64(40)) < int(self.mask_probability * 2**24)
        for special in self.special_token_ids:
            chosen &= tokens != special
        return np.asarray(chosen, np.bool_)


def objective_for(kind: Kind, tokenizer: Any | None, *, vocab_size: int) -> Objective:
    """Return the objective with the tokenizer's ids. Padding never has a label; without a padding token it is EOS, else 0."""
    if tokenizer is None:
        return Objective(kind=kind, vocab_size=vocab_size)
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return Objective(
        kind=kind,
        pad_token_id=next(candidate for candidate in candidates if candidate is not None),
        mask_token_id=tokenizer.mask_token_id,
        special_token_ids=tuple(sorted(set(tokenizer.all_special_ids))),
        vocab_size=vocab_size,
    )


def _sequence_keys(sequence_ids: NDArray[np.int64], *, seed: int, epoch: int) -> NDArray[np.uint64]:
    epoch_key = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
    return _mix(epoch_key + sequence_ids.astype(np.uint64))


def _token_bits(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    return _mix(keys + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix bits by SplitMix64's finaliser (Steele, Lea, Flood 2014).

    It gives one stateless random number for each token, in vector operations.
    """
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
