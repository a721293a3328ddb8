"""The loss in chunks against the model's own: every option, through the real forward pass of models made from configs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.trainer_pt_utils import LabelSmoother

from upshift.models.ops.chunked_loss import ChunkedHeadError, chunked_head, why_not_chunked
from upshift.models.ops.linear_cross_entropy import HeadLoss, LabelLimit, linear_cross_entropy, linear_token_losses

WORDS, CHUNK = 96, 7
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
SMALL = WIDTHS | {"vocab_size": WORDS} | TOKENS
DECODER = SMALL | {"num_key_value_heads": 2}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DECODER)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**DECODER, tie_word_embeddings=True)),
    "gemma2, soft-capped": lambda: Gemma2ForCausalLM(Gemma2Config(**DECODER, head_dim=8, final_logit_softcapping=0.5)),
    "granite, scaled": lambda: GraniteForCausalLM(GraniteConfig(**DECODER, logits_scaling=0.125)),
    "cohere, scaled": lambda: CohereForCausalLM(CohereConfig(**DECODER, logit_scale=4.0)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=WORDS, **TOKENS)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "t5, tied": lambda: T5ForConditionalGeneration(
        T5Config(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0)
    ),
    "bart, with final_logits_bias": lambda: BartForConditionalGeneration(
        BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=WORDS, decoder_start_token_id=2, **TOKENS,
        )
    ),
}  # fmt: skip
CAUSAL = [name for name in MODELS if name.split(",")[0] in ("llama", "gemma2", "granite", "cohere", "gpt2")]


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in key and tensor.is_floating_point():
            tensor.data.normal_()  # they are born zero, and would prove nothing
    return model


def batch(*, ignored: float = 0.4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, WORDS, (3, 17), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < ignored, -100)}


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_equal(model: nn.Module, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """To 1e-5; gradients that are zero but for rounding, as of a bias that softmax cancels, by the size of the others."""
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    expected, found = gradients(model, theirs), gradients(model, ours)
    assert found.keys() == expected.keys()
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < 1e-5 * max(gradient.norm(), 0.01 * whole), name


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name: str) -> None:
    model, inputs = made(name), batch()
    assert why_not_chunked(model, inputs) is None
    with chunked_head(model, chunk_tokens=CHUNK):
        ours = model(**inputs).loss
    check_equal(model, ours, model(**inputs).loss)
    assert isinstance(model(**inputs).logits, torch.Tensor), "the head is the model's own again"


class LimitOfAGpu(LabelLimit):
    """As on a GPU, which is not asked how many labels there are."""

    def of(self, labels: torch.Tensor) -> int | None:
        return self.labels


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_limit_of_the_labels_changes_no_loss_and_no_gradient(by_token: bool, has_bias: bool) -> None:
    """Rows without a label may then be computed, and count for nothing, even if they are not numbers."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, WORDS, (40,), generator=generator)
    labels[torch.rand(40, generator=generator) < 0.5] = -100
    hidden = torch.randn(40, 16, generator=generator)
    hidden[int((labels == -100).nonzero()[0])] = math.nan
    weight = torch.randn(WORDS, 16, generator=generator)
    bias = torch.randn(WORDS, generator=generator) if has_bias else None
    count = int((labels != -100).sum())

    def results(max_labels: int | None) -> list[torch.Tensor]:
        inputs = [None if tensor is None else tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        limit = None if max_labels is None else LimitOfAGpu(labels=max_labels)
        head = HeadLoss(CHUNK)
        if by_token:
            loss = linear_token_losses(*inputs, labels, head, limit).sum()
        else:
            loss = linear_cross_entropy(*inputs, labels, head, limit=limit)
        loss.backward()
        return [loss.detach(), *(tensor.grad for tensor in inputs if tensor is not None and tensor.grad is not None)]

    plain = results(None)
    assert len(plain) == 3 + has_bias and all(torch.isfinite(tensor).all() for tensor in plain)
    for max_labels in (count, count + 3, 40):
        for found, expected in zip(results(max_labels), plain, strict=True):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_more_labels_than_the_limit_are_never_left_out_in_silence() -> None:
    hidden = torch.ones(8, 4)
    labels = torch.arange(8)
    loss = linear_cross_entropy(hidden, torch.ones(9, 4), None, labels, HeadLoss(4), limit=LimitOfAGpu(labels=7))
    assert math.isnan(float(loss))
    limit = LabelLimit(labels=7, positions=4)
    assert limit.of(labels.to("meta")) is None and limit.of(labels[:4].to("meta")) == 7 and limit.of(labels[:4]) is None


@pytest.mark.parametrize("items", [40, torch.tensor(40)], ids=["int", "tensor"])
@pytest.mark.parametrize("name", CAUSAL)
def test_num_items_in_batch_and_shift_labels(name: str, items: Any) -> None:
    model, inputs = made(name), batch()
    shifted = inputs["labels"].roll(2, 1)  # another shift than the model's own
    divisor = {"num_items_in_batch": items}
    for more in (divisor, {"shift_labels": shifted}, divisor | {"shift_labels": shifted}):
        with chunked_head(model, chunk_tokens=CHUNK):
            ours = model(**inputs, **more).loss
        check_equal(model, ours, model(**inputs, **more).loss)


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("name", MODELS)
def test_label_smoothing_is_the_trainers(name: str, items: int | None) -> None:
    if items and name not in CAUSAL:
        pytest.skip("takes no num_items_in_batch")
    model, inputs = made(name), batch()
    more = {} if items is None else {"num_items_in_batch": items}
    with chunked_head(model, chunk_tokens=CHUNK, label_smoothing=0.1):
        ours = model(**inputs, **more).loss
    theirs = LabelSmoother(epsilon=0.1)(model(**inputs), inputs["labels"], shift_labels=name in CAUSAL, num_items_in_batch=items)
    check_equal(model, ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_z_loss(name: str) -> None:
    model, inputs = made(name), batch()
    with chunked_head(model, chunk_tokens=CHUNK, z_loss=0.01):
        ours = model(**inputs).loss
    plain = model(**inputs)
    logits, labels = (plain.logits[:, :-1], inputs["labels"][:, 1:]) if name in CAUSAL else (plain.logits, inputs["labels"])
    check_equal(model, ours, plain.loss + 0.01 * logits[labels != -100].logsumexp(-1).square().mean())


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "tokens": draw(st.integers(1, 40)), "words": draw(st.integers(2, 50)), "width": draw(st.integers(1, 8)),
        "ignored": draw(st.sampled_from([0.0, 0.3, 0.9])), "bias": draw(st.booleans()), "seed": draw(st.integers(0, 99)),
        "head": HeadLoss(
            chunk_tokens=draw(st.integers(1, 50)), scale=draw(st.sampled_from([1.0, -0.5, 3.0])),
            cap=draw(st.sampled_from([None, 2.0])), ignore_index=draw(st.sampled_from([-100, 0])),
            label_smoothing=draw(st.sampled_from([0.0, 0.2])), z_loss=draw(st.sampled_from([0.0, 0.1])),
        ),
    }  # fmt: skip


def tensors_of(drawn: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return hidden states, the head's weight and its bias, and labels."""
    torch.manual_seed(drawn["seed"])
    hidden = torch.randn(drawn["tokens"], drawn["width"], requires_grad=True)
    weight = torch.randn(drawn["words"], drawn["width"], requires_grad=True)
    bias = torch.randn(drawn["words"], requires_grad=True) if drawn["bias"] else None
    labels = torch.randint(drawn["words"], (drawn["tokens"],))
    labels[torch.rand(drawn["tokens"]) < drawn["ignored"]] = drawn["head"].ignore_index
    return hidden, weight, bias, labels


@settings(max_examples=150)
@given(heads())
def test_any_head(drawn: dict[str, Any]) -> None:
    """Against the same in double precision with all logits."""
    head: HeadLoss = drawn["head"]
    hidden, weight, bias, labels = tensors_of(drawn)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    ours = linear_cross_entropy(hidden, weight, bias, labels, head)
    found = torch.autograd.grad(3 * ours, inputs)

    doubled = [tensor.detach().double().requires_grad_() for tensor in inputs]
    logits = head.scale * doubled[0] @ doubled[1].T + (doubled[2] if bias is not None else 0.0)
    logits = logits if head.cap is None else head.cap * torch.tanh(logits / head.cap * head.cap)
    options: dict[str, Any] = {"ignore_index": head.ignore_index, "label_smoothing": head.label_smoothing, "reduction": "sum"}
    kept = labels != head.ignore_index
    theirs = cross_entropy(logits, labels, **options) + head.z_loss * logits[kept].logsumexp(1).square().sum()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5, abs=1e-6)
    for gradient, expected in zip(found, torch.autograd.grad(3 * theirs, doubled), strict=True):
        assert (gradient - expected).norm() <= 1e-5 * max(float(expected.norm()), 1.0)


@settings(max_examples=40)
@given(heads())
def test_losses_of_tokens_with_any_factors(drawn: dict[str, Any]) -> None:
    """As the sum above: how much each token's loss counts is decided after all are computed."""
    head: HeadLoss = drawn["head"]
    hidden, weight, bias, labels = tensors_of(drawn)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    ours = linear_token_losses(hidden, weight, bias, labels, head)
    assert float(ours.sum().detach()) == pytest.approx(
        float(linear_cross_entropy(hidden, weight, bias, labels, head).detach()), rel=1e-5, abs=1e-6
    )
    factors = torch.randn(drawn["tokens"])
    gradients = torch.autograd.grad((ours * factors).sum(), inputs)
    parts = []
    for row in range(drawn["tokens"]):
        loss = linear_cross_entropy(hidden[row : row + 1], weight, bias, labels[row : row + 1], head)
        parts.append(torch.autograd.grad(factors[row] * loss, inputs))
    for number, gradient in enumerate(gradients):
        expected = torch.stack([part[number] for part in parts]).sum(0)
        assert (gradient - expected).norm() <= 1e-4 * max(float(expected.norm()), 1.0)


def test_autocast_is_no_further_from_the_truth_than_the_plain_head() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64, requires_grad=True), torch.randn(900, 64, requires_grad=True)
    labels = torch.randint(900, (300,))
    exact = torch.autograd.grad(cross_entropy(hidden @ weight.T, labels), (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = cross_entropy(nn.functional.linear(hidden, weight).float(), labels)
        ours = linear_cross_entropy(hidden, weight, None, labels, HeadLoss(chunk_tokens=64)) / 300
    for true, theirs, found in zip(
        exact, torch.autograd.grad(plain, (hidden, weight)), torch.autograd.grad(ours, (hidden, weight)), strict=True
    ):
        assert found.dtype == torch.float32
        assert (found - true).norm() < 1.1 * (theirs - true).norm()


def flops_of(labels: torch.Tensor, *, frozen: bool = False, grad: bool = True) -> int:
    hidden, weight = torch.randn(len(labels), 8, requires_grad=True), torch.randn(50, 8, requires_grad=not frozen)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad):
        linear_cross_entropy(hidden, weight, None, labels, HeadLoss(chunk_tokens=16))
    return counter.get_total_flops()


def test_only_what_is_wanted_is_computed() -> None:
    labels = torch.zeros(128, dtype=torch.long)
    product = 2 * 128 * 50 * 8
    assert flops_of(labels) == 3 * product
    assert flops_of(labels, frozen=True) == 2 * product, "no gradient for a frozen weight"
    assert flops_of(labels, grad=False) == product, "no gradients in evaluation"
    labels[12:] = -100
    assert flops_of(labels) == 3 * product * 16 // 128, "no row without a label, but for those that fill a chunk"


def test_no_label_at_all_is_as_in_torch() -> None:
    model, inputs = made("llama"), batch(ignored=1.1)
    with chunked_head(model, chunk_tokens=CHUNK):
        ours = model(**inputs).loss
    assert math.isnan(ours) and math.isnan(model(**inputs).loss)
    assert all(not gradient.any() for gradient in gradients(model, ours).values())


def test_frozen_head() -> None:
    model, inputs = made("llama"), batch()
    model.get_output_embeddings().requires_grad_(False)
    with chunked_head(model, chunk_tokens=CHUNK):
        ours = model(**inputs).loss
    check_equal(model, ours, model(**inputs).loss)


@pytest.mark.parametrize("name", ["llama", "gemma2, soft-capped", "bert"])
def test_adapters(name: str) -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj"] if name != "bert" else ["query", "value"]
    head = "decoder" if name == "bert" else "lm_head"
    model, inputs = peft.get_peft_model(made(name), peft.LoraConfig(target_modules=targets)), batch()
    assert why_not_chunked(model, inputs) is None
    with chunked_head(model, chunk_tokens=CHUNK):
        ours = model(**inputs).loss
    check_equal(model, ours, model(**inputs).loss)
    adapted = peft.get_peft_model(made(name), peft.LoraConfig(target_modules=[*targets, head]))
    assert "not a plain linear layer" in (why_not_chunked(adapted, inputs) or "")


def test_compiled_model_is_compiled_once() -> None:
    model, inputs = made("gemma2, soft-capped"), batch()
    plain = model(**inputs, use_cache=False).loss
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    try:
        model.compile(backend=backend)
        num_compiled = []
        for _ in range(3):
            with chunked_head(model, chunk_tokens=CHUNK):
                ours = model(**inputs, use_cache=False).loss
            num_compiled.append(len(compiled))
        assert num_compiled[0] == num_compiled[2] > 0
        check_equal(model, ours, plain)
    finally:
        torch.compiler.reset()


class Between(nn.Module):
    """A head, something, a loss."""

    def __init__(self, change: Callable[[Any], Any], **options: Any) -> None:
        super().__init__()
        self.head, self.change, self.options = nn.Linear(4, WORDS), change, options

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> Any:
        return cross_entropy(self.change(self.head(hidden)), labels, **self.options)


ACCEPTED: dict[str, Callable[[Any], Any]] = {
    "old shift": lambda x: x[None][..., :, :].contiguous().view(-1, WORDS) if isinstance(x, torch.Tensor) else x[..., :, :],
    "tensor first": lambda x: torch.arange(WORDS) / WORDS + x,
    "cap, then scale": lambda x: torch.tanh(x / 3.0) * 3.0 * 0.5,
    "to": lambda x: x.to(torch.float32).to(x.device),
}
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another function": (lambda x: x.exp(), "takes .exp of its logits"),
    "a function of torch": (lambda x: torch.sort(x)[0], "torch's sort"),
    "a temperature that is learned": (lambda x: x * torch.ones(1), "multiplies its logits by a tensor"),
    "a number for each token": (lambda x: x + torch.ones(5, 1), "other than one number a word"),
    "some words": (lambda x: x[:, :50], "other than ranges of tokens"),
    "other rows": (lambda x: x.view(-1, WORDS // 2), "to rows of 48"),
    "two caps": (lambda x: x.tanh().tanh(), "twice"),
    "a bias after the cap": (lambda x: x.tanh() + torch.ones(WORDS), "after soft-capping"),
    "other logits": (lambda x: torch.zeros(5, WORDS), "do not become its loss"),
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_what_stands_between(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    model, inputs = Between(change), {"hidden": torch.randn(5, 4), "labels": torch.arange(5)}
    assert why_not_chunked(model, inputs) is None
    with chunked_head(model, chunk_tokens=2):
        ours = model(**inputs)
    check_equal(model, ours, model(**inputs))


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    change, words = REFUSED[name]
    inputs = {"hidden": torch.randn(5, 4), "labels": torch.arange(5)}
    reason = why_not_chunked(Between(change), inputs)
    assert reason is not None and words in reason
    if name != "other logits":
        with pytest.raises(ChunkedHeadError, match="the model"), chunked_head(model := Between(change), chunk_tokens=2):
            model(**inputs)


def test_losses_that_are_refused() -> None:
    inputs = {"hidden": torch.randn(5, 4), "labels": torch.arange(5)}
    for options in ({"reduction": "none"}, {"weight": torch.ones(WORDS)}):
        assert "one loss a token" in (why_not_chunked(Between(lambda x: x, **options), inputs) or "")
    assert "no output embedding" in (why_not_chunked(nn.Linear(2, 2), {}) or "")
