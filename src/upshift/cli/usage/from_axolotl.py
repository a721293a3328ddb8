"""Read an Axolotl config (``--from-axolotl``) as options of ``upshift train``, and reject by name what has no option.

The keys are those of Axolotl 0.19. A key is an option here, or a choice that the plan makes and that changes no mathematics, or
it is rejected. Null is no value. Axolotl's defaults that differ from ours become options, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
import yaml

from upshift.cli.usage.axolotl_keys import OFF_VALUES, OPTION_OF, OTHER_KEYS, PLANNED, REMARKS, WITHOUT_EFFECT
from upshift.cli.usage.help_page import CONFIG
from upshift.cli.usage.messages import WrongValue
from upshift.cli.usage.run_file import AXOLOTL, FileEntry, file_parameters, key_of, with_entries, without_option
from upshift.errors import RequestError
from upshift.planning.optimizers import ALIASES, optimizers
from upshift.text import did_you_mean

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")  # one computation, of which the plan takes the fastest
DEFAULT_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
TRACKERS = {
    "use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow", "use_tensorboard": "tensorboard",
    "use_trackio": "trackio",
}  # fmt: skip
TRACKER_VARIABLES = {  # read by the trackers themselves
    "wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "wandb_name": "WANDB_NAME", "wandb_run_id": "WANDB_RUN_ID",
    "wandb_mode": "WANDB_MODE", "mlflow_tracking_uri": "MLFLOW_TRACKING_URI", "mlflow_experiment_name": "MLFLOW_EXPERIMENT_NAME",
    "mlflow_run_name": "MLFLOW_RUN_NAME",
}  # fmt: skip
LOADERS = ("json", "csv", "parquet", "arrow", "text")  # of datasets: the path is then that of the files
ROW_FORMATS = {  # by the type of a data set
    "chat_template": "messages", "chat_template.argilla_chat": "preference", "completion": "text", "input_ids": "input_ids",
}  # fmt: skip
MESSAGE_FIELDS = {"messages": ("role", "content"), "conversations": ("from", "value")}


@dataclass(frozen=True)
class Understood:
    """One option, as a key of a run file with its value, and the keys of Axolotl that it was read from."""

    key: str
    value: Any
    sources: tuple[str, ...]


@dataclass
class AxolotlConfig:
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


def with_axolotl_words(
    command: Any, context: Any, words: Sequence[str], values: Mapping[str, Any], *, quiet: bool = False
) -> list[str]:
    """Return the user's words, and before them those of an Axolotl config. Print what is understood to standard error.

    ``quiet``: print nothing. The other arguments are those of ``run_file.with_file_words``. Raise RequestError that names every
    key that cannot be used.
    """
    if values.get(CONFIG):
        raise RequestError("--from-axolotl and --config both give options; write one file with --from-axolotl PATH --init PATH")
    path = Path(values[AXOLOTL])
    typed = {key_of(parameter) for parameter in file_parameters(command) if values.get(parameter.name) is not None}
    config = read_axolotl(path, typed)
    if not quiet:
        typer.echo("\n".join(describe(config)), err=True)
    root: Any = yaml.compose(yaml.safe_dump({option.key: option.value for option in config.options}), Loader=yaml.SafeLoader)
    entries = [FileEntry(str(key.value), value) for key, value in root.value]
    return with_entries(command, context, words, values, entries, str(path))


def expand_axolotl(command: Any, context: Any, words: Sequence[str]) -> list[str]:
    """Return the words with the options of the config of ``--from-axolotl`` in place of its name. Print nothing."""
    values = command.make_parser(context).parse_args(list(words))[0]
    if not values.get(AXOLOTL):
        return list(words)
    return with_axolotl_words(command, context, without_option(words, "--from-axolotl"), values, quiet=True)


def read_axolotl(path: Path, typed: Collection[str]) -> AxolotlConfig:
    """Return what is understood of a config. Raise RequestError that names every key that cannot be used.

    ``typed``: the keys of the options that the user typed.
    """
    config = AxolotlConfig(str(path), _read_values(path), typed)
    _read_same(config)
    _read_batch(config)
    _read_data(config)
    _read_objective(config)
    _read_optimization(config)
    _read_long_rows(config)
    _read_events(config)
    _read_adapter(config)
    _read_precision(config)
    _read_trackers(config)
    _read_others(config)
    if config.rejected:
        number = "1 key has" if len(config.rejected) == 1 else f"{len(config.rejected)} keys have"
        raise RequestError(
            f"{path}: {number} no option of upshift train: {'; '.join(config.rejected)}. Remove them, or follow the advice"
        )
    return config


def describe(config: AxolotlConfig) -> list[str]:
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


def _read_values(path: Path) -> dict[str, Any]:
    """Return the keys with a value. Raise RequestError if the file cannot be read or is no mapping."""
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise WrongValue(f"--from-axolotl {path} {kind}; give the path of an Axolotl config")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"--from-axolotl {path} cannot be read: {error.strerror}; give the path of an Axolotl config"
        ) from None
    except UnicodeDecodeError:
        raise RequestError(f"--from-axolotl {path} is not UTF-8 text; give the path of an Axolotl config") from None
    except yaml.YAMLError as error:
        raise RequestError(f"--from-axolotl {path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(document, Mapping) or "base_model" not in document:
        raise RequestError(
            f"--from-axolotl {path} is no Axolotl config, because it has no key base_model; for our own use --config"
        )
    return {str(key): value for key, value in document.items() if value is not None}


def _read_same(config: AxolotlConfig) -> None:
    """Read the keys with an option of the same meaning."""
    for source, key in OPTION_OF.items():
        value = config.take(source)
        if value is not None and value is not False:
            config.add(key, value, source)


def _read_batch(config: AxolotlConfig) -> None:
    """Read the size of the batch. Axolotl's default for both factors is 1."""
    micro_batch = config.take("micro_batch_size", 1)
    accumulation = config.take("gradient_accumulation_steps", 1)
    if not all(isinstance(factor, int) and factor > 0 for factor in (micro_batch, accumulation)):
        config.reject("micro_batch_size, gradient_accumulation_steps", "they must be 1 or more", replaced_by="global-batch")
        return
    config.add("global-batch", micro_batch * accumulation, "micro_batch_size", "gradient_accumulation_steps")
    config.notes.append("--global-batch is that of one GPU: Axolotl multiplies it by the number of GPUs")
    if config.values.get("sample_packing"):
        config.notes.append("with sample_packing a row of Axolotl's batch holds several texts; --global-batch counts texts")


