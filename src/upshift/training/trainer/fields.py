"""Say what becomes of every field of transformers.TrainingArguments: honoured, planned if left unset, or refused when set.

docs/write_tables.py writes docs/training_arguments.md from this table. A test compares both with the installed transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from upshift.errors import RequestError

Treatment = Literal["honoured", "planned", "refused"]


class Field(NamedTuple):
    treatment: Treatment
    words: str


HONOURED = Field("honoured", "as transformers does")
EVALUATION = Field("honoured", "as transformers does; outputs beyond 32 MiB are kept on disk, not in memory")
CHECKPOINTS = Field("honoured", "as transformers does; checkpoints are complete or absent, and either library resumes them")
DDP = Field("honoured", "has no effect: gradients are summed once a step by the plan's layout, unused weights as zero")
OTHER_ENGINE = Field("refused", "how ranks share the model is planned; leave it unset, or fix it: fixed=('tensor_parallel=2',)")

FIELDS: dict[str, Field] = {
    # planned: what the user leaves unset is chosen and printed
    "per_device_train_batch_size": Field(
        "planned", "with gradient_accumulation_steps it is the global batch, which is kept; how that is cut is planned"
    ),
    "gradient_accumulation_steps": Field("planned", "see per_device_train_batch_size"),
    "auto_find_batch_size": Field("planned", "always on: a step that runs out of memory is done again in smaller parts"),
    "bf16": Field("planned", "kept when set; unset: the precision is planned (tf32=False alone keeps plain fp32)"),
    "fp16": Field("planned", "kept when set; unset: see bf16"),
    "tf32": Field("planned", "kept when set; False: plain fp32 unless bf16 or fp16 is set"),
    "activation_checkpointing": Field("planned", "kept when set; unset: how many layers are recomputed is planned"),
    "activation_checkpointing_kwargs": Field("honoured", "with activation_checkpointing"),
    "gradient_checkpointing": Field("planned", "see activation_checkpointing"),
    "gradient_checkpointing_kwargs": Field("honoured", "with gradient_checkpointing"),
    "torch_compile": Field("planned", "kept when set; unset: compiling each layer is planned, its payback counted"),
    "optim": Field("planned", "kept when set; unset: the implementation of AdamW is planned, others with allow=(...)"),
    "fsdp": Field("planned", "kept when set: weights are divided by torch's fully_shard; unset: the layout of ranks is planned"),
    "dataloader_num_workers": Field("planned", "kept when set; unset: chosen from the measured time of drawing a batch"),
    "fsdp_config": Field(
        "honoured", "with fsdp: reshard_after_forward; how layers are wrapped is the plan's, and its other options are refused"
    ),
    "ddp_broadcast_buffers": Field("honoured", "as transformers does, where a model has statistics of batches"),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph"), DDP),
    # honoured by transformers' own code
    **dict.fromkeys(
        (
            "output_dir", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs",
            "warmup_steps", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
            "optim_target_modules", "average_tokens_across_devices", "max_grad_norm", "use_cache", "use_liger_kernel",
            "liger_kernel_config", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
            "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name",
            "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "push_to_hub", "hub_token",
            "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision", "full_determinism",
            "seed", "data_seed", "use_cpu", "accelerator_config", "dataloader_drop_last", "dataloader_pin_memory",
            "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
            "dataloader_in_order", "remove_unused_columns", "label_names", "train_sampling_strategy",
            "length_column_name", "skip_memory_metrics", "do_train", "do_eval", "do_predict", "torch_empty_cache_steps",
            "ddp_backend", "ddp_timeout", "local_rank",
        ),
        HONOURED,
    ),
    "torch_compile_backend": Field("honoured", "with torch_compile: the whole model, as transformers does"),
    "torch_compile_mode": Field("honoured", "with torch_compile: the whole model, as transformers does"),
    "label_smoothing_factor": Field("honoured", "as transformers defines it, in chunks where planned"),
    "logging_nan_inf_filter": Field("honoured", "for what is logged; a loss that is not finite ends training before the update"),
    "debug": Field("honoured", "underflow_overflow: by upshift.debugging, warns before it too; nothing is compiled unasked"),
    **dict.fromkeys(
        (
            "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only",
            "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
            "include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval",
        ),
        EVALUATION,
    ),
    **dict.fromkeys(
        (
            "save_strategy", "save_steps", "save_on_each_node", "save_total_limit", "save_only_model",
            "enable_jit_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
            "ignore_data_skip", "restore_callback_states_from_checkpoint", "resume_from_checkpoint",
        ),
        CHECKPOINTS,
    ),
    # refused
    "neftune_noise_alpha": Field("refused", "plans are for the model's own mathematics, without noise on it; leave it unset"),
    **dict.fromkeys(("deepspeed", "parallelism_config"), OTHER_ENGINE),
}  # fmt: skip


def was_set(arguments: Any, name: str) -> bool:
    """Return whether a field differs from its default, which is all that TrainingArguments can tell of what the user set."""
    field = next((field for field in dataclasses.fields(arguments) if field.name == name), None)
    if field is None or not field.init:
        return False
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    value = getattr(arguments, name)
    return bool(value != default and not (_is_nothing(value) and _is_nothing(default)))


def _is_nothing(value: Any) -> bool:
    """Return whether a value means that nothing was set. 0 is a number that somebody gave."""
    return value is None or value is False or (isinstance(value, str | list | tuple | dict) and not value)


def refuse_unsupported(arguments: Any) -> None:
    """Raise RequestError that names the first argument that cannot be honoured."""
    for field in dataclasses.fields(arguments):
        known = FIELDS.get(field.name)
        if (
            known is None
            and is_core(field.name)
            and was_set(arguments, field.name)
            and not _is_made_by_default(arguments, field.name)
        ):
            shown = _in_one_line(getattr(arguments, field.name))
            raise RequestError(
                f"{field.name}={shown} is an argument that this version of Upshift does not know; "
                "leave it unset, or use transformers.Trainer"
            )
        if known is not None and known.treatment == "refused" and was_set(arguments, field.name):
            raise RequestError(f"{field.name}={_in_one_line(getattr(arguments, field.name))} cannot be honoured: {known.words}")


def _in_one_line(value: Any) -> str:
    return " ".join(repr(value).split())[:160]


def _is_made_by_default(arguments: Any, name: str) -> bool:
    """Return whether TrainingArguments itself makes this value from its defaults."""
    from transformers import TrainingArguments

    defaults = TrainingArguments(arguments.output_dir, use_cpu=arguments.use_cpu)
    return bool(getattr(defaults, name) == getattr(arguments, name))


def is_core(name: str) -> bool:
    """Return whether TrainingArguments itself has this field. A script's subclass may add fields of its own."""
    from transformers import TrainingArguments

    return name in {field.name for field in dataclasses.fields(TrainingArguments)}


def markdown() -> str:
    """Return the text of docs/training_arguments.md."""
    order = {"planned": 0, "refused": 1, "honoured": 2}
    rows = sorted(FIELDS.items(), key=lambda entry: (order[entry[1].treatment], entry[0]))
    lines = [
        "# TrainingArguments in upshift.Trainer",
        "",
        "Every field of `transformers.TrainingArguments` (5.17 to 5.23). *Planned*: what is left at its default is chosen by the",
        "plan and printed; what is set is kept. *Refused*: setting it is an error that names it. *Honoured*: it works as in",
        "`transformers.Trainer`. Written by `python docs/write_tables.py`; tested.",
        "",
        "| argument | | |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {field.treatment} | {field.words} |" for name, field in rows),
    ]
    return "\n".join(lines) + "\n"
