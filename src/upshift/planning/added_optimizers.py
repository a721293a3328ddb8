"""Read optimizers that are one file each. A file says at its top what it is and costs, and is read without being imported.

OPTIMIZER = {"name": "toy", "class": "Toy", "changes": "...", "state_words": 1, "update_words": 5, "update_copies": 1}

The files are in training/optimizers beside the others. They change the mathematics, so a user allows one with ``--allow`` and
its name.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from upshift.errors import RequestError
from upshift.value import first_problem

FOLDER = Path(__file__).parents[1] / "training" / "optimizers"
MARK = "\nOPTIMIZER = {"


class AddedOptimizer(BaseModel, frozen=True, extra="forbid"):
    """An optimizer in a file of its own. ``name`` is as in ``optim``.

    The three numbers are in words of a parameter's size, for each parameter. They may be measured as docs/log.md measures the
    others'.
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
    def door(self) -> tuple[str, str]:
        """Return the names of the module and the class."""
        return f"upshift.training.optimizers.{self.module}", self.class_name


@cache
def added_optimizers() -> dict[str, AddedOptimizer]:
    """Return the added optimizers by name. Raises RequestError for a file that does not say what it must."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    found = [_read(path, text) for path, text in texts.items() if MARK in text]
    return {one.name: one for one in found}


def _read(path: Path, text: str) -> AddedOptimizer:
    (said,) = (
        node.value for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OPTIMIZER"
    )  # fmt: skip
    literal: dict[str, Any] = ast.literal_eval(said)
    try:
        return AddedOptimizer.model_validate({**literal, "module": path.stem})
    except ValidationError as error:
        raise RequestError(f"OPTIMIZER of {path.name} is not understood: {first_problem(AddedOptimizer, error)}") from None
