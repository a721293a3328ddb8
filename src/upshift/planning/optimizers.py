"""List every optimizer by its name in transformers.TrainingArguments.optim, with its needs and options.

An added optimizer is one file in training/optimizers. A declaration at the top of the file says what it is and costs. It is read
without importing the file:

OPTIMIZER = {"name": "toy", "class": "Toy", "changes": "...", "state_words": 1, "update_words": 5, "update_copies": 1}

Added optimizers change the mathematics, so a user allows one with ``--allow`` and its name.

Names that transformers has and Upshift does not plan are refused with the reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from upshift.errors import MissingExtra, RequestError
from upshift.value import first_problem, read_boolean

FOLDER = Path(__file__).parents[1] / "training" / "optimizers"
DECLARATION_START = "\nOPTIMIZER = {"


class AddedOptimizer(BaseModel, frozen=True, extra="forbid"):
    """An optimizer in a file of its own. ``name`` is the value of ``optim``.

    The three numbers are in words of a parameter's size, for each parameter. They may be measured as those of the other
    optimizers are (docs/log.md).
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    class_name: str = Field(alias="class", description="of the same file: Class(groups, lr=..., **options)")
    changes: str = Field(description="what it changes in the mathematics")
    state_words: float = Field(ge=0, description="kept from step to step")
    update_words: float = Field(gt=0, description="read and written by an update")
    update_copies: float = Field(ge=0, description="temporaries of the update of one parameter")
    options: tuple[str, ...] = Field((), description="numbers that optim_args may set")
    elementwise: bool = Field(False, description="ranks may divide a parameter: no number of it depends on another one's")
    module: str = ""

    @property
    def import_path(self) -> tuple[str, str]:
        """Return the names of the module and the class."""
        return f"upshift.training.optimizers.{self.module}", self.class_name


