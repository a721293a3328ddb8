"""A model that is trained on chats from the command line keeps its chat template, and answers in it afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chat_models import MARKED, byte_level_tokenizer, save_model, write_jsonl

ANSWER = "the road to the north"
STEPS = 60


@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_chat_model_is_trained_saved_and_answers_in_its_template(packing: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", byte_level_tokenizer(MARKED))
    turns = [
        ({"role": "user", "content": f"which road {number}"}, {"role": "assistant", "content": ANSWER}) for number in range(30)
    ]
    data = write_jsonl(tmp_path / "chats.jsonl", [{"messages": list(pair), "id": number} for number, pair in enumerate(turns)])
    output = tmp_path / "out"

    def upshift(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([sys.executable, "-m", "upshift", *arguments], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return done

    common = ["--data", str(data), "--sequence-length", "64", "--trial-seconds", "0", "--set", f"packing={packing}"]
    rate = ["--learning-rate", "0.01", "--global-batch", "8", "--output", str(output)]
    trained = upshift("train", str(model), *common, *rate, "--max-steps", str(STEPS), "--save-steps", str(STEPS // 2))
    assert "chats (messages); the model learns the assistant's turns\n" in trained.stderr
    assert f"{data}: columns that are not used: id\n" in trained.stderr
    resumed = upshift("train", str(model), *common, *rate, "--max-steps", str(STEPS), "--resume", "--json")
    assert json.loads(resumed.stdout)["checkpoint"] is not None
    folder = next(path.parent for path in sorted(output.rglob("chat_template.jinja")) if (path.parent / "config.json").exists())
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == MARKED
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"messages": [turns[0][0]]}])
    answers = tmp_path / "answers.jsonl"
    upshift(
        "generate",
        str(folder),
        "--prompts",
        str(prompts),
        "--output",
        str(answers),
        "--max-new-tokens",
        "24",
        "--engine",
        "torch",
    )
    assert ANSWER in answers.read_text(encoding="utf-8")
