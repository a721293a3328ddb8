"""Generation under XLA: the tokens of transformers' generate(), in one program for many lengths; sampling by its distribution."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from scipy import stats
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LogitsProcessorList,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)
from transformers.generation import logits_process

from upshift.errors import RequestError

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from upshift.xla.generation.generator import (  # noqa: E402
    XlaGenerator,  # noqa: E402
    group_prompts,
    padded_width,
)
from upshift.xla.generation.sampling import Sampling, sample  # noqa: E402
from upshift.xla.model import build  # noqa: E402
from upshift.xla.training.step import custom_calls, dynamic_dimensions  # noqa: E402

NEW, END = 8, 7
SMALL = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}  # fmt: skip
WINDOW = {"sliding_window": 6, "num_hidden_layers": 2}  # shorter than the prompts
DECODERS: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=260, n_positions=128, n_embd=32, n_layer=1, n_head=4),
    "llama": LlamaConfig(**GROUPED),
    "llama 3.1": LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED),
    "mistral, sliding": MistralConfig(**{**GROUPED, "sliding_window": 6}),
    "gemma": GemmaConfig(**GROUPED),
    "gemma2, sliding": Gemma2Config(**{**GROUPED, **WINDOW}, query_pre_attn_scalar=8),
    "gemma3, sliding": Gemma3TextConfig(**{**GROUPED, **WINDOW}, layer_types=["sliding_attention", "full_attention"]),
    "phi3": Phi3Config(**{**SMALL, "num_key_value_heads": 2}, pad_token_id=0),
    "opt": OPTConfig(
        vocab_size=260, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=128,
    ),
    "gpt_neox": GPTNeoXConfig(**SMALL),
    "bloom": BloomConfig(vocab_size=260, hidden_size=32, n_layer=1, n_head=4),
}  # fmt: skip
BESIDE: dict[str, Any] = {
    "t5": T5Config(vocab_size=260, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0),
    "bart": BartConfig(
        vocab_size=260, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128,
    ),
}  # fmt: skip
PROMPTS = [[(31 * place * place + 7 * row) % 240 + 10 for place in range(length)] for row, length in enumerate((11, 7))]


def save(folder: Path, config: Any, kind: Any = AutoModelForCausalLM) -> str:
    torch.manual_seed(0)
    model = kind.from_config(config)
    with torch.no_grad():  # logits far enough apart for a greedy choice to be one
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return str(folder)


def by_transformers(model: str, kind: Any, **options: Any) -> list[list[int]]:
    """All prompts in one padded batch, each up to its end."""
    reference = kind.from_pretrained(model).eval()
    beside, width = reference.config.is_encoder_decoder, max(map(len, PROMPTS))
    ids, mask = torch.zeros(2, len(PROMPTS), width, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        places = slice(len(prompt)) if beside else slice(width - len(prompt), width)
        ids[row, places], mask[row, places] = torch.tensor(prompt), 1
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END, "pad_token_id": 0, **options}
    found = reference.generate(ids, attention_mask=mask, **settings)[:, 1 if beside else width :].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in found]


@pytest.fixture(scope="module")
def generators(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[str, XlaGenerator]] = {}

    def make(name: str) -> tuple[str, XlaGenerator]:
        if name not in made:
            beside = name in BESIDE
            kind = AutoModelForSeq2SeqLM if beside else AutoModelForCausalLM
            folder = save(tmp_path_factory.mktemp("model"), {**DECODERS, **BESIDE}[name], kind)
            made[name] = folder, XlaGenerator(build(folder))
        return made[name]

    return make


@pytest.mark.parametrize("name", [*DECODERS, *BESIDE])
def test_greedy_tokens_are_those_of_transformers(name: str, generators: Any) -> None:
    model, generator = generators(name)
    found = generator.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=END)
    assert found == by_transformers(model, AutoModelForSeq2SeqLM if name in BESIDE else AutoModelForCausalLM)
    generator.generate([PROMPTS[0][:5], PROMPTS[1][:3]], max_new_tokens=NEW, eos_token_id=END)
    assert generator.num_traces == len(generator.compiled) == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0}),
        ("bart", {"num_beams": 2, "early_stopping": True, "forced_eos_token_id": END, "forced_bos_token_id": 20}),
    ],
)
def test_beams_are_those_of_transformers(name: str, options: dict[str, Any], generators: Any) -> None:
    model, generator = generators(name)
    found = generator.generate(PROMPTS, max_new_tokens=NEW, eos_token_id=END, **options)
    assert found == by_transformers(model, AutoModelForSeq2SeqLM if name in BESIDE else AutoModelForCausalLM, **options)


WARPED = [
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, {"temperature": 0.7, "top_k": 8, "top_p": 1.0},
    {"temperature": 1.5, "top_k": 0, "top_p": 0.8}, {"temperature": 1.3, "top_k": 20, "top_p": 0.6},
]  # fmt: skip


def expected_chances(logits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    warpers = LogitsProcessorList([logits_process.TemperatureLogitsWarper(options["temperature"])])
    if options["top_k"]:
        warpers.append(logits_process.TopKLogitsWarper(options["top_k"]))
    if options["top_p"] < 1:
        warpers.append(logits_process.TopPLogitsWarper(options["top_p"]))
    found: np.ndarray = warpers(None, torch.from_numpy(logits)[None]).softmax(-1)[0].numpy()
    return found


def test_sampling_follows_the_distribution() -> None:
    """Chi-squared of 20,000 draws against transformers' warped distribution: fixed draws, so a correct program always passes."""
    logits, draws = np.random.default_rng(3).normal(0, 1.5, 50).astype(np.float32), 20_000
    uniform = np.random.default_rng(5).random((draws, 1)).astype(np.float32)

    @tf.function(jit_compile=True)
    def run(temperature: Any, top_k: Any, top_p: Any) -> Any:
        scores = tf.repeat(tf.constant(logits)[None], draws, axis=0)
        return sample(scores, tf.constant(0), Sampling(temperature, top_k, top_p, tf.constant(uniform)))

    for options in WARPED:
        chances = expected_chances(logits, options)
        inputs = (options["temperature"], options["top_k"] or np.iinfo(np.int32).max, options["top_p"])
        found = np.bincount(run(*map(tf.constant, inputs)).numpy(), minlength=50)
        assert not found[chances == 0].any()
        likely = chances * draws >= 5  # the test's usual condition; the rest is one class
        seen, due = [[*values[likely], values[~likely].sum()] for values in (found, chances * draws)]
        few = int(due[-1] < 1e-9)
        seen, due = (np.array(values[: len(values) - few], np.float64) for values in (seen, due))
        assert stats.chisquare(seen, due / due.sum() * seen.sum()).pvalue > 0.001
    assert run.experimental_get_tracing_count() == 1


