"""Define what a user may say of training data beside its path. Every command that reads training data takes these options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import Field, field_validator

from upshift.errors import RequestError
from upshift.planning.workload import RowsTogether
from upshift.text import one_line
from upshift.training.data.row_formats import PairObjective, RowFormat
from upshift.training.data.rows.chat_templates import CHAT_TEMPLATES
from upshift.value import Value

TEMPLATE_MARKS = ("{{", "{%")  # of Jinja
LossOn = Literal["assistant", "assistant-content", "content", "all"]
LongRows = Literal["cut", "split", "drop"]
LearnedEnds = Literal["turn", "all", "last", "none"]
ObjectiveName = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "dpo",
    "kto",
    "reward",
]


@dataclass(frozen=True)
class LearnedContents:
    """Say of which roles the contents are learned, and which ends of turns."""

    roles: tuple[str, ...] = ("assistant",)
    ends: LearnedEnds = "turn"  # turn: those of learned turns; last: that of the last learned turn
    end_tokens: tuple[str, ...] = ()  # that end a turn, beside EOS


class DataOptions(Value):
    """Hold what a user says of training data. None: the default for what the data holds."""

    text_column: str | None = Field(None, description="the column that holds the text or the token ids")
    data_format: RowFormat | None = Field(None, description="what the rows are; None: the columns say it")
    loss_on: LossOn | None = Field(
        None,
        description="assistant: its turns, or completions; assistant-content: the contents of its turns, and EOS after each; "
        "content: those of all turns; all: all tokens",
    )
    chat_template: str | None = Field(
        None, description="the text, the file or the name of the template that writes chats; None: the tokenizer's own"
    )
    split: str | None = Field(None, description="the split to train on, or a range of its rows, such as train[:10%]")
    long_rows: LongRows | None = Field(None, description="what happens to a row longer than the sequence length")
    eval_size: float | None = Field(
        None, ge=0, description="how much of the training is held out: a share below 1, or a number; None: about 2 %, at most 64"
    )
    objective: ObjectiveName | None = Field(
        None,
        description="what is learned; dpo: to prefer one answer; kto: to prefer good answers, rated one by one; reward: to score "
        "answers; None: the model's own",
    )

    @field_validator("chat_template", mode="before")
    @classmethod
    def _read_template(cls, template: Any) -> Any:
        """Return the text of a template. Raise RequestError for a file that cannot be read or holds none."""
        return read_chat_template(template) if isinstance(template, str | Path) else template

    @field_validator("eval_size")
    @classmethod
    def _check_size(cls, size: float | None) -> float | None:
        """Raise RequestError for a number of sequences that is not whole."""
        if size is not None and size >= 1 and not size.is_integer():
            raise RequestError(f"--eval-size {size:g} is neither a share below 1 nor a whole number; give such as 0.05 or 200")
        return size

    @property
    def has_pairs(self) -> bool:
        """Return whether two sequences belong together: a chosen and a rejected answer, or a rated one and a mismatched one."""
        return self.pair_objective is not None

    @property
    def pair_objective(self) -> PairObjective | None:
        """Return the objective that learns from preferences, or None for another one."""
        return self.objective if self.objective in ("dpo", "kto", "reward") else None

    @property
    def has_ratings(self) -> bool:
        """Return whether each answer is learned for itself, as a good one or a bad one."""
        return self.objective == "kto"

    @property
    def has_reward_head(self) -> bool:
        """Return whether the model gives each answer one number, its reward."""
        return self.objective == "reward"

    @property
    def rows_together(self) -> RowsTogether:
        """Return the number of sequences that one row of the data becomes, which stay in one micro-batch."""
        return 2 if self.has_pairs else 1

    @property
    def as_options(self) -> DataOptions:
        """Return these options alone."""
        return DataOptions(**{name: getattr(self, name) for name in DataOptions.model_fields})


class DataKeywords(TypedDict, total=False):
    """The fields of ``DataOptions`` as keyword arguments, without ``objective``: a search has another option of this name."""

    text_column: str | None
    data_format: RowFormat | None
    loss_on: LossOn | None
    chat_template: str | None
    split: str | None
    long_rows: LongRows | None
    eval_size: float | None


def describe_difference(before: DataOptions, now: DataOptions, run: str) -> str:
    """Return the first option that a run has now, and that it had not before, for an error. ``run``: its name."""
    name = next(name for name in DataOptions.model_fields if getattr(now, name) != getattr(before, name))
    given, earlier = (_show_option(name, getattr(options, name)) for options in (now, before))
    return f"you gave {given}, and the run in {run} has {earlier}"


def _show_option(field: str, value: Any) -> str:
    option = f"--{field.replace('_', '-')}"
    if value is None:
        return f"no {option}"
    shown = format(value, "g") if isinstance(value, float) else one_line(value, limit=60)
    return f"{option} {next((name for name, text in CHAT_TEMPLATES.items() if text == value), shown)}"


def read_chat_template(template: str | Path) -> str:
    """Return the text of a chat template: of a name, of a file, or itself. Raise RequestError for others."""
    text = str(template)
    if text in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[text]
    if any(mark in text for mark in TEMPLATE_MARKS):
        return text
    advice = f"give a Jinja file, the text of a template, or one of {', '.join(CHAT_TEMPLATES)}"
    shown = repr(text[:200])
    try:
        is_file = bool(text) and Path(text).is_file()
        content = Path(text).read_text(encoding="utf-8") if is_file else ""
    except UnicodeDecodeError:
        raise RequestError(f"--chat-template {shown} is not UTF-8 text; {advice}") from None
    except (OSError, ValueError) as error:  # the name is too long, or holds a zero byte
        raise RequestError(f"--chat-template {shown} cannot be read ({error}); {advice}") from None
    if not is_file:
        raise RequestError(f"--chat-template {shown} is not a file; {advice}")
    if not any(mark in content for mark in TEMPLATE_MARKS):
        raise RequestError(f"--chat-template {shown} has no {' and no '.join(TEMPLATE_MARKS)}, so it writes no turn; {advice}")
    return content
