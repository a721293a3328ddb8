"""`upshift profile` through its own door: one process and two, traces, the page, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from command import Answer, Command
from transformers import LlamaConfig

from upshift.planning.analysis.bottleneck import KINDS
from upshift.training.data.tokenizer import train_byte_level_bpe

TEXT = "def add(first, second):\n    return first + second\n\n\nfor number in range(10):\n    print(add(number, 1))\n"

ALONE = ("--tensor-parallel", 1, "--pipeline-parallel", 1, "--context-parallel", 1, "--fully-shard", "no")  # little is traced


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """The command that is profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    tokenizer = train_byte_level_bpe([TEXT * 20], 300)
    tokenizer.save_pretrained(folder / "model")
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "model")  # fmt: skip
    (folder / "text.txt").write_text(TEXT * 200)
    return (
        "train", folder / "model", "--data", folder / "text.txt", "--from-config", "--sequence-length", 32, "--global-batch", 4,
        "--trial-seconds", 0, "--set", "torch_compile=off", "--set", "precision=fp32", "--set", "attention=sdpa",
    )  # fmt: skip


def checked(answer: Answer, folder: Path, *, ranks: int) -> dict[str, Any]:
    assert answer.code == 0, answer.err
    report: dict[str, Any] = json.loads(answer.out)
    assert report == json.loads((folder / "profile.json").read_text())
    assert len(report["ranks"]) == ranks
    for rank in report["ranks"]:
        assert sum(rank["kinds_ms"].values()) == pytest.approx(rank["step_ms"])
        with gzip.open(folder / rank["trace"], "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {"upshift.step", "upshift.data", "upshift.update", "upshift.head", "aten::mm"} <= names
    kinds = {kind["kind"]: kind for kind in report["kinds"]}
    assert {*kinds} <= {*KINDS}
    assert sum(kind["share"] for kind in kinds.values()) == pytest.approx(1.0)
    for kind in ("matrix products", "attention", "head and loss", "optimizer", "idle and dispatch"):
        assert kinds[kind]["ms"] > 0 and kinds[kind]["roofline_ms"] > 0, kind
    assert report["binding_term"] == max(kinds.values(), key=lambda kind: float(kind["ms"]))["kind"]
    highest = max(report["memory"], key=lambda row: float(row["predicted_gib"]))
    assert highest["measured_gib"] == pytest.approx(highest["predicted_gib"], rel=0.1), report["memory"]
    assert len(report["changes"]) <= 3
    for change in report["changes"]:
        assert change["gain"] >= 0.01 and change["fix"].startswith("upshift train ... --set "), change
    return report


def test_one_process(train: tuple[object, ...], tmp_path: Path, upshift: Command) -> None:
    """And the folder may be written again by a profile, and by a profile alone."""
    report = checked(upshift("profile", "-o", tmp_path / "out", "--steps", 4, "--json", "--", *train), tmp_path / "out", ranks=1)
    assert {row["phase"] for row in report["memory"]} == {"forward", "backward", "optimizer"}
    (tmp_path / "out" / "mine.txt").write_text("")
    answer = upshift("profile", "-o", tmp_path / "out", "--", *train)
    assert answer.code == 2 and "mine.txt" in answer.err


def test_two_processes_wait_for_each_other(train: tuple[object, ...], tmp_path: Path, upshift: Command) -> None:
    answer = upshift("profile", "-o", tmp_path / "out", "--steps", 4, "--json", "--", *train, "--nproc", 2, *ALONE)
    report = checked(answer, tmp_path / "out", ranks=2)
    assert all(rank["kinds_ms"]["communication"] > 0 for rank in report["ranks"])


@pytest.mark.parametrize(("words", "said"), [(("serve",), "train"), (("train", "--no-such"), "no-such")])
def test_what_is_no_training_command(words: tuple[str, ...], said: str, upshift: Command) -> None:
    answer = upshift("profile", "--", *words)
    assert answer.code == 2 and said in answer.err and "Traceback" not in answer.err
