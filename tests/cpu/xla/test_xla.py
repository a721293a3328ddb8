"""Models under XLA against torch: forward passes of several kinds, what cannot be lowered, weights held once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from upshift.errors import MissingExtra, RequestError
from upshift.xla.tensorflow import need_tensorflow

need_tensorflow()
import tensorflow as tf  # noqa: E402

from upshift.xla.lowering.program import UnloweredOp, as_constant, lower  # noqa: E402
from upshift.xla.model import build  # noqa: E402
from upshift.xla.model_export import export  # noqa: E402

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
DECODER = SMALL | {"num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
MODELS = {
    "encoder": ("Bert", "BertForSequenceClassification", SMALL | {"num_labels": 3}),
    "decoder, llama3 positions, tied": (
        "Llama", "LlamaForCausalLM", DECODER | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "windows that bite, soft-capping": (
        "Gemma2", "Gemma2ForCausalLM", DECODER | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    ),
    "mixture of experts": ("Mixtral", "MixtralForCausalLM", DECODER | {"num_experts_per_tok": 2, "num_local_experts": 4}),
    "encoder and decoder": (
        "T5", "T5ForConditionalGeneration",
        {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "vision": (
        "ConvNext", "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "num_labels": 5, "image_size": 32},
    ),
}  # fmt: skip


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with random weights large enough that every part of the model shows in its result."""
    made = {}

    def save(name):
        if name not in made:
            config, architecture, arguments = MODELS[name]
            torch.manual_seed(0)
            config = getattr(transformers, f"{config}Config")(**arguments, architectures=[architecture])
            model = getattr(transformers, architecture)(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            made[name] = tmp_path_factory.mktemp("model")
            model.save_pretrained(made[name])
        return made[name], getattr(transformers, MODELS[name][1])

    return save


def inputs_of(kind):
    torch.manual_seed(1)
    if kind.main_input_name == "pixel_values":
        return {"pixel_values": torch.rand(2, 3, 32, 32)}
    ids, mask = torch.randint(5, 90, (2, 16)), torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    return given | {"decoder_input_ids": ids} if "ForConditionalGeneration" in kind.__name__ else given


@pytest.mark.parametrize(
    "name, dtype, limit", [(name, "float32", 1e-5) for name in MODELS] + [("mixture of experts", "bfloat16", 2e-2)]
)
def test_the_forward_pass_is_that_of_torch(name, dtype, limit, saved):
    folder, kind = saved(name)
    given = inputs_of(kind)
    reference = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    inputs = {key: value.to(reference.dtype) if value.is_floating_point() else value for key, value in given.items()}
    for model in (reference, built := build(str(folder), dtype=dtype)):
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
    with torch.no_grad():
        expected = reference(**inputs).logits.float().numpy()
    program = lower(export(Logits(built.torch_model), inputs))
    assert set(program.weights) <= set(built.weights)
    assert {name for name in built.names if name in dict(reference.named_parameters())} == set(dict(reference.named_parameters()))
    compiled = tf.function(lambda *values: program(values, built.weights)[0], jit_compile=True, autograph=False)
    found = tf.cast(compiled(*[tf.constant(inputs[key].numpy()) for key in program.inputs]), tf.float32).numpy()
    real = given["attention_mask"].bool().numpy() if found.ndim == 3 else slice(None)
    assert np.abs(found - expected)[real].max() <= limit * max(1.0, np.abs(expected).max())


def test_tied_weights_are_one_variable(saved):
    folder, _ = saved("decoder, llama3 positions, tied")
    model = build(str(folder))
    assert model.names["lm_head.weight"] == "model.embed_tokens.weight"
    assert "lm_head.weight" not in model.weights
    assert len({id(variable) for variable in model.trainable_variables}) == len(model.weights)


def test_what_is_not_lowered_is_named_with_its_module():
    class Inner(torch.nn.Module):
        def forward(self, value):
            return torch.linalg.inv(value)

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, value):
            return self.inner(value)

    with pytest.raises(UnloweredOp, match=r"aten\.linalg_inv_ex.*inner: Inner"):
        lower(export(Outer(), {"value": torch.eye(3)}))


