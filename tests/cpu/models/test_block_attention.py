"""Block attention against attention in double precision, under every kind of mask, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from upshift.models.ops.block_attention import HALF_KEY_MULTIPLE, block_attention_forward

LENGTH = 300  # not a multiple of a block


class Attention(nn.Module):
    is_causal, num_key_value_groups = True, 1


def packed(batch: int) -> torch.Tensor:
    """Sequences that begin at other places in each row."""
    sequence = (torch.rand(batch, LENGTH) < 0.02).cumsum(1)
    return ((sequence[:, :, None] == sequence[:, None]) & torch.ones(LENGTH, LENGTH).tril().bool())[:, None]


def padded(batch: int) -> torch.Tensor:
    """Not causal: every query sees every real key."""
    lengths = torch.randint(2, LENGTH, (batch, 1, 1))
    return (torch.arange(LENGTH) < lengths).expand(batch, LENGTH, LENGTH)[:, None]


def additive(batch: int) -> torch.Tensor:
    return torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1) + torch.randn(LENGTH, LENGTH)


def blind(batch: int) -> torch.Tensor:
    """A query that sees nothing must give numbers, not NaN, and send no gradient elsewhere."""
    mask = packed(batch)
    mask[:, :, 5] = False
    return mask


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["multi-head", "grouped"])
@pytest.mark.parametrize("make_mask", [None, packed, padded, additive])
def test_output_and_gradients(make_mask, heads):
    torch.manual_seed(0)
    batch, width = 3, 16
    query, key, value = (
        torch.randn(batch, LENGTH, h, width).transpose(1, 2).requires_grad_() for h in (heads[0], *heads[1:] * 2)
    )
    mask = make_mask(batch) if make_mask else None
    out, _ = block_attention_forward(Attention(), query, key, value, mask)
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, (query, key, value), gradient)

    doubled = [tensor.double() for tensor in (query, key, value)]
    spread = [tensor.repeat_interleave(heads[0] // tensor.shape[1], 1) for tensor in doubled]
    float_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(*spread, attn_mask=float_mask, is_causal=mask is None).transpose(1, 2)
    assert out.shape == (batch, LENGTH, heads[0], width)
    for one, other in zip(
        (out, *found), (expected, *torch.autograd.grad(expected, (query, key, value), gradient.double())), strict=True
    ):
        torch.testing.assert_close(one.double(), other.double(), atol=1e-5, rtol=1e-4)


class Products(TorchDispatchMode):
    """Record the sizes of all batched products."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[torch.Size, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bmm.default:
            self.sizes.add(tuple(tensor.shape for tensor in args))
        return func(*args, **(kwargs or {}))


def test_packed_rows_in_16_bits_have_few_sizes():
    """oneDNN makes code for each size of a product in 16 bits, and never frees it. Texts begin anywhere in a row."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, LENGTH, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with Products() as products:
        for _ in range(20):
            out, _ = block_attention_forward(Attention(), query, key, value, packed(1))
            torch.autograd.grad(out.float().square().sum(), (query, key, value))
    num_ranges = -(-LENGTH // HALF_KEY_MULTIPLE)
    assert len(products.sizes) <= 5 * 2 * num_ranges  # products of a block; full blocks, and the last one

    mask = packed(1)
    doubled = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    out, _ = block_attention_forward(Attention(), query, key, value, mask)
    found = (out, *torch.autograd.grad(out.float().square().sum(), (query, key, value)))
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(*doubled, attn_mask=mask).transpose(1, 2)
    for one, other in zip(found, (expected, *torch.autograd.grad(expected.square().sum(), doubled)), strict=True):
        assert (one.double() - other).norm() < 0.02 * other.norm()


def test_a_query_that_sees_nothing():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, LENGTH, 16, requires_grad=True) for _ in range(3))
    mask = blind(2)
    out, _ = block_attention_forward(Attention(), query, key, value, mask)
    gradients = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(torch.isfinite(tensor).all() for tensor in (out, *gradients))


def test_what_it_leaves_to_sdpa():
    """A position bias, and a cache with more keys than queries."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 8, 16) for _ in range(3))
    bias = torch.randn(1, 2, 8, 8)
    module = Attention()
    biased, _ = block_attention_forward(module, query, key, value, None, position_bias=bias)
    plain, _ = block_attention_forward(module, query, key, value, None)
    assert not torch.allclose(biased, plain)
    last, _ = block_attention_forward(module, query[:, :, -1:], key, value, None)
    torch.testing.assert_close(last[:, 0], plain[:, -1])


@pytest.mark.parametrize("make_mask", [None, packed, padded])
def test_dropout(make_mask):
    """The values are unit vectors, so the output shows what is left of each probability; gradients follow from it."""
    torch.manual_seed(0)
    rate, batch, heads = 0.2, 2, 4
    query, key = (torch.randn(batch, heads, LENGTH, 16, requires_grad=True) for _ in range(2))
    value = torch.eye(LENGTH).expand(batch, heads, LENGTH, LENGTH).clone().requires_grad_()
    mask = make_mask(batch) if make_mask else None
    whole, _ = block_attention_forward(Attention(), query, key, value, mask)
    state = torch.get_rng_state()
    out, _ = block_attention_forward(Attention(), query, key, value, mask, dropout=rate)
    seen = whole > 1e-6
    stays = out != 0
    assert abs(float(stays[seen].float().mean()) - (1 - rate)) < 0.01
    torch.testing.assert_close(out, whole * stays / (1 - rate), rtol=1e-4, atol=1e-6)
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True)

    doubled = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    scores = doubled[0] @ doubled[1].transpose(2, 3) * 16**-0.5
    visible = mask if mask is not None else torch.ones(LENGTH, LENGTH).tril().bool()
    left = torch.softmax(scores.masked_fill(~visible, -1e300), -1) * stays.transpose(1, 2).double() / (1 - rate)
    expected = torch.autograd.grad((left @ doubled[2]).transpose(1, 2), doubled, gradient.double())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-3)

    torch.set_rng_state(state)  # as a recomputed layer does
    again, _ = block_attention_forward(Attention(), query, key, value, mask, dropout=rate)
    assert torch.equal(again, out)
    other, _ = block_attention_forward(Attention(), query, key, value, mask, dropout=rate)
    assert not torch.equal(other, out)
