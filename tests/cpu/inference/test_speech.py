"""Sounds are written down as transformers writes them down alone: Whisper, its long form, and a CTC head. Rates are changed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from command import Command
from test_media import SPEECH, WHISPER, write_sound

from upshift.inference.media.files import read_media
from upshift.inference.media.speech import Transcriber
from upshift.loading import media_files
from upshift.loading.media_files import MediaItem, read_sound_at
from upshift.training.data.tokenizer import train_byte_level_bpe

RATE = 16_000
NEW_TOKENS = 6


def tone(hertz: float, seconds: float, rate: int = RATE) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    tokenizer = train_byte_level_bpe(["one two three four five six seven " * 40], 300)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    size = len(tokenizer)
    torch.manual_seed(0)
    changes = {"vocab_size": size + 1510, "decoder_start_token_id": 5, "begin_suppress_tokens": None, "init_std": 0.3}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**WHISPER, **ids, **changes}))
    model.generation_config = transformers.GenerationConfig(**ids, decoder_start_token_id=5)
    model.generation_config.no_timestamps_token_id = size
    model.generation_config.max_initial_timestamp_index = 50
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sounds: two of them have one length, and one has another rate."""
    folder = tmp_path_factory.mktemp("sounds")
    for number, (hertz, seconds, rate) in enumerate([(300, 0.5, RATE), (700, 0.5, RATE), (500, 1.0, 44_100), (440, 0.8, RATE)]):
        write_sound(folder / f"{number}.wav", tone(hertz, seconds, rate) * 20_000, rate=rate)
    return folder


def samples_of(file: Path) -> np.ndarray:
    """The samples at the model's rate: a tone is made anew at this rate, which the test knows."""
    if file.name == "2.wav":
        return (np.float32(tone(500, 1.0) * 20_000).astype("<i2") / np.float32(2**15)).astype(np.float32)
    return np.frombuffer(file.read_bytes()[44:], dtype="<i2") / np.float32(2**15)


def written(upshift: Command, model: Path, prompts: Path, output: Path, *options: str) -> list[dict]:
    answer = upshift("generate", str(model), "--prompts", str(prompts), "--output", str(output), *options)
    assert answer.code == 0, answer.err
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_sound_is_written_down_as_transformers_does(whisper: Path, sounds: Path, upshift: Command, tmp_path: Path) -> None:
    rows = written(upshift, whisper, sounds, tmp_path / "texts.jsonl", "--max-new-tokens", str(NEW_TOKENS))
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(whisper)
    tokenizer = transformers.AutoTokenizer.from_pretrained(whisper)
    texts = []
    all_tokens = []
    for file in sorted(sounds.iterdir()):
        inputs = extractor(samples_of(file), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        (tokens,) = model.generate(**inputs, max_new_tokens=NEW_TOKENS).tolist()
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True).strip())
        all_tokens.append(tokens)
    assert [row["text"] for row in rows] == texts and any(texts)
    transcripts = list(Transcriber(str(whisper), max_new_tokens=NEW_TOKENS).transcribe(read_media(sounds)))
    for found, expected in zip(transcripts, all_tokens, strict=True):
        assert found.tokens == expected[: len(found.tokens)]
        assert set(expected[len(found.tokens) :]) <= {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert [row["seconds"] for row in rows] == [0.5, 0.5, 1.0, 0.8]


def test_a_long_sound_is_read_in_the_long_form(whisper: Path, upshift: Command, tmp_path: Path) -> None:
    write_sound(tmp_path / "long.wav", tone(300, 33.0) * 20_000)
    (tmp_path / "sounds.jsonl").write_text('{"audio": "long.wav"}\n')
    (row,) = written(upshift, whisper, tmp_path / "sounds.jsonl", tmp_path / "texts.jsonl", "--max-new-tokens", str(NEW_TOKENS))
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper).eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(whisper)
    inputs = extractor(
        samples_of(tmp_path / "long.wav"), sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest",
        return_attention_mask=True,
    )  # fmt: skip
    assert inputs["input_features"].shape[-1] > 3000
    (tokens,) = model.generate(**inputs, max_new_tokens=NEW_TOKENS, return_timestamps=True).tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(whisper)
    assert row["text"] == tokenizer.decode(tokens, skip_special_tokens=True).strip() and row["text"]


