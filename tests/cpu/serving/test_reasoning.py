"""Reasoning: its form is read from the chat template, it stands apart from the answer, and a grammar and a budget know of it."""

from __future__ import annotations

import json
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from test_serve_faults import Recording, app_of, posted
from test_tool_calls import END, START, TEMPLATES, TEXT, USER, folder, generate, make_tokenizer, message_of  # noqa: F401

from upshift.errors import RequestError
from upshift.serving.engine.chat_template import ChatTemplate
from upshift.serving.engine.reasoning import ReasoningForm, ReasoningStream, begins_reasoning, find_reasoning_form
from upshift.serving.engine.tool_calls import CallStream, ToolTemplate, template_messages
from upshift.serving.messages import Generate, Piece, TemplateOptions
from upshift.serving.openai_requests import ChatRequest

THOUGHT = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
SHOWN = START + THOUGHT + TEXT + END
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPEN = "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}<think>\n"
FORM = ReasoningForm("<think>", "</think>", "\n\n", "", "reasoning_content")
FORMS = {
    "tags": FORM,
    "channels": ReasoningForm("<c>think<m>", "<e>", "<s>me<c>say<m>", "<c>say<m>", "thinking"),
}


def with_prompt(end: str) -> str:
    """Return a template whose prompt ends with this text."""
    return SHOWN.replace("<|assistant|>{% endif %}", f"<|assistant|>{end}{{% endif %}}")


def read(form: ReasoningForm, answer: str, size: int, *, is_open: bool = False) -> tuple[str, str]:
    stream = ReasoningStream(form, is_open=is_open)
    pieces = [answer[start : start + size] for start in range(0, len(answer), size)] or [""]
    parts = [stream.add(piece, last=index == len(pieces) - 1) for index, piece in enumerate(pieces)]
    return "".join(thought for thought, _ in parts), "".join(text for _, text in parts)


def test_the_templates_of_published_models() -> None:
    """Those that TRL brings: what a template writes for an answer with reasoning, and without, is read back."""
    tokenizer = make_tokenizer("")
    found = set()
    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        template = ChatTemplate(tokenizer)
        form = find_reasoning_form(template)
        if form is None:
            continue
        prompt = template.try_write([USER])
        assert prompt is not None
        opens = begins_reasoning(form, prompt)
        found.add(file.stem)
        for reason in ("first\n\nthen", "")[: 1 if form.key is None else 2]:
            message = {"role": "assistant", "content": "so be it", **({form.key: reason} if form.key and reason else {})}
            chat = template.try_write([USER, message], answers=True)
            assert chat is not None
            answer = chat[len(commonprefix([prompt, chat])) :].partition("so be it")[0] + "so be it"
            if form.key is None:
                answer = f"{'' if opens else form.begin}\n{reason}\n{form.end}\n\nso be it"
            if opens is None:  # without a prompt that closes it
                answer = f"{form.begin}\n{reason}\n{form.end}\n\nso be it"
            for size in (1, 7, len(answer)):
                assert read(form, answer, size, is_open=bool(opens)) == (reason, "so be it"), file.name
    wanted = {"qwen3", "qwen3_5_think", "qwen3_8", "deepseek_r1_distill", "gptoss", "glm4moe", "nemotron_3_nano", "lfm2_2_5"}
    assert wanted <= found and not found & {"qwen2_5", "qwen3_instruct_2507", "llama3_1", "phi3", "cohere", "gemma3"}


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60, deadline=None)
@given(reason=st.text("ab<>/think \n", max_size=20), text=st.text("ab<>/ck \n", max_size=20), size=st.integers(1, 9))
def test_reasoning_is_divided_at_its_end(name: str, reason: str, text: str, size: int) -> None:
    """In pieces of any size, with the reference that sees the whole answer."""
    form = FORMS[name]
    answer = form.begin + reason + form.end + form.after + text
    thought, has_end, rest = (reason + form.end).partition(form.end)
    assert has_end
    rest = (reason + form.end + form.after + text)[len(thought + form.end) :]
    new_thought, new_text = read(form, answer, size)
    assert new_thought == thought.strip()
    if form.end not in reason:
        assert new_text.strip() == text.strip() or form.after.strip() and text.strip() in new_text
    else:
        assert new_text.strip() and new_text.strip() in rest


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="ab<>/think \n", max_size=20), size=st.integers(1, 9))
def test_an_answer_without_reasoning_is_whole(name: str, text: str, size: int) -> None:
    form = FORMS[name]
    if not text.lstrip().startswith((form.begin, form.plain.strip() or "\0")):
        assert read(form, text, size) == ("", text)
    assert read(form, form.begin + text, size)[1] == "" or form.end in text


