"""Tokenizers with chat templates, and rows of chats, for the tests of training on chats. Nothing is downloaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from upshift.errors import RequestError
from upshift.training.data.corpus import read_corpus
from upshift.training.data.tokenizer import tokenize

WORDS = [
    "the",
    "model",
    "writes",
    "a",
    "short",
    "answer",
    "to",
    "every",
    "question",
    "about",
    "trees",
    "rivers",
    "and",
    "roads",
    "north",
]

HEADER = "{{- '<|im_start|>' + message.role + '\\n' }}"
TURN = "{{- (message.content or '') + '<|im_end|>\\n' }}"
CALLS = "{%- for call in message.tool_calls or [] %}{{- '<call>' + (call.function.arguments | tojson) }}{%- endfor %}"
TOOLS = "{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}"
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
CHATML = f"{{{{- bos_token }}}}{TOOLS}{{%- for message in messages %}}{HEADER}{CALLS}{TURN}{{%- endfor %}}{PROMPT}"
MARKED = (  # the same text as CHATML
    f"{{{{- bos_token }}}}{TOOLS}{{%- for message in messages %}}{HEADER}"
    f"{{%- if message.role == 'assistant' %}}{{%- generation %}}{CALLS}{TURN}{{%- endgeneration %}}"
    f"{{%- else %}}{CALLS}{TURN}{{%- endif %}}{{%- endfor %}}{PROMPT}"
)
LLAMA2 = (  # no prompt for the assistant, and a token for the end of its turns
    "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}"
    "{%- else %}{{- '[INST] ' + message.content + ' [/INST]' }}{%- endif %}{%- endfor %}"
)
DROPS_THOUGHTS = (  # writes the last answer in another way than earlier ones
    "{%- for message in messages %}"
    f"{HEADER}{{%- if loop.last and message.role == 'assistant' %}}{{{{- '<think></think>' }}}}{{%- endif %}}{TURN}"
    "{%- endfor %}"
    f"{PROMPT}"
)


def byte_level_tokenizer(template: str | None = CHATML, *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, merges for some words, and BOS before each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = template
    return fast


def word_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words that drops white space, so that a character may belong to no token."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
    words = dict.fromkeys([*special, *WORDS, "user", "assistant", "system", "tool", ".", "?"])
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(word) for word in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def sentence_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a tokenizer in the manner of SentencePiece: a space is a part of the word after it, and bytes are a fallback."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<|im_start|>", 0.0), ("<|im_end|>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    pieces += [(f"\u2581{word}", -5.0) for word in dict.fromkeys(WORDS)] + [("\u2581", -6.0)]
    pieces += [(character, -9.0) for character in "abcdefghijklmnopqrstuvwxyz[]/INST.?<>"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name, _ in pieces[:5]])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


TOKENIZERS = {"bytes": byte_level_tokenizer, "words": word_tokenizer, "sentences": sentence_tokenizer}


def save_model(folder: Path, tokenizer: Any) -> Path:
    """Save a tiny causal language model with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, vocab_size=max(len(tokenizer), 320) + 20, max_position_embeddings=256)
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def words(draws: random.Random, number: int) -> str:
    return " ".join(draws.choices(WORDS, k=number))


def make_chats(number: int, *, seed: int = 0, system: bool = True) -> list[dict[str, Any]]:
    """Return rows with ``messages``: one to three questions with answers, some after a message of the system."""
    draws = random.Random(seed)
    rows = []
    for _ in range(number):
        messages = []
        if system and draws.random() < 0.5:
            messages.append({"role": "system", "content": words(draws, 4)})
        for _ in range(draws.randint(1, 3)):
            messages.append({"role": "user", "content": words(draws, draws.randint(1, 9))})
            messages.append({"role": "assistant", "content": words(draws, draws.randint(1, 12))})
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


Rows = list[tuple[list[int], list[int]]]  # ids and labels


def rows_of(path: Path, tokenizer: Any, **options: Any) -> Rows:
    """The ids and the labels of each document."""
    loss_on = options.pop("loss_on", "assistant")
    tokenized = tokenize(read_corpus(path, **options).documents, tokenizer, loss_on=loss_on)
    labels = tokenized.tokens if tokenized.labels is None else tokenized.labels
    borders = zip(tokenized.offsets[:-1].tolist(), tokenized.offsets[1:].tolist(), strict=True)
    return [(tokenized.tokens[start:end].tolist(), labels[start:end].tolist()) for start, end in borders]


def refusal(path: Path, tokenizer: Any, **options: Any) -> str:
    with pytest.raises(RequestError) as caught:
        rows_of(path, tokenizer, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
