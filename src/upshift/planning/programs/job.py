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
    steps: int = Field(1000, gt=0, description="optimizer steps of the run")
    has_experts: bool = Field(False, description="a mixture of experts")
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


def refuse_adapter(program: str, job: Job) -> None:
    """Raise RequestError for a job with an adapter, which a program's configuration has no word for."""
    if job.adapter.lora_rank is not None:
        raise RequestError(f"a configuration of {program} cannot express LoRA; leave out --lora-rank, or use --write axolotl")


def launch_words(plan: Plan, job: Job) -> str:
    """Return the start of a command that runs a program on all ranks of a plan."""
    if job.num_nodes == 1:
        return f"torchrun --nproc-per-node {plan.num_processes}"
    ranks = plan.num_processes // job.num_nodes
    return f"torchrun --nnodes {job.num_nodes} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint HOST:29500"


def yaml_text(comments: Sequence[str], document: Mapping[str, Any]) -> str:
    """Return a document as YAML, below lines of comments."""
    import yaml

    text: str = yaml.safe_dump(dict(document), sort_keys=False)
    return comment_lines(comments) + text


def comment_lines(comments: Sequence[str]) -> str:
    """Return lines as comments of Python or YAML."""
    return "".join(f"# {comment}\n" if comment else "#\n" for comment in comments)


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