def test_a_call_after_reasoning() -> None:
    tokenizer = make_tokenizer("")
    tokenizer.chat_template = SHOWN.replace(TEXT, TEXT + TEMPLATES["an end of its own"])
    template = ToolTemplate(tokenizer)
    form = find_reasoning_form(template)
    assert form is not None and template.format is not None
    messages = template_messages([USER, message_of([("now", {})]) | {"reasoning_content": "which hour"}], text_arguments=False)
    chat = template.try_write(messages, answers=True) or ""
    thought, text = read(form, chat.partition("<|assistant|>")[2].removesuffix("<|end|>"), 3)
    shown, calls = CallStream(template.format, {"now": {}}).add(text, last=True)
    assert (thought, shown.strip(), [call.name for call in calls]) == ("which hour", "", ["now"])


def variables_of(end: str, *, reasons: bool = True, **fields: Any) -> dict[str, Any]:
    tokenizer = make_tokenizer("")
    tokenizer.chat_template = with_prompt(end)
    body = ChatRequest.model_validate({"model": "m", "messages": [USER], **fields})
    options = body.engine_request(body.prompts()[0], seed=1).template
    return ChatTemplate(tokenizer).read_variables(options, reasons=reasons)


def test_variables_of_a_template() -> None:
    both = SWITCH + OPEN
    assert variables_of(both) == {}
    assert variables_of(both, reasoning_effort="low") == {"reasoning_effort": "low"}
    assert variables_of(both, reasoning_effort="none") == {"enable_thinking": False}
    assert variables_of(SWITCH, reasoning_effort="high", enable_thinking=False) == {"enable_thinking": False}
    assert variables_of(SWITCH, reasoning_effort="high") == {"enable_thinking": True}
    assert variables_of(SWITCH.replace("enable_thinking", "thinking"), enable_thinking=False) == {"thinking": False}
    kwargs = {"enable_thinking": True, "reasoning_effort": [1]}
    assert variables_of(both, chat_template_kwargs=kwargs, reasoning_effort="low", enable_thinking=False) == kwargs
    assert variables_of("", reasons=False, enable_thinking=False) == {}
    for effort in ("none", "low", "high"):  # clients send it to every model
        assert variables_of("", reasons=False, reasoning_effort=effort) == {}
        assert variables_of("<think>", reasoning_effort=effort) == {}


@pytest.mark.parametrize(
    ("end", "fields", "words"),
    [
        (SWITCH, {"chat_template_kwargs": {"think": 1}}, "think is not used by .*; leave it out, or set one of enable_thinking"),
        ("", {"chat_template_kwargs": {"chat_template": "{{ 7 }}"}}, "chat_template_kwargs.chat_template is not used"),
        ("", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages is not used"),
        ("", {"chat_template_kwargs": {"eos_token": ""}}, "chat_template_kwargs.eos_token is not used"),
        ("<think>", {"enable_thinking": False}, "enable_thinking has no place in the chat template"),
    ],
)  # fmt: skip
def test_a_template_without_a_variable(end: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        variables_of(end, **fields)


def test_the_prompt_says_whether_reasoning_is_open() -> None:
    assert begins_reasoning(FORM, "<|assistant|><think>\n") is True
    assert begins_reasoning(FORM, "<think></think>\n<|assistant|>") is False
    assert begins_reasoning(FORM, "<|assistant|><think>\n\n</think>\n\n") is None


def request_of(**fields: Any) -> Generate:
    body = ChatRequest.model_validate({"model": "m", "messages": [USER], "max_tokens": 120, "temperature": 1.0, **fields})
    return body.engine_request(body.prompts()[0], seed=3)


def answered(folder: Any, end: str, request: Generate) -> tuple[str, str, int]:  # noqa: F811
    """Return the reasoning, the text, and the tokens of the reasoning of a model with random weights."""
    template = with_prompt(end)
    pieces = generate(folder, template, [request], whole=True)
    assert all(isinstance(piece, Piece) for piece in pieces), pieces
    return (
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.text for piece in pieces),
        sum(piece.reasoning_tokens for piece in pieces),
    )


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMATTED = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}


