"""Requests to the engine's process that give no length, or too much: each gets an answer within the positions, or its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from running_server import serving
from test_generate import CONFIGS, SEQ2SEQ, SMALL, save
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig, BertConfig, BertModel, LlamaConfig, Phi3Config

from upshift.cli.serve import NOT_OF_A_SERVER
from upshift.errors import RequestError
from upshift.inference.weights import find_weights
from upshift.serving.engine.generation import DEFAULT_ANSWER_TOKENS, GenerationWorker
from upshift.serving.engine.main import _select_engine
from upshift.serving.messages import ContextTooLong, EngineRequest, Generate
from upshift.serving.openai_requests import CompletionRequest

POSITIONS = 64
SHORT, LONG = [5] * 4, [5] * 40
BART = BartConfig(
    vocab_size=260, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=POSITIONS,
)  # fmt: skip
GPT2 = CONFIGS["gpt2"].__class__(vocab_size=260, n_embd=64, n_layer=1, n_head=4, n_positions=POSITIONS)
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def worker_of(folder: Path, config: Any, options: dict[str, Any] | None = None, **file: Any) -> GenerationWorker:
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = save(folder, config, kind, **{"decoder_start_token_id": 2, **file})
    return GenerationWorker(EngineRequest(model=model, engine="torch", options=options or {}))


def limit(worker: GenerationWorker, prompt: list[int], **options: Any) -> int:
    return worker._make_sequence(Generate(prompt=prompt, options=options)).options.new_tokens


@pytest.mark.parametrize("file", [{}, {"max_new_tokens": 500}, {"max_length": 50}, {"max_length": 500}])
@pytest.mark.parametrize("config", [BART, GPT2], ids=["encoder-decoder", "decoder"])
def test_a_chat_without_a_length_ends_within_the_positions(tmp_path: Path, config: Any, file: dict[str, int]) -> None:
    worker = worker_of(tmp_path, config, **file)
    for prompt in (SHORT, LONG):
        positions_left = POSITIONS - 1 if config.is_encoder_decoder else POSITIONS - len(prompt)
        before = 1 if config.is_encoder_decoder else len(prompt)
        expected = min(positions_left, file.get("max_new_tokens", 500), file.get("max_length", 500) - before)
        assert limit(worker, prompt) == expected


def test_a_chat_with_longrope_ends_at_its_border_and_a_prompt_beyond_it_is_refused(tmp_path: Path) -> None:
    config = Phi3Config(
        **SMALL, intermediate_size=128, num_key_value_heads=2, pad_token_id=0, rope_parameters=ROPE,
        original_max_position_embeddings=48,
    )  # fmt: skip
    worker = worker_of(tmp_path, config)
    assert limit(worker, LONG) == 9, "the last token is not computed"
    with pytest.raises(
        RequestError, match=r"the prompt has 50 tokens. Above 48 tokens .* takes at most 48; shorten it, or use up"
    ) as no:
        limit(worker, [5] * 50)
    assert "max_new_tokens" not in str(no.value)
    with pytest.raises(RequestError, match=r"has 40 tokens, and with max_tokens=20 it crosses a border: .* at most 9 tokens"):
        limit(worker, LONG, max_new_tokens=20)


def test_no_request_is_so_long_that_the_pass_would_decide_how_dynamic_ntk_rotates(tmp_path: Path) -> None:
    """A pass beyond max_position_embeddings would rotate its tokens by a base of its own, and a prompt in chunks by several."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = LlamaConfig(**{**SMALL, "max_position_embeddings": POSITIONS}, intermediate_size=128, rope_parameters=rope)
    worker = worker_of(tmp_path, config)
    assert limit(worker, LONG) == POSITIONS - len(LONG)
    for prompt, new_tokens in ((LONG, POSITIONS), ([5] * (POSITIONS + 1), 1)):
        with pytest.raises(ContextTooLong, match="context length is 64 tokens"):
            limit(worker, prompt, max_new_tokens=new_tokens)


@pytest.mark.parametrize("config", [BART, GPT2], ids=["encoder-decoder", "decoder"])
def test_a_refusal_names_what_the_client_gave(tmp_path: Path, config: Any) -> None:
    """In OpenAI's words where the context is too short, as its clients look for them."""
    worker = worker_of(tmp_path, config, max_length=20)
    with pytest.raises(ContextTooLong, match=r"context length is 64 tokens. However, you requested 74 tokens \(4 in the prompt"):
        limit(worker, SHORT, max_new_tokens=70)
    with pytest.raises(ContextTooLong, match="context length is 64 tokens. However, your prompt has 65 tokens"):
        limit(worker, [5] * 65, max_new_tokens=1)
    if config is GPT2:
        with pytest.raises(
            RequestError, match="the prompt has 40 tokens, and max_length=20 counts .*; give max_tokens, or a"
        ) as no:
            limit(worker, LONG)
        assert "--max-new-tokens" not in str(no.value)


