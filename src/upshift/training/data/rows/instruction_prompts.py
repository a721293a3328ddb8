"""Write a row with an instruction and an answer as a prompt of plain text. The named prompts are those of Axolotl 0.19.

Axolotl tokenizes the prompt with the special tokens that the tokenizer adds, then the answer without its BOS, then EOS
(axolotl/prompt_tokenizers.py, InstructionPromptTokenizingStrategy). The texts of the prompts are in axolotl/prompters.py and in
axolotl/prompt_strategies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

from pydantic import Field

from upshift.errors import RequestError
from upshift.training.data.rows.segments import Segment, SegmentRow
from upshift.value import Value


class InstructionPrompt(Value):
    """Describe how a row becomes a prompt and an answer. Names in braces are columns, or the parts of the prompt."""

    instruction: str = Field("{instruction}", description="the instruction, of columns")
    input: str | None = Field("{input}", description="what the instruction is about, of columns that a row need not have")
    output: str = Field("{output}", description="the answer, of columns")
    with_input: str = Field(description="the prompt of {instruction} and {input}")
    without_input: str = Field(description="the prompt of {instruction} alone")
    system: str = Field("", description="what stands before the prompt, of {system}")
    system_column: str | None = Field(None, description="the column with the system message")
    default_system: str = Field("", description="the system message of rows with input, where the row has none")
    default_system_without_input: str | None = Field(None, description="that of rows without input; None: the same")

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that are read. The first are needed in each row."""
        optional = [*_names(self.input or ""), *filter(None, (self.system_column,))]
        return tuple(dict.fromkeys([*self.needed, *optional]))

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the columns that each row must have."""
        return tuple(dict.fromkeys([*_names(self.instruction), *_names(self.output)]))

    def segments_of(self, record: Mapping[str, Any], place: str) -> SegmentRow:
        """Return the row in segments. Raise RequestError, with the place, for values that are no text."""
        values = {name: _text_of(record.get(name), name, place) for name in self.columns}
        instruction = self.instruction.format_map(values)
        extra = self.input.format_map(values) if self.input and any(values[name] for name in _names(self.input)) else ""
        system = values.get(self.system_column or "") or self.default_system
        if not extra and self.default_system_without_input is not None:
            system = values.get(self.system_column or "") or self.default_system_without_input
        opening = self.system.format(system=system) if system and self.system else ""
        frame = self.with_input if extra else self.without_input
        prompt = opening + frame.format(instruction=instruction, input=extra)
        has_output = any(values[name].strip() for name in _names(self.output))
        answer = self.output.format_map(values) if has_output else ""
        segments = (Segment("", kind="start"), Segment(prompt), Segment(answer, True), Segment("", True, "end"))
        return SegmentRow(place=place, segments=segments)


def _names(text: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(text) if name]


def check_places(text: str, allowed: tuple[str, ...], origin: str) -> None:
    """Raise RequestError for a text with other names in braces than the allowed ones."""
    try:
        names = _names(text)
    except ValueError as error:
        raise RequestError(f"{origin} {text!r} is no format ({error}); write names in braces, such as {{{allowed[0]}}}") from None
    other = next((name for name in names if name not in allowed), None)
    if other is not None:
        raise RequestError(f"{origin} has {{{other}}}; it may have {', '.join(f'{{{name}}}' for name in allowed)}")


def _text_of(value: Any, column: str, place: str) -> str:
    """Return the text of a column. A list of texts becomes a list with bullets, as Axolotl writes choices."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "\n".join(f'- "{item}"' for item in value)
    raise RequestError(f"{place}: column {column!r} holds {json.dumps(value, default=str)[:60]}; it must be text")


_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request."
)
_WITHOUT_INPUT = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_CONCISE = (
    "Below is an instruction from a USER that describes a task, paired with an input that provides further context. The "
    "ASSISTANT writes a response that concisely and appropriately completes the request.\n\n"
)
_CONCISE_WITHOUT_INPUT = (
    "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that appropriately and concisely "
    "completes the request.\n\n"
)
_CONTEXT = "Use the following contextual information to concisely answer the question.\n"
_EXPLAIN = "Choose the answer that best answers the question. Explain your reasoning.\n"
_BRIEF = "Choose the answer that best answers the question. Be concise in your response.\n\n"

