"""Read the config of another library as options of ``upshift train``, and reject by name what has no option.

A key is an option here, or a choice that the plan makes and that changes no mathematics, or it is rejected. Null is no value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml

from upshift.cli.usage.help_page import CONFIG
from upshift.cli.usage.messages import WrongValue
from upshift.cli.usage.run_file import FOREIGN, FileEntry, file_parameters, key_of, with_entries, without_option
from upshift.errors import RequestError
from upshift.planning.optimizers import ALIASES, optimizers
from upshift.text import did_you_mean

DATA_KEYS = ("data", "eval-data")
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")  # one computation, of which the plan takes the fastest
OFF_VALUES = (False, 0, "", "no", "none")


@dataclass(frozen=True)
class Understood:
    """One option, as a key of a run file with its value, and the keys of the config that it was read from."""

    key: str
    value: Any
    sources: tuple[str, ...]


@dataclass
class ForeignConfig:
    """A config, and what is understood of it."""

    path: str
    values: dict[str, Any]  # without null
    typed: Collection[str]  # keys of the options that the user typed, which replace those of the config
    options: list[Understood] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value, which is then done, or the default."""
        return self.values.pop(key, default)

    def take_same(self, option_of: Mapping[str, str]) -> None:
        """Add the options with the meaning of a key. ``option_of``: the option's key of each key of the config."""
        for source, key in option_of.items():
            value = self.take(source)
            if value is not None and value is not False:
                self.add(key, value, source)

    def add(self, key: str, value: Any, *sources: str) -> None:
        """Add an option. The values of an option that takes several are joined."""
        same = next((option for option in self.options if option.key == key and isinstance(value, list)), None)
        if same is None:
            self.options.append(Understood(key, value, sources))
        else:
            joined = Understood(key, [*same.value, *value], tuple(dict.fromkeys((*same.sources, *sources))))
            self.options[self.options.index(same)] = joined

    def reject(self, key: str, advice: str, *, replaced_by: str | None = None) -> None:
        """Reject a key with advice, unless the user typed the option that replaces it."""
        if replaced_by is not None and replaced_by in self.typed:
            self.notes.append(f"{key}: --{replaced_by} replaces it")
        else:
            self.rejected.append(f"{key} ({advice})")


def with_foreign_words(
    command: Any,
    context: Any,
    words: Sequence[str],
    values: Mapping[str, Any],
    *,
    parameter: str,
    read: Callable[[Path, Collection[str]], ForeignConfig],
    quiet: bool = False,
) -> list[str]:
    """Return the user's words, and before them those of a config. Print what is understood to standard error.

    Args:
        command: the command, and ``context`` that of its call, as in ``run_file.with_file_words``.
        words: the words that the user typed after the command.
        values: those of the parameters that the user typed, by name.
        parameter: the parameter that names the config.
        read: reads the config of a path. It gets the keys of the options that the user typed.
        quiet: print nothing.
    """
    given = [name for name in (*FOREIGN, CONFIG) if values.get(name)]
    if len(given) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RequestError(f"{names} both give options; write one file with --{given[0].replace('_', '-')} PATH --init PATH")
    path = Path(values[parameter])
    typed = {key_of(other) for other in file_parameters(command) if values.get(other.name) is not None}
    config = read(path, typed)
    if not quiet:
        typer.echo("\n".join(describe(config)), err=True)
    root: Any = yaml.compose(yaml.safe_dump({option.key: option.value for option in config.options}), Loader=yaml.SafeLoader)
    entries = [FileEntry(str(key.value), value) for key, value in root.value]
    return with_entries(command, context, words, values, entries, str(path))


def expand_foreign(
    command: Any,
    context: Any,
    words: Sequence[str],
    *,
    parameter: str,
    read: Callable[[Path, Collection[str]], ForeignConfig],
) -> list[str]:
    """Return the words with the options of a config in place of its name. Print nothing."""
    values = command.make_parser(context).parse_args(list(words))[0]
    if not values.get(parameter):
        return list(words)
    remaining = without_option(words, f"--{parameter.replace('_', '-')}")
    return with_foreign_words(command, context, remaining, values, parameter=parameter, read=read, quiet=True)


