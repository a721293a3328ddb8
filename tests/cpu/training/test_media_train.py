"""Training on images: losses are those of a plain loop, turns alone are learned, the model answers, and bad rows are named."""

from __future__ import annotations

import base64
import json
import os
import signal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import task_runs
import torch
import transformers
from command import Command
from image_models import COLORS, save_chat_model
from plain_loop import plain_losses
from task_runs import RATE

import upshift
from upshift.errors import Interrupted, RequestError
from upshift.training.loop.events import StepDone
from upshift.training.run import Watcher
from upshift.training.tasks.run import RUN_FILE

pytestmark = pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images")
STEPS = 5
train = partial(task_runs.train, steps=STEPS)


def make_images(folder: Path) -> None:
    from PIL import Image

    for name, color in COLORS.items():
        Image.new("RGB", (40, 36), color).save(folder / f"{name}.png")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_chat_model(tmp_path_factory.mktemp("llava"), "llava")
    make_images(folder)
    return folder


def chat(*turns: Any, **columns: Any) -> dict[str, Any]:
    """A row of turns, the user's first."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)], **columns}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def write_rows(folder: Path, *rows: Any) -> str:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def batch_of_transformers(folder: Path, conversations: list[Any]) -> dict[str, Any]:
    """The batch of transformers' own call, in which a token is learned from an assistant's mark up to the end of the turn."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    inputs = dict(
        processor.apply_chat_template(
            conversations, tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "right"},
        )
    )  # fmt: skip
    begin, end = processor.tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        is_learned = False
        for place, token in enumerate(ids):
            if is_learned:
                labels[row, place] = token
            is_learned = token == begin or (is_learned and token != end)
    return {**inputs, "labels": labels}


@pytest.mark.parametrize("kind", ["llava", "idefics3", "qwen2.5-vl"])
def test_losses_and_turns_are_those_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    if kind == "qwen2.5-vl" and find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed: the processor of Qwen2.5-VL needs it")
    from PIL import Image

    folder = save_chat_model(tmp_path / "model", kind)
    make_images(tmp_path)
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    data = write_rows(
        tmp_path,
        chat([{"type": "image", "path": "red.png"}, text("say it")], "red"),
        chat("<image>this and <image> that", "blue and red", "sure", "yes", images=["blue.png", "red.png"]),
        chat([text("and "), {"type": "image_url", "image_url": {"url": url}}, text(" now")], "red again"),
        chat("name it", "blue", images=["blue.png"]),
    )
    red, blue = ({"type": "image", "image": Image.open(tmp_path / f"{name}.png")} for name in COLORS)
    turns = [
        ([red, text("say it")], [text("red")]),
        ([blue, text("this and "), red, text(" that")], [text("blue and red")], [text("sure")], [text("yes")]),
        ([text("and "), red, text(" now")], [text("red again")]),
        ([blue, text("name it")], [text("blue")]),
    ]
    inputs = batch_of_transformers(folder, [chat(*row)["messages"] for row in turns])
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    expected = plain_losses(model, inputs, steps=STEPS, rate=RATE)
    assert expected[-1] < expected[0]
    assert train(folder, data, tmp_path / "out", rows=4) == pytest.approx(expected, rel=2e-4)
    assert not (tmp_path / "out" / "trainer-checkpoints").exists()  # none were saved
    saved = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        trained, reference = (each.eval()(**inputs).loss.item() for each in (saved, model))
    assert trained == pytest.approx(reference, rel=1e-3)


def test_a_trained_model_answers_about_a_picture(llava: Path, tmp_path: Path, upshift: Command) -> None:
    data = write_rows(llava, *(chat("color", name, images=[f"{name}.png"]) for name in COLORS))
    train(llava, data, tmp_path / "out", rows=2, steps=40, rate=1e-2)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": "color", "images": [str(llava / f"{name}.png")]}) for name in COLORS))
    answers = tmp_path / "answers.jsonl"
    files = ("--prompts", prompts, "--output", answers, "--chat", "--max-new-tokens", 2)
    result = upshift("generate", tmp_path / "out", *files)
    assert result.code == 0, result.err
    texts = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    assert [written[0] for written in texts] == [name[0] for name in COLORS]


def test_lora_is_in_the_language_model_alone(llava: Path, tmp_path: Path) -> None:
    data = write_rows(llava, chat("color", "red", images=["red.png"]))
    losses = train(llava, data, tmp_path / "out", rows=1, lora_rank=4)
    assert losses[-1] < losses[0]
    names = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert names and all("language_model" in name for name in names)
    assert (tmp_path / "out" / "processor_config.json").is_file()


