"""Programs for TPUs, compiled by Google's compiler without one; names of slices; what the planner is told."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from command import Command
from transformers import LlamaConfig

from upshift.errors import RequestError
from upshift.xla.tpu.compile import read_topology

NO_COMPILER = [name for name in ("tensorflow", "jax", "libtpu") if find_spec(name) is None]
compiled = pytest.mark.skipif(bool(NO_COMPILER), reason=f"not installed: {', '.join(NO_COMPILER)}")
SMALL = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 131_072,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], tie_word_embeddings=False).save_pretrained(folder)
    return str(folder / "config.json")  # no weights: none are made


@pytest.mark.parametrize(
    ("name", "grid", "chips", "accelerator"),
    [
        ("v5e-1", "1x1", 1, "v5litepod-1"), ("v5e-4", "2x2", 4, "v5litepod-4"), ("v6e-8", "2x4", 8, "v6e-8"),
        ("v5p-8", "2x2x1", 4, "v5p-8"), ("v4-32", "2x2x4", 16, "v4-32"),
    ],
)  # fmt: skip
def test_slices_by_googles_names(name: str, grid: str, chips: int, accelerator: str) -> None:
    found = read_topology(name)
    assert (found.grid, found.chips, found.accelerator_type) == (grid, chips, accelerator)


@pytest.mark.parametrize(("name", "words"), [("v9-4", "v5e-4"), ("v5e", "v5e-4"), ("v5e-3", "1, 4, 8"), ("v4-4", "two a chip")])
def test_other_names_are_refused(name: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_topology(name)


@compiled
def test_a_step_of_four_chips(model: str, upshift: Command) -> None:
    done = upshift("xla", "compile", model, "--topology", "v5e-4", "--batch", 8, "--sequence-length", 64, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    answer = found["answer"]
    assert answer["exchanges"] >= 1  # gradients are summed over the chips
    assert (answer["num_dynamic_dimensions"], answer["num_custom_calls"]) == (0, 0)
    states = found["weight_bytes"] + found["optimizer_bytes"]
    assert states == pytest.approx(3 * 4 * found["num_parameters"], abs=8)
    # Weights and states are written over, so they are in memory once.
    assert states < answer["peak_bytes"] < states + answer["temporary_bytes"] + answer["code_bytes"] + 2**20
    planned = upshift("plan", model, "--on", "4xtpu-v5e")
    assert planned.code == 2 and "train of 8 x 64 tokens in bfloat16 on v5e-4 takes" in planned.err


@compiled
def test_generation_compiles_and_too_much_is_said_in_the_compilers_words(model: str, upshift: Command) -> None:
    asked = ("xla", "compile", model, "--topology", "v6e-1", "--generate", "--max-new-tokens", 4, "--sequence-length")
    done = upshift(*asked, 32)
    assert done.code == 0 and "highest moment" in done.out and "not run on a TPU" in done.out, done.err
    large = upshift(*asked, 65_536, "--batch", 8)
    assert large.code == 3 and "31.25 GiB" in large.err and "The compiler says" in large.err


def test_without_the_compiler_it_is_one_line(model: str, upshift: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshift.xla.tpu.compile.installed_version", lambda name: None if name == "libtpu" else "1")
    done = upshift("xla", "compile", model, "--topology", "v5e-4")
    assert done.code == 2 and "pip install '.[xla-compile]'" in done.err and done.err.count("\n") == 1


def test_wrong_requests(model: str, upshift: Command) -> None:
    for arguments, words in (
        (("--max-new-tokens", 4), "of --generate"),
        (("--sequence-length", 131_073), "131072 positions"),
        (("--sequence-length", 131_000, "--generate", "--max-new-tokens", 128), "and --max-new-tokens 128 are longer"),
    ):
        done = upshift("xla", "compile", model, "--topology", "v5e-4", *arguments)
        assert done.code == 2 and words in done.err and done.err.count("\n") == 1


@compiled
def test_wrong_requests_of_the_compiler(model: str, upshift: Command) -> None:
    for arguments, words in ((("--batch", 6), "multiple of 4"), (("--dtype", "int8"), "use one of bfloat16, float32")):
        done = upshift("xla", "compile", model, "--topology", "v5e-4", *arguments)
        assert done.code == 2 and words in done.err
