"""Handle each field of transformers.TrainingArguments: honour it, plan it if it is left unset, or refuse it when it is set.

1. A table gives the treatment of every field. docs/write_tables.py writes docs/training_arguments.md from it. A test compares
   both with the installed transformers.
2. The values that the user set become fixed fields of the plan.
3. The number of ranks comes from the launcher, and the layout that the user requested comes from ``fsdp``.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal, NamedTuple

from upshift.errors import RequestError
from upshift.planning.cost.optimizer import rounds_stochastically
from upshift.planning.layout import Layout
from upshift.planning.optimizers import optimizers
from upshift.planning.plan import ALONE, Plan
from upshift.planning.search.space import fixed_value, parse_value
from upshift.settings import read_ranks

OPTIMIZER_METHOD = "get_optimizer_cls_and_kwargs"
Treatment = Literal["honoured", "planned", "refused"]
PAGE_WORDS: dict[Treatment, str] = {"planned": "Upshift chooses", "refused": "not supported", "honoured": "works as before"}


class Field(NamedTuple):
    treatment: Treatment
    description: str


HONOURED = Field("honoured", "as in transformers")
EVALUATION = Field("honoured", "as in transformers. Outputs above 32 MiB go to the disk")
CHECKPOINTS = Field("honoured", "as in transformers. A checkpoint is never incomplete, and both libraries can resume it")
DDP = Field("honoured", "has no effect: the plan sums gradients once a step; unused weights count as zero")
OTHER_ENGINE = Field("refused", "the plan says how ranks share the model; leave it unset, or give fixed=('tensor_parallel=2',)")

FIELDS: dict[str, Field] = {
    # planned: the plan chooses a value for an unset field and prints it
    "per_device_train_batch_size": Field(
        "planned",
        "Upshift keeps the global batch: this field, times gradient_accumulation_steps, times the ranks. It may change "
        "both fields",
    ),
    "gradient_accumulation_steps": Field("planned", "see per_device_train_batch_size"),
    "auto_find_batch_size": Field("honoured", "always on: if a step runs out of memory, Upshift repeats it in smaller parts"),
    "bf16": Field("planned", "unset: Upshift chooses the precision. tf32=False alone keeps plain fp32"),
    "fp16": Field("planned", "unset: see bf16"),
    "tf32": Field("planned", "False: plain fp32, unless bf16 or fp16 is set"),
    "activation_checkpointing": Field("planned", "unset: Upshift chooses how many layers are recomputed"),
    "activation_checkpointing_kwargs": Field("honoured", "with activation_checkpointing"),
    "gradient_checkpointing": Field("planned", "see activation_checkpointing"),
    "gradient_checkpointing_kwargs": Field("honoured", "with gradient_checkpointing"),
    "torch_compile": Field("planned", "unset: Upshift compiles each layer if the run is long enough to gain time"),
    "optim": Field("planned", "unset: Upshift chooses the implementation of AdamW, and other optimizers with allow=(...)"),
    "fsdp": Field("planned", "set: torch's fully_shard divides the weights. Unset: Upshift chooses the layout"),
    "dataloader_num_workers": Field("planned", "unset: Upshift measures how long a batch takes to load, and chooses"),
    "fsdp_config": Field(
        "honoured", "with fsdp: reshard_after_forward. The plan wraps the layers. Options that it cannot honour are refused"
    ),
    "ddp_broadcast_buffers": Field("honoured", "as in transformers, if the model has batch statistics (batch norm)"),
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
    "torch_compile_backend": Field("honoured", "with torch_compile: the whole model, as in transformers"),
    "torch_compile_mode": Field("honoured", "with torch_compile: the whole model, as in transformers"),
    "neftune_noise_alpha": Field("honoured", "the batches stay whole, because the noise depends on the width of a batch"),
    "label_smoothing_factor": Field("honoured", "as in transformers; in chunks, if the plan has a chunked loss"),
    "logging_nan_inf_filter": Field("honoured", "for logging. A loss that is not finite stops training before the update"),
    "debug": Field("honoured", "underflow_overflow: upshift.debugging also warns earlier. Nothing is compiled unless you ask"),
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
    "deepspeed": Field("refused", "use fsdp=True, or leave it unset: the plan then says how ranks share the model"),
    "parallelism_config": OTHER_ENGINE,
}  # fmt: skip


def was_set(arguments: Any, name: str) -> bool:
    """Return whether a field differs from its default.

    TrainingArguments does not record which fields the user set, so this is the only sign of it.
    """
    field = next((field for field in dataclasses.fields(arguments) if field.name == name), None)
    if field is None or not field.init:
        return False
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    value = getattr(arguments, name)
    both_empty = _is_empty(value) and _is_empty(default)
    return bool(value != default and not both_empty)


def _is_empty(value: Any) -> bool:
    """Return whether a value means that nothing was set. 0 does not: it is a number that the user gave."""
    return value is None or value is False or (isinstance(value, str | list | tuple | dict) and not value)


def refuse_unsupported(arguments: Any) -> None:
    """Raise RequestError for the first argument that cannot be honoured. The message names it."""
    for field in dataclasses.fields(arguments):
        if not was_set(arguments, field.name):
            continue
        value = _in_one_line(getattr(arguments, field.name))
        entry = FIELDS.get(field.name)
        if entry is None and is_library_field(field.name) and not _is_derived_default(arguments, field.name):
            raise RequestError(
                f"{field.name}={value} is an argument that this version of Upshift does not know; "
                "leave it unset, or use transformers.Trainer"
            )
        if entry is not None and entry.treatment == "refused":
            raise RequestError(f"{field.name}={value} cannot be honoured: {entry.description}")


def _in_one_line(value: Any) -> str:
    return " ".join(repr(value).split())[:160]


def _is_derived_default(arguments: Any, name: str) -> bool:
    """Return whether TrainingArguments derives this value from its own defaults."""
    from transformers import TrainingArguments

    defaults = TrainingArguments(arguments.output_dir, use_cpu=arguments.use_cpu)
    return bool(getattr(defaults, name) == getattr(arguments, name))


def is_library_field(name: str) -> bool:
    """Return whether TrainingArguments itself has this field. A subclass in the script may add others."""
    from transformers import TrainingArguments

    return name in {field.name for field in dataclasses.fields(TrainingArguments)}


PAGE_END = """
## Batches that stay whole

