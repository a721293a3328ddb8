"""Compute several LoRA adapters beside the weights of one model: each row of the engine has an adapter, or none.

peft's layers compute the adapters, so the tokens are those of peft's own generate()."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peft import LoraConfig, PeftModel, get_peft_model_state_dict

from upshift.errors import RequestError
from upshift.inference.generation.engines.base import ComputedRows, NoExtension, Prefix
from upshift.inference.generation.engines.torch_decoder import TorchDecoder
from upshift.loading.files.safetensors_header import read_header
from upshift.loading.load import build_empty_model
from upshift.models.source import ADAPTER_WEIGHTS, ModelSource
from upshift.text import one_line

NO_ADAPTER = "__base__"  # peft's word for a row without an adapter
PEFT_PREFIX = "base_model.model."  # of the names of an adapter's tensors
PEFT_ERRORS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError, NotImplementedError)


def read_config(folder: Path) -> LoraConfig:
    """Return the config of an adapter whose weights will be read. Raise RequestError if it is none."""
    try:
        config: LoraConfig = LoraConfig.from_pretrained(str(folder))
    except PEFT_ERRORS as error:
        raise RequestError(f"{folder} has no config of LoRA that peft reads: {one_line(error)}") from None
    config.init_lora_weights = False  # the weights are read, so they need no random values
    config.inference_mode = True
    return config


def check_fits(source: ModelSource, folder: Path) -> None:
    """Raise RequestError if an adapter was not made for a model of this form. Read only the header of its weights."""
    config = read_config(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's warnings are for training
        try:
            model = PeftModel(build_empty_model(source), config, "checked", low_cpu_mem_usage=True)
            state = get_peft_model_state_dict(model, adapter_name="checked", save_embedding_layers=False)
        except PEFT_ERRORS as error:
            raise _not_for_model(source, folder, one_line(error)) from None
    expected = {name: tuple(weight.shape) for name, weight in state.items()}
    stored = {tensor.name: tuple(tensor.shape) for tensor in read_header(folder / ADAPTER_WEIGHTS).tensors}
    base_names = {name.replace(".base_layer.", ".") for name, _ in model.get_base_model().named_parameters()}
    for name in sorted(stored.keys() | expected.keys()):
        if name not in expected and name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".") in base_names:
            raise RequestError(
                f"{folder} has {name}, a weight of the model itself, which all adapters share here; save the adapter with "
                "save_embedding_layers=False, or merge it (upshift merge)"
            )
        if name not in expected:
            raise _not_for_model(source, folder, f"the adapter has {name}, and the model no place for it")
        if name not in stored:
            raise _not_for_model(source, folder, f"the adapter lacks {name}")
        if stored[name] != expected[name]:
            raise _not_for_model(source, folder, f"{name} is {stored[name]}, and the model takes {expected[name]}")


def _not_for_model(source: ModelSource, folder: Path, reason: str) -> RequestError:
    return RequestError(f"{folder} is not an adapter for {source.reference!r}: {reason}; give one that was made for this model")


class AdapterDecoder(NoExtension):
    """The engine torch with adapters. ``assign`` names those of the rows that the next ``admit`` or ``compute_chunks`` adds.

    Each loaded adapter has a key of its own, also if its name was used before. Cached prompts are kept by these keys."""

    joins = True

    def __init__(self, decoder: TorchDecoder, source: ModelSource) -> None:
        self.weight_bytes = decoder.weight_bytes
        self._decoder = decoder
        self._source = source
        self._model: Any = None  # peft's model around that of the decoder, from the first adapter on
        self._keys: dict[str, str] = {}  # by the adapters' names
        self._unused_keys: set[str] = set()  # of adapters to remove when no request uses them
        self._numbers = itertools.count(1)
        self._rows: list[str] = []
        self._next_rows: list[str] = []
        self._computed_rows: list[str] = []  # those of prompts that were computed in chunks, until they join the rows
        self.prefixes = decoder.prefixes
        self.chunks = decoder.chunks

    @property
    def names(self) -> list[str]:
        return list(self._keys)

    def key_of(self, name: str) -> str:
        """Return the key of a loaded adapter. Raise RequestError for an unknown name."""
        if name not in self._keys:
            raise RequestError(f"the adapter {name!r} is not loaded; load it, or name one of {', '.join(self._keys) or 'none'}")
        return self._keys[name]

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter. Raise RequestError, and leave the others as they are, if it does not fit."""
        check_fits(self._source, folder)
        key = f"adapter_{next(self._numbers)}"  # names of clients may have dots, which names of modules have not
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's warnings are for training
            try:
                if self._model is None:
                    self._model = PeftModel(self._decoder.model, read_config(folder), key)
                    self._decoder.model = self._model
                self._model.load_adapter(str(folder), key, torch_device=str(self._decoder.model.device))
                self._model.eval()
                self._pass([key])
                self._decoder.compute([0])
            except PEFT_ERRORS as error:  # a kind of layer that peft does not compute for rows of several adapters
                self._remove(key)
                raise _not_for_model(self._source, folder, one_line(error)) from None
        self._keys[name] = key

    def unload(self, name: str) -> None:
        """Forget an adapter. ``remove_unused`` frees its memory."""
        self._unused_keys.add(self.key_of(name))
        del self._keys[name]

    def remove_unused(self, used_keys: Iterable[str | None]) -> None:
        """Free the memory of the unloaded adapters, but not of those with these keys."""
        for key in sorted(self._unused_keys - set(used_keys)):
            self._unused_keys.remove(key)
            self._remove(key)

    def assign(self, keys: Sequence[str | None]) -> None:
        """Name the adapters of the rows that the next ``admit`` or ``compute_chunks`` adds. None stands for the model alone."""
        self._next_rows = [key or NO_ADAPTER for key in keys]

    def compute(self, tokens: Sequence[int]) -> Prefix:
        self._pass([NO_ADAPTER])
        return self._decoder.compute(tokens)

    def prefix_of_row(self, row: int) -> Prefix:
        return self._decoder.prefix_of_row(row)

    def compute_chunks(
        self, prompts: Sequence[Sequence[int]], prefix: Prefix | None, next_width: Callable[[], int]
    ) -> Iterator[ComputedRows | None]:
        return self._compute_chunks(self._take_next_rows(prompts), self._decoder.compute_chunks(prompts, prefix, next_width))

    def _compute_chunks(self, rows: list[str], chunks: Iterator[ComputedRows | None]) -> Iterator[ComputedRows | None]:
        """Compute chunks of prompts whose rows have these adapters."""
        computed = None
        while computed is None:
            self._pass(rows)
            computed = next(chunks)
            self._computed_rows = rows
            yield computed

    def join_computed(self, computed: ComputedRows) -> np.ndarray:
        self._rows += self._computed_rows
        return self._decoder.join_computed(computed)

    def _take_next_rows(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return the adapters of the rows that these prompts add."""
        new_rows = self._next_rows or [NO_ADAPTER] * len(prompts)
        self._next_rows = []
        return new_rows

    def admit(self, prompts: Sequence[Sequence[int]], prefix: Prefix | None = None) -> np.ndarray:
        new_rows = self._take_next_rows(prompts)
        self._pass(new_rows)
        logits = self._decoder.admit(prompts, prefix)
        self._rows += new_rows
        return logits

    def step(self, tokens: np.ndarray) -> np.ndarray:
        self._pass(self._rows)
        return self._decoder.step(tokens)

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self._decoder.keep(rows)

    def _pass(self, rows: list[str]) -> None:
        """Name the adapters of the rows of the next pass."""
        self._decoder.pass_arguments = {} if self._model is None else {"adapter_names": rows}

    def _remove(self, key: str) -> None:
        """Free the memory of an adapter, if it is there. peft computes nothing without any adapter, so the last one takes its
        layers with it."""
        if self._model is None or key not in self._model.peft_config:
            return
        if len(self._model.peft_config) > 1:
            self._model.delete_adapter(key)
        else:
            self._decoder.model = self._model.unload()
            self._model = None