def test_an_interrupted_run_resumes(llava: Path, tmp_path: Path) -> None:
    data = write_rows(llava, chat("color", "red", images=["red.png"]), chat("color", "blue", images=["blue.png"]))
    whole = train(llava, data, tmp_path / "whole", rows=1)
    arguments = {"max_steps": STEPS, "learning_rate": RATE, "lr_scheduler_type": "constant"}
    options: dict[str, Any] = {"output": tmp_path / "parts", "global_batch": 1, "eval_size": 0, "arguments": arguments}

    def interrupt(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="after step 3 of 5; a checkpoint is saved"):
        upshift.train(str(llava), data, watcher=Watcher(event=interrupt), **options)
    with pytest.raises(RequestError, match="is not empty"):
        upshift.train(str(llava), data, **options)
    with pytest.raises(RequestError, match="global_batch=.* differs from the run"):
        upshift.train(str(llava), data, resume=True, **options | {"global_batch": 2})
    run_file = tmp_path / "parts" / RUN_FILE
    run = json.loads(run_file.read_text())
    del run["arguments"]["seed"]  # an option that the program of the earlier run did not have
    run_file.write_text(json.dumps(run))
    record = upshift.train(str(llava), data, resume=True, **options)
    assert record is not None
    assert [loss for _, loss in record.details["loss_curve"]] == pytest.approx(whole, rel=1e-5)


def test_the_best_evaluation_is_kept(llava: Path, tmp_path: Path) -> None:
    from PIL import Image

    rows = [chat("color", name, images=[f"{name}.png"]) for name in COLORS]
    data = write_rows(llava, *rows, chat("color", "red", images=["blue.png"]))
    arguments = {"max_steps": 6, "learning_rate": 0.3, "eval_steps": 1, "load_best": True}
    record = upshift.train(str(llava), data, output=tmp_path / "out", arguments=arguments, global_batch=3)
    assert record is not None and record.measured is not None
    losses = [loss for _, loss in record.details["evaluations"]]
    assert len(losses) == 6 and min(losses) < losses[-1]
    turns = [chat([{"type": "image", "image": Image.open(llava / "blue.png")}, text("color")], [text("red")])["messages"]]
    saved = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        loss = saved(**batch_of_transformers(llava, turns)).loss.item()
    assert [loss, record.measured.evaluation_loss] == pytest.approx([min(losses)] * 2, rel=1e-4)
    assert record.details["model_step"] == 1 + losses.index(min(losses))
    options: dict[str, Any] = {"output": tmp_path / "early", "global_batch": 3}
    record = upshift.train(str(llava), data, arguments=arguments | {"early_stopping_patience": 1}, **options)
    assert record is not None and record.details["end"] == "early stopping" and record.details["steps"] < 6


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (chat("a", "b", images=["none.png"]), "rows.jsonl:2 has the image .*none.png.*cannot be read .No such file"),
        (chat("a", "b", images=["broken.png"]), "rows.jsonl:2 has the image .*broken.png.* no image that Pillow knows"),
        (chat("<image> a", "b"), "rows.jsonl:2 has 0 images, and 1 marks"),
        (chat("<image> a", "b", images=["red.png", "red.png"]), "has 2 images in its column, and 1 places"),
        (chat([{"type": "image"}], "b"), "has 0 images in its column, and 1 places"),
        (chat("a", [{"type": "image", "path": "red.png"}]), "rows.jsonl:2 has an image in a turn of the assistant"),
        (chat("a", "b", images=["https://host/a.png"]), "reads no files from the network"),
        (chat("a", "b", images=["data:image/png;base64,?"]), "a data: URL that is not base64"),
        ({"text": "a"}, "rows.jsonl:2 holds 'text', and a model of images and texts is trained on chats"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], words: str, llava: Path, tmp_path: Path) -> None:
    (llava / "broken.png").write_bytes(b"\x89PNG\r\n")
    data = write_rows(llava, chat("a", "b", images=["red.png"]), row)
    with pytest.raises(RequestError, match=words):
        train(llava, data, tmp_path / "out", rows=1)


def test_what_the_model_learns_is_shown(llava: Path, upshift: Command) -> None:
    data = write_rows(llava, chat("<image>color", "red", images=["red.png"]), chat("a", "b"))
    answer = upshift("data", "show", llava, "--data", data)
    assert answer.code == 0, answer.err
    assert "<|user|><image>color<|end|><|assistant|>[[red<|end|>]]" in answer.out
    assert "1 rows to train on, 1 to evaluate on" in answer.out
