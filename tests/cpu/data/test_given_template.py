"""A chat template that the user gives: as a file, as its text, or by its name. It writes chats, and goes with the tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from chat_models import CHATML, MARKED, byte_level_tokenizer, make_chats, save_model, write_jsonl

from upshift.errors import RequestError
from upshift.models.source import find_model_to_train
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data, read_whole_documents
from upshift.training.data.rows.chat_templates import CHAT_TEMPLATES
from upshift.training.data.rows.joined import read_data
from upshift.training.data.tokenizer import tokenize
from upshift.training.data.tokens import TokenizedCorpus
from upshift.training.tasks.chats import read_image_chat
from upshift.training.tasks.rows import TaskRow

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


# What a named template writes for TURNS and for the assistant to go on, and for SYSTEM before them: None if it refuses it.
CHATML_TURNS = "<|im_start|>user\na\n b <|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>assistant\n"
CHATML_SYSTEM = "<|im_start|>system\n d <|im_end|>\n"
COHERE_TURNS = (
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>a\n b<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>c<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
)
COHERE_SYSTEM = f"<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|> d <|END_OF_TURN_TOKEN|>{COHERE_TURNS}"
GEMMA_TURNS = "a\n b<end_of_turn>\n<start_of_turn>model\nc<end_of_turn>\n<start_of_turn>model\n"
EXAONE_TURNS = "[|user|]a\n b \n[|assistant|]c[|endofturn|]\n[|assistant|]"
PHI_TURNS = "<|user|>\na\n b <|end|>\n<|assistant|>\nc<|end|>\n"
QWEN = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
HELPFUL = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def llama_turns(version: int, *turns: tuple[str, str], go_on: str = "assistant") -> str:
    start, end, last = (
        ("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>") if version == 3
        else ("<|header_start|>", "<|header_end|>\n\n", "<|eot|>")
    )  # fmt: skip
    return "<s>" + "".join(f"{start}{role}{end}{text}{last}" for role, text in turns) + f"{start}{go_on}{end}"


WRITTEN: dict[str, tuple[str, str | None]] = {
    "alpaca": (
        "<s>### Instruction:\na\n b \n\n### Response:\nc</s>\n\n### Response:\n",
        "<s> d \n\n### Instruction:\na\n b \n\n### Response:\nc</s>\n\n### Response:\n",
    ),
    "aya": ("<s>" + COHERE_TURNS, COHERE_SYSTEM),
    "chatml": (CHATML_TURNS, CHATML_SYSTEM + CHATML_TURNS),
    "cohere": ("<s>" + COHERE_TURNS, COHERE_SYSTEM),
    "deepseek_v2": (
        "<s><｜User｜>a\n b <｜Assistant｜>c</s><｜Assistant｜>", "<s> d \n\n<｜User｜>a\n b <｜Assistant｜>c</s><｜Assistant｜>"
    ),
    "deepseek_v3": (
        "<s><｜User｜>a\n b <｜Assistant｜>c<｜end▁of▁sentence｜><｜Assistant｜>",
        "<s> d <｜User｜>a\n b <｜Assistant｜>c<｜end▁of▁sentence｜><｜Assistant｜>",
    ),
    "exaone": ("[|system|][|endofturn|]\n" + EXAONE_TURNS, "[|system|] d [|endofturn|]\n" + EXAONE_TURNS),
    "falcon_h1": ("<s>" + CHATML_TURNS, "<s>" + CHATML_SYSTEM + CHATML_TURNS),
    "gemma": ("<s><start_of_turn>user\n" + GEMMA_TURNS, None),
    "gemma3": ("<s><start_of_turn>user\n" + GEMMA_TURNS, "<s><start_of_turn>user\n d \n\n" + GEMMA_TURNS),
    "gemma3n": ("<s><start_of_turn>user\n" + GEMMA_TURNS, "<s><start_of_turn>user\n d \n\n" + GEMMA_TURNS),
    "llama3": (
        llama_turns(3, ("user", "a\n b"), ("assistant", "c")),
        llama_turns(3, ("system", "d"), ("user", "a\n b"), ("assistant", "c")),
    ),
    "llama4": (
        llama_turns(4, ("user", "a\n b "), ("assistant", "c")),
        llama_turns(4, ("system", "d"), ("user", "a\n b "), ("assistant", "c")),
    ),
    "mistral_v1": ("<s> [INST] a\n b  [/INST] c</s>", "<s> [INST]  d \n\na\n b  [/INST] c</s>"),
    "mistral_v2v3": ("<s>[INST] a\n b [/INST] c</s>", "<s>[INST] a\n b [/INST] c</s>"),
    "mistral_v3_tekken": ("<s>[INST]a\n b [/INST]c</s>", "<s>[INST]a\n b [/INST]c</s>"),
    "nemotron_h": (CHATML_TURNS, CHATML_SYSTEM + CHATML_TURNS),
    "phi_3": ("<s>" + PHI_TURNS, "<s><|system|>\n d <|end|>\n" + PHI_TURNS),
    "phi_35": (PHI_TURNS + "<|assistant|>\n", "<|system|>\n d <|end|>\n" + PHI_TURNS + "<|assistant|>\n"),
    "pixtral": ("<s>[INST]a\n b [/INST]c</s>", "<s>[INST]a\n b [/INST]c</s>"),
    "qwen2_vl": (HELPFUL + CHATML_TURNS, CHATML_SYSTEM + CHATML_TURNS),
    "qwen_25": (QWEN + CHATML_TURNS, CHATML_SYSTEM + CHATML_TURNS),
}  # fmt: skip
TURNS = [{"role": "user", "content": "a\n b "}, {"role": "assistant", "content": "c"}]
SYSTEM = {"role": "system", "content": " d "}


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_named_template_writes_what_its_definition_says(name: str) -> None:
    tokenizer = byte_level_tokenizer(CHAT_TEMPLATES[name])
    alone, after_system = WRITTEN[name]
    assert tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == alone
    if after_system is None:
        with pytest.raises(jinja2.TemplateError, match="turns must be"):
            tokenizer.apply_chat_template([SYSTEM, *TURNS], tokenize=False)
    else:
        assert tokenizer.apply_chat_template([SYSTEM, *TURNS], tokenize=False, add_generation_prompt=True) == after_system


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_named_template_learns_the_answers_and_drops_no_turn(name: str, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(CHAT_TEMPLATES[name])

    def written(file: str, rows: list[dict[str, Any]]) -> TokenizedCorpus:
        data_set = {"path": str(write_jsonl(tmp_path / file, rows)), "loss_on": "assistant-content"}
        return tokenize(read_data(json.dumps([data_set]), DataOptions(), has_decoder=False).documents, tokenizer)

    answers = ["short trees", "rivers\nand roads", "north?"]
    data = written("chats.jsonl", [{"messages": [TURNS[0], TURNS[1] | {"content": answer}]} for answer in answers])
    assert data.labels is not None
    texts = tokenizer.decode(data.tokens[data.labels != -100]).replace("</s>", "")
    assert texts.replace(" ", "") == "".join(answers).replace(" ", "")  # a token may begin with the space before an answer
    for role in ("tool", "developer", "system"):  # turns that few templates write there
        turns = [*TURNS, {"role": role, "content": "unusual"}, *TURNS]
        try:
            text = tokenizer.decode(written(f"{role}.jsonl", [{"messages": turns}]).tokens)
        except RequestError as error:
            assert f"{role}.jsonl:1" in str(error) and "\n" not in str(error)
        else:
            assert "unusual" in text


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
    words = f"--chat-template writes no row of {texts}, so the model does not learn its form"
    assert any(message.startswith(words) for message in caplog.messages)


def as_message(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


TEXTS = (("which river", "the north"), ("every road", "a short answer"), ("to trees", "rivers and roads"))
ROLES = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
ROWS: dict[str | None, list[dict[str, Any]]] = {  # of plain texts, by the objective that learns from them
    None: [{"prompt": prompt, "completion": answer} for prompt, answer in TEXTS],
    "kto": [{"prompt": prompt, "completion": answer, "label": answer != "the north"} for prompt, answer in TEXTS],
    "dpo": [{"prompt": prompt, "chosen": answer, "rejected": "about"} for prompt, answer in TEXTS],
    "reward": [{"prompt": prompt, "chosen": answer, "rejected": "about"} for prompt, answer in TEXTS],
}


def with_messages(row: dict[str, Any]) -> dict[str, Any]:
    return {name: as_message(ROLES[name], value) if name in ROLES else value for name, value in row.items()}


def tokens_of(model: str, data: Path | str, template: str | None, objective: Any = None) -> tuple[list[int], Any]:
    options = DataOptions(chat_template=template, objective=objective, eval_size=0)
    source = find_model_to_train(model, has_reward_head=objective == "reward")
    training = prepare_data(source, str(data), sequence_length=128, options=options).training
    return training.tokens.tolist(), None if training.labels is None else training.labels.tolist()


@pytest.mark.parametrize("objective", ROWS)
@pytest.mark.parametrize("form", ["jsonl", "csv", "described"])
def test_plain_texts_are_the_turns_of_a_given_template(objective: Any, form: str, model: str, tmp_path: Path) -> None:
    rows = ROWS[objective]
    expected = tokens_of(
        model, write_jsonl(tmp_path / "messages.jsonl", [with_messages(row) for row in rows]), "chatml", objective
    )
    data: Path | str = tmp_path / "rows.csv"
    if form == "csv":
        lines = [",".join(map(str, values)) for values in (rows[0], *(row.values() for row in rows))]
        Path(data).write_text("\n".join(lines) + "\n")
    elif form == "jsonl":
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
    else:
        theirs = write_jsonl(tmp_path / "theirs.jsonl", [{f"my {name}": value for name, value in row.items()} for row in rows])
        data = json.dumps([{"path": str(theirs), "columns": {name: f"my {name}" for name in rows[0]}}])
    assert tokens_of(model, data, "chatml", objective) == expected


def test_plain_texts_without_a_given_template_are_joined(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS[None])
    tokenizer = byte_level_tokenizer(None)
    tokens, labels = tokens_of(model, data, None)
    assert tokenizer.decode(tokens) == "".join(f"<s>{prompt}{answer}</s>" for prompt, answer in TEXTS)
    assert labels is not None and any("joined as they are" in message for message in caplog.messages)
    caplog.clear()
    tokens, labels = tokens_of(model, data, "chatml")
    learned = [token for token, label in zip(tokens, labels, strict=True) if label != -100]
    assert tokenizer.decode(learned) == "".join(f"{answer}<|im_end|>\n" for _, answer in TEXTS)
    assert any("--chat-template writes a plain text of a prompt as the user's turn" in message for message in caplog.messages)
    described = json.dumps([{"path": str(data), "template": "axolotl/passthrough.default"}])  # this data set stays text
    assert tokens_of(model, described, "chatml") == tokens_of(model, data, None)


@pytest.mark.parametrize("objective", ["dpo", "reward"])
def test_texts_without_a_prompt_have_no_turns(objective: Any, model: str, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"chosen": "the road north", "rejected": "the road"}])
    with pytest.raises(RequestError, match="rows.jsonl:1 has no column 'prompt', .* or leave --chat-template out"):
        tokens_of(model, data, "chatml", objective)


REFUSED = {
    "nowhere.jinja": "'nowhere.jinja' is not a file; give a Jinja file, the text of a template, or one of alpaca",
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


TURNS_THAT_END = "{%- for m in messages %}{{- m.role + ': ' }}ANSWER{%- endfor %}"
UNMARKED = (
    "{%- if m.role == 'assistant' %}{%- generation %}{{- m.content }}{%- endgeneration %}{{- 'END' }}"
    "{%- else %}{{- m.content }}{%- endif %}"
)
ENDS = {  # what the template writes for a turn, and what the message says; None: no message
    "special": ("{{- m.content + '<|im_end|>\n' }}", None),
    "EOS": ("{{- m.content + eos_token }}", None),
    "ordinary": (
        "{{- m.content + '\n###\n' }}",
        r"ends the assistant's turn with '###', .* 3 ordinary tokens.*--stop '###'.*such as </s>",
    ),
    "nothing": ("{{- m.content + '\n' }}", "writes nothing after the assistant's turn, so the model does not learn to stop"),
    "outside": (
        UNMARKED.replace("END", "<|im_end|>"),
        r"writes '<\|im_end\|>' after .* leave it out, .*; put it within the marks",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_how_a_turn_ends_is_said_with_what_to_do(name: str, model: str, chats: str, caplog: pytest.LogCaptureFixture) -> None:
    turn, expected = ENDS[name]
    prepared(model, chats, TURNS_THAT_END.replace("ANSWER", turn))
    said = [message for message in caplog.messages if "the assistant's turn" in message and "chat template" in message]
    assert len(said) == (expected is not None) and all(re.search(str(expected), message) for message in said), said


def test_plain_texts_beside_an_image_are_turns_with_a_given_template() -> None:
    picture = {"type": "image", "path": "cat.png"}
    row = TaskRow("rows.jsonl:1", {"prompt": "<image>which river", "completion": "the north", "image": "cat.png"}, Path())
    chat, images = read_image_chat(row, DataOptions(chat_template="chatml"))
    messages = [as_parts("user", picture, "which river"), as_parts("assistant", "the north")]
    same, _ = read_image_chat(TaskRow(row.place, {"messages": messages}, Path()), DataOptions())
    assert chat is not None and same is not None and len(images) == 1
    assert chat.messages == same.messages and chat.num_prompt_messages == 1
    with pytest.raises(RequestError, match="rows.jsonl:1 holds a prompt and a completion of plain text.*or add --chat-template"):
        read_image_chat(row, DataOptions())


def as_parts(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]}
