"""Define the options of one compiled program of generation, by transformers' own names, and which of them need
another program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from upshift.errors import RequestError
from upshift.models.generation_config import merge_options
from upshift.models.source import ModelSource
from upshift.value import Value

INPUTS = ("temperature", "top_k", "top_p", "seed")  # of a program: a change of them compiles nothing


class XlaGeneration(Value):
    """The options of generation. The text of a prompt depends on ``seed`` and on the prompt's place alone, however
    prompts are batched."""

    max_new_tokens: int = Field(128, gt=0)
    min_new_tokens: int = Field(0, ge=0)
    do_sample: bool = False
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(50, ge=0)  # transformers' own default of sampling; 0: all
    top_p: float = Field(1.0, gt=0, le=1)
    num_beams: int = Field(1, gt=0)
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] | None = None
    suppress_tokens: tuple[int, ...] = ()
    eos_token_id: tuple[int, ...] = ()
    seed: int = Field(0, ge=0)

    def program(self) -> XlaGeneration:
        """Return a value that is the same for all options that one program serves."""
        plain: dict[str, Any] = {name: type(self).model_fields[name].default for name in INPUTS}
        return self.changed(**plain)


def read_options(source: ModelSource, given: Mapping[str, Any], *, decodes_beside: bool) -> XlaGeneration:
    """Return the options. ``decodes_beside``: the model decodes beside an encoder. Raise RequestError for a name or a
    value that is not possible, with what is possible."""
    options = merge_options(XlaGeneration, source, given)
    if options.num_beams > 1 and options.do_sample:
        if given.get("do_sample") or given.get("num_beams"):
            raise RequestError("num_beams over 1 searches and do_sample draws; ask for one: num_beams=1 or do_sample=False")
        options = options.changed(num_beams=1)
    if decodes_beside:
        return options
    return options.changed(forced_bos_token_id=None)  # transformers forces the second token of a text, which a prompt has
