"""Write and read a peft adapter as a directory that peft reads: adapter_config.json, adapter_model.safetensors and a card.

The weights of the model around which the adapter is trained never change and are not in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from upshift.errors import RequestError
from upshift.models.source import ADAPTER_WEIGHTS


def has_adapter(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model that are saved, by its own names: all of them, or those that are not frozen if it has an
    adapter."""
    state: dict[str, Tensor] = model.state_dict()
    if not has_adapter(model):
        return state
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    # Beside a 4-bit weight stand its scales, under names that begin with its own.
    return {name: tensor for name, tensor in state.items() if frozen.isdisjoint(_name_and_beginnings(name))}


def _name_and_beginnings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def write_adapter(directory: Path, model: Any, weights: dict[str, Tensor]) -> None:
    """Write the adapter. ``weights`` is the result of ``saved_state``, or a copy of it."""
    model.save_pretrained(directory, state_dict=weights, save_embedding_layers=False)


def read_adapter(directory: Path, model: Any) -> None:
    """Copy the weights into the adapter's own tensors, bit for bit. Raise RequestError if the adapter is another one."""
    from peft import set_peft_model_state_dict

    file, (name,) = directory / ADAPTER_WEIGHTS, model.peft_config
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        answer: Any = set_peft_model_state_dict(model, load_file(file), adapter_name=name)
    except (RuntimeError, KeyError) as error:  # torch's words for another shape, peft's for a name that is not there
        raise RequestError(f"{file} is of another adapter ({' '.join(str(error).split())[:200]}); {_NEXT}") from None
    wrong = [*answer.unexpected_keys, *sorted(trained.intersection(answer.missing_keys))]
    if wrong:
        raise RequestError(f"{file} and the model's adapter differ in {wrong[0]}; {_NEXT}")


_NEXT = "give the adapter_config.json that was saved with it"
