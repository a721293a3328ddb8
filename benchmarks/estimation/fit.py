"""Fit the table of quick plans (src/upshift/models/estimation/decoder.json) to traces of eight decoders.

    python benchmarks/estimation/fit.py        # an hour on one core, most of it for the traces, which are kept in the cache

Each coefficient of each polynomial in a trace is a sum of a few features of the sizes, such as the hidden size, or the weights of
a layer. The smallest set of features that gives the coefficient of all eight decoders exactly is taken. Only the highest moment
inside a layer is no such sum, because another moment is the highest where the sizes have another ratio: it is fitted roughly.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from upshift.models.estimation.estimate import SUM, TABLE
from upshift.models.estimation.sizes import sizes_of
from upshift.models.profile import Polynomial, Variant
from upshift.models.source import AdapterOptions, ModelSource, find_model_to_train
from upshift.models.tracing.profile_model import profile_model

# Hidden and feed-forward size, heads, heads of keys, their width, words; and the rank of LoRA.
DECODERS = (
    (2048, 8192, 32, 8, 64, 32000, 16), (4096, 14336, 32, 8, 128, 128256, 8), (1024, 3072, 16, 8, 128, 151936, 32),
    (5120, 13824, 40, 40, 128, 32000, 16), (2560, 9728, 32, 8, 128, 151936, 64), (8192, 28672, 64, 8, 128, 128256, 16),
    (3072, 8192, 24, 8, 128, 128256, 8), (896, 4864, 14, 2, 64, 151936, 4),
)  # fmt: skip
KINDS = ("full", "lora", "qlora")
LENGTH = 2048
LAYERS = 4
MAX_FEATURES = 5
EXACT = 1e-7
ROUGH = {False: ("one", "H", "F", "Q", "K", "V", "R", "A"), True: ("HQ", "HK", "HF", "HV", "W", "L", "H", "F")}
LARGE = 1e7  # a coefficient above it is of products of two sizes
HIGH_POINT = (16, 2048)  # where the highest moment of a layer is looked for
VARIANTS = tuple(
    Variant(precision, "sdpa", False, divided=precision != "fp32", selective=True, compiled=True)
    for precision in ("fp32", "bf16", "bf16-pure")
)


def decoder_source(sizes: Sequence[int], kind: str, folder: Path) -> ModelSource:
    """Return a Llama of these sizes with four layers, whose first and last are like the others."""
    hidden, feed_forward, heads, key_heads, width, words, rank = sizes
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": feed_forward,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": width, "vocab_size": words,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 1 << 17, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    options = None if kind == "full" else AdapterOptions(lora_rank=rank, load_in_4bit=kind == "qlora")
    return find_model_to_train(str(folder), options)


def steps_of(source: ModelSource) -> list[Any]:
    """Return the steps of a trace as JSON, with one layer for all, and the highest moment of each pass alone."""
    profile = profile_model(source, sequence_length=LENGTH, variants=VARIANTS)
    steps = json.loads(profile.to_json())["steps"]
    for step in steps:
        for stack in step["stacks"]:
            stack["plain"] = stack["plain"][1:2]
            stack["recomputed"] = {granularity: layers[1:2] for granularity, layers in stack["recomputed"].items()}
    return [reduce_rises(step) for step in steps]


def reduce_rises(entry: Any) -> Any:
    """Return an entry in which each envelope is its highest polynomial, without the moments of freed gradients."""
    if isinstance(entry, list):
        return [reduce_rises(part) for part in entry]
    if not isinstance(entry, dict):
        return entry
    reduced = {name: reduce_rises(part) for name, part in entry.items() if name != "gradients_go"}
    if reduced.get("rise"):
        reduced["rise"] = [max(reduced["rise"], key=lambda terms: Polynomial(*terms).at(*HIGH_POINT))]
    return reduced


class Fit:
    """Finds the features of which a number of each decoder is the sum."""

    def __init__(self, features: Sequence[dict[str, float]]) -> None:
        self.names = [name for name in features[0] if any(row[name] for row in features)]
        self.values = np.array([[float(row[name]) for name in self.names] for row in features])
        self.known: dict[tuple[float, ...], dict[str, float]] = {}
        self.num_rough = 0
        self.subsets = []
        for size in range(1, MAX_FEATURES + 1):
            sets = list(itertools.combinations(range(len(self.names)), size))
            matrices = np.stack([self.values[:, list(chosen)] for chosen in sets])
            scales = np.abs(matrices).max(axis=1, keepdims=True)
            self.subsets.append((sets, matrices / scales, scales[:, 0, :], np.linalg.pinv(matrices / scales, rcond=1e-12)))

    def of(self, numbers: Sequence[float]) -> dict[str, float]:
        """Return the factors by feature, without those that are 0."""
        key = tuple(float(number) for number in numbers)
        if key not in self.known:
            target = np.array(key)
            found = self._exact(target) if target.any() else {}
            self.known[key] = self._rough(target) if found is None else found
        return self.known[key]

    def _weights(self, target: Any) -> Any:
        return 1 / np.maximum(np.abs(target), np.abs(target).max() * 1e-6)

    def _exact(self, target: Any) -> dict[str, float] | None:
        for sets, matrices, scales, inverses in self.subsets:
            factors = inverses @ target
            errors = (np.abs(np.einsum("mik,mk->mi", matrices, factors) - target) * self._weights(target)).max(axis=1)
            fitting = np.flatnonzero(errors < EXACT)
            if len(fitting):
                real = factors / scales
                best = min(fitting, key=lambda index: (self._num_uneven(real[index]), np.abs(real[index]).sum()))
                return {self.names[name]: _even(float(value)) for name, value in zip(sets[best], real[best], strict=True)}
        return None

    @staticmethod
    def _num_uneven(factors: Any) -> int:
        return int((np.abs(factors * 16 - np.round(factors * 16)) > 1e-5).sum())

    def _rough(self, target: Any) -> dict[str, float]:
        self.num_rough += 1
        used = [index for index, name in enumerate(self.names) if name in ROUGH[bool(np.abs(target).max() > LARGE)]]
        sign = 1.0 if target.sum() >= 0 else -1.0
        weighted = self.values[:, used] * self._weights(target)[:, None]
        scale = np.abs(weighted).max(axis=0)
        factors = nnls(weighted / scale, sign * target * self._weights(target))[0] / scale * sign
        return {self.names[name]: float(f"{value:.6g}") for name, value in zip(used, factors, strict=True) if value}


def _even(value: float) -> float:
    """Return a factor without the error of the solution, where it is a number of 65,536ths."""
    nearest = round(value * 65536) / 65536
    return nearest if abs(value - nearest) < 3e-7 else float(f"{value:.8g}")


def fit_entries(entries: Sequence[Any], fit: Fit) -> Any:
    """Return one entry of the table for the same entry of every trace."""
    first = entries[0]
    if isinstance(first, dict):
        return {name: fit_entries([entry[name] for entry in entries], fit) for name in first}
    if isinstance(first, list):
        return [fit_entries(parts, fit) for parts in zip(*entries, strict=True)]
    if isinstance(first, bool | str | None):
        assert all(entry == first for entry in entries), entries
        return first
    if len({*entries}) == 1:
        return first
    return {SUM: fit.of(entries)}


def main() -> None:
    table = {}
    for kind in KINDS:
        traces, features = [], []
        for sizes in DECODERS:
            with tempfile.TemporaryDirectory() as folder:
                source = decoder_source(sizes, kind, Path(folder))
                features.append(sizes_of(source).features)
                traces.append(steps_of(source))
        fit = Fit(features)
        table[kind] = fit_entries(traces, fit)
        print(f"{kind}: {len(fit.known):,} numbers, {fit.num_rough} of them roughly")
    TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
