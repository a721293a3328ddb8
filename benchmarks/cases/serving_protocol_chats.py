"""Cases of vLLM's own tests of chats, tools and the basic addresses, as in serving_protocol_cases.py."""

from __future__ import annotations

import asyncio
import collections
import json
import re

import jsonschema
import openai
import pytest
import requests
from openai import BadRequestError
from serving_protocol_client import ADDRESS, LANGS, MODEL, SCHEMA, SERIES, SYS, TOOLS, URL, chat, tokenizer


# vLLM: chat_completion/test_chat.py
def test_no_logprobs_chat():
    assert chat(logprobs=False).choices[0].logprobs is None


def test_zero_logprobs_chat():
    assert len(chat(logprobs=True, top_logprobs=0).choices[0].logprobs.content[0].top_logprobs) == 0


def test_some_logprobs_chat():
    assert len(chat(logprobs=True, top_logprobs=5).choices[0].logprobs.content[0].top_logprobs) == 5


def test_too_many_chat_logprobs():
    with pytest.raises((BadRequestError, openai.APIError)):
        list(chat(logprobs=True, top_logprobs=21, stream=True))
    with pytest.raises(BadRequestError):
        chat(logprobs=True, top_logprobs=30)
    assert chat().choices[0].message.content is not None


@pytest.mark.parametrize("value", [1, 0, -1, None])
def test_prompt_logprobs_chat(value):
    fields = {} if value is None else {"extra_body": {"prompt_logprobs": value}}
    if value == -1:
        with pytest.raises(BadRequestError):
            chat(messages=SERIES, **fields)
    else:
        answer = chat(messages=SERIES, **fields)
        logprobs = getattr(answer, "prompt_logprobs", None)
        assert (logprobs is None) if value is None else len(logprobs) > 0


def test_more_than_one_prompt_logprobs_chat():  # the actual token comes beside the likeliest ones
    assert all(
        count <= len(chat(messages=SERIES, extra_body={"prompt_logprobs": count}).prompt_logprobs[3]) <= count + 1
        for count in (1, 2)
    )


def test_single_chat_session():
    answer = chat(logprobs=True, top_logprobs=5, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 5
    assert answer.choices[0].message.role == "assistant"
    assert (
        chat(
            messages=[
                *SYS,
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "in json"},
            ]
        )
        .choices[0]
        .message.content
        is not None
    )


def test_chat_streaming():
    one = chat(max_completion_tokens=10).choices[0]
    chunks = list(chat(max_completion_tokens=10, stream=True))
    assert (
        sum(item.choices[0].finish_reason is not None for item in chunks) == 1
        and chunks[-1].choices[0].finish_reason == one.finish_reason
    )
    assert (
        chunks[-1].choices[0].delta.content
        and "".join(item.choices[0].delta.content or "" for item in chunks) == one.message.content
    )


def test_chat_completion_stream_options():
    assert all(item.usage is None for item in chat(stream=True, stream_options={"include_usage": False}))
    chunks = list(chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": False}))
    assert chunks[-1].choices == [] and chunks[-1].usage
    for options in ({"include_usage": None}, {"include_usage": True}):
        with pytest.raises(BadRequestError):
            chat(stream=False, stream_options=options)
    chunks = list(
        chat(
            max_completion_tokens=10,
            extra_body={"min_tokens": 10},
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    last = 0
    for item in chunks:
        assert last == 0 or item.usage.completion_tokens > last or not item.choices
        last = item.usage.completion_tokens
    assert last == 10


def test_min_characters():
    assert (
        len(
            "".join(
                item.choices[0].delta.content or ""
                for item in chat(max_completion_tokens=10, extra_body={"min_characters": 10}, stream=True)
            )
        )
        >= 10
    )


def test_structured_outputs_choice_chat():
    assert (
        chat(max_completion_tokens=10, temperature=0.7, extra_body={"structured_outputs": {"choice": LANGS}})
        .choices[0]
        .message.content
        in LANGS
    )


def test_structured_outputs_json_chat():
    jsonschema.validate(
        json.loads(
            chat(max_completion_tokens=1000, extra_body={"structured_outputs": {"json": SCHEMA}}).choices[0].message.content
        ),
        SCHEMA,
    )


def test_structured_outputs_regex_chat():
    assert re.fullmatch(
        ADDRESS, chat(max_completion_tokens=20, extra_body={"structured_outputs": {"regex": ADDRESS}}).choices[0].message.content
    )


def test_structured_outputs_type_error():
    with pytest.raises(BadRequestError):
        chat(extra_body={"structured_outputs": {"regex": {1: "Python", 2: "C++"}}})


def test_structured_outputs_choice_chat_logprobs():
    assert all(
        texts.logprob >= -9999
        for texts in chat(logprobs=True, top_logprobs=5, extra_body={"structured_outputs": {"choice": LANGS}})
        .choices[0]
        .logprobs.content[0]
        .top_logprobs
    )


def test_response_format_json_object():
    json.loads(
        chat(max_completion_tokens=400, temperature=1, seed=4, response_format={"type": "json_object"}).choices[0].message.content
    )


def test_response_format_json_schema():
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "foo_test",
            "schema": {
                "type": "object",
                "properties": {"result": {"type": "integer", "maximum": 9, "minimum": 0}},
                "required": ["result"],
                "additionalProperties": False,
            },
        },
    }
    assert list(json.loads(chat(max_completion_tokens=200, response_format=form).choices[0].message.content)) == ["result"]


def test_response_format_text():
    assert chat(response_format={"type": "text"}).choices[0].message.content is not None


def test_extra_fields_allowed():
    assert chat(messages=[{"role": "user", "content": "x", "extra_field": "0"}]).choices[0].message.content is not None


def test_complex_message_content():
    assert (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "what is 1+1?"}]}], seed=0)
        .choices[0]
        .message.content
        == chat(messages=[{"role": "user", "content": "what is 1+1?"}], seed=0).choices[0].message.content
    )


