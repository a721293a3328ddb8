"""The data and the model of the trainer case: source code that every machine has, a tokenizer and a config made on the spot."""

from __future__ import annotations

import ast
import json
import platform
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from upshift.training.data.corpus import read_corpus
from upshift.training.data.tokenizer import tokenize, train_byte_level_bpe
from upshift.training.data.tokens import TokenizedCorpus

PAD = "<|pad|>"  # of its own: DataCollatorForLanguageModeling takes every padding token out of the labels


@dataclass(frozen=True)
class Size:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    sequence_length: int
    steps: int


FULL = Size(16384, 768, 2048, 10, 12, 512, 40)
QUICK = Size(4096, 192, 512, 4, 3, 128, 8)


def write_inputs(folder: Path, size: Size, *, full_length: bool, max_files: int | None = None) -> tuple[str, str]:
    """Write a model's config and the tokens of the standard library's source, and return (model directory, data path).

    The data is tokenized once, so that no contender's time holds tokenization. max_files: of the source, None for all."""
    files = [text for text in read_corpus(sysconfig.get_paths()["stdlib"], pattern="*.py").documents][:max_files]
    tokenizer = cached_tokenizer(files, size.vocab_size, f"-{max_files}" if max_files else "")
    documents = files if full_length else [part for text in files for part in definitions(text)]  # type: ignore[arg-type]
    tokenized = tokenize(documents, tokenizer)
    data = folder / "data.jsonl"
    with data.open("w") as file:
        for ids in pieces(tokenized, size.sequence_length, full_length=full_length):
            file.write(json.dumps({"input_ids": ids}) + "\n")
    return write_model(folder / "model", tokenizer, size), str(data)


def definitions(text: str) -> list[str]:
    """A file's top-level functions and classes, as data sets of code cut it; whole files are nearly all longer than a row."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return []
    lines = text.splitlines(keepends=True)
    kept = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in kept]


def pieces(tokenized: TokenizedCorpus, length: int, *, full_length: bool) -> list[list[int]]:
    """One list a document; with ``full_length``, of all documents joined and cut, each piece exactly a row."""
    if full_length:
        count = tokenized.num_tokens // length
        return tokenized.tokens[: count * length].reshape(count, length).tolist()  # type: ignore[no-any-return]
    starts, ends = tokenized.offsets[:-1].tolist(), tokenized.offsets[1:].tolist()
    return [tokenized.tokens[start:end].tolist() for start, end in zip(starts, ends, strict=True)]


def cached_tokenizer(texts: Any, vocab_size: int, texts_name: str = "") -> Any:
    """Return a tokenizer of these texts. It is kept: ``texts_name`` tells texts apart for which another one is kept."""
    from transformers import AutoTokenizer

    name = f"upshift-benchmark-tokenizer-{vocab_size}{texts_name}-{platform.python_version()}"
    folder = Path(tempfile.gettempdir()) / name
    if not (folder / "tokenizer.json").exists():
        tokenizer = train_byte_level_bpe(texts, vocab_size - 1)
        tokenizer.add_special_tokens({"pad_token": PAD})
        tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def write_model(folder: Path, tokenizer: Any, size: Size) -> str:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=size.vocab_size, hidden_size=size.hidden_size, intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers, num_attention_heads=size.num_heads, num_key_value_heads=size.num_heads,
        max_position_embeddings=1024, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
