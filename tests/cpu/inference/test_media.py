"""Images and sounds have the rows of transformers' processor and model, a file at a time; bad files are refused by name."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command
from test_encode import MINILM
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

from upshift.errors import MissingExtra, RequestError
from upshift.inference import registry
from upshift.inference.media.encoder import MediaEncoder
from upshift.inference.media.run import MediaEncoding
from upshift.inference.registry import EngineSetup
from upshift.loading import media_files
from upshift.loading.media_files import MediaItem, read_sound

VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30522, "max_position_embeddings": 64}
SPEECH = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "conv_dim": (32,) * 7,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 40,
}  # fmt: skip
SQUARE = {"height": 32, "width": 32}
LAYERS = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
SIZES = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 100, **dict.fromkeys(LAYERS, 2)}
WHISPER = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
PATTERNS = [(40, 50), (64, 32), (33, 33), (50, 40)]  # width and height
SECONDS = [0.5, 1.0, 0.5, 0.7]
# A model, its kind of files, and how its own class gives a row of the processor's inputs.
MODELS: dict[str, tuple[str, Any, str, Callable[[Any, Any], Any]]] = {
    "vit": ("ViTModel", {**VISION, "intermediate_size": 48}, "image", lambda model, inputs: model(**inputs).pooler_output),
    "vit classifier": (
        "ViTForImageClassification", {**VISION, "num_labels": 3}, "image", lambda model, inputs: model(**inputs).logits,
    ),
    "dinov2": ("Dinov2Model", VISION, "image", lambda model, inputs: model(**inputs).pooler_output),
    "dinov3": ("DINOv3ViTModel", VISION, "image", lambda model, inputs: model(**inputs).pooler_output),
    "clip": (
        "CLIPModel", {"text_config": {**TEXT, "eos_token_id": 102}, "vision_config": VISION, "projection_dim": 16}, "image",
        lambda model, inputs: model.get_image_features(**inputs).pooler_output,
    ),
    "siglip": (
        "SiglipModel", {"text_config": TEXT, "vision_config": VISION}, "image",
        lambda model, inputs: model.get_image_features(**inputs).pooler_output,
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", SPEECH, "audio", lambda model, inputs: model.wav2vec2(**inputs).last_hidden_state.mean(1)),
    "wav2vec2 classifier": (
        "Wav2Vec2ForSequenceClassification", {**SPEECH, "num_labels": 3}, "audio", lambda model, inputs: model(**inputs).logits,
    ),
    "whisper": (
        "WhisperForConditionalGeneration", WHISPER, "audio",
        lambda model, inputs: model.get_encoder()(**inputs).last_hidden_state.mean(1),
    ),
}  # fmt: skip


def need_pillow() -> None:
    pytest.importorskip("PIL", reason="Pillow, which reads images, is not installed")


def saved(folder: Path, name: str) -> Path:
    class_name, sizes, modality, _ = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model_class(model_class.config_class(**sizes)).save_pretrained(folder)
    if modality == "image":
        need_pillow()
        images = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE)
        if name == "clip":
            transformers.CLIPProcessor(images, AutoTokenizer.from_pretrained(MINILM)).save_pretrained(folder)
        else:
            images.save_pretrained(folder)
    else:
        kind = transformers.WhisperFeatureExtractor if name == "whisper" else transformers.Wav2Vec2FeatureExtractor
        kind().save_pretrained(folder)
    return folder


def write_files(folder: Path, modality: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    if modality == "image":
        from PIL import Image

        chance = np.random.default_rng(0)
        files = [folder / f"{number}.png" for number in range(len(PATTERNS))]
        for file, (width, height) in zip(files, PATTERNS, strict=True):
            Image.fromarray(chance.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)
        return files
    files = [folder / f"{number}.wav" for number in range(len(SECONDS))]
    for number, (file, seconds) in enumerate(zip(files, SECONDS, strict=True), start=1):
        write_sound(file, np.sin(np.arange(int(16_000 * seconds)) * 0.05 * number) * 20_000)
    return files


def write_sound(file: Path, samples: np.ndarray, rate: int = 16_000, channels: int = 1) -> None:
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(samples.astype("<i2").tobytes())


def by_transformers(folder: Path, name: str, files: list[Path]) -> np.ndarray:
    """The rows of the model's own processor and class, a file at a time."""
    class_name, _, modality, give = MODELS[name]
    model = getattr(transformers, class_name).from_pretrained(folder).eval()
    rows = []
    for file in files:
        if modality == "image":
            from PIL import Image

            with Image.open(file) as image:
                inputs = AutoImageProcessor.from_pretrained(folder)(images=image, return_tensors="pt")
        else:
            with wave.open(str(file)) as sound:
                samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2") / np.float32(2**15)
            inputs = AutoFeatureExtractor.from_pretrained(folder)(samples, sampling_rate=16_000, return_tensors="pt")
        with torch.inference_mode():
            rows.append(give(model, inputs)[0].numpy())
    return np.stack(rows)


