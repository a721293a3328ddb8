"""Options that several commands share: their types, how they are read, and which of them the command line has.

An option that a command does not use is rejected, never ignored: see ``command_line_options``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import typer

from upshift.cli.usage.help_page import Panel
from upshift.cli.usage.messages import ABOVE_ZERO, WrongValue, check_choice
from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.models.generation_config import WARPERS, changes_sampling
from upshift.models.sequence_length import DEFAULT_SEQUENCE_LENGTH
from upshift.models.source import ALL_LINEAR, AdapterOptions
from upshift.planning.layout import FullyShard
from upshift.planning.plan import changes_of_mathematics
from upshift.training.data.data_options import LongRows, LossOn, ObjectiveName
from upshift.training.data.row_formats import RowFormat


def command_line_options(context: typer.Context) -> dict[str, str]:
    """Return the options that the user typed, as typed, by parameter name: ``{"global_batch": "--global-batch"}``."""
    return {
        parameter.name: parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
        for parameter in context.command.params
        if parameter.name and (source := context.get_parameter_source(parameter.name)) and source.name == "COMMANDLINE"
    }


def split_names(text: str, option: str = "--allow") -> tuple[str, ...]:
    """Return the names of a list that is separated by commas. Raise RequestError if it has commas and no name."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not names:
        raise RequestError(f"{option} {text!r} names nothing; give names separated by commas")
    return names


def option(
    *names: str, text: str, panel: Panel, metavar: str | None = None, default: str | None = None, choices: Sequence[str] = (),
    least: float | None = None, most: float | None = None, check: Callable[[Any], Any] | None = None, is_eager: bool = False,
) -> Any:  # fmt: skip
    """Return an option of a command.

    Args:
        names: its names, such as ``--output`` and ``-o``.
        text: its help: one sentence, with the unit of a number. The choices follow it.
        panel: the group of the help page in which it stands.
        metavar: the word for its value. A flag has none.
        default: the default as the help page shows it, if the function's default does not say it.
        choices: all values that it takes. A shell completes them.
        least, most: the bounds of a number, both inclusive.
        check: returns the value, or raises RequestError. With ``is_eager`` it runs before a missing argument is an error.
    """
    if choices:
        text = f"{text}: {', '.join(choices)}."
        check = partial(_check_choice, names[0], tuple(choices))
    return typer.Option(
        *names, help=text, rich_help_panel=panel.value, metavar=metavar, min=least, max=most, callback=_callback(check),
        show_default=default or True, autocompletion=(lambda: list(choices)) if choices else None, is_eager=is_eager,
    )  # fmt: skip


def _check_choice(name: str, choices: Sequence[str], value: str) -> str:
    return check_choice(name, value, choices)