def read_values(path: Path, *, option: str, library: str, needed: str) -> dict[str, Any]:
    """Return the keys with a value. Raise RequestError if the file cannot be read or is no mapping with the needed key."""
    advice = f"give the path of a config of {library}"
    if not path.is_file():
        raise WrongValue(f"{option} {path} {'is a folder' if path.is_dir() else 'does not exist'}; {advice}")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{option} {path} cannot be read: {error.strerror}; {advice}") from None
    except UnicodeDecodeError:
        raise RequestError(f"{option} {path} is not UTF-8 text; {advice}") from None
    except yaml.YAMLError as error:
        raise RequestError(f"{option} {path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(document, Mapping) or needed not in document:
        raise RequestError(f"{option} {path} is no config of {library}, because it has no key {needed}; for our own use --config")
    return {str(key): value for key, value in document.items() if value is not None}


def check_rejected(config: ForeignConfig) -> None:
    """Raise RequestError that names every key that cannot be used."""
    if config.rejected:
        number = "1 key has" if len(config.rejected) == 1 else f"{len(config.rejected)} keys have"
        raise RequestError(
            f"{config.path}: {number} no option of upshift train: {'; '.join(config.rejected)}. Remove them, or follow the advice"
        )


class LibraryKeys(NamedTuple):
    """The keys of a library that are read by name alone. Keys that decide something together are read before them."""

    option_of: Mapping[str, str]
    planned: Collection[str]
    without_effect: Collection[str]
    rejected: Collection[str]  # unless their value turns a feature off
    remarks: Mapping[str, str]  # what to do instead of a rejected key
    read_before: Collection[str] = ()  # names that a misspelt key may have meant
    planned_prefixes: tuple[str, ...] = ()


def read_others(config: ForeignConfig, keys: LibraryKeys) -> None:
    """Read the remaining keys: those of the plan, those without an effect here, and those to reject."""
    for name, value in config.values.items():
        if name in keys.planned or name.startswith(keys.planned_prefixes):
            config.planned.append(name)
        elif name in keys.without_effect or (name in keys.rejected and is_off(value)):
            continue
        elif name in keys.rejected:
            config.reject(name, keys.remarks.get(name, "not known here"))
        else:
            known = [*keys.option_of, *keys.planned, *keys.without_effect, *keys.rejected, *keys.read_before]
            config.reject(name, f"unknown{did_you_mean(name, known)}")


def read_optimizer(config: ForeignConfig, key: str, name: str) -> None:
    """Read an optimizer by transformers' name. AdamW is the plan's choice."""
    if name in ADAMW:
        config.planned.append(key)
    elif name in optimizers() or name in ALIASES:
        config.add("set", [f"optim={name}"], key)
        allow = optimizers()[ALIASES.get(name, name)].allow
        if allow is not None:
            config.add("allow", [allow], key)
    else:
        config.reject(f"{key} {name}", f"use one of {', '.join(optimizers())}")


def read_evaluation_size(config: ForeignConfig, key: str, other: str) -> None:
    """Read how much of the training is held out. ``other``: the key of evaluation data."""
    size = config.take(key)
    has_data = "eval-data" in config.typed or any(option.key == "eval-data" for option in config.options)
    if size is None and not has_data:
        config.notes.append(f"without {key} and {other}, about 2 % of the rows are held out; add --eval-size 0 to train on all")
    elif size is not None and not is_number(size):
        config.reject(f"{key} {size}", "give a share below 1, or a number", replaced_by="eval-size")
    elif has_data:
        config.notes.extend([f"{key}: the evaluation data replaces it"] * bool(size))
    else:
        config.add("eval-size", size, key)
        config.notes.append(f"{key}: the last rows are held out, and not drawn at random")


def add_data_sets(config: ForeignConfig, key: str, data_sets: Sequence[Mapping[str, Any]], source: str) -> None:
    """Add data sets: as plain options if there is one that needs no description, else as the JSON of a description."""
    plain = {"path": key, "split": "split", "format": "data-format", "text_column": "text-column", "loss_on": "loss-on"}
    only = data_sets[0] if len(data_sets) == 1 else {}
    if only and only.keys() <= plain.keys() and (key == "data" or only.keys() <= {"path", "format", "loss_on", "text_column"}):
        for name, value in only.items():
            if name == "path" or (key == "data" and value is not None):
                config.add(plain[name], value, f"{source}.{name}")
        return
    config.add(key, json.dumps(list(data_sets), ensure_ascii=False), source)


LIBRARY_TRAINERS = {"kto": "KTOTrainer", "grpo": "GRPOTrainer", "rloo": "RLOOTrainer"}  # of upshift.trl, by the objective


def advice_on_objective(objective: str) -> str:
    """Return what to do about an objective that ``upshift train`` does not have."""
    trainer = LIBRARY_TRAINERS.get(objective)
    known = "upshift train has sft, dpo, kto and reward models"
    if objective == "kto":
        return (
            f"{known}, and reads rated rows with prompt, completion and label alone; write them so and use --objective kto "
            f"without this file, or train by upshift.trl.{trainer} in a script"
        )
    return known if trainer is None else f"{known}; train by upshift.trl.{trainer} in a script, which takes the same rows"


def describe(config: ForeignConfig) -> list[str]:
    """Return the lines that say what was understood."""
    lines = [f"{config.path}, as options of upshift train:"]
    for option in config.options:
        name = "MODEL" if option.key == "model" else f"--{option.key}"
        value = ",".join(map(str, option.value)) if isinstance(option.value, list) else str(option.value)
        words = name if option.value is True else f"{name} {value}"
        replaced = ", replaced by the command line" if option.key in config.typed else ""
        lines.append(f"  {words}  ({', '.join(option.sources)}{replaced})")
    if config.planned:
        lines.append(f"  the plan chooses: {', '.join(config.planned)}")
    return lines + [f"  note: {note}" for note in config.notes]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_off(value: Any) -> bool:
    """Return whether a value turns a feature off."""
    return value in OFF_VALUES or (isinstance(value, Sequence | Mapping) and not value)
