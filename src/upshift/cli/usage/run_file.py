"""Read options of a command from a YAML file (``--config``), and write such a file with all options (``--init``).

Keys and values follow from the options that the command declares. A value of the file becomes words of the command line, which
are read and checked as the user's own words are.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from upshift.cli.usage.help_page import CONFIG, NO_BREAK, entry_of, is_option, long_name, panels_of, shown_parameters
from upshift.cli.usage.messages import (
    MAY_BE_EMPTY,
    USAGE_ERROR,
    WrongValue,
    annotation_of,
    check_numbers,
    check_words,
    describe_error,
    number_type,
)
from upshift.errors import RequestError
from upshift.text import did_you_mean

INIT = "init"  # the parameter with the file to write
AXOLOTL = "from_axolotl"  # the parameter with a config of Axolotl
LLAMA_FACTORY = "from_llama_factory"  # that with a config of LLaMA-Factory
FOREIGN = (AXOLOTL, LLAMA_FACTORY)
COMMENT_WIDTH = 100  # columns
SET_ASIDE = {  # by a typed option: the option of the file that it replaces, because the two exclude each other
    "resume": "overwrite", "overwrite": "resume", "epochs": "max_steps", "warmup_steps": "warmup_ratio",
    "warmup_ratio": "warmup_steps",
}  # fmt: skip
BOOL_TAG = "tag:yaml.org,2002:bool"
NULL_TAG = "tag:yaml.org,2002:null"


class FileEntry(NamedTuple):
    """One key of a file, with its value as the YAML reader found it."""

    key: str
    value: yaml.Node


def with_file_words(command: Any, context: Any, words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the user's words, and before them those of the file. An option that the user typed replaces that of the file.

    Raise RequestError that names the file and the key for an unknown key and for a wrong value.

    Args:
        command: the command, and ``context`` that of its call.
        words: the words that the user typed after the command.
        values: those of the parameters that the user typed, by name.
    """
    path = str(values[CONFIG])
    return with_entries(command, context, words, values, _read_entries(Path(path)), path)


def with_entries(
    command: Any, context: Any, words: Sequence[str], values: Mapping[str, Any], entries: Sequence[FileEntry], path: str
) -> list[str]:
    """Return the user's words, and before them those of the entries of a file, as ``with_file_words`` does."""
    parameters = {key_of(parameter): parameter for parameter in file_parameters(command)}
    arguments: list[str] = []
    options: list[str] = []
    used: set[str] = set()
    set_aside = {other for name, other in SET_ASIDE.items() if values.get(name) is not None}
    for entry in entries:
        key = entry.key.replace("_", "-")
        if key not in parameters:
            raise RequestError(
                f"{path}: unknown key {entry.key!r}{did_you_mean(key, parameters)}; {context.command_path} --init PATH writes a "
                "file with all keys"
            )
        if key in used:
            raise RequestError(f"{path}: key {entry.key!r} is given twice; give it once")
        used.add(key)
        parameter = parameters[key]
        entry_words = _words_of(parameter, entry, path)
        _check_words(command, context, parameter, entry_words, f"{path}: key {entry.key!r}")
        if values.get(parameter.name) is None and parameter.name not in set_aside:
            (options if is_option(parameter) else arguments).extend(entry_words)
    return [*arguments, *options, *words]


def expand_file(command: Any, context: Any, words: Sequence[str]) -> list[str]:
    """Return the words with the options of the file of ``--config`` in place of its name, if there is one."""
    values = command.make_parser(context).parse_args(list(words))[0]
    if not values.get(CONFIG):
        return list(words)
    return with_file_words(command, context, without_option(words, f"--{CONFIG}"), values)


def without_option(words: Sequence[str], option: str) -> list[str]:
    """Return the words without an option and its value."""
    remaining: list[str] = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word == option:
            is_value = True
        elif not word.startswith(f"{option}="):
            remaining.append(word)
    return remaining


def file_parameters(command: Any) -> list[Any]:
    """Return the parameters that a file may have: all but those that name files of this kind."""
    return [parameter for parameter in shown_parameters(command) if parameter.name not in (CONFIG, INIT, *FOREIGN)]


def key_of(parameter: Any) -> str:
    """Return the key of a parameter: its long name without the dashes in front, or the name of an argument."""
    return long_name(parameter).removeprefix("--") if is_option(parameter) else str(parameter.name)


def _read_entries(path: Path) -> list[FileEntry]:
    """Return the keys and values of a file. Raise RequestError if it cannot be read or is no mapping."""
    if not path.is_file():
        raise WrongValue(f"--config {path} {'is a folder' if path.is_dir() else 'does not exist'}; give the path of a file")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; check its rights") from None
    except UnicodeDecodeError:
        raise RequestError(f"{path} is not UTF-8 text; give a YAML file of options") from None
    except yaml.YAMLError as error:
        raise RequestError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if root is None:  # every line is a comment
        return []
    if not isinstance(root, yaml.MappingNode):
        raise RequestError(f"{path} is no mapping of options; write lines such as  learning-rate: 2e-5")
    for key, _ in root.value:
        if not isinstance(key, yaml.ScalarNode):
            raise RequestError(f"{path} has {_shown(key)} as a key; write the name of an option")
    return [FileEntry(str(key.value), value) for key, value in root.value]