Upshift measures your loss on some rows of your data. If the loss of a batch is made of the losses of its rows, the plan may
divide the batch in another way. If not, your code computes each batch as the data loader returns it, and the plan chooses the
rest: the precision, activation checkpointing, compilation, the optimizer and the workers of the data loader. Upshift prints the
reason.

Examples are a contrastive loss, pairs of texts, a loss that keeps a state, texts end to end, and a `training_step` of your own.
For the trainers of TRL, see [From TRL](trl.md). For those of Sentence Transformers, see
[Sentence Transformers](trl.md#sentence-transformers).

Your own module around a model of transformers also keeps its batches whole. If a batch has no entry `input_ids`, Upshift
computes its loss and gradients once, and counts the texts that the model of transformers computes.

With several processes, and if no texts can be counted, your own settings run instead.

## Trials

Before a long run, Upshift tests the plain default and the best predicted plans, each in a process of its own. The fastest one
runs.

| argument of `upshift.Trainer` | trials |
| --- | --- |
| `trial_seconds=None` (default) | one minute, or 2 % of the run if that is more, and at most five minutes |
| `trial_seconds=20` | at most 20 seconds |
| `trial_seconds=0` | none. Upshift trusts the prediction |
| `plan=...` | none. Your plan runs |

Trials never take more than 5 % of the predicted time of the run. If that is too short for two plans, or if there are several
processes, no trial is made. Upshift remembers the results, so the same script does not test again. If the whole run takes less
than about half a minute, Upshift does not plan at all."""


def markdown() -> str:
    """Return the text of docs/training_arguments.md."""
    order = {"planned": 0, "refused": 1, "honoured": 2}
    rows = sorted(FIELDS.items(), key=lambda entry: (order[entry[1].treatment], entry[0]))
    lines = [
        "# TrainingArguments in upshift.Trainer",
        "",
        "`upshift.Trainer` takes the `TrainingArguments` of transformers (5.17 to 5.23). Change one import of your script:",
        "",
        "```diff",
        "-from transformers import Trainer",
        "+from upshift import Trainer",
        "```",
        "",
        "This page says for every field what Upshift does with it.",
        "",
        "| word | meaning |",
        "| --- | --- |",
        "| Upshift chooses | Upshift chooses a value if the field is at its default, and prints it. Another value stays. "
        "Exceptions are in the last column |",
        "| not supported | If you set the field, you get an error that names it |",
        "| works as before | as in `transformers.Trainer`, with the differences in the last column |",
        "",
        "`TrainingArguments` does not record which fields you set. So a value that equals the default, such as `bf16=False`,",
        'counts as unset. To fix such a choice, give it to the Trainer: `Trainer(..., fixed=("precision=fp32",))`.',
        "",
        "| argument | Upshift | details |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {PAGE_WORDS[field.treatment]} | {field.description} |" for name, field in rows),
        PAGE_END,
    ]
    return "\n".join(lines) + "\n"


OFFLOAD_FIELDS = ("optim_offload", "activation_offload")
# The plan uses these only on request: callbacks would see no gradients, or tensors on another device.
OPT_IN_FIELDS = ("optimizer_in_backward", *OFFLOAD_FIELDS)
BACKWARD_UPDATE_OPTIMIZERS = ("lomo", "adalomo")  # they update inside the backward pass, by transformers' own step


NO_SCALER = (
    "gradients of fp16 underflow without a loss scaler, and accelerate makes one only for TrainingArguments(fp16=True); set it, "
    "or use precision=bf16"
)


class DebugOptions(list[Any]):
    """The options of ``debug`` without underflow_overflow, which Upshift handles itself."""


def fixed_fields(arguments: Any, *, num_layers: int, optimizer_given: bool) -> tuple[str, ...]:
    """Return the user's settings as ``field=value`` assignments for the planner.

    ``optimizer_given`` means that the script passed an optimizer or its class to the Trainer.
    """
    fixed = {"num_processes": str(arguments.world_size), "weight_offload": "none", **dict.fromkeys(OPT_IN_FIELDS, "False")}
    precision = given_precision(arguments)
    if precision is not None:
        fixed["precision"] = precision
    elif arguments.tf32 is not None:
        fixed["precision"] = "tf32" if arguments.tf32 else "fp32"
    if chose_recomputation(arguments):
        fixed |= {"activation_checkpointing": str(num_layers), "recompute_granularity": "full"}
    if arguments.torch_compile or arguments.debug or isinstance(arguments.debug, DebugOptions):
        fixed["torch_compile"] = "off"  # accelerate compiles what the user asked for; debugging looks into modules
    if arguments.use_liger_kernel:
        fixed["loss_chunk_tokens"] = "0"  # its own fused head
    if was_set(arguments, "optim") or optimizer_given:
        name = optimizer_name(arguments)
        is_plannable = name in optimizers() and not optimizer_given
        fixed["optim"] = name if is_plannable else "adamw_torch"  # transformers makes any other one; it is costed as AdamW
        if is_plannable and arguments.optim_args:
            fixed["optim_args"] = arguments.optim_args
    return tuple(f"{name}={value}" for name, value in fixed.items())


def given_precision(arguments: Any) -> str | None:
    """Return the precision in which accelerate runs the model: ``bf16`` or ``fp16``, or None.

    The user sets it by an argument of this name, or for ``accelerate launch``.
    """
    for name in ("bf16", "fp16"):
        if getattr(arguments, name) or getattr(arguments, "mixed_precision", "no") == name:
            return name
    return None


def check_fixed(fixed: tuple[str, ...], arguments: Any, *, device: str, optimizer_given: bool) -> None:
    """Raise RequestError for a fixed field that the Trainer cannot honour together with the user's arguments.

    ``fixed`` has "field=value" assignments.
    """
    for assignment in fixed:
        name, _, value = assignment.partition("=")
        if name == "num_processes":
            raise RequestError(
                f"fixed {assignment!r} is not possible in the Trainer: the launcher starts the processes (torchrun "
                "--nproc-per-node); leave it out"
            )
        if name == "weight_offload" and value != "none":
            raise RequestError(f"fixed {assignment!r} is not possible in the Trainer: the model is in memory; use upshift train")
        if name == "precision" and value == "fp16" and given_precision(arguments) != "fp16":
            raise RequestError(f"fixed {assignment!r} is not possible in the Trainer alone: {NO_SCALER}")
        if name == "mup_base" and value:
            raise RequestError(
                f"fixed {assignment!r} is not possible in the Trainer: its model has its weights already; use upshift train "
                "--from-config --mup-base, or upshift.train(..., mup_base=)"
            )
        if name not in OPT_IN_FIELDS or not fixed_value(fixed, name):
            continue
        if optimizer_given:
            raise RequestError(f"fixed {assignment!r} is for an optimizer that the Trainer makes; leave the optimizer to it")
        if name in OFFLOAD_FIELDS and device != "cuda":
            raise RequestError(f"fixed {assignment!r} needs a CUDA device: on a CPU everything is on the host; leave it out")
        reason = _why_no_update_in_backward(arguments) if name == "optimizer_in_backward" else None
        if reason:
            raise RequestError(f"fixed {assignment!r} {reason}")


def refuse_contradictions(chosen: tuple[str, ...], arguments: Any, *, num_layers: int, optimizer_given: bool) -> None:
    """Raise RequestError for a ``field=value`` assignment that contradicts an argument which transformers itself carries out.

    transformers casts, compiles, recomputes and makes the optimizer by its arguments, whatever a plan says."""
    from_arguments = dict(
        assignment.split("=", 1) for assignment in fixed_fields(arguments, num_layers=num_layers, optimizer_given=optimizer_given)
    )
    carried_out = {}
    precision = given_precision(arguments)
    if precision is not None:
        carried_out["precision"] = f"{precision}=True"
    if arguments.torch_compile:
        carried_out["torch_compile"] = "torch_compile=True"
    if was_set(arguments, "optim"):
        carried_out["optim"] = f"optim={optimizer_name(arguments)!r}"
    if chose_recomputation(arguments):
        fields = ("activation_checkpointing", "recompute_granularity")
        carried_out |= dict.fromkeys(fields, "gradient_checkpointing=True")
    for assignment in chosen:
        name, _, text = assignment.partition("=")
        if name not in carried_out:
            continue
        if parse_value(name, text, option="fixed") != parse_value(name, from_arguments[name]):
            raise RequestError(f"{assignment} contradicts TrainingArguments({carried_out[name]}); leave out one of them")


def check_limits(*, memory_limit_gib: float | None, trial_seconds: float | None) -> None:
    """Raise RequestError for a memory limit that is not positive, or a negative time."""
    if memory_limit_gib is not None and not memory_limit_gib > 0:
        raise RequestError(f"memory_limit_gib={memory_limit_gib:g} leaves no memory; give GiB above 0, or leave it out")
    if trial_seconds is not None and not trial_seconds >= 0:
        raise RequestError(f"trial_seconds={trial_seconds:g} is no time; give seconds, 0 for no trials, or leave it out")


def opt_in_fields(plan: Plan) -> tuple[str, ...]:
    """Return the fields of the user's plan, as "field=value", that the Trainer uses only on request."""
    enabled = (f"{name}=True" for name in OPT_IN_FIELDS if getattr(plan, name))
    return (f"weight_offload={plan.weight_offload}", f"mup_base={plan.mup_base}", *enabled)


def _why_no_update_in_backward(arguments: Any) -> str | None:
    """Return why the optimizer cannot run in the backward pass under these arguments, or None."""
    if arguments.max_grad_norm:
        return "updates weights before the norm of all gradients is known; set TrainingArguments(max_grad_norm=0)"
    if arguments.gradient_accumulation_steps > 1:
        return "updates weights at the first gradient; set TrainingArguments(gradient_accumulation_steps=1)"
    return "cannot skip a step whose scaled gradients overflow; use bf16 instead of fp16" if arguments.fp16 else None


def optimizer_name(arguments: Any) -> str:
    return str(getattr(arguments.optim, "value", arguments.optim))


def changes_by_optimizer(arguments: Any) -> tuple[str, ...]:
    """Return the changes of the mathematics that the user requested by naming an optimizer."""
    name = optimizer_name(arguments)
    if not was_set(arguments, "optim") or name not in optimizers():
        return ()
    fields: dict[str, Any] = {"precision": "fp32", "optim": name}  # changes_mathematics reads only these fields
    plan = Plan.model_construct(**fields)
    return plan.changes_mathematics


def recomputes_activations(arguments: Any) -> bool:
    """Return whether activation checkpointing is on, by either of its two names."""
    new_name_value = getattr(arguments, "activation_checkpointing", None)
    return bool(arguments.gradient_checkpointing if new_name_value is None else new_name_value)


def chose_recomputation(arguments: Any) -> bool:
    """Return whether the user turned on activation checkpointing, and not the default of a subclass of TrainingArguments.

    A value that equals the default counts as unset, as for all other fields.
    """
    fields = {field.name: field.default for field in dataclasses.fields(arguments)}
    is_default = bool(fields.get("gradient_checkpointing") or fields.get("activation_checkpointing"))
    kwargs = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    has_kwargs = any(name in fields and was_set(arguments, name) for name in kwargs)
    return recomputes_activations(arguments) and (has_kwargs or not is_default)


def check_devices(arguments: Any) -> None:
    """Raise RequestError if one process would train on several devices."""
    if arguments.n_gpu > 1:
        raise RequestError(
            f"{arguments.n_gpu} GPUs are visible to one process: start one for each (torchrun --nproc-per-node {arguments.n_gpu} "
            "script.py), or set CUDA_VISIBLE_DEVICES to one"
        )


def refuse_other_engines(trainer: Any) -> None:
    """Raise RequestError if a launcher made accelerate divide the model by another engine.

    TrainingArguments does not show what ``accelerate launch`` and its config file set.
    """
    parallelism = trainer.accelerator.parallelism_config
    engines = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "parallelism_config": parallelism is not None and parallelism.total_size > 1,
    }
    for name, is_enabled in engines.items():
        if is_enabled:
            raise RequestError(
                f"accelerate runs {name} here, as its launcher or config file says, and Upshift's plan divides the model itself; "
                "start the script with torchrun"
            )


