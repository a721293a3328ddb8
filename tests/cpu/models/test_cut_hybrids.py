"""Hybrid models run after their layers are cut to those that differ: each layer keeps its kind, its mask and its shared block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from upshift.models.build import cut_stacks, disable_cache

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LAYERS = 12
MIXED = ["linear_attention", "linear_attention", "linear_attention", "hybrid"] * 3
ALTERNATING = ["mamba", "mamba", "mamba", "attention"] * 3
HYBRIDS: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 3, "expert_layer_period": 99, "num_experts": 2, "mamba_d_state": 8},
    "zamba2": {"num_mem_blocks": 2, "adapter_rank": 4, "mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4,
               "mamba_ngroups": 1, "layers_block_type": MIXED},
    "recurrent_gemma": {"attention_window_size": 16, "lru_width": 32},
    "granitemoehybrid": {"layers_block_type": ALTERNATING, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                         "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32},
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_cut_hybrid_runs_its_layers_as_before(kind: str) -> None:
    sizes = {**SIZES, "num_hidden_layers": LAYERS, **HYBRIDS[kind]}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes)).eval()
    disable_cache(model)
    ids = torch.arange(1, 25).reshape(2, 12)
    inputs: dict[int, tuple[Any, ...]] = {}
    layers = list(next(module for name, module in model.named_modules() if name.endswith("layers") and len(module) == LAYERS))
    seen: dict[int, Any] = {}
    for number, layer in enumerate(layers):
        layer.register_forward_hook(
            lambda module, args, kwargs, output, number=number: seen.update({number: output}), with_kwargs=True
        )
        layer.register_forward_pre_hook(
            lambda module, args, kwargs, number=number: inputs.update({number: (args, kwargs)}), with_kwargs=True
        )
    with torch.no_grad():
        model(ids)
    types = list(model.config.layer_types)
    whole_inputs, whole = dict(inputs), dict(seen)
    (stack,) = cut_stacks(model)
    assert list(model.config.layer_types) == [types[number] for number in stack.traced_layers]
    inputs.clear()
    seen.clear()
    with torch.no_grad():
        model(ids)
        assert sorted(seen) == sorted(stack.traced_layers)
        torch.testing.assert_close(first_of(seen[min(seen)]), first_of(whole[min(seen)]))
        for number in stack.traced_layers:  # it gets the mask that it got, and computes the same of the same
            assert mask_shape(inputs[number]) == mask_shape(whole_inputs[number])
            positional, named = with_tensors_of(whole_inputs[number], inputs[number])
            torch.testing.assert_close(first_of(layers[number](*positional, **named)), first_of(whole[number]))


def with_tensors_of(whole: tuple[Any, ...], cut: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the call of a cut model with the tensors of the whole one. Numbers of layers stay those of the cut one."""
    positional = [value if isinstance(value, torch.Tensor) else other for value, other in zip(whole[0], cut[0], strict=True)]
    return positional, {name: value if isinstance(value, torch.Tensor) else cut[1][name] for name, value in whole[1].items()}


def first_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def mask_shape(call: tuple[Any, ...]) -> Any:
    masks = [*call[0][1:], *call[1].values()]
    return [tuple(mask.shape) for mask in masks if isinstance(mask, torch.Tensor)]