def test_a_budget_ends_the_reasoning_and_a_schema_holds_after_it(folder: Any) -> None:  # noqa: F811
    end_tokens = len(make_tokenizer("").encode("</think>", add_special_tokens=False))
    thought, text, count = answered(folder, OPEN, request_of(thinking_token_budget=9, ignore_eos=True))
    assert thought and text and count == 9 + end_tokens
    thought, text, count = answered(folder, OPEN, request_of(thinking_token_budget=9, **FORMATTED))
    assert thought and json.loads(text)["a"] in (1, 2) and count == 9 + end_tokens
    assert answered(folder, OPEN, request_of(thinking_token_budget=0, **FORMATTED))[0] == ""
    thought, text, count = answered(folder, SWITCH, request_of(enable_thinking=False, **FORMATTED))
    assert (thought, count) == ("", 0) and json.loads(text)["a"] in (1, 2)
    thought, text, _ = answered(folder, "", request_of(thinking_token_budget=3, **FORMATTED))
    assert json.loads(text)["a"] in (1, 2)
    assert answered(folder, OPEN, request_of(**FORMATTED))[1] == "", "a reasoning that does not end leaves no answer"


def test_a_budget_without_reasoning(folder: Any) -> None:  # noqa: F811
    (refused,) = generate(folder, "", [request_of(thinking_token_budget=3)])
    assert refused.status == 400 and "thinking_token_budget" in refused.why


class Reasoning(Recording):
    """An engine whose answers have reasoning."""

    async def pieces(self, request: Generate) -> Any:
        self.requests.append(request)
        for fields in ({"reasoning": "first"}, {"reasoning": " then", "text": "so"}, {"text": " be it", "ending": "stop"}):
            yield Piece(id=1, tokens=2, prompt_tokens=3, reasoning_tokens=1, **{"text": "", **fields})


def asked(**fields: Any) -> Any:
    engine = Reasoning()
    body = {"model": "m", "messages": [USER], **fields}
    return posted(app_of(engine)[0], body, path="/v1/chat/completions")[0], engine.requests


def test_reasoning_has_a_field_of_its_own() -> None:
    answer = ChatCompletion.model_validate(asked()[0].json())
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("so be it", "first then", "first then")
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    hidden = asked(include_reasoning=False)[0].json()["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": "so be it"}
    _, requests = asked(messages=[USER, message.model_dump(), USER])
    assert requests[0].prompt[1] == {"role": "assistant", "content": "so be it", "reasoning_content": "first then"}


def test_reasoning_is_streamed_apart() -> None:
    lines = asked(stream=True)[0].text.split("\n\n")
    chunks = [ChatCompletionChunk.model_validate_json(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks]
    assert [delta.get("reasoning_content") for delta in deltas] == ["first", " then", None]
    assert [delta.get("content") for delta in deltas] == [None, "so", " be it"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert deltas[0]["role"] == "assistant"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"reasoning_effort": "some"}, "reasoning_effort"), ({"chat_template_kwargs": []}, "chat_template_kwargs"),
     ({"enable_thinking": "perhaps"}, "enable_thinking"), ({"thinking_token_budget": -1}, "thinking_token_budget")],
)  # fmt: skip
def test_wrong_values(fields: dict[str, Any], param: str) -> None:
    answer, _ = asked(**fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_options_reach_the_engine() -> None:
    _, requests = asked(reasoning_effort="low", enable_thinking=True, chat_template_kwargs={"a": [1]}, thinking_token_budget=5)
    assert requests[0].template == TemplateOptions(variables='{"a": [1]}', effort="low", thinking=True)
    assert requests[0].reasoning_budget == 5