def _read_data(config: AxolotlConfig) -> None:
    """Read the data sets, and what is learned of them."""
    for source, key in (("datasets", "data"), ("test_datasets", "eval-data")):
        datasets = config.take(source)
        if datasets is None:
            continue
        if not isinstance(datasets, list) or len(datasets) != 1 or not isinstance(datasets[0], Mapping):
            config.reject(
                source, f"give one data set; put the files of several into one folder, and use --{key}", replaced_by=key
            )
        elif key in config.typed:
            config.notes.append(f"{source}: --{key} replaces it")
        else:
            _read_data_set(config, source, key, {name: value for name, value in datasets[0].items() if value is not None})
    if config.take("train_on_inputs"):
        config.add("loss-on", "all", "train_on_inputs")
    share = config.take("val_set_size")
    if share is not None:
        config.notes.append("val_set_size: without --eval-data, about 2 % of the rows are held out")


def _read_data_set(config: AxolotlConfig, source: str, key: str, data_set: dict[str, Any]) -> None:
    files = data_set.pop("data_files", None)
    path = data_set.pop("path", None)
    data_set.pop("ds_type", None)  # the name of a file says its kind
    if files is not None:
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        if not isinstance(files, str) or path not in LOADERS:
            config.reject(f"{source}.data_files", f"give the path of one file or folder with --{key}", replaced_by=key)
            return
        path = files
    config.add(key, path, f"{source}.path")
    if data_set.pop("split", "train") != "train":
        config.reject(f"{source}.split", "the split train is read; save another one as files of its own", replaced_by=key)
    _read_row_type(config, source, data_set)
    for name, value in data_set.items():
        if value is not False:
            config.reject(f"{source}.{name}", "not known here; prepare the rows so that it is not needed", replaced_by=key)


def _read_row_type(config: AxolotlConfig, source: str, data_set: dict[str, Any]) -> None:
    """Read what the rows are. Rows whose prompt Axolotl writes by a template of its own are rejected."""
    kind = data_set.pop("type", "input_ids")
    _check_learned_turns(config, source, data_set)
    row_format = ROW_FORMATS.get(str(kind))
    if row_format is None:
        advice = "write the rows as messages, as prompt and completion, or as prompt, chosen and rejected"
        if str(kind) == "alpaca":
            advice = "Axolotl writes '### Instruction:'; add --data-format alpaca to use the chat template instead"
        config.reject(f"{source}.type {kind if isinstance(kind, str) else 'of your own'}", advice, replaced_by="data-format")
        return
    if row_format == "messages":
        row_format = _read_message_fields(config, source, data_set)
    column = data_set.pop("field", "text") if row_format == "text" else None
    if source != "datasets" or row_format is None:
        return
    if column is not None:
        config.add("text-column", column, "datasets.field")
    else:
        config.add("data-format", row_format, "datasets.type")
    if row_format in MESSAGE_FIELDS and "excess_length_strategy" not in config.values:
        config.add("long-rows", "drop", "Axolotl's default")


