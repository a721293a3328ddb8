"""Hold a row that is text in segments, of which some are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from upshift.training.data.data_options import LossOn

# start, end: the special tokens that the tokenizer adds to a text, end with EOS. Those that stand there already are not added.
# bos, eos: this token, if the tokenizer has one. token: the special token with this name.
# closing: EOS is the label of the next token, because the template writes no EOS between two turns.
SegmentKind = Literal["text", "start", "end", "bos", "eos", "token", "closing"]


@dataclass(frozen=True)
class Segment:
    """A part of a row."""

    text: str
    is_learned: bool = False
    kind: SegmentKind = "text"


@dataclass(frozen=True, kw_only=True)
class SegmentRow:
    """A row of segments."""

    place: str
    segments: tuple[Segment, ...]
    eos_token: str | None = None  # the token that stands for EOS in this row; None: that of the tokenizer
    loss_on: LossOn | None = None  # None: that of the run

    @property
    def has_answer(self) -> bool:
        """Return whether a text is learned."""
        return any(segment.is_learned and segment.text.strip() for segment in self.segments)

    @property
    def num_characters(self) -> int:
        return sum(len(segment.text) for segment in self.segments)