def test_a_ctc_head_is_decoded_by_its_tokenizer(sounds: Path, upshift: Command, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(1)
    transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**SPEECH)).save_pretrained(folder)
    names = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyzABCDEFGHI"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    rows = written(upshift, folder, sounds, tmp_path / "texts.jsonl")
    speech = transformers.pipeline("automatic-speech-recognition", model=str(folder), framework="pt")
    assert [row["text"] for row in rows] == [speech(samples_of(file))["text"].strip() for file in sorted(sounds.iterdir())]
    assert len({row["text"] for row in rows}) > 1


def test_what_cannot_be_written_down_is_refused(whisper: Path, sounds: Path, upshift: Command, tmp_path: Path) -> None:
    def refused(*words: str, expected: str, model: Path = whisper) -> None:
        answer = upshift("generate", str(model), *words)
        assert answer.code == 2 and expected in answer.err.splitlines()[-1], answer.err

    output = ("--output", str(tmp_path / "texts.jsonl"))
    prompts = ("--prompts", str(sounds))
    refused(*prompts, expected="add --output FILE.jsonl")
    refused(*prompts, *output, "--engine", "torch", expected="--engine is for prompts of text")
    refused(*prompts, *output, "--seed", "0", expected="--seed is for prompts of text")
    refused(*prompts, *output, "--set", "top_k=3", expected="--set is for prompts of text")
    refused("--prompt", "hello", expected='{"audio": "a.wav"}')
    (tmp_path / "mixed.jsonl").write_text(f'{{"audio": "{sounds / "0.wav"}"}}\n{{"text": "a"}}\n')
    refused("--prompts", str(tmp_path / "mixed.jsonl"), *output, expected="line 2 is no sound")
    (tmp_path / "missing.jsonl").write_text('{"audio": "nothing.wav"}\n')
    refused("--prompts", str(tmp_path / "missing.jsonl"), *output, expected="nothing.wav does not exist")
    text_model = tmp_path / "text"
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=50)
    transformers.GPT2LMHeadModel(config).save_pretrained(text_model)
    refused(*prompts, *output, model=text_model, expected="no text from sounds or images alone (its task is text-generation)")
    assert not (tmp_path / "texts.jsonl").exists()


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 44_101, 48_000])
def test_a_tone_keeps_its_pitch_and_strength_at_another_rate(rate: int, tmp_path: Path) -> None:
    def read(hertz: float) -> np.ndarray:
        write_sound(tmp_path / "tone.wav", tone(hertz, 0.5, rate) * 20_000, rate=rate)
        return read_sound_at(MediaItem("audio", str(tmp_path / "tone.wav"), "here"), RATE).samples / (20_000 / 2**15)

    found = read(440)
    assert found.dtype == np.float32 and abs(len(found) - RATE // 2) <= 1
    np.testing.assert_allclose(found[500:-500], tone(440, 0.6)[500 : len(found) - 500], atol=2e-4)
    if rate > 2 * 10_000:  # a tone that the new rate cannot hold is gone, and does not come back as another one
        assert np.abs(read(10_000)[500:-500]).max() < 1e-3


def test_another_rate_needs_soxr(whisper: Path, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    write_sound(folder / "other.wav", np.zeros(44_100), rate=44_100)
    monkeypatch.setattr(media_files, "find_spec", lambda name: None)
    answer = upshift("generate", str(whisper), "--prompts", str(folder), "--output", str(tmp_path / "texts.jsonl"))
    assert answer.code == 2 and "soxr" in answer.err and "16,000 samples a second" in answer.err
