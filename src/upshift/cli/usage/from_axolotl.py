"""Read an Axolotl config (``--from-axolotl``) as options of ``upshift train``, and reject by name what has no option.

The keys are those of Axolotl 0.19. A key is an option here, or a choice that the plan makes and that changes no mathematics, or
it is rejected. Null is no value. Axolotl's defaults that differ from ours become options, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

from upshift.cli.usage.axolotl_keys import OPTION_OF, OTHER_KEYS, PLANNED, REMARKS, WITHOUT_EFFECT
from upshift.cli.usage.foreign_config import (
    ADAMW,
    ForeignConfig,
    LibraryKeys,
    add_data_sets,
    advice_on_objective,
    check_rejected,
    is_number,
    read_evaluation_size,
    read_optimizer,
    read_others,
    read_values,
)
from upshift.text import did_you_mean
from upshift.training.data.data_options import LearnedEnds
from upshift.training.data.rows.chat_templates import CHAT_TEMPLATES
from upshift.training.data.rows.instruction_prompts import PROMPTS
from upshift.training.data.rows.pair_prompts import PAIR_PROMPTS, PASSTHROUGH

KEYS = LibraryKeys(OPTION_OF, PLANNED, WITHOUT_EFFECT, OTHER_KEYS, REMARKS, planned_prefixes=("liger_", "cut_cross_entropy"))
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
TOKENIZERS_OWN = "tokenizer_default"
FALLBACK = f"{TOKENIZERS_OWN}_fallback_"
LOADERS = ("json", "csv", "parquet", "arrow", "text")  # of datasets: the path is then that of the files
ROW_FORMATS = {  # by the type of a data set
    "chat_template": "messages",
    "chat_template.argilla_chat": "preference",
    "completion": "text",
    "input_ids": "input_ids",
    "input_output": "segments",
}
PAIR_OBJECTIVES = ("dpo", "ipo")  # of rl: the second one is DPO with another loss
PAIR_TYPES = ("chat_template.default", "chat_template.argilla_chat", PASSTHROUGH)  # of rl: dpo
MESSAGE_FIELDS = {"messages": ("role", "content"), "conversations": ("from", "value")}
ROLES = {"human": "user", "gpt": "assistant"}  # that Axolotl renames by default
PLAIN_NAME = re.compile(r"[^{}.:!\[\]]+")  # of a column that may stand in braces
OWN_PROMPT = {  # the keys of a type of the user's own, with Axolotl's defaults (prompt_strategies/user_defined.py)
    "system_prompt": "", "field_system": "system", "field_instruction": "instruction", "field_input": "input",
    "field_output": "output", "format": "{instruction} {input} ", "no_input_format": "{instruction} ",
    "system_format": "{system}",
}  # fmt: skip


def read_axolotl(path: Path, typed: Collection[str]) -> ForeignConfig:
    """Return what is understood of a config. Raise RequestError that names every key that cannot be used.

    ``typed``: the keys of the options that the user typed.
    """
    config = ForeignConfig(str(path), read_values(path, option="--from-axolotl", library="Axolotl", needed="base_model"), typed)
    config.take_same(OPTION_OF)
    _read_batch(config)
    _read_chat_template(config)
    _read_data(config)
    _read_objective(config)
    _read_optimization(config)
    _read_long_rows(config)
    _read_events(config)
    _read_adapter(config)
    _read_precision(config)
    _read_trackers(config)
    _read_parts(config)
    read_others(config, KEYS)
    check_rejected(config)
    return config


def _read_batch(config: ForeignConfig) -> None:
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


def _read_chat_template(config: ForeignConfig) -> None:
    """Read the template that writes chats. That of a data set goes before that of the config, and a run here has one."""
    default = (config.take("chat_template", TOKENIZERS_OWN), config.take("chat_template_jinja"))
    chosen = [default] if default[0] != TOKENIZERS_OWN else []
    for source in ("datasets", "test_datasets"):
        entries = config.values.get(source)
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, Mapping) and str(entry.get("type")).startswith("chat_template"):
                own = (entry.get("chat_template"), entry.get("chat_template_jinja"))
                chosen.append(own if own[0] is not None else default)
    templates = list(dict.fromkeys((str(name), text) for name, text in chosen))
    if len(templates) > 1:
        names = " and ".join(name for name, _ in templates)
        config.reject(f"chat_template {names}", "a run has one chat template", replaced_by="chat-template")
    elif templates:
        _add_chat_template(config, *templates[0])


def _add_chat_template(config: ForeignConfig, name: str, text: Any) -> None:
    if name == "jinja" and text:
        config.add("chat-template", str(text), "chat_template_jinja")
    elif name in CHAT_TEMPLATES:
        config.add("chat-template", name, "chat_template")
    elif name.startswith(FALLBACK):
        config.notes.append(f"chat_template: the tokenizer's own; if it has none, add --chat-template {name[len(FALLBACK) :]}")
    elif name != TOKENIZERS_OWN:
        advice = (
            f"give {TOKENIZERS_OWN} for the model's own, Axolotl's file {name}.jinja with --chat-template FILE, or one of "
            f"{', '.join(CHAT_TEMPLATES)}"
        )
        config.reject(f"chat_template {name}", advice, replaced_by="chat-template")


def _read_data(config: ForeignConfig) -> None:
    """Read the data sets, and what is learned of them."""
    learns_all = bool(config.take("train_on_inputs"))
    training: list[dict[str, Any]] = []
    for source, key in (("datasets", "data"), ("test_datasets", "eval-data")):
        data_sets = config.take(source)
        if data_sets is None:
            continue
        if key in config.typed:
            config.notes.append(f"{source}: --{key} replaces it")
            continue
        if not isinstance(data_sets, list) or not data_sets or not all(isinstance(entry, Mapping) for entry in data_sets):
            config.reject(source, "it must be a list of data sets")
            continue
        entries = [_read_data_set(config, source, key, entry, learns_all=learns_all) for entry in data_sets]
        if key == "data":
            training = entries
        _add_data(config, key, entries, training, source)
    config.take("eot_tokens")
    read_evaluation_size(config, "val_set_size", "test_datasets")


def _add_data(
    config: ForeignConfig, key: str, entries: list[dict[str, Any]], training: list[dict[str, Any]], source: str
) -> None:
    """Add data sets. Evaluation data with the same rows as one data set of the training is its path alone."""
    if "data-format" in config.typed and len(entries) == 1:
        entries = [{name: value for name, value in entries[0].items() if name in ("path", "split")}]
    rest = [{name: value for name, value in entry.items() if name not in ("path", "split")} for entry in (*entries, *training)]
    is_same = len(entries) == len(training) == 1 and rest[0] == rest[1] and not {"columns", "template", "prompt"} & {*rest[0]}
    if key == "eval-data" and is_same and "split" not in entries[0]:
        config.add(key, entries[0]["path"], f"{source}.path")
        return
    add_data_sets(config, key, entries, source)
    has_answers = any(entry.get("format") not in ("text", "input_ids", "preference") for entry in rest[: len(entries)])
    if key == "data" and has_answers and "text_column" not in rest[0] and "excess_length_strategy" not in config.values:
        config.add("long-rows", "drop", "Axolotl's default")


def _read_data_set(
    config: ForeignConfig, source: str, key: str, values: Mapping[str, Any], *, learns_all: bool
) -> dict[str, Any]:
    """Return a data set with the keys of ours."""
    data_set = {str(name): value for name, value in values.items() if value is not None}
    files = data_set.pop("data_files", None)
    path = data_set.pop("path", None)
    data_set.pop("ds_type", None)  # the name of a file says its kind
    if files is not None:
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        if not isinstance(files, str) or path not in LOADERS:
            config.reject(f"{source}.data_files", f"give the path of one file or folder with --{key}", replaced_by=key)
        path = files
    entry: dict[str, Any] = {"path": str(path)}
    split = data_set.pop("split", "train")
    if split != "train":
        entry["split"] = str(split)
    entry |= _read_row_type(config, source, data_set, learns_all=learns_all)
    for name, value in data_set.items():
        if value is not False:
            config.reject(f"{source}.{name}", "not known here; prepare the rows so that it is not needed", replaced_by=key)
    return entry


def _read_row_type(config: ForeignConfig, source: str, data_set: dict[str, Any], *, learns_all: bool) -> dict[str, Any]:
    """Return what the rows are, and the template that they are written with."""
    kind = data_set.pop("type", "input_ids")
    for name in ("chat_template", "chat_template_jinja"):  # those of chats are read already; other rows have none
        data_set.pop(name, None)
    learned = _read_learned_contents(config, source, data_set, learns_all=learns_all)
    if config.values.get("rl") in PAIR_OBJECTIVES:
        return _read_pairs(config, source, kind, data_set)
    of_answers: dict[str, Any] = {"loss_on": "all"} if learns_all else {}
    if isinstance(kind, Mapping):
        return {"prompt": _read_own_prompt(config, source, kind), **of_answers}
    if str(kind) in PROMPTS:
        return {"template": f"axolotl/{kind}", **of_answers}
    row_format = ROW_FORMATS.get(str(kind))
    if row_format is None:
        advice = f"use chat_template, completion, input_output, a type of your own, or one of {', '.join(PROMPTS)}"
        config.reject(f"{source}.type {kind}", advice, replaced_by="data-format")
        return {}
    if row_format == "text":
        return {"text_column": data_set.pop("field", "text")}
    if row_format == "messages":
        if config.values.get("eot_tokens"):
            learned["turn_ends"] = [str(token) for token in config.values["eot_tokens"]]
        return _read_messages(data_set) | {"loss_on": "content" if learns_all else "assistant-content"} | learned
    return {"format": row_format, **(of_answers if row_format == "segments" else {})}


def _read_own_prompt(config: ForeignConfig, source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt of the user's own."""
    other = next((str(name) for name in values if name not in OWN_PROMPT), None)
    if other is not None:
        config.reject(f"{source}.type.{other}", f"unknown{did_you_mean(other, OWN_PROMPT)}")
    keys = OWN_PROMPT | {str(name): str(value) for name, value in values.items() if value is not None}
    columns = {name: value for name, value in keys.items() if name.startswith("field_")}
    for name, column in columns.items():
        if PLAIN_NAME.fullmatch(column) is None:
            config.reject(f"{source}.type.{name} {column}", "rename the column: no braces, brackets, points, colons or !")
    return {
        "instruction": f"{{{columns['field_instruction']}}}",
        "input": f"{{{columns['field_input']}}}",
        "output": f"{{{columns['field_output']}}}",
        "with_input": keys["format"],
        "without_input": keys["no_input_format"],
        "system": keys["system_format"],
        "system_column": columns["field_system"],
        "default_system": keys["system_prompt"],
    }