class Few(torch.nn.Module):
    """Operators that few models use."""

    def forward(self, value):
        norms = [torch.linalg.vector_norm(value, ord=order, dim=-1) for order in (1, 2, 3, torch.inf, -torch.inf)]
        images = value[None, None]
        resized = [
            functional.interpolate(images, size=(7, 3), mode="bilinear"),
            functional.interpolate(images, scale_factor=1.7, mode="bilinear", align_corners=True),
            functional.interpolate(images, scale_factor=2.3, mode="nearest"),
            functional.avg_pool2d(images, 3, 2, padding=1, count_include_pad=False),
            functional.avg_pool2d(images, 3, 2, padding=1, ceil_mode=True),
            functional.avg_pool2d(images, 2, divisor_override=3),
        ]
        counted = [torch.arange(4, dtype=torch.uint8).float(), torch.arange(0, 4, 1.0, dtype=torch.int64).float()]
        waves = [torch.fft.fftn(value, dim=(0, 1)).real, torch.fft.ifft(value.to(torch.complex64), norm="ortho").imag]
        return [torch.stack([*norms, *counted]), *resized, *waves]


class Rounding(torch.nn.Module):
    """Operators that torch computes wide in half precision."""

    def __init__(self):
        super().__init__()
        self.linear, self.convolution = torch.nn.Linear(32, 48), torch.nn.Conv1d(32, 48, 3)

    def forward(self, value):
        found = [self.linear(value), self.convolution(value[None].mT), 0.044715 * value, value.pow(3), value.abs().log2()]
        return [*found, functional.gelu(value), functional.gelu(value, approximate="tanh"), functional.elu(value, alpha=0.3)]


def lowered(module, value):
    program, weights = lower(export(module, {"value": value}), strip=""), module.state_dict()
    known = {name: as_constant(weight) for name, weight in weights.items()}
    run = tf.function(lambda one: program([one], known), jit_compile=True, autograph=False)
    return [tf.cast(one, tf.float32).numpy() for one in run(as_constant(value))]


def test_operators_that_few_models_use():
    value = torch.randn(4, 6)
    for found, expected in zip(lowered(Few(), value), Few()(value), strict=True):
        assert np.allclose(found, expected.numpy(), atol=1e-6)


def test_half_precision_is_rounded_once():
    """The nearest bfloat16 to the exact result, but for sums in another order at a border between two."""
    torch.manual_seed(0)
    module, value = Rounding().bfloat16(), torch.randn(64, 32).bfloat16()
    found = lowered(module, value)
    with torch.no_grad():
        exact = module.double()(value.double())
    for one, expected in zip(found, exact, strict=True):
        assert (one != expected.bfloat16().float().numpy()).mean() < 0.01


def test_a_shape_that_depends_on_data_is_refused_in_one_line():
    class Picks(torch.nn.Module):
        def forward(self, value):
            return value[value > 0].sum() if value.sum() > 0 else value.sum()

    with pytest.raises(RequestError, match="no static graph"):
        export(Picks(), {"value": torch.ones(3)})


def test_a_missing_tensorflow_is_one_line(monkeypatch):
    monkeypatch.setattr("upshift.xla.tensorflow.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install '.*\[xla\]'"):
        need_tensorflow("--backend xla")


MEMORY = """
import json, resource, sys
from upshift.xla.tensorflow import need_tensorflow
need_tensorflow()
from upshift.xla.model import build
from upshift.xla.generation.generator import XlaGenerator
from xla_batches import as_batches, ragged_batches, train

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def generates(folder, found):
    model = build(folder)
    found["build"] = peak()
    XlaGenerator(model).generate([[5, 6, 7]], max_new_tokens=4)
    found["generate"] = peak()

def trains(folder, found):
    data = as_batches(ragged_batches(2, 8, 30, 2), 32)
    train(folder, data, output=folder + "/out", max_steps=2, on_step=lambda done: found.update(train=peak()))

run, small, large = globals()[sys.argv[1]], *sys.argv[2:]
run(small, {})  # what libraries and compilers load once
before, found = peak(), {}
run(large, found)
print(json.dumps({name: value - before for name, value in found.items()}))
"""


def test_weights_are_held_once(tmp_path):
    """Peaks of building, generating and training. Beside weights, gradients and AdamW's two states activations are little."""
    for name, hidden in (("small", 64), ("large", 1024)):
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=8, architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / name)
    weights, found = 4 * sum(weight.numel() for weight in model.parameters()), {}
    del model
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEMORY, what, tmp_path / "small", tmp_path / "large"], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for what in ("generates", "trains")
    ]  # fmt: skip
    for process in started:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        found |= json.loads(out.splitlines()[-1])
    times = {name: found[name] / (parts * weights) for name, parts in (("build", 1), ("generate", 1), ("train", 4))}
    assert weights > 130e6 and max(times.values()) <= 1.3, times