def _callback(check: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Return a function that checks a value, if there is one, in the form that typer calls."""
    if check is None:
        return None

    def check_value(value: Any) -> Any:
        return value if value is None else check(value)

    return check_value


def _check_engine(name: str) -> str:
    from upshift.inference.registry import ENGINES  # reads the files of all engines, which takes a moment

    return check_choice("--engine", name, tuple(ENGINES))


def _check_quality(text: str) -> str:
    if text != "exact":
        from upshift.inference.race.types import read_quality  # imports numpy

        read_quality(text)
    return text


def output_folder(text: str) -> Any:
    """Return the option ``--output`` of a command that writes a folder. An existing file is refused before anything starts."""
    return option("--output", "-o", text=text, panel=Panel.OUTPUT, metavar="FOLDER", check=partial(check_new_folder, "--output"))


def check_new_folder(name: str, path: Path) -> Path:
    """Return ``path``. Raise WrongValue if it is a file. A folder that does not exist is made later."""
    if path.is_file():
        raise WrongValue(f"{name} {path} is a file; give a folder, which may be new")
    return path


def check_existing_folder(name: str, path: Path) -> Path:
    """Return ``path``. Raise WrongValue if it is not a folder that exists."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise WrongValue(f"{name} {path} {problem}; give a folder that exists")
    return path


def check_file(name: str, path: Path) -> Path:
    """Return ``path``. Raise WrongValue if it is not a file that exists."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise WrongValue(f"{name} {path} {problem}; give the path of a file")
    return path


def argument(metavar: str, text: str, *, panel: Panel = Panel.MODEL) -> Any:
    """Return an argument of a command, which has no name but a place."""
    return typer.Argument(metavar=metavar, help=text, rich_help_panel=panel.value)


LARGEST_BATCH = 10_000_000  # sequences; a plan for the lengths of data draws so many
POSITIONS_DEFAULT = f"{DEFAULT_SEQUENCE_LENGTH}, or the model's positions if they are fewer"
SHARDED_STATES = get_args(FullyShard)

Model = Annotated[
    str, argument("MODEL", "A folder with a Hugging Face model, a config.json, or a model id of the Hugging Face Hub.")
]
Data = Annotated[
    str,
    option(
        "--data",
        panel=Panel.MODEL,
        metavar="PATH",
        text="The training data: text files, JSON, CSV, Parquet, a folder of them, a saved datasets directory, or a YAML file "
        "that lists several.",
    ),
]
SequenceLength = Annotated[
    int | None,
    option(
        "--sequence-length", text="The longest sequence, in tokens.", panel=Panel.MODEL, metavar="N",
        default=POSITIONS_DEFAULT, least=2,
    ),
]  # fmt: skip
Images = Annotated[
    int | None,
    option(
        "--images", panel=Panel.ROWS, metavar="N", least=0, default="1 if the model is no language model by itself, else 0",
        text="Plan for rows with so many images each. Their tokens count in --sequence-length.",
    ),
]  # fmt: skip
GlobalBatch = Annotated[
    int,
    option(
        "--global-batch",
        text="Sequences, pairs or rated answers of one optimizer step, over all ranks.",
        panel=Panel.TRAINING, metavar="N", least=1, most=LARGEST_BATCH,
    ),
]  # fmt: skip
Epochs = Annotated[
    float, option("--epochs", text="How often to train on all the data.", panel=Panel.TRAINING, metavar="X", least=0.001)
]
Set = Annotated[
    list[str] | None,
    option("--set", text="Fix one field of the plan, such as precision=bf16.", panel=Panel.PLAN, metavar="FIELD=VALUE"),
]
GenerationSettings = Annotated[
    list[str] | None,
    option(
        "--set", panel=Panel.TEXT, metavar="NAME=VALUE",
        text="Set one option of generation by its name in transformers, such as temperature=0.7.",
    ),
]  # fmt: skip
Allow = Annotated[
    str,
    option(
        "--allow", panel=Panel.PLAN, metavar="NAME,NAME", default="none",
        text=f"Allow choices that change the mathematics. Training: {', '.join(changes_of_mathematics())}.",
    ),
]  # fmt: skip
LoraRank = Annotated[
    int | None,
    option(
        "--lora-rank", text="Train a LoRA adapter of this rank.", panel=Panel.TRAINING, metavar="N", default="none",
        least=1,
    ),
]  # fmt: skip
LoraAlpha = Annotated[
    int | None,
    option(
        "--lora-alpha", text="The scale of LoRA is alpha / rank.", panel=Panel.ADAPTER, metavar="N", default="twice the rank",
        least=1,
    ),
]  # fmt: skip
LoraDropout = Annotated[
    float,
    option(
        "--lora-dropout", text="The probability that LoRA drops an element of its input, from 0 to below 1.",
        panel=Panel.ADAPTER, metavar="X", least=0.0,
    ),
]  # fmt: skip
LoraTarget = Annotated[
    str,
    option(
        "--lora-target", panel=Panel.ADAPTER, metavar="NAME,NAME",
        text="The modules with LoRA, such as q_proj,v_proj, or a regular expression of their paths. all-linear: every linear "
        "layer except the head.",
    ),
]  # fmt: skip
LoraModulesToSave = Annotated[
    str,
    option(
        "--lora-modules-to-save", panel=Panel.ADAPTER, metavar="NAME,NAME", default="none",
        text="Modules to train whole beside LoRA, such as lm_head. The adapter holds a copy of each.",
    ),
]  # fmt: skip
LoraRslora = Annotated[bool, option("--lora-rslora", text="Use the scale alpha / sqrt(rank) (rsLoRA).", panel=Panel.ADAPTER)]
LoraDora = Annotated[
    bool,
    option("--lora-dora", text="Train the magnitude of each weight apart from its direction (DoRA).", panel=Panel.ADAPTER),
]
FourBits = Annotated[
    bool,
    option("--load-in-4bit", text="Store the frozen weights in 4 bits (QLoRA). Needs --lora-rank.", panel=Panel.TRAINING),
]
TextColumn = Annotated[
    str | None,
    option(
        "--text-column",
        text="The column of --data that holds the text.",
        panel=Panel.MODEL,
        metavar="NAME",
        default="input_ids, or text",
    ),
]
FromConfig = Annotated[
    bool, option("--from-config", text="Start from random weights, not from those of the model.", panel=Panel.MODEL)
]
MaxGradNorm = Annotated[
    float,
    option(
        "--max-grad-norm", text="Clip gradients to this norm. 0 does not clip.", panel=Panel.OPTIMIZATION, metavar="X", least=0.0
    ),
]
Engine = Annotated[
    str | None,
    option(
        "--engine", text="Use only this engine, such as torch, openvino or llamacpp.", panel=Panel.ENGINES, metavar="NAME",
        default="race all installed engines", check=_check_engine,
    ),
]  # fmt: skip
EnginePython = Annotated[
    Path | None,
    option(
        "--engine-python", text="The Python interpreter of an environment that has vLLM. With it, the engine vllm races, too.",
        panel=Panel.ENGINES, metavar="PATH", default="UPSHIFT_VLLM_PYTHON, or what upshift engines install made",
    ),
]  # fmt: skip
EngineSettings = Annotated[
    list[str] | None,
    option(
        "--engine-set", text="Fix an engine argument of vLLM, such as tensor_parallel_size=2.", panel=Panel.ENGINES,
        metavar="NAME=VALUE", default="Upshift's choice, or vLLM's",
    ),
]  # fmt: skip
WorkerReplicas = Annotated[
    int | None,
    option(
        "--replicas", text="Copies of the model that share the work, each on its part of the cores or on GPUs of its own.",
        panel=Panel.ENGINES, metavar="N", default="one for each GPU, or host of --ray, if the file is long", least=1,
    ),
]  # fmt: skip
TensorParallel = Annotated[
    int | None,
    option(
        "--tensor-parallel", text="GPUs, or groups of cores, that share each layer. Uses the engine torch.", panel=Panel.ENGINES,
        metavar="N", default="1: each device has the whole model", least=1,
    ),
]  # fmt: skip
OnRay = Annotated[
    bool, option("--ray", text="Run the copies on a Ray cluster: RAY_ADDRESS, or this machine.", panel=Panel.ENGINES)
]
Quality = Annotated[
    str,
    option(
        "--quality", panel=Panel.ENGINES, metavar="exact|X",
        text="How close results must be to transformers in fp32: exact, or the lowest cosine, such as 0.999.",
        check=_check_quality,
    ),
]  # fmt: skip
RaceSeconds = Annotated[
    float | None,
    option(
        "--race-seconds", text="The longest time of the race, in seconds.", panel=Panel.LIMITS, metavar="SECONDS",
        default="90, a tenth of a longer run, the time of a shorter one", least=ABOVE_ZERO,
    ),
]  # fmt: skip
MaxTtft = Annotated[
    float | None,
    option(
        "--max-ttft-ms", text="The longest time to the first token of an answer, in milliseconds.", panel=Panel.LIMITS,
        metavar="MS", default="no limit", least=ABOVE_ZERO,
    ),
]  # fmt: skip
MaxTpot = Annotated[
    float | None,
    option(
        "--max-tpot-ms", text="The longest mean time of each later token of an answer, in milliseconds.", panel=Panel.LIMITS,
        metavar="MS", default="no limit", least=ABOVE_ZERO,
    ),
]  # fmt: skip
MaxLatency = Annotated[
    float | None,
    option(
        "--max-latency-ms", text="The longest time to encode one batch, in milliseconds.", panel=Panel.LIMITS, metavar="MS",
        default="no limit", least=ABOVE_ZERO,
    ),
]  # fmt: skip
MaxMemory = Annotated[
    list[str] | None,
    option(
        "--max-memory", text="The memory that the model may take, such as cpu=8GiB. inspect also takes GPUs, such as 0=20GiB.",
        panel=Panel.LIMITS, metavar="DEVICE=SIZE", default="all free memory",
    ),
]  # fmt: skip
PromptLength = Annotated[
    int | None,
    option(
        "--prompt-length", text="The expected length of a prompt, in tokens.", panel=Panel.TEXT, metavar="N",
        default="chosen for the model", least=1,
    ),
]  # fmt: skip
OutputLength = Annotated[
    int | None,
    option(
        "--output-length", text="The expected length of an answer, in tokens.", panel=Panel.TEXT, metavar="N",
        default="chosen for the model", least=1,
    ),
]  # fmt: skip
ApiKeyFile = Annotated[
    Path | None,
    option(
        "--api-key-file", text="A file with API keys, one in each line.", panel=Panel.SERVER, metavar="PATH", default="no key"
    ),
]
DataFormat = Annotated[
    str | None,
    option(
        "--data-format", text="What the rows of --data are, where their columns allow several forms", panel=Panel.ROWS,
        metavar="NAME", default="as the columns say", choices=get_args(RowFormat),
    ),
]  # fmt: skip
LossOnOption = Annotated[
    str | None,
    option(
        "--loss-on",
        text="What is learned of chats and prompts: the assistant's turns, their contents, those of all turns, or all tokens",
        panel=Panel.ROWS, metavar="NAME", default="assistant", choices=get_args(LossOn),
    ),
]  # fmt: skip
ChatTemplateOption = Annotated[
    str | None,
    option(
        "--chat-template", panel=Panel.ROWS, metavar="FILE", default="the model's own",
        text="A Jinja file with the chat template that writes chats, and that is saved with the model; or its text; or a name, "
        "such as chatml, llama3 or qwen_25.",
    ),
]  # fmt: skip
SplitOption = Annotated[
    str | None,
    option(
        "--split", text="The split of --data to train on, or a range of its rows, such as train[:10%].", panel=Panel.ROWS,
        metavar="NAME", default="train",
    ),
]  # fmt: skip
ObjectiveOption = Annotated[
    str | None,
    option(
        "--objective", text="What is learned (dpo: preferences; kto: rated answers; reward: scores)",
        panel=Panel.TRAINING, metavar="NAME", default="the model's own", choices=get_args(ObjectiveName),
    ),
]  # fmt: skip
LongRowsOption = Annotated[
    str | None,
    option(
        "--long-rows", text="What happens to rows that are longer than a sequence", panel=Panel.ROWS, metavar="NAME",
        default="cut for chats, split for texts, drop for --objective reward", choices=get_args(LongRows),
    ),
]  # fmt: skip
EvalSizeOption = Annotated[
    float | None,
    option(
        "--eval-size", panel=Panel.ROWS, metavar="X", default="about 2 %, at most 64", least=0.0,
        text="How much of --data to hold out for evaluation: a share, such as 0.05, or a number of sequences. 0 holds none out.",
    ),
]  # fmt: skip
Overwrite = Annotated[bool, option("--overwrite", text="Replace an output that exists.", panel=Panel.OUTPUT)]
Html = Annotated[
    Path | None,
    option("--html", text="Also write an HTML page to this file. It works offline.", panel=Panel.OUTPUT, metavar="PATH"),
]
Json = Annotated[bool, option("--json", text="Print one JSON document to standard output.", panel=Panel.OUTPUT)]


def read_settings_of(option_name: str, pairs: Sequence[str], *, example: str) -> dict[str, Any]:
    """Return the values of a repeatable option (NAME=VALUE) by name. A value is JSON, or a text.

    Raise RequestError for a name without a value, or with two. ``example``: a pair, for the message."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise RequestError(f"{option_name} {pair!r} has no value; write NAME=VALUE, such as {example}")
        value: Any = text
        with suppress(ValueError):
            value = json.loads(text.lower() if text in ("True", "False") else text)
        if name in settings and settings[name] != value:
            earlier = f"{option_name} {name}={json.dumps(settings[name])}"
            raise RequestError(f"{earlier} and {option_name} {pair} say two things; leave out one of them")
        settings[name] = value
    return settings


def read_generation_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the options of generation of ``--set`` (NAME=VALUE) by name.

    Raise RequestError as ``read_settings_of`` does, and for greedy decoding with an option of sampling."""
    options = read_settings_of("--set", pairs, example="temperature=0.7")
    if options.get("do_sample") is False:
        unused = next((name for name in WARPERS if changes_sampling(name, options.get(name))), None)
        if unused is not None:
            raise RequestError(
                f"--set do_sample=False takes the most likely token each time, and --set {unused}={json.dumps(options[unused])} "
                "changes only what is sampled; leave out one of them"
            )
    return options


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Return the API keys of a file, one in each line. Raise RequestError if it cannot be read, or has no key."""
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read --api-key-file {path}: {error}; give a file with a key a line") from None
    if not keys:
        raise RequestError(f"--api-key-file {path} has no key; write a key a line")
    return keys


class LayoutFlag(NamedTuple):
    """An option that is short for ``--set field=value``."""

    field: str
    type: Any
    text: str
    choices: tuple[str, ...] = ()


Command = Callable[..., None]
LAYOUT_FLAGS = {  # how ranks share a job
    "nproc": LayoutFlag("num_processes", int, "Processes on each host. They share its cores or its GPUs."),
    "tensor_parallel": LayoutFlag("tensor_parallel", int, "Ranks that share the matrices of every layer."),
    "pipeline_parallel": LayoutFlag("pipeline_parallel", int, "Ranks that share the layers."),
    "context_parallel": LayoutFlag("context_parallel", int, "Ranks that share the tokens of every sequence."),
    "expert_parallel": LayoutFlag("expert_parallel", int, "Ranks that share the experts."),
    "fully_shard": LayoutFlag("fully_shard", str, "What data-parallel ranks divide (ZeRO 0 to 3)", SHARDED_STATES),
}


def with_layout_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the layout flags, too, and passes them to ``command`` as assignments of its ``--set``."""

    @wraps(command)
    def command_with_flags(**arguments: Any) -> None:
        command(**move_flags_to_set(arguments))

    flags = [parameter_of(name, _flag_annotation(name, flag), None) for name, flag in LAYOUT_FLAGS.items()]
    _replace_signature(command_with_flags, command, flags)
    return command_with_flags


def with_options_as(
    argument: str, parameters: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any] = dict
) -> Callable[[Command], Command]:
    """Return a decorator of commands. It adds these options, and passes what is made of their values by name in one argument."""
    names = [parameter.name for parameter in parameters]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def command_with_options(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in names}
            command(**arguments, **{argument: make(given)})

        _replace_signature(command_with_options, command, list(parameters), without=argument)
        return command_with_options

    return decorate


def parameter_of(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return the parameter of a command that makes an option."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


ADAPTER_PARAMETERS = (
    parameter_of("lora_rank", LoraRank, None),
    parameter_of("lora_alpha", LoraAlpha, None),
    parameter_of("lora_dropout", LoraDropout, 0.0),
    parameter_of("lora_target", LoraTarget, ALL_LINEAR),
    parameter_of("lora_modules_to_save", LoraModulesToSave, ""),
    parameter_of("lora_rslora", LoraRslora, False),
    parameter_of("lora_dora", LoraDora, False),
    parameter_of("load_in_4bit", FourBits, False),
)
with_adapter_options = with_options_as("adapter", ADAPTER_PARAMETERS, AdapterOptions.from_fields)
ROW_PARAMETERS = (
    parameter_of("text_column", TextColumn, None),
    parameter_of("data_format", DataFormat, None),
    parameter_of("loss_on", LossOnOption, None),
    parameter_of("chat_template", ChatTemplateOption, None),
    parameter_of("split", SplitOption, None),
    parameter_of("long_rows", LongRowsOption, None),
)
with_row_options = with_options_as("row_options", ROW_PARAMETERS)


def _replace_signature(
    target: Callable[..., None], command: Callable[..., None], added: list[inspect.Parameter], without: str | None = None
) -> None:
    """Give ``target`` the parameters of ``command`` but one, and the added ones, so that typer makes them options."""
    signature = inspect.signature(command, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=kind) for name, parameter in signature.parameters.items() if name != without]
    parameters += added
    target.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    target.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del target.__wrapped__  # type: ignore[attr-defined]


def move_flags_to_set(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a command's arguments by name, with each layout flag replaced by an assignment in ``set_``.

    Raise RequestError for a field that a flag and ``--set`` both fix."""
    flags = {name: arguments[name] for name in LAYOUT_FLAGS}
    others = {name: value for name, value in arguments.items() if name not in LAYOUT_FLAGS}
    assignments = arguments["set_"] or []
    return others | {"set_": [*assignments, *_assignments_of_flags(flags, arguments.get("on"), assignments)]}


def _flag_annotation(name: str, flag: LayoutFlag) -> Any:
    metavar = "NAME" if flag.choices else "N"
    least = None if flag.choices else 1
    declaration = option(
        _option_name(name), text=flag.text, panel=Panel.PROCESSES, metavar=metavar, default="the plan decides",
        choices=flag.choices, least=least,
    )  # fmt: skip
    return Annotated[flag.type | None, declaration]


def _option_name(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"


def _assignments_of_flags(flags: dict[str, Any], on: str | None, assignments: list[str]) -> list[str]:
    """Return ``field=value`` for each flag that is set. ``--nproc`` counts processes of one host; its field counts all."""
    texts = []
    for name, value in flags.items():
        if value is None:
            continue
        field = LAYOUT_FLAGS[name].field
        duplicate = next((text for text in assignments if text.partition("=")[0] == field), None)
        if duplicate is not None:
            raise RequestError(f"{_option_name(name)} {value} and --set {duplicate} fix the same field; give one of them")
        num_nodes = describe(on).num_nodes if name == "nproc" and on is not None else 1
        texts.append(f"{field}={value * num_nodes if name == 'nproc' else value}")
    return texts
