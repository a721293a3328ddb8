"""Read a LLaMA-Factory config (``--from-llama-factory``) as options of ``upshift train``.

The data sets are those of its dataset_info.json. The keys are those of LLaMA-Factory 0.9.5. Its defaults that differ from ours
become options, too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args

from upshift.cli.usage.foreign_config import (
    ADAMW,
    ForeignConfig,
    LibraryKeys,
    add_data_sets,
    advice_on_objective,
    check_rejected,
    is_number,
    is_off,
    read_evaluation_size,
    read_optimizer,
    read_others,
    read_values,
)
from upshift.cli.usage.llama_factory_keys import OPTION_OF, OTHER_KEYS, PLANNED, REMARKS, WITHOUT_EFFECT
from upshift.text import did_you_mean
from upshift.training.arguments import Tracker
from upshift.training.data.rows.data_set import LLAMA_FACTORY
from upshift.training.data.rows.llama_factory_templates import TEMPLATES

READ_BEFORE = ("dataset", "template", "cutoff_len", "finetuning_type")
KEYS = LibraryKeys(OPTION_OF, PLANNED, WITHOUT_EFFECT, OTHER_KEYS, REMARKS, READ_BEFORE)
INFO_FILE = "dataset_info.json"
LOSSES = ("sigmoid", "hinge", "ipo", "simpo", "orpo")  # values of pref_loss with the same formula here
OBJECTIVES = {"sft": None, "pt": None, "dpo": "dpo", "rm": "reward"}
COLUMNS = {  # of rows in the form of Alpaca: the keys of dataset_info.json and our names
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "tools": "tools",
}
DEFAULT_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
DEFAULT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
SAME_TEMPLATES = ("chatml",)  # write the text that --chat-template writes by this name
USED_KEYS = ("file_name", "formatting", "ranking", "split", "columns", "tags")  # of a data set in dataset_info.json


def read_llama_factory(path: Path, typed: Collection[str]) -> ForeignConfig:
    """Return what is understood of a config. Raise RequestError that names every key that cannot be used.

    ``typed``: the keys of the options that the user typed.
    """
    values = read_values(path, option="--from-llama-factory", library="LLaMA-Factory", needed="model_name_or_path")
    config = ForeignConfig(str(path), values, typed)
    config.take_same(OPTION_OF)
    stage = _read_stage(config)
    _read_batch_and_length(config)
    _read_data(config, stage)
    read_optimizer(config, "optim", str(config.take("optim", ADAMW[0])))
    _read_events(config)
    _read_adapter(config)
    _read_precision(config)
    _read_trackers(config)
    read_others(config, KEYS)
    check_rejected(config)
    return config


def _read_stage(config: ForeignConfig) -> str:
    """Return the stage, and read what belongs to it."""
    stage = str(config.take("stage", "sft"))
    if stage not in OBJECTIVES:
        advice = f"use one of {', '.join(OBJECTIVES)}; {advice_on_objective(stage)}"
        config.reject(f"stage {stage}", advice, replaced_by="objective")
    elif OBJECTIVES[stage] is not None:
        config.add("objective", OBJECTIVES[stage], "stage")
    if config.values.get("do_train") is False:
        config.reject("do_train", "upshift train trains; leave it out")
    beta = config.take("pref_beta")
    if stage == "dpo" and beta is not None:
        config.add("dpo-beta", beta, "pref_beta")
    _read_pair_loss(config)
    if config.take("pref_ftx"):
        config.reject("pref_ftx", "the loss of DPO alone is known")
    return stage


def _read_pair_loss(config: ForeignConfig) -> None:
    loss = str(config.take("pref_loss", "sigmoid"))
    if loss not in LOSSES:
        config.reject(f"pref_loss {loss}", f"use one of {', '.join(LOSSES)}", replaced_by="dpo-loss")
    elif loss != LOSSES[0]:
        config.add("dpo-loss", loss, "pref_loss")
    gamma = config.take("simpo_gamma")
    if gamma is not None and loss != "simpo":
        config.reject("simpo_gamma", f"it is for pref_loss simpo, not {loss}", replaced_by="simpo-gamma")
    elif gamma is not None:
        config.add("simpo-gamma", gamma, "simpo_gamma")
    if loss == "orpo":
        config.notes.append("the likelihood term of orpo is a mean over all tokens; LLaMA-Factory's is a mean over the answers")


def _read_batch_and_length(config: ForeignConfig) -> None:
    """Read sizes whose defaults are others here."""
    micro_batch = config.take("per_device_train_batch_size", 8)
    accumulation = config.take("gradient_accumulation_steps", 1)
    if not all(isinstance(factor, int) and factor > 0 for factor in (micro_batch, accumulation)):
        config.reject(
            "per_device_train_batch_size, gradient_accumulation_steps", "they must be 1 or more", replaced_by="global-batch"
        )
    else:
        config.add("global-batch", micro_batch * accumulation, "per_device_train_batch_size", "gradient_accumulation_steps")
        config.notes.append("--global-batch is that of one GPU: LLaMA-Factory multiplies it by the number of GPUs")
    for source, key, default in (("cutoff_len", "sequence-length", 2048), ("num_train_epochs", "epochs", 3)):
        value = config.take(source)
        if value is not None:
            config.add(key, value, source)
        elif key != "epochs" or not {"max-steps"} & {option.key for option in config.options}:
            config.add(key, default, "LLaMA-Factory's default")


def _read_data(config: ForeignConfig, stage: str) -> None:
    """Read the data sets of dataset_info.json by their names."""
    folder = config.take("dataset_dir", "data")
    template = _read_template(config)
    strategy = config.take("mix_strategy", "concat")
    if strategy != "concat":
        config.reject(f"mix_strategy {strategy}", "not known here; the data sets are read one after another")
    if config.take("mask_history"):
        template["learned_turns"] = "last"
    if config.take("train_on_prompt"):
        template["loss_on"] = "all"
    max_samples = config.take("max_samples")
    if max_samples is not None:
        template["split"] = f"[:{max_samples}]"
    for source, key in (("dataset", "data"), ("eval_dataset", "eval-data")):
        names = config.take(source)
        if names is None:
            continue
        if key in config.typed:
            config.notes.append(f"{source}: --{key} replaces it")
            continue
        information = _read_information(config, folder)
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        data_sets = [_read_data_set(config, str(name), information, Path(str(folder)), stage, template) for name in listed]
        add_data_sets(config, key, [data_set for data_set in data_sets if data_set], source)
    if stage == "rm":
        config.add("long-rows", "cut", "LLaMA-Factory's default")
    read_evaluation_size(config, "val_size", "eval_dataset")


def _read_template(config: ForeignConfig) -> dict[str, Any]:
    """Return the template of all data sets, with what it is to write."""
    name = config.take("template")
    system = config.take("default_system")
    thinks = config.take("enable_thinking", True)
    if name is None:
        config.notes.append("template: without it, rows are written by the tokenizer's chat template")
        if system is not None:
            config.reject("default_system", "it needs a template; write the system message into the rows")
        return {}
    if name not in TEMPLATES:
        config.reject(f"template {name}", f"use one of {', '.join(TEMPLATES)}, or remove it to use the chat template")
        return {}
    chosen: dict[str, Any] = {"template": f"{LLAMA_FACTORY}{name}"}
    if name in SAME_TEMPLATES:
        config.add("chat-template", name, "template")
    if system is not None:
        chosen["system"] = str(system)
    if TEMPLATES[name].thoughts is not None and not thinks:
        chosen["thinks"] = False
    return chosen


def _read_information(config: ForeignConfig, folder: Any) -> Mapping[str, Any]:
    """Return the contents of dataset_info.json. Reject the folder if there is none."""
    path = Path(str(folder)) / INFO_FILE
    try:
        information = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        config.reject("dataset_dir", f"{path} cannot be read: {reason}; give the folder with {INFO_FILE}", replaced_by="data")
        return {}
    return information if isinstance(information, Mapping) else {}


def _read_data_set(
    config: ForeignConfig,
    name: str,
    information: Mapping[str, Any],
    folder: Path,
    stage: str,
    template: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return a data set with the keys of ours, or None if it cannot be used."""
    values = information.get(name)
    if not isinstance(values, Mapping):
        if information:
            config.reject(f"dataset {name}", f"it is not in {folder / INFO_FILE}{did_you_mean(name, information)}")
        return None
    problem = _problem_of(values, stage)
    if problem is not None:
        config.reject(f"dataset {name}", problem, replaced_by="data")
        return None
    path = {"path": str(folder / str(values["file_name"]))}
    split = str(values.get("split", "train")) + str(template.get("split", ""))
    if split != "train":
        path["split"] = split
    columns = {str(key): value for key, value in values.get("columns", DEFAULT_COLUMNS).items() if value is not None}
    if stage == "pt":
        return path | {"text_column": columns["prompt"]}
    shared = {key: value for key, value in template.items() if key != "split"}
    pairs = {key: columns.get(key, key) for key in ("chosen", "rejected")} if values.get("ranking") else {}
    row_format = "preference" if pairs else None
    if values.get("formatting", "alpaca") == "alpaca":
        names = {
            ours: columns[theirs] for theirs, ours in COLUMNS.items() if theirs in columns and not (pairs and ours == "output")
        }
        return path | {"format": row_format or "alpaca", "columns": names | pairs} | shared
    tags = {str(key): value for key, value in values.get("tags", DEFAULT_TAGS).items() if value is not None}
    names = {ours: columns[ours] for ours in ("messages", "system", "tools") if ours in columns}
    fields = {"role": tags.get("role_tag", "from"), "content": tags.get("content_tag", "value")}
    roles = {str(tags[tag]): role for tag, role in ROLES.items() if tag in tags}
    form = {"format": row_format or "messages", "columns": names | pairs, "message_fields": fields, "roles": roles}
    return path | form | shared


