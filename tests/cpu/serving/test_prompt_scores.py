"""What a request may ask of its prompt, and the forms that it may give: log-probabilities of prompts, echo, vLLM's forms."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serve_faults import app_of, posted
from test_serving_parts import Clock, following, made, ticket
from test_tool_calls import TEMPLATES, TOOLS, USER, Working, folder, make_tokenizer  # noqa: F401
from transformers import AutoModelForCausalLM

from upshift.errors import RequestError
from upshift.inference.generation import grammar
from upshift.inference.generation.grammar import Grammars
from upshift.serving.messages import Detokenize

PROMPT = "the quick brown fox"


class Echoing(Working):
    async def text(self, request: Detokenize) -> str:
        tokenizer = make_tokenizer("")
        text: str = tokenizer.decode(list(request.tokens))
        return text


def asked(folder: Any, path: str = "/v1/completions", **fields: Any) -> Any:  # noqa: F811
    engine = Echoing(folder, TEMPLATES["hermes"])
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, **fields}
    if path != "/v1/completions":
        body["messages"] = [USER]
        del body["prompt"]
    return posted(app_of(engine)[0], body, path=path)[0]


def reference(folder: Any, text: str) -> tuple[list[int], np.ndarray]:  # noqa: F811
    """Return the token ids of a text, and the log-probabilities [T - 1, V] of the tokens after each of them."""
    ids = make_tokenizer("")(text, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    return ids[0].tolist(), logits[0].double().log_softmax(-1).numpy()


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_logprobs(max_tokens: int, folder: Any) -> None:  # noqa: F811
    answer = asked(folder, echo=True, logprobs=2, max_tokens=max_tokens).json()
    (choice,) = answer["choices"]
    ids, logprobs = reference(folder, PROMPT)
    found, text, count = choice["logprobs"], choice["text"], len(ids)
    assert text.startswith(PROMPT) and "".join(found["tokens"][:count]) == PROMPT
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    expected = [logprobs[place - 1, ids[place]] for place in range(1, count)]
    assert np.allclose(found["token_logprobs"][1:count], expected, atol=1e-4)
    best = logprobs[: count - 1].max(axis=1)
    assert np.allclose([max(top.values()) for top in found["top_logprobs"][1:count]], best, atol=1e-4)
    assert len(found["tokens"]) == len(found["text_offset"]) == count + max_tokens
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (count, max_tokens)
    for start, token in zip(found["text_offset"][:count], found["tokens"][:count], strict=True):
        assert text[start : start + len(token)] == token
    plain = asked(folder, max_tokens=max(max_tokens, 1)).json()["choices"][0]["text"]
    assert text == PROMPT + (plain if max_tokens else ""), "scoring a prompt changes no answer"


def test_prompt_logprobs(folder: Any) -> None:  # noqa: F811
    ids, logprobs = reference(folder, PROMPT)
    body = asked(folder, prompt_logprobs=1).json()
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1 and not body["choices"][0]["logprobs"]
    for place, tokens in enumerate(others, start=1):
        order = np.argsort(-logprobs[place - 1])
        expected = {str(ids[place]), str(order[0])}
        assert set(tokens) == expected
        chosen = tokens[str(ids[place])]
        assert chosen["rank"] == int(np.flatnonzero(order == ids[place])[0]) + 1
        assert chosen["logprob"] == pytest.approx(logprobs[place - 1, ids[place]], abs=1e-4)
    single = asked(folder, prompt=[ids[0]], prompt_logprobs=0).json()["choices"][0]["prompt_logprobs"]
    assert single == [None]
    chat = asked(folder, "/v1/chat/completions", prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_echo_of_token_ids_and_in_a_stream(folder: Any) -> None:  # noqa: F811
    ids, _ = reference(folder, PROMPT)
    whole = asked(folder, prompt=ids, echo=True, logprobs=0).json()["choices"][0]
    assert whole["text"].startswith(PROMPT)
    lines = asked(folder, prompt=ids, echo=True, logprobs=0, stream=True).text.split("\n\n")
    events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert events[0]["text"].startswith(PROMPT) and "".join(event["text"] for event in events) == whole["text"]
    assert [token for event in events for token in event["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([{"joins": False}, {}, {"mixes": True}]),
)
def test_scored_prompts_beside_others(requests: list[tuple[int, int, bool]], kind: dict[str, Any]) -> None:
    """On every kind of engine, each row gets the tokens of its own text, and each token of a scored prompt comes once."""
    clock = Clock()
    scheduler = made(clock, rows=3, **kind)
    tickets = [ticket(number, clock, prompt=prompt, new=new) for number, (prompt, new, _) in enumerate(requests)]
    for one, (_, _, is_scored) in zip(tickets, requests, strict=True):
        one.sequence.scores_prompt = is_scored
        assert scheduler.add(one) is None
    scored: dict[int, list[tuple[int, float]]] = {number: [] for number in range(len(tickets))}
    while scheduler.is_busy:
        for one, token in scheduler.step():
            if not one.sequence.tokens:
                assert one.logprob is not None
                scored[one.id].append((token, one.logprob.logprob))
    for one, (_, new, is_scored) in zip(tickets, requests, strict=True):
        tokens = one.sequence.prompt + one.sequence.tokens
        assert one.sequence.tokens == [following(tokens[:place]) for place in range(len(one.sequence.prompt), len(tokens))]
        assert len(one.sequence.tokens) == new
        assert [token for token, _ in scored[one.id]] == (one.sequence.prompt[1:] if is_scored else [])
        best = [following(one.sequence.prompt[:place]) for place in range(1, len(one.sequence.prompt))]
        for (token, logprob), likeliest in zip(scored[one.id], best, strict=False):
            assert (logprob > -2.1) == (token == likeliest)


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[a-c]{2}-[0-9]"}, "[a-c]{2}-[0-9]"),
    ({"guided_choice": ["yes", "no (or so)", 'a "b"\n']}, 'yes|no \\(or so\\)|a "b"\n'),
    ({"guided_json": SCHEMA}, r'\{\s*"a"\s*:\s*[12]\s*\}'),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r'\{\s*"a"\s*:\s*[12]\s*\}'),
    ({"structured_outputs": {"regex": "(x|y)z", "choice": None}}, "[xy]z"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"guided_grammar": 'start: "a" ("b" | "c")'}, "ab|ac"),
    ({"structured_outputs": {"grammar": 'start: "no"'}}, "no"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_forms_hold(form: dict[str, Any], pattern: str, path: str, folder: Any) -> None:  # noqa: F811
    answer = asked(folder, path, **form, temperature=1.0, seed=5, max_tokens=80).json()["choices"][0]
    text = answer["text"] if "text" in answer else answer["message"]["content"]
    assert answer["finish_reason"] == "stop" and re.fullmatch(pattern, text.strip() if "json" in str(form) else text), answer


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(a"}, "the regular expression is not possible"),
    ({"guided_grammar": "start"}, "the grammar is not possible"),
    ({"guided_json": "{"}, "the JSON schema is not possible"),
    ({"guided_json": {"type": 7}}, "the JSON schema is not possible"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice.0"),
    ({"structured_outputs": {}}, "structured_outputs is empty"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag is not possible here"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice are several forms"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "are several forms"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not possible in a stream"),
    ({"max_tokens": 0}, "max_tokens is 0, so there is no answer"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_wrong_fields(fields: dict[str, Any], words: str, folder: Any) -> None:  # noqa: F811
    answer = asked(folder, **fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("more", "words"),
    [({"tools": TOOLS}, "calls no tools"), ({"response_format": {"type": "json_object"}}, "give one of them")],
)
def test_a_form_beside_others(more: dict[str, Any], words: str, folder: Any) -> None:  # noqa: F811
    answer = asked(folder, "/v1/chat/completions", guided_regex="a", **more)
    assert answer.status_code == 400 and words in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_of_prompt_and_answer(path: str, stream: bool, folder: Any) -> None:  # noqa: F811
    """Each once, also where a text has no new character, and for each choice; nothing where nobody asks."""
    tokenizer = make_tokenizer(TEMPLATES["hermes"])
    chat = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    is_chat = path != "/v1/completions"
    fields = {"max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    answer = asked(folder, path, **fields, stream=stream, return_token_ids=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.json()]
    ids: dict[int, list[int]] = {0: [], 1: []}
    prompts = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    for choice in (choice for event in events for choice in event["choices"]):
        ids[choice["index"]] += choice["token_ids"]
        prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert [len(of_choice) for of_choice in ids.values()] == [9, 9] and ids[0] != ids[1]
    assert prompts == ([chat] if is_chat else [tokenizer(PROMPT).input_ids] * 2)
    assert "token_ids" not in asked(folder, path, **fields, stream=stream).text


@pytest.mark.parametrize(
    ("fields", "part"),
    [({}, slice(None)), ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, slice(-3, None)),
     ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(3)), ({"truncate_prompt_tokens": 900}, slice(None)),
     ({"truncate_prompt_tokens": 2}, slice(2))],
)  # fmt: skip
def test_a_prompt_that_is_cut(fields: dict[str, Any], part: slice, folder: Any) -> None:  # noqa: F811
    """At the side that the request names, or else at that of the tokenizer."""
    ids = make_tokenizer("")(PROMPT).input_ids
    answer = asked(folder, return_token_ids=True, **fields).json()
    assert answer["choices"][0]["prompt_token_ids"] == ids[part] and len(ids) > 4
    alone = asked(folder, prompt=ids[part]).json()
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_by_their_ids(path: str, folder: Any) -> None:  # noqa: F811
    wanted = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}
    (choice,) = asked(folder, path, **wanted, return_token_ids=True, return_tokens_as_token_ids=True).json()["choices"]
    found = choice["logprobs"]
    if "chat" in path:
        assert all(len({token["token"] for token in one["top_logprobs"]}) == 2 for one in found["content"])
    names = [one["token"] for one in found["content"]] if "chat" in path else found["tokens"]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]]


def test_the_stop_string_stays_on_request(folder: Any) -> None:  # noqa: F811
    text = asked(folder, max_tokens=12).json()["choices"][0]["text"]
    stop = text[2:4]
    for shown, end in ((False, 0), (True, len(stop))):
        (choice,) = asked(folder, max_tokens=12, stop=stop, include_stop_str_in_output=shown).json()["choices"]
        assert choice["text"] == text[: text.index(stop) + end] and choice["finish_reason"] == "stop"


DEFAULTS: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "priority": 0, "top_k": -1, "request_id": "r", "session_id": "s", "prompt_cache_retention": "24h",
}  # fmt: skip
OTHERS: dict[str, Any] = {
    "use_beam_search": True, "length_penalty": 0.9, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "priority": 1, "top_k": -2, "seed": 2**63, "truncate_prompt_tokens": -2, "truncation_side": "left",
}  # fmt: skip


def test_fields_of_vllm_with_values_that_change_nothing(folder: Any) -> None:  # noqa: F811
    assert asked(folder, **DEFAULTS).json()["choices"] == asked(folder).json()["choices"]
    for name, value in OTHERS.items():
        answer = asked(folder, **{name: value})
        assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text
    assert asked(folder, seed=-(2**63)).status_code == 200


def test_each_wrong_key_of_a_bias_is_named(folder: Any) -> None:  # noqa: F811
    message = asked(folder, logit_bias={"a": 1, "5": 2, "b": 3}).json()["error"]["message"]
    assert message == "logit_bias: a, b in logit_bias are no token ids; give whole numbers"


def test_a_form_that_comes_again_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts of one form do not know of each other, and the forms that came last are kept."""
    monkeypatch.setattr(grammar, "CACHED_GRAMMARS", 2)
    tokenizer = make_tokenizer("")
    grammars = Grammars(tokenizer, 320, [tokenizer.eos_token_id])
    read: list[str] = []
    make_matcher = llguidance.LLMatcher
    monkeypatch.setattr(llguidance, "LLMatcher", lambda *args, **more: read.append(args[1]) or make_matcher(*args, **more))
    for name in ("grammar_from_regex", "grammar_from_json_schema"):
        monkeypatch.setattr(llguidance.LLMatcher, name, getattr(make_matcher, name), raising=False)
    first, second = grammars.from_regex("ab"), grammars.from_regex("ab")
    assert not first.accept(tokenizer.convert_tokens_to_ids("a"))
    assert [np.isfinite(one.mask(np.zeros(320))).nonzero()[0].tolist() for one in (first, second)] == [
        [tokenizer.convert_tokens_to_ids("b")], [tokenizer.convert_tokens_to_ids("a")]
    ]  # fmt: skip
    for regex in ("ab", "cd", "ef", "cd", "ab"):
        grammars.from_regex(regex)
    assert len(read) == 4, "ab, cd and ef, and ab again, for which there was no place"
    for _ in range(2):
        with pytest.raises(RequestError, match="the regular expression is not possible"):
            grammars.from_regex("(a")