def test_custom_role():
    answer, other = (
        chat(messages=[{"role": "my-custom-role", "content": item}], seed=0).choices[0].message.content
        for item in ("hi", [{"type": "text", "text": "hi"}])
    )
    assert answer == other


def test_long_seed():
    for chunks in (-(2**63) - 1, 2**63):
        with pytest.raises(BadRequestError):
            chat(seed=chunks)


def test_invocations():
    requests.post(URL + "/invocations", json={"model": MODEL, "messages": SYS}).raise_for_status()


def test_n_non_streaming():
    answer = chat(n=3, temperature=0.7, max_completion_tokens=20)
    assert len({item.message.content for item in answer.choices}) > 1 and [item.index for item in answer.choices] == [0, 1, 2]


def test_n_streaming():
    texts = collections.defaultdict(str)
    for item in chat(n=2, temperature=0.7, stream=True):
        for part in item.choices:
            texts[part.index] += part.delta.content or ""
    assert texts[0] and texts[1]


def test_n_with_seed():
    assert len(chat(n=2, seed=42, temperature=0.8).choices) == 2


def test_n_equals_1():
    assert len(chat(n=1).choices) == 1


# vLLM: chat_completion/test_chat_logit_bias_validation.py, test_chat_stop_token_ids_validation.py
VOCABULARY = len(tokenizer)


def test_chat_logit_bias_valid():
    assert chat(logit_bias={str(VOCABULARY - 1): 1.0}).choices[0].message.content is not None


def test_chat_logit_bias_invalid():
    with pytest.raises(BadRequestError) as raised:
        chat(logit_bias={str(VOCABULARY + 1): 1.0})
    assert str(VOCABULARY + 1) in str(raised.value) and str(VOCABULARY) in str(raised.value)


def test_chat_logit_bias_non_integer_key():
    with pytest.raises(BadRequestError) as raised:
        chat(logit_bias={"not_a_token_id": 50})
    assert "not_a_token_id" in str(raised.value) and "logit_bias" in str(raised.value)


def test_chat_logit_bias_non_numeric_value():
    with pytest.raises(BadRequestError) as raised:
        chat(logit_bias={"1": "not_a_number"})
    assert "logit_bias" in str(raised.value)


def test_chat_logit_bias_multiple_non_integer_keys():
    with pytest.raises(BadRequestError) as raised:
        chat(logit_bias={"bad1": 50.0, "bad2": 20.0})
    assert "bad1" in str(raised.value) and "bad2" in str(raised.value)


def test_chat_stop_token_ids_valid():
    assert chat(extra_body={"stop_token_ids": [VOCABULARY - 1]}).choices[0].message.content is not None


def test_chat_stop_token_ids_out_of_vocab():
    with pytest.raises(BadRequestError) as raised:
        chat(extra_body={"stop_token_ids": [VOCABULARY + 1]})
    assert str(VOCABULARY + 1) in str(raised.value) and str(VOCABULARY - 1) in str(raised.value)


def test_chat_stop_token_ids_negative():
    with pytest.raises(BadRequestError):
        chat(extra_body={"stop_token_ids": [-1]})


