"""One run with a prime batch, and torch's cache of operators with shorter keys, give the numbers of plain runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from upshift.internals.torch_names import FAKE_TENSOR_MODE, STORAGE
from upshift.models.profile import Variant
from upshift.models.source import find_model
from upshift.models.tracing.fast_fake_mode import fake_mode
from upshift.models.tracing.fit_polynomials import fit_points, segment_names, trace_points
from upshift.models.tracing.polynomials import fit_segment
from upshift.models.tracing.segments import Tracer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}
VARIANT = Variant(
    precision="bf16", attention="block", masked=False, divided=False, selective=False, alternate=False, compiled=False
)  # fmt: skip


def tracer_of(config: PreTrainedConfig, architecture: str, folder: Path) -> Tracer:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    tracer = Tracer(find_model(str(folder)))
    tracer.base  # noqa: B018 - finds the stacks of layers
    return tracer


@pytest.mark.parametrize("attention", ["block", "sdpa"])
def test_a_prime_batch_gives_the_polynomials_of_two_small_ones(attention: str, tmp_path: Path) -> None:
    """Rows beyond the window of 24 tokens, and blocks of queries, make the numbers no polynomials of the length."""
    windows = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=24, layer_types=["sliding_attention", "full_attention"])
    tracer = tracer_of(windows, "Gemma3ForCausalLM", tmp_path)
    variant = VARIANT._replace(attention=attention)
    points = trace_points(192)
    plain = [tracer.measure(variant, batch=batch, sequence=sequence) for batch, sequence in points]
    expected = {name: fit_segment(points, [plain], name, longest=192) for name in segment_names(tracer)}
    assert fit_points(tracer, variant, None, points, (1,)) == expected


def test_shorter_keys_give_the_numbers_of_torchs_keys(tmp_path: Path) -> None:
    tracer = tracer_of(LlamaConfig(**SIZES), "LlamaForCausalLM", tmp_path)
    torchs = Tracer(tracer.source)
    torchs.fake = FAKE_TENSOR_MODE.get()()
    assert type(tracer.fake) is type(fake_mode()) is not type(torchs.fake)
    for variant in (VARIANT, VARIANT._replace(precision="fp32", attention="eager", masked=True)):
        runs = [each.measure(variant, batch=2, sequence=48, recompute="full") for each in (tracer, torchs)]
        assert runs[0] == runs[1]


@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_attention_counts_each_query_head(num_key_heads: int, tmp_path: Path) -> None:
    """Each head of queries is multiplied with keys, also if heads share their keys. torch 2.11's own formulas refuse that."""
    config = LlamaConfig(**{**SIZES, "num_key_value_heads": num_key_heads})
    tracer = tracer_of(config, "LlamaForCausalLM", tmp_path)
    run = tracer.measure(VARIANT._replace(attention="sdpa"), batch=2, sequence=48)
    product = 2 * 2 * 4 * 48 * 48 * 8 // 2  # of 2 rows, 4 heads of size 8, 48 queries and 48 keys; causal: half
    for passes, number in ((run.forward, 2), (run.backward, 5)):  # backward: 2 products each, and the scores again
        flops = [interval.attention_flops for interval in passes.values() if interval.attention_flops]
        assert flops == [number * product] * 2  # layers


def describe_results(mode: Any) -> list[Any]:
    """Return layouts and sharing of results of new tensors, views, operators in place, and operators with several results."""
    described: list[Any] = []
    with mode:
        for _ in range(3):  # the first run fills torch's cache
            whole = torch.ones(4, 6)
            part = whole[1:, ::2]
            added = part.add_(1)
            norm, mean, _ = torch.native_layer_norm(part, [3], None, None, 1e-5)
            for tensor in (whole, part, added, part.t(), part.to(torch.bfloat16), norm, mean, *whole.split([1, 3])):
                shares = STORAGE.of(tensor.untyped_storage()) == STORAGE.of(whole.untyped_storage())
                described.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(), shares))
            described.append(added is part)
    return described


def test_results_without_torchs_calls_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs_class = FAKE_TENSOR_MODE.get()
    expected = describe_results(torchs_class())
    operators = []
    dispatch = torchs_class.__torch_dispatch__

    def count(self: Any, function: Any, *others: Any) -> Any:
        operators.append(function)
        return dispatch(self, function, *others)

    mode = fake_mode()
    describe_results(mode)
    monkeypatch.setattr(torchs_class, "__torch_dispatch__", count)
    assert describe_results(mode) == expected
    by_torch = len(operators)
    describe_results(torchs_class())
    assert 0 <= by_torch < 0.6 * (len(operators) - by_torch)


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.untyped_storage().nbytes()


def loop_over_parts(rows: int, columns: int) -> list[tuple[Any, ...]]:
    """Return what the results of operators on parts of tensors are, in a fake mode. Parts differ in their place alone."""
    matrix = torch.zeros(rows, columns)
    described = []
    for number, part in enumerate(matrix.split(3)):
        copied = part.t().contiguous()
        product = part @ part.t()
        products = torch.ops.aten._unsafe_view.default(product, [*product.shape, 1])
        part.add_(1.0)
        part.copy_(torch.ones(part.shape, dtype=torch.bfloat16))
        result = torch.log_softmax(part[:, number % columns :], dim=1)
        described += [describe(each) for each in (part, part.t(), copied, product, products, result, part[1:], part.unsqueeze(0))]
        assert STORAGE.of(products.untyped_storage()) == STORAGE.of(product.untyped_storage())
        assert STORAGE.of(part.untyped_storage()) == STORAGE.of(matrix.untyped_storage())
        assert STORAGE.of(result.untyped_storage()) != STORAGE.of(matrix.untyped_storage())
    return described


@pytest.mark.parametrize(("rows", "columns"), [(12, 5), (13, 4), (5, 7)])
def test_parts_of_a_tensor_have_the_results_that_torch_gives(rows: int, columns: int) -> None:
    with FAKE_TENSOR_MODE.get()():
        expected = loop_over_parts(rows, columns)
    for _ in range(2):  # the second time, all of them come from the cache
        with fake_mode():
            assert loop_over_parts(rows, columns) == expected