# Fields of fsdp_config. All others control the wrapper of accelerate, so extract_fsdp refuses them.
HONOURED_FSDP_OPTIONS = (
    "reshard_after_forward", "version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "state_dict_type",
    "cpu_ram_efficient_loading", "sync_module_states", "use_orig_params", "forward_prefetch", "backward_prefetch",
    "limit_all_gathers",
)  # fmt: skip
RESHARD_OFF_VALUES = (False, "false", "SHARD_GRAD_OP")  # values of reshard_after_forward


def use_cpu_with_ranks(arguments: Any) -> None:
    """Set ``use_cpu`` if a launcher started several processes without a GPU.

    Without it, transformers does not see the other processes, and each process would train its own copy. Raise RequestError if
    transformers still sees another number of ranks than the launcher started.
    """
    ranks = read_ranks()
    if ranks is None or ranks.size == 1 or arguments.world_size > 1 or arguments.device.type != "cpu":
        return
    arguments.use_cpu = True
    vars(arguments).pop("_setup_devices", None)  # a cached property, which reads use_cpu
    if arguments.device.type != "cpu" or arguments.world_size != ranks.size:
        raise RequestError(
            f"{ranks.size} ranks were launched, and transformers sees {arguments.world_size}; start the script with torchrun, "
            "and set TrainingArguments(use_cpu=True)"
        )