@pytest.fixture
def no_race(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = registry.EngineFactory("torch_media:TorchMediaEngine", ("fp32",))
    monkeypatch.setattr(registry, "ENGINES", {"torch": registry.ENGINES["torch"]._replace(factories={"media": factory})})


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", name)
    files = write_files(tmp_path / "files", MODELS[name][2])
    expected = by_transformers(folder, name, files)
    encoder = MediaEncoder(str(folder))
    found_items = encoder.check([MediaItem(MODELS[name][2], str(file), str(file)) for file in files])  # type: ignore[arg-type]
    assert np.ptp(expected, axis=0).max() > 1e-3
    for engine in ("torch", "openvino") if registry.is_installed("openvino") else ("torch",):
        setup = EngineSetup(engine=engine, precision="fp32", threads=1, batch=3)
        found = MediaEncoding(encoder.source, encoder.config, setup).rows(found_items)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.usefixtures("no_race")
def test_images_and_texts_of_one_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "clip")
    files = write_files(tmp_path / "files", "image")
    texts = ["a cat", "a dog that runs"]
    found = MediaEncoder(str(folder)).encode([files[0], {"text": texts[0]}, {"image": str(files[1])}, {"text": texts[1]}])
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    with torch.inference_mode():
        inputs = [processor(text=[text], return_tensors="pt") for text in texts]
        rows = [model.get_text_features(**one).pooler_output[0].numpy() for one in inputs]
    np.testing.assert_allclose(found[[1, 3]], rows, atol=1e-5)
    np.testing.assert_allclose(found[[0, 2]], by_transformers(folder, "clip", files[:2]), atol=1e-5)


@pytest.mark.usefixtures("no_race")
@pytest.mark.parametrize("form", ["folder", "lines"])
def test_the_command(form: str, tmp_path: Path, upshift: Command) -> None:
    folder = saved(tmp_path / "model", "wav2vec2")
    files = write_files(tmp_path / "files", "audio")
    source = tmp_path / "files"
    (source / ".hidden").touch()
    if form == "lines":
        source = tmp_path / "lines.jsonl"
        source.write_text("".join(json.dumps({"audio": f"files/{file.name}"}) + "\n" for file in files))
    answer = upshift("encode", str(folder), "-i", str(source), "-o", str(tmp_path / "rows.npy"))
    assert answer.code == 0, answer.err
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), by_transformers(folder, "wav2vec2", files), atol=1e-5)


