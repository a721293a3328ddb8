"""Cases of vLLM's own tests of its OpenAI server, rebuilt so that they need an address and a model with random weights only.

They were read in November 2026 (vLLM 0.32, tests/entrypoints/openai). Names are vLLM's where one case is one of its tests. Tests
of vLLM's own classes, and those with pictures, sounds or embeddings as prompts, are not among them.

serving_protocol.py starts the server and runs them.
"""

from __future__ import annotations

import openai
import pytest
from openai import BadRequestError
from serving_protocol_client import TOOLS, chat, complete, tokenizer


# vLLM: completion/test_completion.py
def test_single_completion():
    answer = complete(extra_body={"ignore_eos": True})
    count = len(tokenizer("Hello, my name is").input_ids)
    assert (
        answer.id
        and len(answer.choices) == 1
        and answer.choices[0].finish_reason == "length"
        and answer.usage.completion_tokens == 5
    )
    assert (
        answer.usage.prompt_tokens == count
        and answer.usage.total_tokens == count + 5
        and answer.usage.prompt_tokens_details.cached_tokens == 0
    )
    answer = complete(prompt=[0] * 5)
    assert len(answer.choices[0].text) >= 1 and getattr(answer.choices[0], "prompt_logprobs", None) is None


def test_completion_truncation_side_controls_prompt_truncation():
    for side, want in (("right", list(range(4))), ("left", list(range(4, 8)))):
        answer = complete(
            prompt=list(range(8)),
            max_tokens=1,
            extra_body={"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side},
        )
        assert answer.choices[0].prompt_token_ids == want


def test_no_logprobs():
    assert complete(prompt=[0] * 5, logprobs=None).choices[0].logprobs is None


def test_zero_logprobs():
    logprobs = complete(prompt=[0] * 5, logprobs=0).choices[0].logprobs
    assert logprobs.token_logprobs is not None and len(logprobs.top_logprobs[0]) == 1


def test_some_logprobs():
    assert 5 <= len(complete(prompt=[0] * 5, logprobs=5).choices[0].logprobs.top_logprobs[0]) <= 6


def test_too_many_completion_logprobs():
    with pytest.raises((BadRequestError, openai.APIError)):
        complete(prompt=[0] * 5, logprobs=21)
    with pytest.raises((BadRequestError, openai.APIError)):
        list(complete(prompt=[0] * 5, logprobs=30, stream=True))
    assert len(complete(prompt=[0] * 5).choices[0].text) >= 0


@pytest.mark.parametrize("value", [-1, 0, 1, None])
def test_prompt_logprobs_completion(value):
    fields = {} if value is None else {"extra_body": {"prompt_logprobs": value}}
    if value == -1:
        with pytest.raises(BadRequestError):
            complete(**fields)
        return
    answer = complete(prompt=["A robot may not injure another robot", "My name is"], **fields)
    assert all(
        (len(item.prompt_logprobs) > 0) if value is not None else getattr(item, "prompt_logprobs", None) is None
        for item in answer.choices
    )


def test_completion_streaming():
    one = complete(prompt="What is an LLM?")
    chunks = list(complete(prompt="What is an LLM?", stream=True))
    assert (
        sum(item.choices[0].finish_reason is not None for item in chunks) == 1 and chunks[-1].choices[0].finish_reason == "length"
    )
    assert chunks[-1].choices[0].text and "".join(item.choices[0].text for item in chunks) == one.choices[0].text


def test_parallel_no_streaming():
    answer = complete(prompt="What is an LLM?", max_tokens=50, n=3, temperature=1.0, logprobs=0, seed=42)
    assert (
        [item.index for item in answer.choices] == [0, 1, 2]
        and all(item.finish_reason for item in answer.choices)
        and len({item.text for item in answer.choices}) == 3
    )


def test_parallel_streaming():
    texts = [""] * 3
    ends = 0
    for item in complete(prompt="What is an LLM?", max_tokens=50, n=3, temperature=1.0, stream=True, seed=42):
        texts[item.choices[0].index] += item.choices[0].text
        ends += item.choices[0].finish_reason is not None
    assert ends == 3 and len(set(texts)) == 3


def test_completion_stream_options():
    for options in (
        {"include_usage": False, "continuous_usage_stats": False},
        {"include_usage": False, "continuous_usage_stats": True},
        {},
    ):
        assert all(item.usage is None for item in complete(stream=True, stream_options=options))
    chunks = list(complete(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False}))
    assert (
        all(item.usage is None for item in chunks[:-1])
        and chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
        and chunks[-1].choices == []
    )
    chunks = list(complete(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert all(item.usage.prompt_tokens > 0 and item.usage.completion_tokens > 0 for item in chunks) and chunks[-1].choices == []
    for options in (
        {"include_usage": None},
        {"include_usage": True},
        {"continuous_usage_stats": None},
        {"continuous_usage_stats": True},
    ):
        with pytest.raises(BadRequestError):
            complete(stream=False, stream_options=options)


def test_batch_completions():
    for value in (["Hello, my name is"] * 2, [[0] * 5] * 2):
        answer = complete(prompt=value)
        assert len(answer.choices) == 2 and answer.choices[0].text == answer.choices[1].text
        answer = complete(prompt=value, n=2, extra_body={"use_beam_search": True})
        assert len(answer.choices) == 4
        texts = [""] * 2
        for item in complete(prompt=value, stream=True):
            texts[item.choices[0].index] += item.choices[0].text
        assert texts[0] == texts[1]


@pytest.mark.parametrize("count", [1, 0])
def test_echo_logprob_completion(count):
    for value in ("Hello, my name is", [0] * 5):
        item = complete(prompt=value, echo=True, logprobs=count).choices[0]
        logprobs = item.logprobs
        assert (
            item.text.startswith(tokenizer.decode(value) if isinstance(value, list) else value) and len(logprobs.text_offset) > 5
        )
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None and len(logprobs.tokens) > 5
        assert all(max(count, 1) <= len(texts) <= count + 1 for texts in logprobs.top_logprobs[1:])


def test_invalid_json_schema():
    with pytest.raises((BadRequestError, openai.APIError)):
        complete(extra_body={"structured_outputs": {"json": {"properties": {"foo": "bar"}, "type": "object"}}})


def test_invalid_regex():
    with pytest.raises((BadRequestError, openai.APIError)):
        complete(extra_body={"structured_outputs": {"regex": "[.*"}, "stop": ["\n"]})


def test_invalid_grammar():
    with pytest.raises((BadRequestError, openai.APIError)):
        complete(
            extra_body={
                "structured_outputs": {"grammar": 'root ::= select_statementinvalidsyntax\n\nselect_statement ::= "SELECT "'}
            }
        )


# vLLM: completion/test_prompt_validation.py, test_empty_prompt_list.py (by HTTP)
def test_empty_prompt():
    with pytest.raises(BadRequestError):
        complete(prompt=None, extra_body={"prompt_embeds": []})


def test_out_of_vocab_token_ids():
    with pytest.raises(BadRequestError):
        complete(prompt=[999999])


def test_empty_prompt_list_rejected():
    with pytest.raises(BadRequestError):
        complete(prompt=[])


# vLLM: completion/test_token_in_token_out.py + basic/test_return_token_ids.py
def test_token_ids_of_a_completion():
    answer = complete(logprobs=1, extra_body={"return_token_ids": True}).choices[0]
    assert answer.prompt_token_ids == tokenizer("Hello, my name is").input_ids and tokenizer.decode(answer.token_ids).startswith(
        answer.text
    )
    other = complete(logprobs=1, extra_body={"return_token_ids": False}).choices[0]
    assert getattr(other, "token_ids", None) is None


def test_token_ids_of_a_chat_with_tools():
    answer = chat(tools=TOOLS, tool_choice="auto", logprobs=True, extra_body={"return_token_ids": True})
    assert "you are a helpful assistant" in tokenizer.decode(answer.prompt_token_ids) and answer.choices[0].token_ids


def test_token_ids_beside_logprobs():
    answer = complete(
        echo=True, logprobs=1, extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt_logprobs": 1}
    ).choices[0]
    ids = [int(texts.removeprefix("token_id:")) for texts in answer.logprobs.tokens]
    assert ids[-len(answer.token_ids) :] == answer.token_ids


def test_token_ids_in_a_stream():
    chunks = list(chat(stream=True, extra_body={"return_token_ids": True}))
    assert isinstance(chunks[0].prompt_token_ids, list) and all(
        "prompt_token_ids" not in item.model_dump() for item in chunks[1:]
    )
    assert [texts for item in chunks for texts in item.choices[0].model_dump().get("token_ids", [])]
