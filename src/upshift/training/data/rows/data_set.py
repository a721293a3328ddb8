"""Describe one of several data sets: its path, the rows to read, the names of its columns, and the template of its prompts.

``--data`` takes a YAML file with the key ``data_sets``, or the same list as JSON text. docs/data.md states the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import Field

from upshift.errors import RequestError
from upshift.text import did_you_mean
from upshift.training.data.data_options import LearnedContents, LearnedEnds, LossOn
from upshift.training.data.row_formats import PREFERENCE, RowFormat
from upshift.training.data.rows.instruction_prompts import PROMPTS, InstructionPrompt, check_places, find_prompt
from upshift.training.data.rows.llama_factory_templates import TEMPLATES
from upshift.training.data.rows.pair_prompts import PAIR_PROMPTS, PASSTHROUGH, PairPrompt, find_pair_prompt
from upshift.training.data.rows.row_slice import RowSlice, read_split
from upshift.training.data.rows.turn_templates import TurnWriter
from upshift.value import Value

KEY = "data_sets"
SUFFIXES = (".yaml", ".yml")
AXOLOTL = "axolotl/"
LLAMA_FACTORY = "llama-factory/"
Role = Literal["system", "developer", "user", "assistant", "tool"]


class DataSet(Value):
    """Describe where the rows of a data set are, what they hold, and how they are written."""

    path: str
    split: str = Field("train", description="its split, or a range of its rows, such as train[:10%]")
    format: RowFormat | None = Field(None, description="what the rows are; None: the columns say it")
    text_column: str | None = Field(None, description="the column that holds the text")
    columns: dict[str, str] = Field({}, description="by our name the data's name of a column; the others are not read")
    message_fields: dict[str, str] = Field({}, description="by our name the data's name of a field of messages")
    roles: dict[str, str] = Field({}, description="by the data's name of a role ours")
    template: str | None = Field(None, description="a template by its name; None: the tokenizer's chat template")
    prompt: InstructionPrompt | None = Field(None, description="a template of the user's own")
    system: str | None = Field(None, description="the system message of rows without one, with a template of turns")
    thinks: bool = Field(True, description="keep the thoughts of answers, with a template of turns")
    loss_on: LossOn | None = Field(None, description="what is learned; None: --loss-on says it")
    learned_turns: Literal["all", "last"] = Field("all", description="the turns of the assistant that are learned")
    learned_roles: tuple[Role, ...] = Field(
        ("assistant",), description="whose contents are learned, with loss_on assistant-content"
    )
    learned_ends: LearnedEnds = Field("turn", description="the ends of turns that are learned, with loss_on assistant-content")
    answer_ends: Literal["template", "eos"] = Field("template", description="what ends the answers of a pair")
    turn_ends: tuple[str, ...] = Field((), description="tokens that end a turn, beside EOS, with loss_on assistant-content")

    @property
    def learns_last_only(self) -> bool:
        return self.learned_turns == "last"

    @property
    def learned_contents(self) -> LearnedContents:
        return LearnedContents(self.learned_roles, self.learned_ends, self.turn_ends)

    @property
    def rows(self) -> RowSlice:
        return read_split(self.split)

    @property
    def instruction_prompt(self) -> InstructionPrompt | None:
        """Return the prompt of an instruction and its answer, or None for another template."""
        name = self.template or ""
        if self.prompt is None and name.startswith(AXOLOTL) and name != f"{AXOLOTL}{PASSTHROUGH}" and self.pair_prompt is None:
            return find_prompt(name.removeprefix(AXOLOTL))
        return self.prompt

    @property
    def has_template(self) -> bool:
        """Return whether the data set says itself how its rows become texts."""
        return self.template is not None or self.prompt is not None

    @property
    def pair_prompt(self) -> PairPrompt | None:
        """Return what writes the texts of a pair of answers, or None for another template."""
        return find_pair_prompt((self.template or "").removeprefix(AXOLOTL))

    @property
    def turn_writer(self) -> TurnWriter | None:
        """Return what writes chats by a template of turns, or None for another template."""
        if self.template is None or not self.template.startswith(LLAMA_FACTORY):
            return None
        template = TEMPLATES[self.template.removeprefix(LLAMA_FACTORY)]
        return TurnWriter(template, system=self.system, thinks=self.thinks, learns_last_only=self.learns_last_only)

    def check(self, origin: str) -> None:
        """Raise RequestError for a template that does not exist, and for answers that exclude each other."""
        names = [f"{AXOLOTL}{name}" for name in (*PROMPTS, *PAIR_PROMPTS, PASSTHROUGH)] + [
            f"{LLAMA_FACTORY}{name}" for name in TEMPLATES
        ]
        if self.template is not None and self.template not in names:
            raise RequestError(
                f"{origin}: template {self.template!r} is not known{did_you_mean(self.template, names)}; docs/data.md lists the "
                "names, or leave it out to use the tokenizer's chat template"
            )
        if not self.path:
            raise RequestError(f"{origin} has an empty path; give that of a file or a folder")
        if self.pair_prompt is not None and self.format != PREFERENCE:
            raise RequestError(f"{origin}: template {self.template} writes pairs of answers; add format: {PREFERENCE}")
        if self.template is not None and self.prompt is not None:
            raise RequestError(f"{origin} has a template and a prompt; give one of them")
        if self.learns_last_only and (self.loss_on in ("content", "all") or self.format == PREFERENCE):
            other = f"format {PREFERENCE}" if self.format == PREFERENCE else f"loss_on {self.loss_on}"
            raise RequestError(f"{origin} has learned_turns last and {other}; leave one of the two out")
        if self.answer_ends == "eos" and (self.format != PREFERENCE or self.template is not None):
            raise RequestError(f"{origin} has answer_ends, which needs format: {PREFERENCE} without a template")
        self._check_contents(origin)
        if self.prompt is not None:
            check_places(self.prompt.with_input, ("instruction", "input"), f"{origin}: with_input")
            check_places(self.prompt.without_input, ("instruction",), f"{origin}: without_input")
            check_places(self.prompt.system, ("system",), f"{origin}: system")
        _ = self.rows

    def _check_contents(self, origin: str) -> None:
        """Raise RequestError for keys of learned contents that would have no effect."""
        plain = {"learned_roles": ("assistant",), "learned_ends": "turn", "turn_ends": ()}
        given = [name for name, value in plain.items() if getattr(self, name) != value]
        learns_contents = self.loss_on in ("assistant-content", "content")
        if given and (not learns_contents or self.template is not None or self.prompt is not None):
            raise RequestError(f"{origin} has {given[0]}, which needs loss_on assistant-content, without a template and a prompt")
        if self.loss_on == "content" and "learned_roles" in given:
            raise RequestError(f"{origin} has loss_on content and learned_roles; leave one of the two out")
        if not self.learned_roles:
            raise RequestError(f"{origin}: learned_roles is empty, so nothing is learned; give such as [assistant]")


class Described(NamedTuple):
    """The data sets of a description, and the name of the description for messages."""

    data_sets: tuple[DataSet, ...]
    origin: str


def read_description(data: Path | str) -> Described | None:
    """Return the data sets that a file or a JSON text describes, or None for another path. Raise RequestError for wrong keys."""
    text = str(data)
    if text.lstrip().startswith("["):
        return Described(_read_entries(_parse_json(text), "--data", None), "--data")
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        return None
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None  # it is read as a text, whose reader says what is wrong with it
    if not isinstance(document, Mapping):
        return None
    if KEY not in document:
        meant = next((key for key, value in document.items() if _lists_paths(value)), None)
        if meant is not None:  # else the description itself would be the text to train on
            raise RequestError(f"{path}: key {meant!r} is unknown; a description of data has the key {KEY}; rename it")
        return None
    other = next((key for key in document if key != KEY), None)
    if other is not None:
        raise RequestError(f"{path}: key {other!r} is unknown; a description of data has the key {KEY} alone")
    return Described(_read_entries(document[KEY], str(path), path.parent), str(path))


def _lists_paths(value: Any) -> bool:
    """Return whether the value is a list of mappings with a path, as that of ``data_sets``."""
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Mapping) and "path" in entry for entry in value)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"--data {text[:60]!r} begins as a JSON list of data sets, and is not JSON ({error}); for a path write ./ before it"
        ) from None


def _read_entries(entries: Any, origin: str, folder: Path | None) -> tuple[DataSet, ...]:
    """Return the data sets of a list. Paths that are not absolute are in the folder, if there is one."""
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise RequestError(f"{origin}: {KEY} must be a list of data sets, each with a path")
    data_sets = []
    for number, entry in enumerate(entries, start=1):
        name = f"{origin}: data set {number}"
        if not isinstance(entry, Mapping):
            raise RequestError(f"{name} is {str(entry)[:60]!r}; write its path and other keys, such as path: chats.jsonl")
        try:
            data_set = DataSet.from_fields({str(key): value for key, value in entry.items()})
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from None
        if folder is not None:
            data_set = data_set.changed(path=str(folder / data_set.path))
        data_set.check(name)
        data_sets.append(data_set)
    return tuple(data_sets)
