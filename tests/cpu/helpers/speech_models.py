"""Tiny models that recognize speech, and sounds."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from chat_models import write_jsonl


def make_sounds(folder: Path, *seconds_of_each: float) -> list[Path]:
    """Write a sound of each length, and of 0.5 and 0.8 seconds by default."""
    folder.mkdir(parents=True)
    files = []
    for number, seconds in enumerate(seconds_of_each or (0.5, 0.8)):
        samples = np.sin(np.arange(int(seconds * 16_000)) * 0.05 * (number + 1)) * 20_000
        files.append(folder / f"{number}.wav")
        with wave.open(str(files[-1]), "wb") as sound:
            sound.setnchannels(1)
            sound.setsampwidth(2)
            sound.setframerate(16_000)
            sound.writeframes(samples.astype("<i2").tobytes())
    return files


def save_wav2vec2(folder: Path, **changes: Any) -> tuple[Any, Any, Any]:
    """Return a model with a CTC head, its tokenizer and its feature extractor. ``changes``: of its config."""
    names = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    no_chance = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout", "layerdrop")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "conv_dim": (8,) * 7}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": len(names), "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(**sizes, **places, **dict.fromkeys(no_chance, 0.0), mask_time_prob=0.0, **changes)
    return transformers.Wav2Vec2ForCTC(config), tokenizer, transformers.Wav2Vec2FeatureExtractor()


def spoken_rows(folder: Path, number: int) -> Path:
    """Write rows of sounds with texts of other lengths. Padded sounds would change what the model computes."""
    files = make_sounds(folder / "sounds", *[0.5] * number)
    texts = ("one", "two three", "a", "four five")
    rows = [{"audio": f"sounds/{file.name}", "text": texts[index % len(texts)]} for index, file in enumerate(files)]
    return write_jsonl(folder / "rows.jsonl", rows)


def save_speech_model(folder: Path, **changes: Any) -> Path:
    """Write a model with a CTC head. ``changes``: of its config."""
    for part in save_wav2vec2(folder, **changes):
        part.save_pretrained(folder)
    return folder
