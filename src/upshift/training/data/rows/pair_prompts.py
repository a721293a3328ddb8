"""Write pairs of answers as Axolotl's types of data sets for DPO write them: two texts that begin with one prompt.

The names are Axolotl's (axolotl/prompt_strategies/dpo, version 0.19): a form, a point, and where the columns come from. The texts
are then tokenized as those of other pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from upshift.errors import RequestError

SYSTEM = "system"


@dataclass(frozen=True)
class _Form:
    """The texts before and behind a system message, a question, and an answer."""

    system: tuple[str, str]
    question: tuple[str, str]
    answer: tuple[str, str]


FORMS = {
    "chatml": _Form(
        ("<|im_start|>system\n", "<|im_end|>\n"),
        ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
        ("", "<|im_end|>"),
    ),
    "llama3": _Form(
        ("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("", "<|eot_id|>"),
    ),
}
QUESTIONS = {  # the columns that may hold the question; the first one that there is does
    "default": ("prompt", "input", "question", "instruction"),
    "icr": ("input",),
    "intel": ("question",),
    "prompt_pairs": ("prompt",),
}
PASSTHROUGH = "passthrough.default"  # Axolotl's name for texts that stay as they are, which needs no PairPrompt
PAIR_PROMPTS = tuple(f"{form}.{columns}" for form in FORMS for columns in QUESTIONS)


@dataclass(frozen=True)
class PairPrompt:
    """One of PAIR_PROMPTS."""

    form: _Form
    questions: tuple[str, ...]

    def columns_of(self, names: Collection[str]) -> dict[str, str]:
        """Return the data's names of the columns that there are, by ours."""
        has_alternatives = len(self.questions) > 1
        choices = {
            "prompt": self.questions,
            SYSTEM: (SYSTEM,),
            **{name: (name, f"{name}_response") if has_alternatives else (name,) for name in ("chosen", "rejected")},
        }
        found = {ours: next((name for name in theirs if name in names), None) for ours, theirs in choices.items()}
        return {ours: name for ours, name in found.items() if name is not None}

    def texts_of(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return a row of texts. Raise RequestError for a column that is missing, or that holds no text."""
        if "prompt" not in row:
            raise RequestError(f"{place} has no column {' or '.join(self.questions)}, which the template reads; rename it")
        other = next(
            (name for name, value in row.items() if not isinstance(value, str) and (name, value) != (SYSTEM, None)), None
        )
        if other is not None:
            raise RequestError(f"{place}: {other} holds no text, and the template writes texts; leave the template out")
        system = _between(self.form.system, row[SYSTEM]) if row.get(SYSTEM) else ""
        answers = {name: _between(self.form.answer, row[name]) for name in ("chosen", "rejected") if name in row}
        return {"prompt": system + _between(self.form.question, row["prompt"]), **answers}


def find_pair_prompt(name: str) -> PairPrompt | None:
    """Return the pair prompt of a name, or None for another name."""
    form, _, questions = name.partition(".")
    return PairPrompt(FORMS[form], QUESTIONS[questions]) if name in PAIR_PROMPTS else None


def _between(texts: tuple[str, str], value: str) -> str:
    before, behind = texts
    return before + value + behind