def _read_learned_contents(config: ForeignConfig, source: str, data_set: dict[str, Any], *, learns_all: bool) -> dict[str, Any]:
    """Return whose turns are learned, and which ends of turns, if these are others than by default."""
    names = data_set.pop("roles_to_train", None)
    ends = data_set.pop("train_on_eos", None) or "turn"
    ends_of_turns = data_set.pop("train_on_eot", None) or ends
    found: dict[str, Any] = {}
    if names is not None and not learns_all:
        if not isinstance(names, list) or not names:
            config.reject(f"{source}.roles_to_train", "give a list of roles, such as [assistant]")
            names = ["assistant"]
        sources = data_set.get("roles")
        renamed = ROLES if sources is None else {str(other): str(role) for role, others in sources.items() for other in others}
        roles = list(dict.fromkeys(renamed.get(str(name), str(name)) for name in names))
        found |= {} if roles == ["assistant"] else {"learned_roles": roles}
    if ends not in get_args(LearnedEnds):
        config.reject(f"{source}.train_on_eos {ends}", f"use {', '.join(get_args(LearnedEnds))}")
    elif ends_of_turns != ends:
        config.reject(f"{source}.train_on_eot {ends_of_turns}", f"give train_on_eos and train_on_eot one value; EOS has {ends}")
    elif ends != "turn":
        found["learned_ends"] = ends
    return found