def test_a_race_of_engines(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "whisper")
    files = write_files(tmp_path / "files", "audio")
    encoder = MediaEncoder(str(folder))
    found = encoder.encode(files)
    assert encoder.race is not None and {run.setup.engine for run in encoder.race.runs} >= {"torch"}
    assert all(run.failure is None for run in encoder.race.runs), encoder.race.runs
    np.testing.assert_allclose(found, by_transformers(folder, "whisper", files), atol=1e-4)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"audio": "0.wav"}', '{"audio": "missing.wav"}'], "line 2: {folder}/missing.wav does not exist"),
        (['{"audio": "0.wav"}', '{"audio": "broken.wav"}'], "line 2: {folder}/broken.wav"),
        (['{"audio": "0.wav"}', '{"sound": "0.wav"}'], "line 2 is no image, sound or text"),
        (['{"audio": "0.wav"}', '{"audio": 3}'], "line 2 is no image, sound or text"),
        (['{"audio": "0.wav"}', "{"], "line 2 is no image, sound or text"),
        (['{"audio": "0.wav"}', '{"audio": "long.wav"}'], "long.wav has 31.0 s, and the model reads 30"),
        (['{"audio": "0.wav"}', '{"text": "a"}'], "line 2 is of kind text, and"),
    ],
)
def test_bad_files_are_refused(lines: list[str], words: str, tmp_path: Path, upshift: Command) -> None:
    folder = tmp_path / "files"
    write_files(folder, "audio")
    (folder / "broken.wav").write_bytes(b"RIFFnothing")
    write_sound(folder / "long.wav", np.zeros(16_000 * 31))
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    model = saved(tmp_path / "model", "whisper")
    answer = upshift("encode", str(model), "-i", str(folder / "lines.jsonl"), "-o", str(tmp_path / "rows.npy"))
    assert answer.code == 2 and words.format(folder=folder) in answer.err.replace("\n", " "), answer.err


def test_bad_images_are_refused(tmp_path: Path, upshift: Command) -> None:
    need_pillow()
    folder = tmp_path / "files"
    write_files(folder, "image")
    (folder / "9.png").write_bytes(b"no image")
    answer = upshift("encode", "no model", "-i", str(folder), "-o", str(tmp_path / "rows.npy"))
    assert answer.code == 2 and "9.png is no image that can be read" in answer.err.replace("\n", " ")
    (folder / "9.png").unlink()
    (folder / "notes.txt").touch()
    answer = upshift("encode", "no model", "-i", str(folder), "-o", str(tmp_path / "rows.npy"))
    assert answer.code == 2 and "has notes.txt, which is no image or sound" in answer.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--query", "a"], "--query a is for vectors and scores of texts"),
        (["--task", "query"], "--task query is for vectors and scores of texts"),
        (["--max-latency-ms", "5"], "--max-latency-ms 5.0 is for vectors and scores of texts"),
    ],
)
def test_options_of_texts_are_refused(options: list[str], words: str, tmp_path: Path, upshift: Command) -> None:
    write_files(tmp_path / "files", "audio")
    answer = upshift("encode", "m", "-i", str(tmp_path / "files"), "-o", str(tmp_path / "rows.npy"), *options)
    assert answer.code == 2 and words in answer.err.replace("\n", " ")


@pytest.mark.usefixtures("no_race")
def test_texts_for_a_model_of_images(tmp_path: Path, upshift: Command) -> None:
    """A file of texts alone goes to the same features, and a model that reads none says so."""
    (tmp_path / "texts.txt").write_text("a cat\na dog that runs\n")
    output = tmp_path / "rows.npy"
    folder = saved(tmp_path / "clip", "clip")
    answer = upshift("encode", str(folder), "-i", str(tmp_path / "texts.txt"), "-o", str(output))
    assert answer.code == 0, answer.err
    expected = MediaEncoder(str(folder)).encode([{"text": "a cat"}, {"text": "a dog that runs"}])
    np.testing.assert_allclose(np.load(output), expected, atol=1e-6)
    speech = saved(tmp_path / "speech", "wav2vec2")
    answer = upshift("encode", str(speech), "-i", str(tmp_path / "texts.txt"), "-o", str(tmp_path / "x.npy"))
    assert answer.code == 2 and "texts.txt line 1 is of kind text, and" in answer.err.replace("\n", " ")


def test_models_that_read_neither(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is a BertModel, which reads text; images and sounds need a model that reads them"):
        MediaEncoder(str(MINILM))


def test_a_sound_is_the_mean_of_its_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "two.wav"
    write_sound(file, np.array([1000, 3000, -2000, 0]), channels=2)
    sound = read_sound(MediaItem("audio", str(file), "here"))
    np.testing.assert_allclose(sound.samples, np.array([2000, -1000]) / 2**15, atol=1e-7)
    other = tmp_path / "song.flac"
    other.write_bytes(b"fLaC")
    monkeypatch.setattr(media_files, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="soundfile"):
        read_sound(MediaItem("audio", str(other), "here"))
    with pytest.raises(MissingExtra, match="Pillow"):
        media_files.read_image(MediaItem("image", "x.png", "here"))
