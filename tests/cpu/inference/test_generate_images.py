"""Prompts with images have the tokens of transformers' own processor and generate()."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from command import Command
from image_models import COLORS, save_llava

from upshift.errors import RequestError
from upshift.inference.generation.generator import Generator
from upshift.inference.generation.media import MediaPrompts, read_image
from upshift.loading.media_files import MediaItem
from upshift.loading.media_files import read_image as read_row
from upshift.training.data.tokenizer import train_byte_level_bpe

NEEDS_PILLOW = pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with its processor, and images of one color."""
    from PIL import Image

    folder = save_llava(tmp_path_factory.mktemp("llava"))
    for name, color in COLORS.items():
        Image.new("RGB", (40, 36), color).save(folder / f"{name}.png")
    return folder


def by_transformers(folder: Path, text: str, names: list[str]) -> str:
    from PIL import Image

    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
    images = [Image.open(folder / name) for name in names]
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(processor.tokenizer.decode(tokens, skip_special_tokens=True))


def answers(upshift: Command, folder: Path, lines: list[Any], *options: str) -> list[str]:
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    output = folder / "answers.jsonl"
    files = ("--prompts", folder / "prompts.jsonl", "--output", output, "--overwrite")
    answer = upshift("generate", folder, *files, "--max-new-tokens", 6, *options)
    assert answer.code == 0, answer.err
    return [json.loads(line)["text"] for line in output.read_text().splitlines()]


@NEEDS_PILLOW
def test_lines_and_messages_with_images(folder: Path, upshift: Command) -> None:
    red, blue = (str(folder / f"{name}.png") for name in COLORS)
    say, between = ({"type": "text", "text": text} for text in ("say ", " and "))
    parts = [say, {"type": "image", "path": blue}, between, {"type": "image"}]
    lines = [
        {"prompt": "see <image> there", "images": [red]},
        {"prompt": "a text alone"},
        {"messages": [{"role": "user", "content": parts}], "images": [red]},
        {"messages": [{"role": "user", "content": "what?"}], "images": [blue]},
    ]
    expected = [
        by_transformers(folder, "see <image> there", ["red.png"]),
        by_transformers(folder, "a text alone", []),
        by_transformers(folder, "say <image> and <image>", ["blue.png", "red.png"]),
        by_transformers(folder, "<image>what?", ["blue.png"]),
    ]
    assert answers(upshift, folder, lines) == expected
    assert expected[0] != by_transformers(folder, "see <image> there", ["blue.png"]), "the image changes nothing here"


@NEEDS_PILLOW
def test_texts_after_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as before, without another race, and by the weights that are loaded. An image is processed once."""
    generator = Generator(str(folder), engine="torch")
    processed: list[str] = []
    read = MediaPrompts._process
    monkeypatch.setattr(MediaPrompts, "_process", lambda self, fields, *rest, **more: (
        processed.append(fields["prompt"]) or read(self, fields, *rest, **more)
    ))  # fmt: skip
    image: Any = {"prompt": "see <image> there", "images": [str(folder / "red.png")]}
    generator.check_prompts([image], generator.options())
    calls: list[list[Any]] = [["a text alone"], [image], ["a text alone"], [image]]
    texts, decoders = [], []
    for prompts in calls:
        texts.append(generator.generate(prompts, max_new_tokens=6)[0].text)
        decoders.append(generator.decoder)
    assert texts[:2] == texts[2:] == [by_transformers(folder, *one) for one in (
        ("a text alone", []), ("see <image> there", ["red.png"])
    )]  # fmt: skip
    assert decoders[:2] == decoders[2:] and decoders[0] is not decoders[1]
    assert decoders[0].model is decoders[1].model  # type: ignore[attr-defined]
    assert processed == ["see <image> there"]


@NEEDS_PILLOW
def test_images_that_cannot_be_used_are_refused(folder: Path, upshift: Command) -> None:
    red = str(folder / "red.png")
    text = folder / "text.png"
    text.write_text("no image")
    parts = [{"type": "video", "path": red}]
    for line, reason in (
        ({"prompt": "see <image>", "images": ["none.png"]}, "the image 'none.png', which cannot be read (No such file"),
        ({"prompt": "see <image>", "images": [str(text)]}, "no image that pillow knows"),
        ({"prompt": "see", "images": [red]}, "has 1 images and 0 marks '<image>'"),
        ({"prompt": "see <image>", "images": red}, "is not of the form"),
        ({"messages": [{"role": "user", "content": parts}], "images": [red]}, "has a part {'type': 'video'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": []}, "has 0 images, and 1 places"),
        ({"prompt": "see <image>", "images": [red], "tools": []}, "has a key 'tools', which is not used"),
    ):
        (folder / "prompts.jsonl").write_text(json.dumps(line))
        files = ("--prompts", folder / "prompts.jsonl", "--output", folder / "none.jsonl")
        answer = upshift("generate", folder, *files)
        assert answer.code == 2 and reason in " ".join(answer.err.split()), answer.err


def test_a_model_of_text_alone_refuses_images(tmp_path: Path, upshift: Command) -> None:
    config = transformers.GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    train_byte_level_bpe(["a text"], 260).save_pretrained(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "see", "images": ["a.png"]}))
    answer = upshift("generate", tmp_path, "--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path / "answers.jsonl")
    assert answer.code == 2 and "reads text, and the prompts have images" in " ".join(answer.err.split())


@NEEDS_PILLOW
def test_whatever_pillow_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow says that an image is broken, or far too large, by errors of three kinds, for prompts as for rows to encode."""
    from PIL import Image

    cut = tmp_path / "cut.png"
    Image.new("RGB", (64, 64)).save(cut)
    cut.write_bytes(cut.read_bytes()[:50])
    large = tmp_path / "large.png"
    Image.new("RGB", (64, 64)).save(large)
    (text := tmp_path / "text.png").write_text("no image")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for path in (cut, large, text):
        with pytest.raises(RequestError, match=path.name):
            read_image(str(path), "prompt 1")
        with pytest.raises(RequestError, match=path.name):
            read_row(MediaItem("image", str(path), "line 1"))