def _read_messages(data_set: dict[str, Any]) -> dict[str, Any]:
    """Return the form of chats: OpenAI's or ShareGPT's, or the names of columns, fields and roles that differ from them."""
    column = str(data_set.pop("field_messages", "messages"))
    mappings = data_set.pop("message_property_mappings", {})
    names = {"role": "role", "content": "content"}
    if column == "conversations" and not mappings and "message_field_role" not in data_set:
        names = {"role": "from", "content": "value"}
    names |= {name: data_set.pop(f"message_field_{name}") for name in ("role", "content") if f"message_field_{name}" in data_set}
    names |= {str(ours): str(theirs) for ours, theirs in dict(mappings).items()}
    weight = data_set.pop("message_field_training", None)
    tools = data_set.pop("field_tools", None)
    sources = data_set.pop("roles", None)
    is_plain = weight is None and tools is None and sources is None
    if is_plain and tuple(names.values()) == MESSAGE_FIELDS.get(column):
        return {"format": column}
    if weight is not None:
        names["weight"] = str(weight)
    roles = ROLES if sources is None else {str(other): str(role) for role, others in sources.items() for other in others}
    columns = {"messages": column, "tools": tools or "tools"}
    return {"format": "messages", "columns": columns, "message_fields": names, "roles": dict(roles)}