def _problem_of(values: Mapping[str, Any], stage: str) -> str | None:
    """Return what cannot be used of a data set of dataset_info.json, with advice, or None."""
    formatting = values.get("formatting", "alpaca")
    columns = values.get("columns", DEFAULT_COLUMNS)
    media = next((key for key in ("images", "videos", "audios", "kto_tag") if columns.get(key)), None)
    other = next((str(key) for key, value in values.items() if key not in USED_KEYS and not is_off(value)), None)
    needs = "prompt" if formatting == "alpaca" else "messages"
    if "file_name" not in values:
        return "it is not a file; download it, and give its file_name"
    if formatting not in ("alpaca", "sharegpt", "openai"):
        return f"formatting {formatting} is not known; use alpaca, sharegpt or openai"
    if bool(values.get("ranking")) != (stage in ("rm", "dpo")):
        return f"ranking {bool(values.get('ranking'))} is not for stage {stage}"
    if stage == "pt" and formatting != "alpaca":
        return "texts for stage pt are a column prompt; remove formatting"
    if media is not None:
        return f"the column {media} is not read; only text is trained on"
    if needs not in columns:
        return f"its columns have no {needs}, which names the column of the rows"
    return None if other is None else f"the key {other} is not known here; prepare the rows so that it is not needed"


