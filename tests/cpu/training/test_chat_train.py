"""A model that is trained on chats from the command line keeps its chat template, and answers in it afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_models import MARKED, byte_level_tokenizer, save_model, write_jsonl
from command import Answer, Command

ANSWER = "the road to the north"
STEPS = 60


@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_chat_model_is_trained_saved_and_answers_in_its_template(
    packing: str, tmp_path: Path, upshift: Command, caplog: pytest.LogCaptureFixture
) -> None:
    is_given = packing == "true"  # the template, beside a tokenizer without one
    model = save_model(tmp_path / "model", byte_level_tokenizer(None if is_given else MARKED))
    template = tmp_path / "template.jinja"
    template.write_text(MARKED, encoding="utf-8")
    turns = [
        ({"role": "user", "content": f"which road {number}"}, {"role": "assistant", "content": ANSWER}) for number in range(30)
    ]
    data = write_jsonl(tmp_path / "chats.jsonl", [{"messages": list(pair), "id": number} for number, pair in enumerate(turns)])
    output = tmp_path / "out"

    def succeed(*arguments: object) -> Answer:
        answer = upshift(*arguments)
        assert answer.code == 0, answer.err
        return answer

    common = ["--data", str(data), "--sequence-length", "64", "--trial-seconds", "0"]
    common += ["--chat-template", str(template)] if is_given else []
    fixed = (f"packing={packing}", "attention=sdpa", "torch_compile=off", "precision=fp32")  # little is traced
    pinned = [word for assignment in fixed for word in ("--set", assignment)]
    rate = ["--learning-rate", "0.01", "--global-batch", "8", "--output", str(output)]
    succeed("train", model, *common, *pinned, *rate, "--max-steps", str(STEPS), "--save-steps", str(STEPS // 2))
    assert f"{data}: chats (messages); the model learns the assistant's turns" in caplog.messages
    assert f"{data}: columns that are not used: id" in caplog.messages
    resumed = succeed("train", model, *common, *pinned, *rate, "--max-steps", str(STEPS), "--resume", "--json")
    assert json.loads(resumed.out)["checkpoint"] is not None
    folder = next(path.parent for path in sorted(output.rglob("chat_template.jinja")) if (path.parent / "config.json").exists())
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == MARKED
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"messages": [turns[0][0]]}])
    answers = tmp_path / "answers.jsonl"
    options = ["--max-new-tokens", "24", "--engine", "torch"]
    succeed("generate", folder, "--prompts", prompts, "--output", answers, *options)
    assert ANSWER in answers.read_text(encoding="utf-8")