_STYLES: Mapping[str, Mapping[str, str]] = {  # axolotl/prompters.py, AlpacaPrompter.match_prompt_style
    "instruct": {
        "with_input": "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "without_input": "### Instruction:\n{instruction}\n\n### Response:\n",
        "system": "{system}\n\n",
    },
    "chat": {
        "with_input": "USER: {instruction}\n{input}\nASSISTANT:",
        "without_input": "USER: {instruction}\nASSISTANT:",
        "system": "SYSTEM: {system}\n",
    },
    "chatml": {
        "with_input": "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "without_input": "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
        "system": "<|im_start|>system\n{system}<|im_end|>\n",
    },
    "phi": {
        "with_input": "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "without_input": "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
        "system": "<|system|>\n{system}<|end|>\n",
    },
}
_ORCA = {
    "with_input": "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    "without_input": "### Human:\n{instruction}\n### Assistant:\n",
    "system": "### System:\n{system}\n",
}
_PLAIN_CHAT = {"with_input": _STYLES["chat"]["with_input"], "without_input": _STYLES["chat"]["without_input"]}
_SUMMARY = "USER: Summarize the following article as a TL;DR.\n{instruction}\n"
_ALPACA = {"default_system": _WITH_INPUT, "default_system_without_input": _WITHOUT_INPUT}
_SHORT = {"default_system": _CONCISE, "default_system_without_input": _CONCISE_WITHOUT_INPUT}
_CHOICES = {"instruction": "{question}", "input": "{choices}", "output": "{solution}"}
_ORCA_COLUMNS: dict[str, Any] = {
    "instruction": "{question}",
    "input": None,
    "output": "{response}",
    "system_column": "system_prompt",
}

# By the type of Axolotl's data set: the style that it has by default, and the fields that differ from InstructionPrompt's.
_TYPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "alpaca": ("instruct", _ALPACA),
    "gpteacher": ("instruct", _ALPACA | {"output": "{response}"}),
    "oasst": ("instruct", _ALPACA | {"instruction": "{INSTRUCTION}", "input": None, "output": "{RESPONSE}"}),
    "jeopardy": ("instruct", _ALPACA | {"instruction": "{question}", "input": "{category}", "output": "what is {answer}"}),
    "explainchoice": ("instruct", _CHOICES | {"default_system": _EXPLAIN}),
    "concisechoice": ("instruct", _CHOICES | _PLAIN_CHAT | {"default_system": _BRIEF, "system": "{system}"}),
    "summarizetldr": (
        "instruct",
        {
            "instruction": "{article}",
            "input": None,
            "output": "{summary}",
            "without_input": f"{_SUMMARY}ASSISTANT:",
            "with_input": f"{_SUMMARY}{{input}}\nASSISTANT:",
        },
    ),
    "alpaca_chat": ("chat", _ALPACA),
    "alpaca_chat.load_concise": ("chat", _SHORT),
    "alpaca_chat.load_qa": ("chat", _SHORT | {"instruction": "{question}", "input": None, "output": "{answer}"}),
    "alpaca_chat.load_camel_ai": ("chat", _SHORT | {"instruction": "{message_1}", "input": None, "output": "{message_2}"}),
    "alpaca_chat.load_no_prompt": ("chat", {}),
    "alpaca_instruct": ("instruct", _ALPACA),
    "alpaca_instruct.load_no_prompt": ("instruct", {}),
    "alpaca_w_system": ("chat", {"system_column": "system"}),
    "alpaca_w_system.load_chat": ("chat", {"system_column": "system"}),
    "alpaca_w_system.load_instruct": ("instruct", {"system_column": "system"}),
    "alpaca_w_system.load_open_orca": ("instruct", _ORCA | _ORCA_COLUMNS),
    "alpaca_w_system.load_open_orca_chatml": ("chatml", _ORCA_COLUMNS),
    "context_qa": (
        "chat",
        {"instruction": "{article}\n===\n{question}", "input": None, "output": "{answer}", "default_system": _CONTEXT},
    ),
    "context_qa.load_v2": (
        "chat",
        {
            "instruction": "Context: {context}\nQuestion: {question}\n",
            "input": None,
            "output": "Answer: {answer}",
            "with_input": "{instruction}\n{input}",
            "without_input": "{instruction}",
            "system": "{system}",
        },
    ),
}
STYLED_TYPES = ("alpaca", "gpteacher", "oasst", "jeopardy", "explainchoice")  # a style may follow their name and a colon
PROMPTS: tuple[str, ...] = (
    *_TYPES,
    *(f"{name}:{style}" for name in STYLED_TYPES for style in _STYLES),
)


def find_prompt(name: str) -> InstructionPrompt:
    """Return a prompt of PROMPTS by its name."""
    base, _, style = name.partition(":")
    default_style, fields = _TYPES[base]
    return InstructionPrompt(**{**_STYLES[style or default_style], **fields})
