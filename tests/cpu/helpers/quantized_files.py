"""Write a Llama's weights in the formats of quantized checkpoints, and the same rounded weights in fp32 beside them.

The fp32 model is what each engine must compute: it is multiplied out here, by none of the libraries that read the formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32  # inputs that share a scale, in the formats with 4 bits
BLOCK = 32  # rows and columns that share a scale, in blocks of FP8
TINY = 1e-5  # the least scale: that of zeros
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each nibble of an int32, from the lowest on
Coded = tuple[dict[str, Tensor], Tensor]  # the tensors of the format, and the rounded weight [out, in] in fp32


def _round_to_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of 0 to 15 [out, in], where 8 is zero, and fp16 scales [out, groups]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).clamp_min(TINY).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return codes.flatten(1).int(), scales


def _multiply(codes: Tensor, scales: Tensor) -> Tensor:
    return ((codes - 8).float().unflatten(1, (-1, GROUP)) * scales.float()[..., None]).flatten(1)


def _pack(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return int32 [rows, columns / 8]: eight codes of a row in each, the first in the lowest four bits."""
    nibbles = codes.unflatten(1, (-1, 8))[..., list(order)].long()
    packed = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def gptq(weight: Tensor) -> Coded:
    codes, scales = _round_to_4_bits(weight)
    zeros = torch.full_like(scales.T, 7, dtype=torch.int32)  # the format stores the zero less one
    tensors = {
        "qweight": _pack(codes).T, "qzeros": _pack(zeros), "scales": scales.T,
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }  # fmt: skip
    return tensors, _multiply(codes, scales)


def awq(weight: Tensor) -> Coded:
    codes, scales = _round_to_4_bits(weight)
    zeros = torch.full_like(scales.T, 8, dtype=torch.int32)
    tensors = {"qweight": _pack(codes.T, AWQ_ORDER), "qzeros": _pack(zeros, AWQ_ORDER), "scales": scales.T}
    return tensors, _multiply(codes, scales)


def packed(weight: Tensor) -> Coded:
    codes, scales = _round_to_4_bits(weight)
    tensors = {"weight_packed": _pack(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return tensors, _multiply(codes, scales)


def int8(weight: Tensor) -> Coded:
    scales = (weight.abs().amax(1, keepdim=True) / 127).clamp_min(TINY)
    codes = (weight / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def fp8(weight: Tensor) -> Coded:
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.reshape(rows, BLOCK, columns, BLOCK).transpose(1, 2)
    scales = (blocks.abs().amax((2, 3)) / 448).clamp_min(TINY)
    codes = (blocks / scales[..., None, None]).to(torch.float8_e4m3fn)
    multiplied = (codes.float() * scales[..., None, None]).transpose(1, 2).reshape(weight.shape)
    return {"weight": codes.transpose(1, 2).reshape(weight.shape), "weight_scale_inv": scales}, multiplied


def _compressed(kind: str, bits: int, strategy: str, inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": None, "dynamic": False}
    if strategy == "group":
        weights["group_size"] = GROUP
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


_PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS: dict[str, tuple[Callable[[Tensor], Coded], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "w4a16": (packed, _compressed("pack-quantized", 4, "group")),
    "w8a8": (int8, _compressed("int-quantized", 8, "channel", _PER_TOKEN)),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}),
}


def write_quantized(plain: Path, folder: Path, name: str) -> Path:
    """Write the model of ``plain`` into ``folder`` in a format, and its rounded weights as a plain model, which is returned.

    ``folder`` gets all other files of ``plain``. The matrices of the layers are rounded, and the others stay."""
    encode, config = FORMATS[name]
    rounded = folder / "rounded"
    for target in (folder, rounded):
        target.mkdir(parents=True)
        for file in plain.iterdir():
            if file.suffix != ".safetensors":
                (target / file.name).write_bytes(file.read_bytes())
    stored = load_file(plain / "model.safetensors")
    coded: dict[str, Tensor] = {}
    for key, weight in load_file(plain / "model.safetensors").items():
        if "_proj." not in key:
            coded[key] = weight
            continue
        tensors, stored[key] = encode(weight.float())
        coded |= {f"{key.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(coded, folder / "model.safetensors", metadata={"format": "pt"})
    multiplied = {key: weight.contiguous() for key, weight in stored.items()}
    save_file(multiplied, rounded / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
    return rounded
