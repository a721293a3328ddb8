"""Texts that the tokenizer does not know: no run learns <unk> without a word, whatever the model, the data and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from upshift.errors import RequestError
from upshift.inference.tokenizer import load_tokenizer as load_for_inference
from upshift.models.source import find_model
from upshift.text import has_words
from upshift.training.data import tokenizer as data_tokenizer
from upshift.training.data.corpus import read_corpus
from upshift.training.data.tokenizer import load_tokenizer, tokenize, tokenize_corpus, train_byte_level_bpe

TEXT = "Hello world, this is text 123."
# Types whose tokenizers transformers can build without a file, and others of the same kinds.
TYPES = (
    "t5", "mt5", "switch_transformers", "mbart", "deberta-v2", "bert", "gpt2", "opt", "llama", "albert", "pegasus",
    "electra", "xlnet", "gemma", "qwen2", "bloom", "big_bird",
)  # fmt: skip


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_folder_without_a_vocabulary_has_no_tokenizer(model_type: str, tmp_path: Path) -> None:
    """Every text would be unknown to the tokenizer that transformers builds, if it builds one."""
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="no tokenizer that loads.*save one there with tokenizer.save_pretrained"):
        load_tokenizer(tmp_path)


def test_the_tokenizer_that_transformers_builds_from_nothing_knows_no_text(tmp_path: Path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert set(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) == {tokenizer.unk_token_id, 3}  # 3: a space
    assert not has_words(tokenizer)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(RequestError, match="turns every text into unknown tokens"):
        load_for_inference(find_model(str(tmp_path)))


def word_tokenizer(*words: str) -> Any:
    vocabulary = {word: number for number, word in enumerate(("<unk>", "</s>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_data_that_the_tokenizer_does_not_know_is_refused() -> None:
    with pytest.raises(RequestError, match=r"20 of the first 30 tokens are <unk>.*save the tokenizer that was trained for it"):
        tokenize(["known other words"] * 10, word_tokenizer("known"))


def test_unknown_tokens_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    tokenize(["known word"] * 90 + ["known strange"] * 10, word_tokenizer("known", "word"))
    assert "does not know 10 of 200 tokens (5.0%), which become <unk>" in warnings_of(caplog)


def test_a_single_text_of_unknown_tokens_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tokenize(["known word"] * 500 + ["strange"], word_tokenizer("known", "word"))
    assert "does not know 1 of 1,001 tokens (0.1%), which become <unk>, and of 1 texts it knows no token" in warnings_of(caplog)


@pytest.mark.parametrize(("pieces", "num_known", "num_lost"), [("ssk", 50, 0), ("kss", 60, 0), ("sss", 70, 1)])
def test_a_long_text_is_one_text_however_many_pieces_it_has(
    pieces: str, num_known: int, num_lost: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_tokenizer, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr(data_tokenizer, "BATCH_BYTES", 1)  # each piece in a batch of its own
    lines = {"s": "strange strange\n", "k": "known known\n"}
    tokenize(["known\n" * num_known, "".join(lines[piece] for piece in pieces)], word_tokenizer("known"))
    assert "does not know" in warnings_of(caplog)
    lost = ", and of 1 texts it knows no token" if num_lost else ""
    assert warnings_of(caplog).endswith(f"which become <unk>{lost}")


def test_texts_that_are_known_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenize(["known word"] * 100, word_tokenizer("known", "word"))
    bytes_tokenizer = train_byte_level_bpe([TEXT], 300)  # knows every byte
    tokenize([TEXT, "完全に別の文字", "<|endoftext|>" * 20], bytes_tokenizer)
    assert warnings_of(caplog) == ""


def test_chats_of_unknown_words_are_refused(tmp_path: Path) -> None:

    tokenizer = word_tokenizer("user", "assistant")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
    messages = [{"role": "user", "content": "words that are strange"}, {"role": "assistant", "content": "more of such words"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 8)
    with pytest.raises(RequestError, match="tokens are <unk>"):
        tokenize_corpus(read_corpus(str(tmp_path / "chats.jsonl")), tokenizer, sequence_length=64)