def local_ranks() -> int:
    """Return the number of ranks on this host."""
    ranks = read_ranks()
    return ranks.local_size if ranks is not None else 1


def extract_fsdp(arguments: Any) -> tuple[Any, Layout]:
    """Return the arguments without ``fsdp``, and the layout that ``fsdp`` requests.

    The field is cleared because accelerate would wrap the model. Raise RequestError for options that cannot be honoured.
    """
    if not arguments.fsdp:
        return arguments, ALONE
    config = dict(arguments.fsdp_config or {})
    unsupported = sorted(name for name, value in config.items() if value and name not in HONOURED_FSDP_OPTIONS)
    if unsupported:
        name = unsupported[0]
        advice = ", and set gradient_checkpointing=True" if name == "activation_checkpointing" else ""
        raise RequestError(
            f"fsdp_config={{{name!r}: {config[name]!r}}} cannot be honoured: layers are wrapped by the plan; leave it out{advice}"
        )
    world = arguments.world_size
    if world == 1:
        raise RequestError("fsdp is for several processes, and this is one: start the script with torchrun, or leave it unset")
    plain = copy.copy(arguments)
    plain.fsdp = None
    plain.fsdp_plugin_args = None
    keeps_weights = config.get("reshard_after_forward", True) in RESHARD_OFF_VALUES
    return plain, Layout(fully_shard="gradients" if keeps_weights else "weights", shard_size=world)