def test_a_sampled_text_depends_on_seed_and_place_alone(generators: Any) -> None:
    _, generator = generators("gpt2")
    before = generator.num_traces
    asked = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5}
    together = generator.generate(PROMPTS, **asked, seed=1)
    assert together == generator.generate(PROMPTS, **asked, seed=1) != generator.generate(PROMPTS, **asked, seed=2)
    assert generator.generate(PROMPTS, max_new_tokens=NEW, top_p=1e-6) == generator.generate(PROMPTS, max_new_tokens=NEW)
    assert generator.num_traces == before + 2  # sampled, and greedy without an end: other numbers are inputs
    again = dict(generator.generate_each(PROMPTS[1:], generator.options(**asked, seed=1), first=1))
    assert again == {0: together[1]}


def test_the_program_is_static_and_whole(generators: Any) -> None:
    """Prompts, sampling and the loop over tokens."""
    _, generator = generators("gpt2")
    program = generator.options(max_new_tokens=NEW, do_sample=True).program()
    function = tf.function(generator.traced(program), jit_compile=True, autograph=False)
    ids = tf.ones((2, 32), tf.int64)
    sampling = Sampling(tf.constant(1.0), tf.constant(50), tf.constant(1.0), tf.zeros((2, NEW)))
    text = function.experimental_get_compiler_ir(ids, ids, sampling)(stage="stablehlo")
    assert "stablehlo.while" in text and "stablehlo.dynamic_update_slice" in text
    assert dynamic_dimensions(text) == 0 and custom_calls(text) == []


def test_programs_are_compiled_ahead(generators: Any) -> None:
    _, generator = generators("llama")
    known = generator.num_traces
    made = generator.warm_up(width=20, rows=1, max_new_tokens=3)
    assert (made.width, made.rows, generator.num_traces) == (32, 1, known + 1)
    assert len(generator.generate([PROMPTS[0]], max_new_tokens=3)[0]) == 3 and generator.num_traces == known + 1


KEPT = """
import sys
import upshift.xla
from upshift.xla.tensorflow import keep_programs
upshift.xla.generate(sys.argv[1], [[5, 6, 7]], max_new_tokens=2)
print(len(list(keep_programs().iterdir())))
"""


def test_programs_are_kept(generators: Any, tmp_path: Path) -> None:
    """In a process of its own: TensorFlow reads where to keep them at the first compilation of a process, whatever compiles."""
    model, _ = generators("gpt2")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "UPSHIFT_CACHE": str(tmp_path), "TF_XLA_FLAGS": ""}
    answer = subprocess.run([sys.executable, "-c", KEPT, model], env=env, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) > 0


