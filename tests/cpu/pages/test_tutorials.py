"""Each command and each Python block of the tutorials runs, in the order of its page, in a folder as `make demo` leaves it. The
models are tiny, and what would take minutes gets fewer steps."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from chat_models import byte_level_tokenizer, save_model
from command import Command
from pages import ROOT, Block, blocks

TUTORIALS = ROOT / "docs" / "tutorials"
README = (ROOT / "README.md").read_text(encoding="utf-8")
OF_THE_SHELL = ("source ", "pip install ")
ELSEWHERE = ("upshift serve ", "curl ", "upshift profile ")  # tests/cpu/cli/test_readme.py runs the same, with its own data
SHORTER = {
    "train": {"--epochs": None, "--max-steps": "2"},
    "tune": {"--max-steps": "2", "--pruner": "none"},
    "generate": {"--max-new-tokens": "4"},
}
TRIALS = {"6": "1", "8": "1"}  # the second command continues a study that has ended
CODES = {  # of commands whose page says that they end with another one than 0
    "upshift plan examples/decoder_8b.json --quick --sequence-length 2048 --global-batch 8 --on rtx-4090": 3,
}
SAME_EACH_TIME = ("fit_a_gpu", "from_gpu_to_cluster")  # their plans are of described GPUs


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a clone's folder after the demo: a tiny model without a chat template, some text, and the examples."""
    folder = tmp_path_factory.mktemp("clone")
    save_model(folder / "upshift-demo" / "trained", byte_level_tokenizer(None))
    (folder / "upshift-demo" / "text").mkdir()
    (folder / "upshift-demo" / "text" / "a.txt").write_text("def double(value):\n    return value + value\n" * 400)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def commands(block: Block) -> list[str]:
    """Return the lines of a block that are typed, a text for a file (<<'END') as part of its command."""
    text = "\n".join(block.lines[1:-1])
    return [found.group().strip() for found in re.finditer(r"^.+<<'END'\n(?:.*\n)*?END$|^.+$", text, flags=re.MULTILINE)]


def shortened(words: list[str]) -> list[str]:
    """Return a command with fewer steps, as SHORTER says."""
    for option, value in SHORTER.get(words[0], {}).items():
        if option in words:
            place = words.index(option)
            words = [*words[:place], *words[place + 2 :]]
        if value is not None:
            words = [*words, option, value]
    if words[0] == "tune":
        words = [TRIALS.get(word, word) for word in words]
    if words[0] == "train" and "torch_compile=off" not in words:
        words = [*words, "--set", "torch_compile=off"]
    return [*words, "--engine", "torch"] if words[0] == "encode" else words


def run_python(block: Block) -> None:
    text = "\n".join(block.lines[1:-1]).replace("NUMBER = 100_000", "NUMBER = 40")
    exec(compile(text, f"line {block.line}", "exec"), {})


def not_printed(lines: list[str], out: str) -> list[str]:
    """Return the lines of a page that a command did not print, but for spaces and what is left out with ..."""
    found = " ".join(out.split())
    pieces = [" ".join(piece.split()) for line in lines for piece in line.split("...")]
    return [piece for piece in pieces if piece not in found]


@pytest.mark.parametrize("page", sorted(path.stem for path in TUTORIALS.glob("*.md")))
def test_a_tutorial_runs(page: str, demo: Path, upshift: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(demo)
    monkeypatch.setenv("COLUMNS", "80")
    whole = blocks(TUTORIALS / f"{page}.md")
    out = ""
    ran = 0
    for block in whole:
        if block.language == "python":
            run_python(block)
        elif block.language == "console":
            for line in commands(block):
                if line.startswith("cat "):
                    subprocess.run(["sh", "-c", line], check=True)
                elif line.startswith(ELSEWHERE):
                    assert not line.startswith("upshift serve ") or line in README.splitlines()
                elif not line.startswith(OF_THE_SHELL):
                    answer = upshift(*shortened(shlex.split(line)[1:]))
                    assert answer.code == CODES.get(line, 0), f"{line}\n{answer.err}"
                    out = answer.out + answer.err
                    ran += 1
        elif block.language == "text" and page in SAME_EACH_TIME and "held-out loss" not in block.text:
            assert not_printed(block.lines[1:-1], out) == [], out
    assert ran >= 2


def test_the_start_page_and_the_tutorials_lead_to_each_other() -> None:
    start = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = sorted(path.name for path in TUTORIALS.glob("*.md"))
    assert sorted(re.findall(r"\(tutorials/(\w+\.md)\)", start)) == pages
    assert all(60 <= len((TUTORIALS / page).read_text(encoding="utf-8").splitlines()) <= 150 for page in pages)
