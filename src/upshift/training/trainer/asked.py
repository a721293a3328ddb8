"""What the user set by hand in TrainingArguments, as fixed fields of the plan."""

from __future__ import annotations

from typing import Any, get_args

from upshift.errors import RequestError
from upshift.planning.plan import Optimizer
from upshift.training.trainer.fields import was_set

NOT_IN_TRAINER = ("optimizer_in_backward", "optim_offload", "activation_offload")  # `upshift train` has them
OWN_LOOP_OPTIMIZERS = ("lomo", "adalomo")  # they update inside the backward pass, by transformers' own step


def fixed_fields(arguments: Any, *, num_layers: int, optimizer_given: bool) -> tuple[str, ...]:
    """``field=value`` for the planner. ``optimizer_given``: an optimizer or its class came through Trainer's arguments."""
    fixed = {"num_processes": "1", **dict.fromkeys(NOT_IN_TRAINER, "False")}
    if arguments.bf16 or arguments.fp16:
        fixed["precision"] = "bf16" if arguments.bf16 else "fp16"
    elif arguments.tf32 is not None:
        fixed["precision"] = "tf32" if arguments.tf32 else "fp32"
    if recomputes(arguments):
        fixed |= {"activation_checkpointing": str(num_layers), "recompute_granularity": "full"}
    if arguments.torch_compile or arguments.debug:
        fixed["torch_compile"] = "off"  # accelerate compiles what the user asked for; debugging looks into modules
    if arguments.use_liger_kernel:
        fixed["loss_chunk_tokens"] = "0"  # its own fused head
    if was_set(arguments, "optim") or optimizer_given:
        name = optimizer_name(arguments)
        known = name in get_args(Optimizer) and not optimizer_given
        fixed["optim"] = name if known else "adamw_torch"  # another one is transformers' own affair: costed as AdamW
        if known and arguments.optim_args:
            fixed["optim_args"] = arguments.optim_args
    return tuple(f"{name}={value}" for name, value in fixed.items())


def check_fixed(fixed: tuple[str, ...]) -> None:
    """Raises RequestError for a field that only `upshift train` executes."""
    for assignment in fixed:
        if assignment.partition("=")[0] in (*NOT_IN_TRAINER, "num_processes"):
            raise RequestError(f"fixed {assignment!r} is not possible in the Trainer (one process, its own update)")


def optimizer_name(arguments: Any) -> str:
    return str(getattr(arguments.optim, "value", arguments.optim))


def allowed_by_hand(arguments: Any) -> tuple[str, ...]:
    """Changes of the mathematics that the user asked for by naming an optimizer."""
    from upshift.planning.plan import Plan

    name = optimizer_name(arguments)
    if not was_set(arguments, "optim") or name not in get_args(Optimizer):
        return ()
    plan = Plan.model_construct(precision="fp32", optim=name)
    return plan.changes_mathematics


def recomputes(arguments: Any) -> bool:
    named = getattr(arguments, "activation_checkpointing", None)
    return bool(arguments.gradient_checkpointing if named is None else named)


def check_devices(arguments: Any) -> None:
    """Raises RequestError where several devices or processes would train."""
    if arguments.world_size > 1:
        raise RequestError(
            f"{arguments.world_size} processes were launched, and the Trainer trains in one: start the script without a "
            "launcher, or use `upshift train` on one host"
        )
    if arguments.n_gpu > 1:
        raise RequestError(f"{arguments.n_gpu} GPUs are visible, and the Trainer trains on one: set CUDA_VISIBLE_DEVICES to one")