def test_prompts_share_few_widths() -> None:
    assert [padded_width(length, multiple=None) for length in (1, 32, 33, 500)] == [32, 32, 64, 512]
    assert padded_width(33, multiple=48) == 48
    found = list(group_prompts([5, 40, 6, 7, 100, 8], rows=2))
    assert [(group.indices, group.width) for group in found] == [((0, 2), 32), ((3, 5), 32), ((1, 4), 128)]


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[]], {}, "prompt 1 is empty"),
        ([[5] * 125], {"max_new_tokens": 8}, "128 positions"),
        ([[5]], {"num_beams": 2, "do_sample": True}, "num_beams=1 or do_sample=False"),
        ([[5]], {"repetition_penalty": 2.0}, "repetition_penalty"),
        ([[5]], {"top_p": 0.0}, "top_p"),
        ([[5], [5, 10**6]], {"max_new_tokens": 4}, "prompt 2 has the token id 1000000, and .* the tokenizer is of another model"),
        ([[5]], {"suppress_tokens": [10**6]}, "suppress_tokens has 1000000, which is no token of the model"),
    ],
)
def test_wrong_requests_are_one_line(prompts: Any, options: dict[str, Any], words: str, generators: Any) -> None:
    _, generator = generators("gpt2")
    with pytest.raises(RequestError, match=words) as told:
        generator.generate(prompts, **options)
    assert "\n" not in str(told.value)


def test_command(generators: Any, upshift: Command, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, _ = generators("gpt2")
    letters = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("one prompt\nanother\n")
    done = upshift("generate", model, "--backend", "xla", "--prompts", prompts, "-o", output, "--max-new-tokens", NEW, "--json")
    assert done.code == 0, done.err
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == ["one prompt", "another"]
    assert all(answer["tokens"] == NEW and answer["ending"] == "length" for answer in answers)
    assert len(json.loads(done.out)["compiled"]) == 1
    refused = upshift("generate", model, "--backend", "xla", "--engine", "torch", "--prompt", "a")
    assert refused.code == 2 and "--engine" in refused.err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BertConfig(**SMALL), "depend on the tokens behind it; use transformers' generate"),
        (BESIDE["bart"], "padding on the left of a text changes its results; use upshift.Generator"),
    ],
)  # fmt: skip
def test_what_padding_or_a_cache_would_change_is_refused(config: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=words):
        XlaGenerator(build(save(tmp_path / "model", config)))


def alone(model: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    texts = []
    for prompt in prompts:
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        text = reference.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, pad_token_id=0, **options)
        texts.append(text[0, len(prompt) :].tolist())
    return texts


def prompts_of(*lengths: int) -> list[list[int]]:
    return [[(31 * place * place + 7 * length) % 240 + 10 for place in range(length)] for length in lengths]


def test_longrope_on_both_sides_of_its_border_is_each_text_alone(tmp_path: Path) -> None:
    """The longest row of a program's run decides by which factors all its rows are rotated."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        **{**SMALL, "num_key_value_heads": 2}, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=48
    )
    model = save(tmp_path, config)
    generator = XlaGenerator(build(model))
    prompts = prompts_of(42, 50, 7, 60)
    expected = alone(model, prompts, max_new_tokens=6)
    assert generator.generate(prompts, max_new_tokens=6) == expected
    assert generator.generate(prompts[:1], max_new_tokens=7) == alone(model, prompts[:1], max_new_tokens=7)
    with pytest.raises(RequestError, match=r"prompt 3 has 42 tokens, and with max_new_tokens=8 it crosses .* at most 7 tokens"):
        generator.generate([*prompts[1:3], prompts[0]], max_new_tokens=8)


def test_a_max_length_counts_each_prompt(tmp_path: Path) -> None:
    model = save(tmp_path, DECODERS["gpt2"])
    generation = json.loads((tmp_path / "generation_config.json").read_text()) | {"max_length": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    generator = XlaGenerator(build(model))
    prompts = prompts_of(11, 7, 11, 18)
    expected = alone(model, prompts, max_length=20)
    assert [len(text) for text in expected] == [9, 13, 9, 2]
    assert generator.generate(prompts) == expected
    assert generator.generate(prompts, max_length=19) == alone(model, prompts, max_length=19)
    with pytest.raises(RequestError, match="prompt 2 has 20 tokens, and max_length=20 has no room for an answer"):
        generator.generate([*prompts[:1], *prompts_of(20)])