def _read_events(config: ForeignConfig) -> None:
    """Read when the run evaluates and saves. transformers saves every 500 steps by default."""
    for verb, default_strategy in (("eval", "no"), ("save", "steps")):
        strategy = config.take(f"{verb}_strategy", default_strategy)
        steps = config.take(f"{verb}_steps", 500 if verb == "save" else None)
        option = f"{verb}-steps"
        if strategy == "no" or (verb == "eval" and steps is None and strategy == "steps"):
            continue
        if strategy != "steps" or not is_number(steps):
            config.reject(f"{verb}_strategy {strategy}, {verb}_steps {steps}", f"add --{option} N", replaced_by=option)
        else:
            config.add(option, steps, f"{verb}_steps")
    if config.take("resume_from_checkpoint"):
        config.add("resume", True, "resume_from_checkpoint")


def _read_adapter(config: ForeignConfig) -> None:
    """Read the adapter. LLaMA-Factory trains one of rank 8 on all linear layers by default."""
    kind = config.take("finetuning_type", "lora")
    if kind not in ("lora", "full"):
        config.reject(f"finetuning_type {kind}", "use lora or full")
    rank = config.take("lora_rank", 8)
    target = str(config.take("lora_target", "all"))
    keys = {
        "lora_alpha": "lora-alpha",
        "lora_dropout": "lora-dropout",
        "additional_target": "lora-modules-to-save",
        "use_rslora": "lora-rslora",
        "use_dora": "lora-dora",
    }
    options = {key: (config.take(source), source) for source, key in keys.items()}
    bits = config.take("quantization_bit")
    if kind == "lora":
        config.add("lora-rank", rank, "lora_rank")
        config.add("lora-target", "all-linear" if target == "all" else target.replace(" ", ""), "lora_target")
        for key, (value, source) in options.items():
            if value is not None and value is not False:
                config.add(key, value.replace(" ", "") if isinstance(value, str) else value, source)
    if bits == 4 and kind == "lora":
        config.add("load-in-4bit", True, "quantization_bit")
    elif bits is not None:
        config.reject(f"quantization_bit {bits}", "weights in 4 bits, with finetuning_type lora, are known")


def _read_precision(config: ForeignConfig) -> None:
    for source in ("bf16", "fp16"):
        value = config.take(source)
        if value is True:
            config.add("set", [f"precision={source}"], source)
        elif value is not None:
            config.planned.append(source)


def _read_trackers(config: ForeignConfig) -> None:
    value = config.take("report_to", "none")
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    names = [name for name in names if name != "none"]
    other = next((name for name in names if name not in get_args(Tracker)), None)
    if other is not None:
        config.reject(f"report_to {other}", f"use {', '.join(get_args(Tracker))} or none", replaced_by="report-to")
    elif names:
        config.add("report-to", names, "report_to")