# vLLM: chat_completion/test_chat_echo.py
@pytest.mark.parametrize("echo", [True, False])
def test_echo_and_continue_final_message(echo):
    say = "An apple a day, keeps"
    message = (
        chat(
            messages=[{"role": "user", "content": "tell me"}, {"role": "assistant", "content": say}],
            extra_body={"echo": echo, "continue_final_message": True, "add_generation_prompt": False},
        )
        .choices[0]
        .message
    )
    assert (say in message.content) == echo


def test_prompt_logprobs_all():
    assert chat(extra_body={"prompt_logprobs": -1}).prompt_logprobs


def test_top_logprobs_all():
    assert len(chat(extra_body={"top_logprobs": -1, "logprobs": True}).choices[0].logprobs.content[0].top_logprobs) == VOCABULARY


# vLLM: chat_completion/test_root_path.py: the body that it sends
def test_root_path_body():
    assert chat(
        messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "An"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    ).choices


# vLLM: chat_completion/test_non_object_body_validation.py by HTTP
@pytest.mark.parametrize("body", ["this is not valid json{{{", ["not"], 42, None])
def test_non_object_body(body):
    assert requests.post(URL + "/v1/chat/completions", json=body).status_code == 400


# vLLM: chat_completion/test_completion_with_function_calling.py
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_current_weather"}}])
def test_function_tool_use(stream, choice):
    fields = dict(tools=TOOLS, tool_choice=choice, max_completion_tokens=300)
    if stream:
        assert [part for item in chat(stream=True, **fields) for part in (item.choices[0].delta.tool_calls or [])]
    else:
        assert chat(**fields).choices[0].message.tool_calls


@pytest.mark.parametrize("arguments", ["{}", ""])
def test_no_args_tool_call(arguments):
    texts = [
        {
            "type": "function",
            "function": {
                "name": "get_current_time",
                "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
            },
        }
    ]
    message = chat(tools=texts, tool_choice="required", max_completion_tokens=100).choices[0].message
    message.tool_calls[0].function.arguments = arguments
    assert (
        chat(messages=[*SYS, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "now"}])
        .choices[0]
        .message.content
        is not None
    )


def test_named_tool_use():
    texts = [{"type": "function", "function": {"name": "dummy", "parameters": SCHEMA}}]
    fields = dict(tools=texts, tool_choice={"type": "function", "function": {"name": "dummy"}}, max_completion_tokens=1000)
    message = chat(**fields).choices[0].message
    assert not message.content
    jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), SCHEMA)
    chunks = list(chat(stream=True, **fields))
    assert sum(item.choices[0].finish_reason is not None for item in chunks) == 1
    jsonschema.validate(
        json.loads(
            "".join(part.function.arguments or "" for item in chunks for part in (item.choices[0].delta.tool_calls or []))
        ),
        SCHEMA,
    )


def test_inconsistent_tool_choice_and_tools():
    count = {"type": "function", "function": {"name": "other"}}
    for fields in ({"tool_choice": count}, {"tools": TOOLS, "tool_choice": count}, {"tools": TOOLS, "tool_choice": {}}):
        with pytest.raises(BadRequestError):
            chat(**fields)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_current_weather"}}])
def test_max_tokens_with_tool_choice_required(choice):
    item = chat(tools=TOOLS, tool_choice=choice, max_completion_tokens=1).choices[0]
    assert item.finish_reason == "length" and not item.message.tool_calls


# vLLM: basic/test_basic.py
def test_show_version():
    assert list(requests.get(URL + "/version").json()) == ["version"]


def test_check_health():
    assert requests.get(URL + "/health").status_code == 200


def test_request_wrong_content_type():
    with pytest.raises(openai.APIStatusError):
        chat(extra_headers={"Content-Type": "application/x-www-form-urlencoded"})


def test_server_load():
    assert requests.get(URL + "/load").json()["server_load"] == 0


def test_request_cancellation():
    async def go():
        answer = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="x", max_retries=0, timeout=0.5)
        await asyncio.gather(
            *(
                answer.chat.completions.create(messages=SYS, model=MODEL, max_tokens=3000, extra_body={"min_tokens": 3000})
                for _ in range(200)
            ),
            return_exceptions=True,
        )
        other = openai.AsyncOpenAI(base_url=URL + "/v1", api_key="x", max_retries=0, timeout=20)
        assert len((await other.chat.completions.create(messages=SYS, model=MODEL, max_tokens=10)).choices) == 1

    asyncio.run(go())