def _read_pairs(config: ForeignConfig, source: str, kind: Any, data_set: dict[str, Any]) -> dict[str, Any]:
    """Return the form of pairs of answers. Reject a type that Axolotl does not have for them, or that has no form here."""
    name = f"{kind}.default" if isinstance(kind, str) and "." not in kind else str(kind)
    if name in PAIR_PROMPTS:
        return {"format": "preference", "template": f"axolotl/{name}"}
    if name not in PAIR_TYPES:
        config.reject(f"{source}.type {kind}", f"for pairs use {', '.join((*PAIR_TYPES, *PAIR_PROMPTS))}", replaced_by="data")
        return {}
    form = {"format": "preference"} | ({} if name == PASSTHROUGH else {"answer_ends": "eos"})
    if name == PASSTHROUGH and "chat-template" in (option.key for option in config.options):  # it would write them as turns
        return form | {"template": f"axolotl/{PASSTHROUGH}"}
    if name != "chat_template.default":
        return form
    columns = {name: str(data_set.pop(f"field_{name}", name)) for name in ("messages", "chosen", "rejected")}
    fields = {"role": "role", "content": "content"} | dict(data_set.pop("message_property_mappings", {}))
    roles = {str(other): str(role) for role, others in data_set.pop("roles", {}).items() for other in others}
    return form | {"columns": columns, "message_fields": fields, "roles": roles}


def _read_objective(config: ForeignConfig) -> None:
    objective = config.take("rl")
    if objective in PAIR_OBJECTIVES:
        config.add("objective", "dpo", "rl")
        _read_pair_losses(config, "ipo" if objective == "ipo" else None)
    elif objective is not None:
        config.reject(f"rl {objective}", advice_on_objective(str(objective)), replaced_by="objective")
    if config.take("reward_model"):
        config.add("objective", "reward", "reward_model")
    if config.take("num_labels", 1) != 1:
        config.reject("num_labels", "upshift train has no classifiers; use upshift.Trainer")