@pytest.mark.parametrize(
    ("settings", "file", "expected"), [({}, 7, 16), ({"max_new_tokens": 30}, 7, 30), ({"max_length": 20}, 7, 16)]
)
def test_a_completion_has_the_length_of_the_server_or_openais(
    tmp_path: Path, settings: dict[str, int], file: int, expected: int
) -> None:
    worker = worker_of(tmp_path, GPT2, settings, max_new_tokens=file)
    body = CompletionRequest.model_validate({"model": "m", "prompt": SHORT})
    assert worker._make_sequence(body.engine_request(tuple(SHORT), seed=1)).options.new_tokens == expected
    near_the_end = worker._make_sequence(body.engine_request((5,) * 60, seed=1)) if "max_length" not in settings else None
    assert near_the_end is None or near_the_end.options.new_tokens == POSITIONS - 60


def test_which_tokens_end_a_text(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, GPT2, eos_token_id=3)

    def ends(**fields: Any) -> Any:
        return worker._make_sequence(Generate(prompt=tuple(SHORT), options={"max_new_tokens": 8}, **fields)).options.eos_token_id

    assert ends() == (3,)
    assert ends(stop_token_ids=(7, 3)) == (3, 7)
    assert ends(ignore_eos=True) == ()
    assert ends(ignore_eos=True, stop_token_ids=(7,)) == (7,)
    with pytest.raises(RequestError, match="stop_token_ids has 260, which is no token of the model; give some of 0 to 259"):
        ends(stop_token_ids=(260,))
    with pytest.raises(RequestError, match="min_tokens is 9, and the answer has at most 8 tokens"):
        limit(worker, SHORT, max_new_tokens=8, min_new_tokens=9)


def test_options_of_the_server_are_under_those_of_a_request(tmp_path: Path) -> None:
    given = {"num_beams": 1, "guidance_scale": None, "max_new_tokens": 30, "temperature": 0.5, "stop_strings": ["z"]}
    worker = worker_of(tmp_path, GPT2, given, num_beams=4, guidance_scale=2.0, max_new_tokens=7, top_k=3)
    options = worker._make_sequence(Generate(prompt=SHORT)).options
    assert (options.max_new_tokens, options.temperature, options.do_sample, options.top_k) == (30, 0.5, True, 3)
    assert options.stop_strings == ("z",)
    options = worker._make_sequence(Generate(prompt=SHORT, options={"max_new_tokens": 4, "temperature": 0.9, "top_k": 2})).options
    assert (options.max_new_tokens, options.temperature, options.top_k) == (4, 0.9, 2)
    assert limit(worker, LONG) == POSITIONS - len(LONG)


def test_a_length_of_the_server_may_be_more_than_the_default(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, SEQ2SEQ["t5, relative positions"], {"max_new_tokens": 3000})
    assert limit(worker, SHORT) == 3000 > DEFAULT_ANSWER_TOKENS
    with pytest.raises(RequestError, match="unknown key 'num_beams'"):
        worker_of(tmp_path / "b", GPT2, {"num_beams": 3})


def test_a_model_whose_file_asks_for_beams_is_served(tmp_path: Path, upshift: Any) -> None:
    save(tmp_path / "tiny", BART, AutoModelForSeq2SeqLM, num_beams=4, length_penalty=2.0, decoder_start_token_id=2)
    refused = upshift("serve", tmp_path / "tiny", "--port", 0, "--engine", "torch")
    assert refused.code == 2 and "says num_beams=4" in refused.err and "give --set num_beams=1" in refused.err
    options = ("tiny", "--port", "0", "--engine", "torch", "--concurrency", "1", "--set", "num_beams=1", "--set", "top_k=5")
    with serving(tmp_path, tmp_path / "log", *options) as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == POSITIONS - 1


@pytest.mark.parametrize("name", sorted(NOT_OF_A_SERVER))
def test_what_a_server_would_not_use_is_refused(name: str, upshift: Any) -> None:
    refused = upshift("serve", "model", "--set", f"{name}=3")
    assert refused.code == 2 and f"--set {name}=3 is not possible here" in refused.err


def test_two_values_for_one_option_are_refused(upshift: Any) -> None:
    refused = upshift("serve", "model", "--set", "top_k=3", "--set", "top_k=4")
    assert refused.code == 2 and "--set top_k=3 and --set top_k=4 say two things" in refused.err


def test_a_request_without_stop_strings_leaves_those_of_the_model(tmp_path: Path) -> None:
    worker = worker_of(tmp_path, GPT2, stop_strings=["q"])
    for stop, expected in ((None, ("q",)), ("b", ("b",)), (["b", "c"], ("b", "c"))):
        request = CompletionRequest.model_validate({"model": "m", "prompt": "x", "stop": stop}).engine_request(SHORT, seed=1)
        assert worker._make_sequence(request).options.stop_strings == expected


def test_an_encoder_takes_no_option_of_generation(tmp_path: Path) -> None:
    BertModel(BertConfig(vocab_size=260, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path)
    request = EngineRequest(model=str(tmp_path), options={"top_k": 3})
    with pytest.raises(RequestError, match="--set gives top_k to models that generate, and .* encodes texts; leave it out"):
        _select_engine(find_weights(request.model), request)
