"""The tuning case's models and data: source code of Python's standard library, which every machine has."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from trainer_data import cached_tokenizer
from transformers import BertConfig, LlamaConfig

from upshift.training.data.corpus import read_corpus

VOCABULARY, LAYERS, HEADS = 1024, 2, 2
PACKAGES = ("asyncio", "ctypes", "distutils", "email", "encodings", "idlelib", "importlib", "lib2to3", "multiprocessing")
HELD_OUT = 64  # rows of the classifier
SPARE = 1.25  # rows over those of one epoch: some are held out
LARGE, MEMORY_GIB = 262_144, 1.0  # tokens of a sequence that does not fit in so much: 1.34 GiB by the leanest plan


def library() -> Any:
    return list(read_corpus(sysconfig.get_paths()["stdlib"], pattern="*.py").documents)


def write_lm(folder: Path, size: Any) -> tuple[str, str]:
    """Rows of exactly a sequence, tokenized once for both contenders."""
    texts = list(library())
    tokenizer = cached_tokenizer(texts, VOCABULARY)
    wanted = int(size.steps * size.global_batch * SPARE)
    chosen = np.random.default_rng(0).permutation(len(texts)).tolist()
    tokens: list[int] = []
    for number in chosen:
        tokens += tokenizer(texts[number])["input_ids"]
        if len(tokens) >= wanted * size.sequence_length:
            break
    data, length = folder / "data.jsonl", size.sequence_length
    rows = [tokens[start : start + length] for start in range(0, len(tokens) - length, length)][:wanted]
    data.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    return write_llama(folder / "lm", tokenizer, size.hidden_size, positions=1024), str(data)


def write_llama(folder: Path, tokenizer: Any, hidden_size: int, *, positions: int) -> str:
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=positions,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_classifier(folder: Path, size: Any) -> tuple[str, str]:
    """Which package a piece of a file is from. Files, not pieces, are divided among training and evaluation. No dropout: what
    it drops would depend on how often is evaluated."""
    root = Path(sysconfig.get_paths()["stdlib"])
    there = [name for name in PACKAGES if (root / name).is_dir()]
    tokenizer = cached_tokenizer(list(library()), VOCABULARY)
    chance, length, wanted = np.random.default_rng(0), size.sequence_length, size.steps * size.global_batch
    pieces: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for label, name in enumerate(there):
        of_package: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for number, path in enumerate(sorted((root / name).glob("*.py"))):
            ids = tokenizer(path.read_text(encoding="utf-8", errors="replace"))["input_ids"]
            starts = range(0, len(ids) - length, length)
            of_package[number % 5 == 0] += [{"input_ids": ids[start : start + length], "labels": label} for start in starts]
        for held_out, rows_of in of_package.items():  # no package has more than its share
            pieces[held_out] += shuffled(rows_of, chance)[: wanted // len(there)]
    evaluation = shuffled(pieces[True], chance)[:HELD_OUT]
    rows = {"train": shuffled(pieces[False], chance), "evaluation": evaluation}
    data = folder / "data.json"
    data.write_text(json.dumps(rows))
    BertConfig(
        vocab_size=len(tokenizer), hidden_size=size.hidden_size, intermediate_size=3 * size.hidden_size,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=length, num_labels=len(there),
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        architectures=["BertForSequenceClassification"],
    ).save_pretrained(folder / "classifier")  # fmt: skip
    return str(folder / "classifier"), str(data)


def shuffled(rows: list[dict[str, Any]], chance: np.random.Generator) -> list[dict[str, Any]]:
    return [rows[number] for number in chance.permutation(len(rows)).tolist()]


def write_failures(folder: Path) -> tuple[str, str, dict[str, Any], int, float]:
    """(model, data, space, the length that does not fit, GiB that trials may take)."""
    tokenizer = cached_tokenizer(list(library()), VOCABULARY)
    chance, data = np.random.default_rng(0), folder / "data.jsonl"
    lengths = [LARGE + 1] * 3 + [300] * 40
    rows = [chance.integers(0, len(tokenizer), length).tolist() for length in lengths]
    data.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    model = write_llama(folder / "model", tokenizer, 32, positions=2 * LARGE)
    space = {"learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}, "sequence_length": [32, LARGE]}
    return model, str(data), space, LARGE, MEMORY_GIB
