"""Translate what the user set by hand in TrainingArguments into fixed fields of the plan."""

from __future__ import annotations

from typing import Any

from upshift.errors import RequestError
from upshift.planning.optimizers import optimizers
from upshift.planning.plan import Plan
from upshift.training.trainer.fields import was_set

OFFLOADS = ("optim_offload", "activation_offload")
ONLY_WHEN_ASKED = ("optimizer_in_backward", *OFFLOADS)  # with them callbacks see no gradients, or tensors elsewhere
OWN_LOOP_OPTIMIZERS = ("lomo", "adalomo")  # they update inside the backward pass, by transformers' own step


class Ours(list[Any]):
    """A list with the options of ``debug`` after underflow_overflow was taken out of them."""


def fixed_fields(arguments: Any, *, num_layers: int, optimizer_given: bool) -> tuple[str, ...]:
    """Return ``field=value`` assignments for the planner.

    ``optimizer_given`` says that an optimizer or its class came through Trainer's arguments.
    """
    fixed = {"num_processes": str(arguments.world_size), "weight_offload": "none", **dict.fromkeys(ONLY_WHEN_ASKED, "False")}
    if arguments.bf16 or arguments.fp16:
        fixed["precision"] = "bf16" if arguments.bf16 else "fp16"
    elif arguments.tf32 is not None:
        fixed["precision"] = "tf32" if arguments.tf32 else "fp32"
    if recomputes(arguments):
        fixed |= {"activation_checkpointing": str(num_layers), "recompute_granularity": "full"}
    if arguments.torch_compile or arguments.debug or isinstance(arguments.debug, Ours):
        fixed["torch_compile"] = "off"  # accelerate compiles what the user asked for; debugging looks into modules
    if arguments.use_liger_kernel:
        fixed["loss_chunk_tokens"] = "0"  # its own fused head
    if was_set(arguments, "optim") or optimizer_given:
        name = optimizer_name(arguments)
        known = name in optimizers() and not optimizer_given
        fixed["optim"] = name if known else "adamw_torch"  # another one is transformers' own affair: costed as AdamW
        if known and arguments.optim_args:
            fixed["optim_args"] = arguments.optim_args
    return tuple(f"{name}={value}" for name, value in fixed.items())


def check_fixed(fixed: tuple[str, ...], arguments: Any, *, device: str, optimizer_given: bool) -> None:
    """Raise RequestError for a field, as "field=value", that the Trainer cannot honour beside the user's arguments."""
    for assignment in fixed:
        name, _, value = assignment.partition("=")
        if name == "num_processes":
            raise RequestError(
                f"fixed {assignment!r} is not possible in the Trainer: the launcher starts the processes (torchrun "
                "--nproc-per-node); leave it out"
            )
        if name == "weight_offload" and value != "none":
            raise RequestError(f"fixed {assignment!r} is not possible in the Trainer: the model is in memory; use upshift train")
        if name == "mup_base" and value:
            raise RequestError(
                f"fixed {assignment!r} is not possible in the Trainer: its model has its weights already; use upshift train "
                "--from-config --mup-base, or upshift.train(..., mup_base=)"
            )
        if name not in ONLY_WHEN_ASKED or value.lower() not in ("true", "1", "yes", "on"):
            continue
        if optimizer_given:
            raise RequestError(f"fixed {assignment!r} is for an optimizer that the Trainer makes; leave the optimizer to it")
        if name in OFFLOADS and device != "cuda":
            raise RequestError(f"fixed {assignment!r} needs a CUDA device: on a CPU everything is on the host; leave it out")
        reason = _against_updates(arguments) if name == "optimizer_in_backward" else None
        if reason:
            raise RequestError(f"fixed {assignment!r} {reason}")


def check_limits(*, memory_limit_gib: float | None, trial_seconds: float | None) -> None:
    if memory_limit_gib is not None and not memory_limit_gib > 0:
        raise RequestError(f"memory_limit_gib={memory_limit_gib:g} leaves no memory; give GiB above 0, or leave it out")
    if trial_seconds is not None and not trial_seconds >= 0:
        raise RequestError(f"trial_seconds={trial_seconds:g} is no time; give seconds, 0 for no trials, or leave it out")


def fields_of(plan: Plan) -> tuple[str, ...]:
    """Return, as "field=value", the fields of a given plan that the Trainer uses only when somebody asks for them."""
    switched = (f"{name}=True" for name in ONLY_WHEN_ASKED if getattr(plan, name))
    return (f"weight_offload={plan.weight_offload}", f"mup_base={plan.mup_base}", *switched)


def _against_updates(arguments: Any) -> str | None:
    if arguments.max_grad_norm:
        return "updates weights before the norm of all gradients is known; set TrainingArguments(max_grad_norm=0)"
    if arguments.gradient_accumulation_steps > 1:
        return "updates weights at the first gradient; set TrainingArguments(gradient_accumulation_steps=1)"
    return "cannot skip a step whose scaled gradients overflow; use bf16 instead of fp16" if arguments.fp16 else None


def optimizer_name(arguments: Any) -> str:
    return str(getattr(arguments.optim, "value", arguments.optim))


def allowed_by_hand(arguments: Any) -> tuple[str, ...]:
    """Return the changes of the mathematics that the user asked for by naming an optimizer."""
    name = optimizer_name(arguments)
    if not was_set(arguments, "optim") or name not in optimizers():
        return ()
    alone: dict[str, Any] = {"precision": "fp32", "optim": name}  # the answer depends on these fields alone
    plan = Plan.model_construct(**alone)
    return plan.changes_mathematics


def recomputes(arguments: Any) -> bool:
    named = getattr(arguments, "activation_checkpointing", None)
    return bool(arguments.gradient_checkpointing if named is None else named)


def check_devices(arguments: Any) -> None:
    """Raise RequestError if one process would train on several devices."""
    if arguments.n_gpu > 1:
        raise RequestError(
            f"{arguments.n_gpu} GPUs are visible to one process: start one for each (torchrun --nproc-per-node {arguments.n_gpu} "
            "script.py), or set CUDA_VISIBLE_DEVICES to one"
        )
