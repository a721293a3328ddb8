# needs torch
"""Create and count the frozen 4-bit weights below an adapter (QLoRA: bitsandbytes' NF4 and FP4), on the meta device, too.

An adapter's gradients pass through such weights, which have no gradients themselves. Every other quantization of transformers
is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from upshift.errors import MissingExtra, RequestError

NESTED_BLOCK = 256  # scales that share one nested scale, as bitsandbytes has it
CODES = 16  # entries in the table of 4-bit codes
NESTED_CODES = 256  # entries in the table of codes for quantized scales
LOAD_4BIT = "load it with BitsAndBytesConfig(load_in_4bit=True)"


def check_quantization(quantization_config: Any, name: str, *, adapter: bool) -> None:
    """Raise RequestError if a model with this quantization_config (a dict or an object) cannot be trained."""
    config = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method")))
    if method != "bitsandbytes":
        raise RequestError(f"{name} is quantized with {method}, through which no adapter is trained here; {LOAD_4BIT}")
    if not config.get("load_in_4bit"):
        raise RequestError(f"{name} is quantized to 8 bits (LLM.int8), which is not planned; {LOAD_4BIT}")
    if not adapter:
        kind = str(config.get("bnb_4bit_quant_type", "fp4")).upper()
        raise RequestError(
            f"{name} is quantized to 4 bits ({kind}), and such weights are never trained; put an adapter around it with "
            "peft.get_peft_model, or give the model that it was made from"
        )
    if find_spec("bitsandbytes") is None:
        raise MissingExtra(library="bitsandbytes", extra="bitsandbytes", purpose=f"{name}, quantized to 4 bits,")


def quantize(model: PreTrainedModel, *, dtype: torch.dtype) -> None:
    """Replace the layers that the config's quantization_config names by 4-bit layers, as from_pretrained does.

    On the meta device the new weights have the shapes of 4-bit weights. ``dtype``: the dtype of the original weights, to which
    4-bit weights are dequantized."""
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=False)
    original_modules = dict(model.named_modules())
    quantizer.preprocess_model(model=model, device_map={"": "cpu"})
    for path, module in four_bit_layers(model):
        original = original_modules[path]
        weight = original.weight.T if isinstance(original, Conv1D) else original.weight
        module.weight = _meta_weight(weight, module, dtype) if weight.is_meta else _quantized_weight(weight, module, dtype)
        if module.bias is not None:
            module.bias = nn.Parameter(original.bias.detach(), requires_grad=False)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def four_bit_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the path and the module of every layer with 4-bit weights."""
    for path, module in model.named_modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            yield path, module


def _quantized_weight(weight: Tensor, module: Any, dtype: torch.dtype) -> nn.Parameter:
    from bitsandbytes.nn import Params4bit

    parameter: Any = Params4bit(weight.detach().to(dtype), requires_grad=False, **vars(module.weight))
    quantized: nn.Parameter = parameter.to(weight.device)  # ``to`` quantizes it
    return quantized


def _meta_weight(weight: Tensor, module: Any, dtype: torch.dtype) -> nn.Parameter:
    """Return a 4-bit weight on the meta device.

    bitsandbytes can quantize on meta, but would then cache its tables there for the whole process."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    settings = module.weight
    blocks = -(-weight.numel() // module.weight.blocksize)
    with torch.device("meta"):
        scales: dict[str, Any] = {"absmax": torch.empty(blocks)}
        if settings.compress_statistics:
            nested = QuantState(
                absmax=torch.empty(-(-blocks // NESTED_BLOCK)),
                code=torch.empty(NESTED_CODES),
                blocksize=NESTED_BLOCK,
                dtype=torch.float32,
            )
            scales = {"absmax": torch.empty(blocks, dtype=torch.uint8), "offset": torch.empty(()), "state2": nested}
        state = QuantState(
            shape=weight.shape,
            code=torch.empty(CODES),
            blocksize=settings.blocksize,
            quant_type=settings.quant_type,
            dtype=dtype,
            **scales,
        )
        size = (weight.numel() + 1) // (2 * settings.quant_storage.itemsize)
        packed = torch.empty((size, 1), dtype=settings.quant_storage)
        options = {key: value for key, value in vars(settings).items() if key not in ("quant_state", "bnb_quantized")}
        quantized: nn.Parameter = Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True, **options)
    return quantized


def multiply_4bit(
    inputs: Tensor,
    weight: Tensor,
    shape: list[int],
    absmax: Tensor,
    blocksize: int,
    kind: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Multiply by a 4-bit weight as bitsandbytes::gemm_4bit does for many rows, as in training.

    The whole weight is dequantized to the dtype of the inputs."""
    bitsandbytes = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        nested = bitsandbytes.dequantize_blockwise(absmax_8bit, absmax, absmax_code, NESTED_BLOCK, torch.float32)
        absmax = nested + absmax_offset
    return nn.functional.linear(inputs, bitsandbytes.dequantize_4bit(weight, absmax, blocksize, kind, shape, inputs.dtype), bias)


def weight_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter's weights before they were packed."""
    state = getattr(parameter, "quant_state", None)
    return tuple(parameter.shape if state is None else state.shape)


def num_weights(parameter: Tensor) -> int:
    """Return the number of a parameter's weights before they were packed."""
    return torch.Size(weight_shape(parameter)).numel()


def stored_bytes(parameter: Tensor) -> int:
    """Return the bytes of a 4-bit weight with its scales and its own tables of codes (1 KiB)."""
    state = parameter.quant_state  # type: ignore[attr-defined]
    states = (state, state.state2) if state.nested else (state,)
    tensors = [value for fields in map(vars, states) for value in fields.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in (parameter, *tensors))


def copy_scales(parameter: Tensor, target: Tensor, move_tensor: Any) -> None:
    """Copy the scales of a 4-bit weight to ``target``, its copy on another device. ``move_tensor`` copies a tensor there."""
    from bitsandbytes.functional import QuantState

    def copy_state(state: Any) -> Any:
        fields = {
            key: move_tensor(value) if isinstance(value, Tensor) else value
            for key, value in vars(state).items()
            if key != "nested"
        }
        fields["state2"] = copy_state(state.state2) if state.nested else None
        return QuantState(**fields)

    target.quant_state = copy_state(parameter.quant_state)  # type: ignore[attr-defined]


def keep_trainable(model: nn.Module) -> None:
    """Keep 4-bit layers in the layout that can be trained.

    On CPUs with bf16 instructions, bitsandbytes packs a weight in place when it is first evaluated, and its kernel for that
    layout has no backward pass (from the source of bitsandbytes 0.50; not observed). Raise RequestError if a weight is packed
    already, because packing also rounds the scales."""
    for path, module in four_bit_layers(model):
        module.support_avx512bf16_for_cpu = False
        if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
            raise RequestError(
                f"the 4-bit weights of {path} were packed for inference when the model was evaluated on the CPU, and no gradient "
                "passes through them; load the model again, and evaluate it with the Trainer"
            )