def _read_pair_losses(config: ForeignConfig, loss: str | None) -> None:
    """Read the losses of pairs. ``loss``: the one that the objective names."""
    names = config.take("dpo_loss_type", loss) or []
    names = [names] if isinstance(names, str) else names
    weights = config.take("dpo_loss_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        advice = f"there are {len(weights)} weights for {len(names)} losses; give one weight for each"
        config.reject("dpo_loss_weights", advice, replaced_by="dpo-loss")
    elif names:
        keys: tuple[str, ...] = ("dpo_loss_type", "dpo_loss_weights")
        sources = [key for key in keys if key in config.values]
        losses = [f"{name}={weight}" if weight != 1 else str(name) for name, weight in zip(names, weights, strict=True)]
        config.add("dpo-loss", ",".join(losses), *(sources or ["rl"]))


def _read_optimization(config: ForeignConfig) -> None:
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
    read_optimizer(config, "optimizer", str(config.take("optimizer", ADAMW[0])))


def _read_long_rows(config: ForeignConfig) -> None:
    """Read what happens to rows that are longer than a sequence."""
    strategy = config.take("excess_length_strategy")
    if strategy in ("drop", "truncate"):
        config.add("long-rows", "cut" if strategy == "truncate" else "drop", "excess_length_strategy")
    elif strategy is not None:
        config.reject(f"excess_length_strategy {strategy}", "add --long-rows cut or drop", replaced_by="long-rows")


def _read_events(config: ForeignConfig) -> None:
    """Read when the run evaluates and saves: after steps, after a share of the run, or so often in each epoch."""
    epochs = next((option.value for option in config.options if option.key == "epochs"), 1)
    evaluates = bool({"eval-data", "eval-size"} & {*config.typed}) or any(
        option.key == "eval-data" or (option.key == "eval-size" and option.value) for option in config.options
    )
    for verb, option in (("eval", "eval-steps"), ("save", "save-steps")):
        steps = config.take(f"{verb}_steps")
        if is_number(steps):
            config.add(option, steps, f"{verb}_steps")
        elif steps is not None:
            config.reject(f"{verb}_steps {steps}", f"add --{option} N, a number of steps", replaced_by=option)
        if config.take(f"{verb}_strategy", "steps") not in ("steps", "no"):
            config.reject(f"{verb}_strategy", f"add --{option} N", replaced_by=option)
        times = config.take(f"{verb}s_per_epoch")
        if times and option in config.typed:
            config.notes.append(f"{verb}s_per_epoch: --{option} replaces it")
        elif is_number(times) and times > 0 and is_number(epochs):
            share = 1 / (times * epochs)
            if share < 1 and (verb == "save" or evaluates):
                config.add(option, round(share, 6), f"{verb}s_per_epoch", "num_epochs")
            else:  # as in Axolotl
                config.notes.append(f"{verb}s_per_epoch: there is none before the end of the run")
        elif times:
            config.reject(f"{verb}s_per_epoch {times}", f"add --{option} N", replaced_by=option)


def _read_adapter(config: ForeignConfig) -> None:
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


def _read_precision(config: ForeignConfig) -> None:
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


def _read_trackers(config: ForeignConfig) -> None:
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


def _read_parts(config: ForeignConfig) -> None:
    """Read the keys that hold other things than a value: special tokens, a tokenizer and plugins."""
    tokens = config.take("special_tokens", {})
    if isinstance(tokens, Mapping) and any(value is not None and name != "pad_token" for name, value in tokens.items()):
        config.reject("special_tokens", "set them in the tokenizer, and save it beside the model")
    if config.take("tokenizer_config", config_model := _model_of(config)) != config_model:
        config.reject("tokenizer_config", "save that tokenizer beside the model")
    plugins = config.take("plugins", [])
    unknown = [name for name in plugins if not any(word in str(name).lower() for word in ("liger", "cut_cross_entropy"))]
    if unknown:
        config.reject(f"plugins {', '.join(map(str, unknown))}", "upshift train has no plugins")
    config.planned += ["plugins"] * bool(plugins and not unknown)


def _model_of(config: ForeignConfig) -> Any:
    return next((option.value for option in config.options if option.key == "model"), None)