def _words_of(parameter: Any, entry: FileEntry, path: str) -> list[str]:
    """Return the words of the command line for one key. Raise RequestError for a value of the wrong kind."""
    origin = f"{path}: key {entry.key!r}"
    if entry.value.tag == NULL_TAG:
        raise RequestError(f"{origin} has no value; write one, or remove the line")
    if is_option(parameter) and parameter.is_flag:
        if entry.value.tag != BOOL_TAG or str(entry.value.value).lower() not in yaml.SafeLoader.bool_values:
            raise RequestError(f"{origin} must be true or false (got {_shown(entry.value)})")
        return [long_name(parameter)] if yaml.SafeLoader("").construct_yaml_bool(entry.value) else list(parameter.secondary_opts)
    texts = _texts_of(parameter, entry.value, origin)
    if is_option(parameter):
        return [f"{long_name(parameter)}={text}" for text in texts]
    if texts[0].startswith("-"):  # it would be read as an option
        raise RequestError(f"{origin} must not begin with a dash (got {texts[0]!r}); give a path, such as ./{texts[0]}")
    return texts


def _texts_of(parameter: Any, value: yaml.Node, origin: str) -> list[str]:
    """Return the values of an option: several if it is repeatable. A list is joined if the option takes names with commas."""
    takes_list = is_option(parameter) and (parameter.multiple or "," in str(parameter.metavar))
    nodes = value.value if isinstance(value, yaml.SequenceNode) and takes_list else [value]
    for node in nodes:
        if not isinstance(node, yaml.ScalarNode) or node.tag == NULL_TAG:
            raise RequestError(f"{origin} must be {'a list or ' if takes_list else ''}one value (got {_shown(node)})")
        if node.tag == BOOL_TAG:
            raise RequestError(f"{origin} must be {_expected(parameter)} (got {node.value}); put it into quotes if it is a text")
    texts = [str(node.value) for node in nodes]
    return texts if not texts or parameter.multiple else [",".join(texts)]


def _expected(parameter: Any) -> str:
    return f"{long_name(parameter)} {parameter.metavar}" if is_option(parameter) else "a text"


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _check_words(command: Any, context: Any, parameter: Any, words: list[str], origin: str) -> None:
    """Raise RequestError, with the origin, for words that the command line would reject."""
    values: dict[str, Any] = {}
    try:
        values, _, order = command.make_parser(context).parse_args(list(words))
        check_words(context.command_path, values, order, MAY_BE_EMPTY)
        check_numbers(command, context.command_path, values, order)
        if values.get(parameter.name) is not None:
            parameter.process_value(context, values[parameter.name])
    except USAGE_ERROR as error:
        raise RequestError(f"{origin}: {describe_error(command, context.command_path, error, values)}") from None
    except RequestError as error:
        raise RequestError(f"{origin}: {error}") from None


def write_run_file(command: Any, context: Any, values: Mapping[str, Any]) -> Path:
    """Write a file with every option of a command. Return its path. Raise WrongValue if it exists or cannot be written.

    Options are comments with their defaults, but for those that the user typed, or that a file of ``--config`` has.

    Args:
        command: the command, and ``context`` that of its call.
        values: the words of each parameter that has some, by its name.
    """
    path = Path(values[INIT])
    lines = [
        f"# Options of {context.command_path}. To use them: {context.command_path} --config {path}",
        "# Remove the # before a key to set it. An option on the command line replaces that of this file.",
    ]
    for panel, parameters in panels_of(file_parameters(command)).items():
        lines += ["", f"## {panel}"]
        for parameter in parameters:
            text = entry_of(parameter).text.replace(NO_BREAK, " ")
            lines += [
                "",
                *textwrap.wrap(text, COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False),
            ]
            if values.get(parameter.name) is not None:
                parameter.process_value(context, values[parameter.name])  # a wrong value is an error
                lines.append(f"{key_of(parameter)}: {_yaml_value(command, parameter, values[parameter.name])}")
            else:
                lines.append(f"# {key_of(parameter)}: {_default_value(command, parameter)}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except FileExistsError:
        raise WrongValue(f"--init {path} exists; give the path of a new file") from None
    except OSError as error:
        raise WrongValue(f"--init {path} cannot be written: {error.strerror}; give another path") from None
    return path


def _yaml_value(command: Any, parameter: Any, value: Any) -> str:
    """Return the words of a parameter as YAML. JSON's texts and lists are YAML, too."""
    if is_option(parameter) and parameter.is_flag:
        return "true"
    is_number = number_type(annotation_of(command, parameter)) is not None
    return str(value) if is_number else json.dumps(value, ensure_ascii=False)


def _default_value(command: Any, parameter: Any) -> str:
    """Return the default of a parameter as YAML, or the word for its value if it has none that can be written."""
    default = parameter.default
    if is_option(parameter) and parameter.is_flag:
        return str(bool(default)).lower()
    if default is None or default == "" or parameter.required:
        return str(parameter.metavar)
    return f"{default:g}" if isinstance(default, float) else _yaml_value(command, parameter, str(default))
