"""A chat template that the user gives: as a file, as its text, or by its name. It writes chats, and goes with the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_models import CHATML, MARKED, byte_level_tokenizer, make_chats, save_model, write_jsonl

from upshift.errors import RequestError
from upshift.models.source import find_model_to_train
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data, read_whole_documents
from upshift.training.data.rows.chat_templates import CHAT_TEMPLATES

NAMED = CHAT_TEMPLATES["chatml"]
TEMPLATES = {"text": CHATML, "marked": MARKED, "chatml": NAMED}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base model: its tokenizer has no chat template."""
    return str(save_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer(None)))


@pytest.fixture
def chats(tmp_path: Path) -> str:
    return str(write_jsonl(tmp_path / "chats.jsonl", make_chats(12)))


def prepared(model: str, data: str, template: Any, tokenizer: Any = None) -> TrainingData:
    options = DataOptions(chat_template=template)
    return prepare_data(find_model_to_train(model), data, tokenizer=tokenizer, sequence_length=128, options=options)


def sequences(data: TrainingData) -> tuple[list[int], list[int]]:
    assert data.training.labels is not None
    return data.training.tokens.tolist(), data.training.labels.tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_rows_are_those_of_a_tokenizer_that_has_the_template(name: str, model: str, chats: str, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATES[name], encoding="utf-8")
    expected = sequences(prepared(model, chats, None, byte_level_tokenizer(TEMPLATES[name])))
    for given in (TEMPLATES[name], file, *({name} & CHAT_TEMPLATES.keys())):
        data = prepared(model, chats, given)
        assert sequences(data) == expected
        assert data.tokenizer is not None and data.tokenizer.chat_template == TEMPLATES[name]


WRITTEN = {  # what a named template writes for TURNS and for the assistant to go on
    "chatml": "<|im_start|>user\na\n b <|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "<s><start_of_turn>user\na\n b<end_of_turn>\n<start_of_turn>model\nc<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\na\n b<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nc"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "phi_35": "<|user|>\na\n b <|end|>\n<|assistant|>\nc<|end|>\n<|assistant|>\n",
}
TURNS = [{"role": "user", "content": "a\n b "}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_named_template_writes_what_its_definition_says(name: str) -> None:
    tokenizer = byte_level_tokenizer(CHAT_TEMPLATES[name])
    assert tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == WRITTEN[name]


def test_the_template_of_the_users_tokenizer_stays_and_lengths_follow_the_given_one(model: str, chats: str) -> None:
    mine = byte_level_tokenizer(MARKED)
    data = prepared(model, chats, NAMED, mine)
    assert mine.chat_template == MARKED and data.tokenizer.chat_template == NAMED  # type: ignore[union-attr]
    whole = read_whole_documents(find_model_to_train(model), chats, DataOptions(chat_template=NAMED))
    num_tokens = data.training.lengths.sum() + (0 if data.evaluation is None else data.evaluation.lengths.sum())
    assert len(whole.tokenized.tokens) == num_tokens


def test_a_template_that_writes_no_row_is_named(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "the model writes"}] * 4)
    data = prepared(model, str(texts), "chatml")
    assert data.tokenizer is not None and data.tokenizer.chat_template == NAMED
    assert f"{texts} has no chats that --chat-template writes; the template is only saved with the model" in caplog.messages


REFUSED = {
    "nowhere.jinja": "'nowhere.jinja' is not a file; give a Jinja file, the text of a template, or chatml",
    "": "'' is not a file",
    "x" * 5000: "--chat-template 'xx",
    ".": "'.' is not a file",
    "{% for message in messages %}": "is no Jinja template: .* (line 1)",
    "{{ messages | nothing }}": "is no Jinja template: No filter named 'nothing'",
    "{{ bos_token }}": "its text has no content of the turns",
    "{% for m in messages %}{{ m.role }}{% endfor %}": "its text has no content of the turns",
    "{% for m in messages[2:] %}{{ m.content }}{% endfor %}": "its text has no content of the turns",
    "{{ raise_exception('only for robots') }}": "only for robots",
    "{{ messages[9].content + '' }}": "does not write a chat of a question and an answer",
}


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_that_writes_no_chat_is_refused_before_the_data_is_tokenized(
    template: str, model: str, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "upshift.training.data.dataset.tokenize_corpus"
    monkeypatch.setattr(module, lambda *_, **__: pytest.fail("the data was tokenized first"))
    with pytest.raises(RequestError) as caught:
        prepared(model, chats, template)
    message = str(caught.value)
    assert "\n" not in message and "--chat-template" in message
    assert all(words in message for words in REFUSED[template].split(" .* "))


def test_a_file_without_jinja_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("Hello", encoding="utf-8")
    (tmp_path / "b.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(RequestError, match="has no {{ and no {%, so it writes no turn"):
        DataOptions(chat_template=str(tmp_path / "a.jinja"))
    with pytest.raises(RequestError, match="is not UTF-8 text"):
        DataOptions(chat_template=str(tmp_path / "b.jinja"))


def test_templates_that_take_parts_or_need_a_system_message_are_taken(model: str, chats: str) -> None:
    parts = CHATML.replace("(message.content or '')", "message.content[0].text")
    assert sequences(prepared(model, chats, parts)) == sequences(prepared(model, chats, CHATML))
    demanding = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    with pytest.raises(RequestError, match="no system"):  # the row's fault, and not the template's
        prepared(model, chats, demanding)
