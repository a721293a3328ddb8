"""Tiny models of texts with a tokenizer of word pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PIECES = ("an", "##na", "##s", "lives", "in", "rome", "paris", "and", "bob", "who", "where", "is", "good", "bad", ".")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "dim": 16, "n_layers": 1,
         "n_heads": 2, "hidden_dim": 16, "max_position_embeddings": 64}  # fmt: skip


def save_text_model(folder: Path, name: str, **config: Any) -> Path:
    """A tiny model of a class, with a tokenizer of word pieces that marks both ends of a text."""
    vocabulary = {piece: number for number, piece in enumerate((*SPECIAL, *PIECES))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if name.startswith("Bert") else [])]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names).save_pretrained(folder)
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(vocabulary), "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes |= {"dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0, "seq_classif_dropout": 0.0}
    model_class(model_class.config_class(**{**sizes, **SIZES, **config})).save_pretrained(folder)
    return folder


def named(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