def _check_learned_turns(config: AxolotlConfig, source: str, data_set: dict[str, Any]) -> None:
    """Reject other turns than the assistant's, and a template that is not the tokenizer's."""
    if data_set.pop("roles_to_train", ["assistant"]) not in (["assistant"], ["gpt"]):
        config.reject(f"{source}.roles_to_train", "the assistant's turns are learned, or all tokens with --loss-on all")
    if data_set.pop("train_on_eos", "turn") != "turn":
        config.reject(f"{source}.train_on_eos", "the end of each learned turn is learned: turn")
    if data_set.pop("chat_template", "tokenizer_default") != "tokenizer_default":
        config.reject(f"{source}.chat_template", "save the template in the tokenizer")


def _read_message_fields(config: AxolotlConfig, source: str, data_set: dict[str, Any]) -> str | None:
    """Return the form of chats: OpenAI's or ShareGPT's, by the names of their columns and fields."""
    column = str(data_set.pop("field_messages", "messages"))
    mappings = data_set.pop("message_property_mappings", {})
    names = dict(zip(("role", "content"), MESSAGE_FIELDS.get(column, ("role", "content")), strict=True))
    names |= {name: data_set.pop(f"message_field_{name}") for name in ("role", "content") if f"message_field_{name}" in data_set}
    names |= dict(mappings) if isinstance(mappings, Mapping) else {}
    if column not in MESSAGE_FIELDS or tuple(names.values()) not in MESSAGE_FIELDS.values():
        advice = "rename them: messages with role and content, or conversations with from and value"
        config.reject(f"{source}.field_messages {column}", advice, replaced_by="data")
        return None
    return column


def _read_objective(config: AxolotlConfig) -> None:
    objective = config.take("rl")
    if objective == "dpo":
        config.add("objective", "dpo", "rl")
    elif objective is not None:
        config.reject(f"rl {objective}", "only dpo is known", replaced_by="objective")
    if config.take("reward_model"):
        config.add("objective", "reward", "reward_model")
    if config.take("num_labels", 1) != 1:
        config.reject("num_labels", "upshift train has no classifiers; use upshift.Trainer")


def _read_optimization(config: AxolotlConfig) -> None:
    """Read the optimizer and the schedule. Axolotl's default schedule is a cosine."""
    scheduler = config.take("lr_scheduler", "cosine")
    if scheduler in ("one_cycle", "rex", "log_sweep", "jagged"):
        config.reject(f"lr_scheduler {scheduler}", "use --lr-scheduler-type cosine", replaced_by="lr-scheduler-type")
    else:
        config.add("lr-scheduler-type", scheduler, "lr_scheduler")
    warmup = {option.key for option in config.options} & {"warmup-steps", "warmup-ratio"}
    if len(warmup) == 2:  # Axolotl then takes the steps
        config.options = [option for option in config.options if option.key != "warmup-ratio"]
    elif not warmup and not {"warmup-steps", "warmup-ratio"} & {*config.typed}:
        config.add("warmup-ratio", 0.03, "Axolotl's default, there at most 100 steps")
    for name, usual in DEFAULT_BETAS.items():
        value = config.take(name, usual)
        if not math.isclose(float(value), usual):
            config.reject(f"{name} {value}", f"it is {usual:g} here; upshift.train takes it in its arguments")
    optimizer = str(config.take("optimizer", ADAMW[0]))
    if optimizer in ADAMW:
        config.planned.append("optimizer")
    elif optimizer in optimizers() or optimizer in ALIASES:
        config.add("set", [f"optim={optimizer}"], "optimizer")
        allow = optimizers()[ALIASES.get(optimizer, optimizer)].allow
        if allow is not None:
            config.add("allow", [allow], "optimizer")
    else:
        config.reject(f"optimizer {optimizer}", f"use one of {', '.join(optimizers())}")


def _read_long_rows(config: AxolotlConfig) -> None:
    """Read what happens to rows that are longer than a sequence."""
    strategy = config.take("excess_length_strategy")
    if strategy in ("drop", "truncate"):
        config.add("long-rows", "cut" if strategy == "truncate" else "drop", "excess_length_strategy")
    elif strategy is not None:
        config.reject(f"excess_length_strategy {strategy}", "add --long-rows cut or drop", replaced_by="long-rows")


def _read_events(config: AxolotlConfig) -> None:
    """Read when the run evaluates and saves. Only numbers of steps are known."""
    for verb, option in (("eval", "eval-steps"), ("save", "save-steps")):
        steps = config.take(f"{verb}_steps")
        if isinstance(steps, int) and not isinstance(steps, bool):
            config.add(option, steps, f"{verb}_steps")
        elif steps is not None:
            config.reject(f"{verb}_steps {steps}", f"add --{option} N, a number of steps", replaced_by=option)
        if config.take(f"{verb}_strategy", "steps") not in ("steps", "no"):
            config.reject(f"{verb}_strategy", f"add --{option} N", replaced_by=option)
        if config.take(f"{verb}s_per_epoch"):
            config.reject(f"{verb}s_per_epoch", f"add --{option} N", replaced_by=option)


