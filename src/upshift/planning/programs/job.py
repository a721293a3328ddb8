"""Define what a configuration of another program needs beside the plan, and refuse plans that the program cannot express."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from upshift.errors import RequestError
from upshift.models.source import AdapterOptions
from upshift.planning.plan import Plan
from upshift.value import Value


class Job(Value):
    """The facts of a training job that are no choices of the plan."""

    model: str = Field(description="reference of the model, as the user wrote it")
    data: str | None = Field(None, description="the user's texts")
    num_layers: int = Field(gt=0)
    layer_classes: tuple[str, ...] = Field((), description="class names of the layers, which FSDP wraps one by one")
    num_nodes: int = Field(1, gt=0)
    adapter: AdapterOptions = AdapterOptions()
    clips_gradients: bool = True


class Inexpressible(RequestError):
    """A choice of the plan that a program's configuration has no word for. ``fixed``: assignments that make it expressible."""

    def __init__(self, program: str, choices: str, fixed: tuple[str, ...]) -> None:
        options = " ".join(f"--set {assignment}" for assignment in fixed)
        self.problem = f"a configuration of {program} cannot express {choices}"
        super().__init__(f"{self.problem}; plan for what it can, with {options}")
        self.fixed = fixed


def check_expressible(program: str, plan: Plan, allowed: Mapping[str, Sequence[Any]]) -> None:
    """Raise Inexpressible that names every choice of the plan that a program's configuration has no word for.

    ``allowed``: the values that it has words for, by field of the plan or of its layout. Fields that are not in it may have any
    value.
    """
    wrong = {name: value for name in allowed if (value := choice_of(plan, name)) not in allowed[name]}
    if not wrong:
        return
    choices = ", ".join(f"{name}={_shown(value)}" for name, value in wrong.items())
    raise Inexpressible(program, choices, tuple(f"{name}={_shown(allowed[name][0])}" for name in wrong))


def choice_of(plan: Plan, name: str) -> Any:
    """Return the value of a field of the plan or of its layout."""
    return getattr(plan.layout if name in type(plan.layout).model_fields else plan, name)


def trainer_arguments(plan: Plan) -> dict[str, Any]:
    """Return the choices that transformers' TrainingArguments express, by their names."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "optim": plan.optim,
    }
    if plan.optim_args:
        arguments["optim_args"] = plan.optim_args
    if plan.activation_checkpointing:
        arguments["gradient_checkpointing"] = True
    return arguments


ONLY_HERE: Mapping[str, Sequence[Any]] = {  # choices that no other program has a word for, with the plain value
    "packing": (False,),
    "mup_base": ("",),
    "optimizer_in_backward": (False,),
    "activation_offload": (False,),
    "weight_offload": ("none",),
    "fused_kernels": (False,),
    "loss_kernel": ("eager",),
    "loss_chunk_tokens": (0,),
    "master_weights": (False,),
    "bf16_gradients": (False,),
    "gather_again": (False,),
    "vocabulary_parallel": (False,),
}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
