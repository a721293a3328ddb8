"""The commands of docs/many_hosts.md run, with a pretended vLLM where a real one would start."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command import Command
from pages import ROOT, blocks
from test_generate_vllm import Pretended, save

# Commands with these words start servers, ranks, copies of a model, a cluster or a draft model. tests/cpu/serving,
# tests/cpu/distributed, test_tensor_parallel.py and test_generate_vllm.py run such.
ELSEWHERE = ("serve", "--tensor-parallel", "--replicas", "--ray", "--draft")


def commands() -> list[str]:
    fences = [block.lines[1:-1] for block in blocks(ROOT / "docs" / "many_hosts.md") if block.language == "console"]
    lines = [line for fence in fences for line in fence if line.startswith("upshift ")]
    return [line for line in lines if shlex.split(line)[1] == "launch" or not set(ELSEWHERE) & {*shlex.split(line)}]


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Pretended:
    model = save(tmp_path_factory.mktemp("model"), layers=1, is_table=True)
    return Pretended(model, tmp_path_factory.mktemp("environment"))


def test_the_commands_of_the_page_run(
    pretended: Pretended, upshift: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSHIFT_VLLM_PYTHON", str(pretended.python))
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nroads\n")
    words = {"MODEL": pretended.model, "SMALLER_MODEL": pretended.model, "examples/prompts.txt": str(prompts)}
    lines = commands()
    assert {shlex.split(line)[1] for line in lines} == {"generate", "engines", "doctor", "launch", "plan"}
    for line in lines:
        arguments = [words.get(word, word) for word in shlex.split(line)[1:]]
        if arguments[0] == "generate":
            arguments += ["--max-new-tokens", "4", *(() if "--engine" in arguments else ("--engine", "torch"))]
        if arguments[0] in ("engines", "launch"):
            arguments.insert(2 if arguments[0] == "engines" else 1, "--dry-run")
        if arguments[0] == "plan":
            for option in ("--prompt-length", "--output-length"):
                arguments[arguments.index(option) + 1] = "8"
        answer = upshift(*arguments)
        assert answer.code == 0, (line, answer.err)
        if "tensor_parallel_size=2" in arguments:
            assert pretended.start["tensor_parallel_size"] == 2 and pretended.start["model"] == pretended.model
    answers = [json.loads(row) for row in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 2