def _read_adapter(config: AxolotlConfig) -> None:
    adapter = config.take("adapter") or None
    four_bits = bool(config.take("load_in_4bit")) or adapter == "qlora"
    if adapter not in (None, "lora", "qlora"):
        config.reject(f"adapter {adapter}", "use lora or qlora")
    keys = {
        "lora_r": "lora-rank",
        "lora_alpha": "lora-alpha",
        "lora_dropout": "lora-dropout",
        "lora_target_modules": "lora-target",
        "lora_modules_to_save": "lora-modules-to-save",
        "peft_use_dora": "lora-dora",
        "peft_use_rslora": "lora-rslora",
    }
    linear = config.take("lora_target_linear")
    if adapter is not None and linear:
        config.add("lora-target", "all-linear", "lora_target_linear")
    elif adapter is not None and "lora_target_modules" not in config.values:
        config.reject("lora_target_modules", "it is missing; add --lora-target", replaced_by="lora-target")
    for source, key in keys.items():
        value = config.take(source)
        if value is None or value is False or (source == "lora_target_modules" and linear):
            continue
        if adapter is None:
            config.notes.append(f"{source}: without adapter it has no effect")
        else:
            config.add(key, value, source)
    if adapter is not None and four_bits:
        config.add("load-in-4bit", True, "adapter" if adapter == "qlora" else "load_in_4bit")
    elif four_bits:
        config.reject("load_in_4bit", "weights in 4 bits need adapter: qlora")


def _read_precision(config: AxolotlConfig) -> None:
    """Read the precision. ``auto`` leaves it to the plan."""
    for source in ("bf16", "fp16", "fp8"):
        value = config.take(source)
        if value is True or value == "true":
            config.add("set", [f"precision={source}"], source)
            if source == "fp8":
                config.add("allow", ["fp8"], source)
        elif value in (False, "auto", "false"):
            config.planned.append(source)
        elif value is not None:
            config.reject(f"{source} {value}", "give true, false or auto", replaced_by="set")
    for source in ("bfloat16", "float16"):
        if config.take(source):
            config.reject(source, "add --set precision=bf16-weights --allow bf16-weights", replaced_by="set")


def _read_trackers(config: AxolotlConfig) -> None:
    trackers: dict[str, str] = {}
    for source, tracker in TRACKERS.items():
        if config.values.get(source):
            trackers.setdefault(tracker, source)
        if source not in TRACKER_VARIABLES:
            config.take(source)
    if trackers:
        config.add("report-to", list(trackers), *trackers.values())
    for source, variable in TRACKER_VARIABLES.items():
        value = config.take(source)
        if value:
            config.notes.append(f"{source}: set {variable}={value}, which the tracker reads itself")


def _read_others(config: AxolotlConfig) -> None:
    """Read the remaining keys: those of the plan, those without an effect here, and those to reject."""
    tokens = config.take("special_tokens", {})
    if isinstance(tokens, Mapping) and any(value is not None and name != "pad_token" for name, value in tokens.items()):
        config.reject("special_tokens", "set them in the tokenizer, and save it beside the model")
    if config.take("tokenizer_config", config_model := _model_of(config)) != config_model:
        config.reject("tokenizer_config", "save that tokenizer beside the model")
    if not str(config.take("chat_template", "tokenizer_default")).startswith("tokenizer_default"):
        config.reject("chat_template", "save the template in the tokenizer")
    plugins = config.take("plugins", [])
    unknown = [name for name in plugins if not any(word in str(name).lower() for word in ("liger", "cut_cross_entropy"))]
    if unknown:
        config.reject(f"plugins {', '.join(map(str, unknown))}", "upshift train has no plugins")
    config.planned += ["plugins"] * bool(plugins and not unknown)
    for name, value in config.values.items():
        if name in PLANNED or name.startswith(("liger_", "cut_cross_entropy")):
            config.planned.append(name)
        elif name in WITHOUT_EFFECT or (name in OTHER_KEYS and _is_off(value)):
            continue
        elif name in OTHER_KEYS:
            config.reject(name, REMARKS.get(name, "not known here"))
        else:
            known = [*OPTION_OF, *PLANNED, *WITHOUT_EFFECT, *OTHER_KEYS]
            config.reject(name, f"unknown{did_you_mean(name, known)}")


def _model_of(config: AxolotlConfig) -> Any:
    return next((option.value for option in config.options if option.key == "model"), None)


def _is_off(value: Any) -> bool:
    """Return whether a value turns a feature off."""
    return value in OFF_VALUES or (isinstance(value, Sequence | Mapping) and not value)