def layout_fields(layout: Layout) -> tuple[str, ...]:
    """Return the requested layout as ``field=value`` assignments for the planner."""
    fields = ("fully_shard", "shard_size")
    return tuple(f"{name}={getattr(layout, name)}" for name in fields if getattr(layout, name) != getattr(ALONE, name))


def builds_optimizer(plan: Plan, arguments: Any) -> bool:
    """Return whether Upshift builds the plan's optimizer, because transformers has no such optimizer."""
    library_optimizers: Any = type(arguments.optim)  # an enum
    return plan.optim not in {*library_optimizers} or rounds_stochastically(plan) or plan.optim_offload


def why_unsupported(
    plan: Plan, *, optimizer_given: bool, averages: bool, scales_losses: bool, leaves_out_weights: bool = False
) -> str | None:
    """Return why the Trainer cannot run the plan, or None.

    ``averages`` means that labels are counted over all ranks, ``scales_losses`` that accelerate scales the loss of fp16, and
    ``leaves_out_weights`` that the script gives its optimizer weights which Upshift's own would not have, such as a loss's.
    """
    if plan.precision == "fp16" and not scales_losses:
        return NO_SCALER
    if leaves_out_weights:
        return f"optim={plan.optim} has the model's weights alone, and the script's {OPTIMIZER_METHOD} may add those of its loss"
    layout = plan.layout
    if layout.pipeline_parallel > 1:
        return "pipeline_parallel has logits in its last stage alone, and a Trainer wants them; use upshift train, or fully_shard"
    if layout.context_parallel > 1:
        return "context_parallel gives each rank the logits of its own tokens alone; use upshift train, or fully_shard"
    if layout.sequence_parallel:
        return "sequence_parallel divides the tokens of a row, and a collator's rows have any number; leave it out"
    if plan.num_processes > 1 and plan.optimizer_in_backward:
        return "optimizer_in_backward updates weights before the ranks' gradients are summed; leave it out"
    if optimizer_given and (layout.tensor_parallel > 1 or layout.fully_shard != "no"):
        return "an optimizer that the script made has whole weights, and this layout divides them; leave it to the Trainer"
    if layout.tensor_parallel > 1 and not averages:
        return "tensor_parallel computes the batches of its ranks together; leave average_tokens_across_devices at True"
    return None