@cache
def added_optimizers() -> dict[str, AddedOptimizer]:
    """Return the added optimizers by name. Raise RequestError for a file with a wrong declaration."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    declarations = [_read_declaration(path, text) for path, text in texts.items() if DECLARATION_START in text]
    return {declaration.name: declaration for declaration in declarations}


def _read_declaration(path: Path, text: str) -> AddedOptimizer:
    (declaration,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OPTIMIZER"
    )
    fields: dict[str, Any] = ast.literal_eval(declaration)
    try:
        return AddedOptimizer.model_validate({**fields, "module": path.stem})
    except ValidationError as error:
        raise RequestError(f"OPTIMIZER of {path.name} is not understood: {first_problem(AddedOptimizer, error)}") from None


Option = float | bool | int

EXTRAS = {"torchao": "quant", "bitsandbytes": "bitsandbytes"}  # the extra of this package that brings the library


@dataclass(frozen=True)
class OptimizerFacts:
    """The requirements and the options of an optimizer."""

    allow: str | None = None  # the name for --allow, if the optimizer is not plain AdamW
    library: str | None = None
    cuda_only: bool = False
    compiles: bool = False  # its update is made by torch.compile, which needs a compiler that works
    rounds: bool = False  # its update of bf16 weights is rounded stochastically
    options: Mapping[str, type] = field(default_factory=dict)  # the options of optim_args, as transformers reads them
    added: AddedOptimizer | None = None  # if the optimizer is a file of its own


LOW_BIT_OPTIONS = {"block_size": int}
_NAMED_BY_TRANSFORMERS: dict[str, OptimizerFacts] = {
    "adamw_torch_fused": OptimizerFacts(rounds=True),
    "adamw_torch": OptimizerFacts(rounds=True),
    "adafactor": OptimizerFacts("adafactor"),
    "adamw_torch_8bit": OptimizerFacts("8bit-optimizer", "torchao", compiles=True, rounds=True, options=LOW_BIT_OPTIONS),
    "adamw_torch_4bit": OptimizerFacts("4bit-optimizer", "torchao", compiles=True, rounds=True, options=LOW_BIT_OPTIONS),
    "adamw_bnb_8bit": OptimizerFacts("8bit-optimizer", "bitsandbytes", cuda_only=True),
    "adamw_8bit": OptimizerFacts("8bit-optimizer", "bitsandbytes", cuda_only=True),
    "muon": OptimizerFacts("muon"),
    "sgd": OptimizerFacts("sgd", options={"momentum": float, "dampening": float, "nesterov": bool}),
    "adagrad": OptimizerFacts("adagrad", options={"lr_decay": float, "eps": float}),
    "rmsprop": OptimizerFacts("rmsprop", options={"momentum": float, "alpha": float, "eps": float, "centered": bool}),
}
ALIASES: dict[str, str] = {"adamw_8bit": "adamw_bnb_8bit"}  # transformers has two names for it

_BITSANDBYTES = "of bitsandbytes only its 8-bit AdamW is planned; use adamw_bnb_8bit"
_PAGED = "paged state is not predicted; use optim_offload=true to keep the state on the host"
_LOW_RANK = "it projects the gradients of named modules, which is not planned; use adamw_torch_8bit or optimizer_in_backward=true"
_SCHEDULE_FREE = "it replaces the learning-rate schedule and has weights of its own for evaluation; use adamw_torch_fused"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("lion_32bit", "lion_8bit", "ademamix", "ademamix_8bit"), _BITSANDBYTES),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"), "bitsandbytes' own is not planned; use rmsprop"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit"), _PAGED),
    **dict.fromkeys(("paged_lion_32bit", "paged_lion_8bit"), _PAGED),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor"), _LOW_RANK),
    **dict.fromkeys(("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"), _LOW_RANK),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), _LOW_RANK),
    **dict.fromkeys(("lomo", "adalomo"), "it takes over the backward pass; use optimizer_in_backward=true with another one"),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), _SCHEDULE_FREE),
    "adamw_torch_xla": "it is for XLA devices, which are not planned; use adamw_torch_fused",
    "adamw_torch_npu_fused": "it is for Ascend devices, which are not planned; use adamw_torch_fused",
    "adamw_anyprecision": "its library torchdistx is no longer maintained; use precision=bf16-weights with adamw_torch_fused",
    "grokadamw": "its third-party update is not predicted; use adamw_torch_fused",
    "stable_adamw": "its third-party update is not predicted; use adamw_torch_fused with gradient clipping",
}


@cache
def optimizers() -> Mapping[str, OptimizerFacts]:
    """Return every optimizer that is planned, by name. Added ones come last."""
    added = {
        name: OptimizerFacts(allow=name, options=dict.fromkeys(declaration.options, float), added=declaration)
        for name, declaration in added_optimizers().items()
    }
    return {**_NAMED_BY_TRANSFORMERS, **added}


def check_name(name: str) -> None:
    """Raise RequestError for a name that transformers knows and Upshift refuses."""
    if name in REFUSED:
        raise RequestError(f"optim={name} is not offered: {REFUSED[name]}")


def check_library(library: str, *, purpose: str, on_gpu: bool = False) -> None:
    """Raise MissingExtra with the install line where the library is not installed.

    ``on_gpu``: also raise RequestError if the installed build has no machine code for GPUs.
    """
    if find_spec(library) is None:
        raise MissingExtra(library=library, extra=EXTRAS[library], purpose=purpose)
    if on_gpu and not has_gpu_code(library):
        raise RequestError(
            f"{purpose} needs {library} with its code for GPUs, and the installed {library} has none (it is built for CPUs "
            f"only); run  pip uninstall {library}, and then  pip install {library}"
        )


def has_gpu_code(library: str) -> bool:
    """Return whether a library is installed with machine code for GPUs, as bitsandbytes packs it: one file for each version."""
    spec = find_spec(library)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    names = [file.name for folder in folders for file in Path(folder).iterdir()]
    return any(re.fullmatch(rf"lib{library}_(cuda|rocm)[0-9]+\.(so|dll)", name) for name in names)


def read_optim_args(optim: str, text: str) -> dict[str, Option]:
    """Return the optimizer's arguments, read from a text such as ``momentum=0.9,nesterov=true`` (transformers' optim_args).

    Raise RequestError for an option that the optimizer does not have, or for a value of another type.
    """
    options = optimizers()[optim].options
    values: dict[str, Option] = {}
    for assignment in filter(None, text.replace(" ", "").split(",")):
        name, _, value = assignment.partition("=")
        if name not in options:
            allowed = f"takes {', '.join(options)}" if options else "takes none"
            raise RequestError(f"optim_args {assignment!r}: optim={optim} {allowed}")
        try:
            values[name] = _read(options[name], value)
        except ValueError:
            raise RequestError(f"optim_args {assignment!r}: give {name} a {options[name].__name__}") from None
    return values


def _read(kind: type, text: str) -> Option:
    if kind is bool:
        return read_boolean(text)
    return int(text) if kind is int else float(text)
