"""Models whose state is not keys and values alone, or that read more than text, generate transformers' own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command import Command
from model_matrix import HOST
from model_matrix_cells import TinyModel
from tiny_models import KINDS

from upshift.hardware import describe
from upshift.inference.generation.batching import decode
from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.model import cache_bytes, generation_task, pads_safely
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.registry import EngineSetup, build_engine
from upshift.models.kv_cache import layer_tensors
from upshift.models.source import ModelSource, find_model
from upshift.training.data.tokenizer import train_byte_level_bpe

NEW = 7
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [15, 16, 17, 18, 19], list(range(20, 60)), [12], [44, 43, 42]]
MODELS = {  # what a sequence keeps: the kind and type of a model, the task that its engine has, and how many prompts run at once
    "states alone": ("causal", "mamba", "states", 3),
    "states, and keys and values": ("causal", "qwen3_next", "states", 3),
    "states, and keys and values of one layer": ("causal", "zaya", "states", 3),
    "states, and a window; padding changes them": ("causal", "recurrent_gemma", "states", 1),
    "keys of an indexer": ("causal", "deepseek_v32", "states", 3),
    "images beside text": ("image-text", "llava", "states", 3),
    "positions of three dimensions": ("image-text", "qwen2_vl", "states", 3),
    "a state of its own form": ("causal", "rwkv", "as-transformers", 1),
    "no cache": ("causal", "openai-gpt", "as-transformers", 3),
    "inputs of its own": ("causal", "xlnet", "as-transformers", 1),
    "positions that padding moves": ("image-text", "kosmos-2.5", "as-transformers", 1),
}


def tiny(kind: str, model_type: str, folder: Path) -> TinyModel:
    return TinyModel(kind, model_type, KINDS[kind][model_type], folder, describe(HOST))


def torch_decoder(source: ModelSource, task: Any) -> Any:
    setup = EngineSetup(engine="torch", precision="fp32", threads=1, batch=3)
    return build_engine(task, "torch", DecoderBuild(source, setup, Path(str(source.directory)) / "engine"))


def by_transformers(model: Any, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, -NEW:].tolist()
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Alone, beside others with padding, and where a prompt joins rows that have begun."""
    kind, model_type, task, most_rows = MODELS[name]
    reference = tiny(kind, model_type, tmp_path).reference()
    expected = [by_transformers(reference, prompt) for prompt in PROMPTS]
    source = find_model(str(tmp_path))
    assert (generation_task(source), pads_safely(source)) == (task, most_rows > 1)
    decoder = torch_decoder(source, task)
    for rows in {1, most_rows}:
        decoder.keep([])
        options = GenerationOptions(max_new_tokens=NEW)
        sequences = [GeneratedSequence(number, prompt, options, None) for number, prompt in enumerate(PROMPTS)]
        for _ in decode(decoder, sequences, rows=rows):
            pass
        assert [sequence.tokens for sequence in sequences] == expected, rows


@pytest.mark.parametrize("model_type", ["mamba", "qwen3_next", "zaya", "llama"])
def test_what_a_sequence_keeps_is_counted(model_type: str, tmp_path: Path) -> None:
    reference = tiny("causal", model_type, tmp_path).reference()
    counted = cache_bytes(find_model(str(tmp_path)))
    assert counted is not None
    for tokens in (9, 30):
        with torch.no_grad():
            output = reference(torch.zeros((1, tokens), dtype=torch.long), use_cache=True)
        cache = output["cache_params" if model_type == "mamba" else "past_key_values"]
        held = sum(tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in layer_tensors(layer))
        assert counted.row + tokens * counted.token == held


def test_an_error_in_the_thread_of_generate_reaches_the_caller(tmp_path: Path) -> None:
    tiny("causal", "openai-gpt", tmp_path)
    decoder = torch_decoder(find_model(str(tmp_path)), "as-transformers")
    with pytest.raises(IndexError):
        decoder.admit([[5, 1_000_000]])
    decoder.keep([])
    assert decoder.admit([[5, 6]]).shape == (1, 96)
    decoder.keep([])


def test_a_model_of_states_answers_a_prompt(tmp_path: Path, upshift: Command) -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = train_byte_level_bpe(["a text of some words"], 260)
    tokenizer.save_pretrained(tmp_path)
    answer = upshift("generate", tmp_path, "--prompt", "a text", "--set", "max_new_tokens=4")
    assert answer.code == 0, answer.err
    reference = transformers.MambaForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([tokenizer("a text").input_ids])
    expected = reference.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert answer.out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
