"""What the README tells a person to type works, and what is short of the start page and of the guides. All the others are
parsed by tests/light/test_docs.py."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import httpx2
import pytest
from chat_models import MARKED, byte_level_tokenizer, save_model
from pages import ROOT, blocks
from running_server import Running, serving
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.cli.demo import next_commands, program_words
from upshift.training.data.tokenizer import train_byte_level_bpe
from upshift.training.demo import write_prompts

README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
SHORT = (  # what trains, or ranks layouts of many GPUs, is run with smaller questions in tests of its own
    "upshift plan MODEL --why activation_checkpointing=0", "upshift plan MODEL --generate --on 8xh100",
    "upshift inspect MODEL --placement", "upshift launch --hosts a,b,c -- train MODEL --data PATH -o trained",
)  # fmt: skip
ALSO_RUN = (  # of the start page, beside what the README shows
    "upshift data show MODEL --data PATH", "upshift train MODEL --data PATH --nproc 2 -o trained",
    "upshift train MODEL --data PATH --backend xla -o trained", "upshift profile -- train MODEL --data PATH",
    "upshift tune MODEL --data PATH --space examples/space.yaml --trials 20", "upshift serve MODEL --max-ttft-ms 500",
    "upshift encode MODEL --input examples/texts.txt --output rows.npy",
    "upshift quantize MODEL --bits 8 --texts examples/texts.txt --output small",
    "upshift shard MODEL --max-shard-size 5GB --output sharded",
)  # fmt: skip
NEXT = [line for _, line in next_commands(Path("upshift-demo"))]
CHAT_MODEL = "Qwen/Qwen3-0.6B"
TEXT = "def double(value):\n    return value + value\n" * 400


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("readme")
    tokenizer = train_byte_level_bpe([TEXT], 300)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT * 2)
    (folder / "space.yaml").write_text("learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}\n")
    write_prompts(folder / "prompts.txt")
    demo = {f"upshift-demo/{name}": str(folder / name) for name in ("prompts.txt", "answers.jsonl", "longer")}
    return demo | {
        "MODEL": str(folder / "model"), "upshift-demo/trained": str(folder / "model"), "PATH": str(folder / "text.txt"),
        "upshift-demo/text": str(folder / "text.txt"), "trained": str(folder / "trained"),
        "examples/texts.txt": str(ROOT / "examples" / "texts.txt"), "rows.npy": str(folder / "rows.npy"),
        "examples/prompts.txt": str(ROOT / "examples" / "prompts.txt"), "answers.jsonl": str(folder / "answers.jsonl"),
        CHAT_MODEL: str(save_model(folder / "chat-model", byte_level_tokenizer(MARKED))), "tuned": str(folder / "tuned"),
        "examples/chats.jsonl": str(ROOT / "examples" / "chats.jsonl"),
        "small": str(folder / "small"), "examples/space.yaml": str(folder / "space.yaml"), "sharded": str(folder / "sharded"),
    }  # fmt: skip


def commands() -> list[str]:
    """What stands in fences of the README, more commands of the start page, and those that the demo names at its end."""
    fences = re.findall(r"```console\n(.*?)```", README, flags=re.S)
    lines = [line.split("#")[0].strip() for fence in fences for line in fence.splitlines() if line.startswith("upshift ")]
    return [*lines, *ALSO_RUN, *NEXT]


def test_the_readme_shows_the_commands():
    shown = [line for line in commands() if line not in (*ALSO_RUN, *NEXT)]
    assert {line.split()[1] for line in shown} == {"data", "doctor", "generate", "plan", "serve", "train"}
    assert [line for line in ALSO_RUN if f"`{line}`" not in START] == []


def ask_as_the_tutorial(server: Running) -> None:
    """Send the request of the tutorial that serves the same model."""
    page = (ROOT / "docs" / "tutorials" / "first_fine_tune.md").read_text(encoding="utf-8")
    (curl,) = re.findall(r"^curl .*$", page, flags=re.M)
    _, address, _, body = shlex.split(curl)
    answer = httpx2.post(server.url + address.removeprefix("http://127.0.0.1:8000"), content=body, timeout=60)
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("line", commands())
def test_commands(line, paths, upshift, tmp_path):
    arguments = [paths.get(word, word) for word in shlex.split(line)]
    folder = Path(arguments[2])
    if arguments[1] in ("generate", "serve") and not folder.exists():  # a line before makes it, and did not run
        training = next(other for other in commands() if other.endswith(f"-o {folder.name}"))
        test_commands(training, paths, upshift, tmp_path)
    if arguments[1] == "serve":  # it ends when it is told to
        with serving(tmp_path, tmp_path / "log", *arguments[2:], "--engine", "torch", "--port", "0") as server:
            answer = server.client.completions.create(model=folder.name, prompt="double", max_tokens=3)
            if folder.name == "tuned":
                ask_as_the_tutorial(server)
        assert answer.usage.completion_tokens == 3
        return
    if "xla" in arguments:
        arguments = [*arguments[:-1], f"{arguments[-1]}-xla", "--max-steps", "2"]
    elif arguments[1] == "train":  # short, and without the minute of trials
        if "--max-steps" in arguments:
            place = arguments.index("--max-steps")
            del arguments[place : place + 2]
        arguments += ["--max-steps", "2", "--trial-seconds", "0", "--set", "torch_compile=off", "--overwrite"]
    if arguments[1] == "profile":
        short = ["--sequence-length", "64", "--trial-seconds", "0", "--set", "torch_compile=off"]
        arguments = [*arguments[:2], "-o", str(tmp_path / "profile"), "--steps", "3", *arguments[2:], *short]
    if arguments[1] == "tune":
        arguments[arguments.index("--trials") + 1] = "2"
        arguments += ["--max-steps", "2", "--set", "torch_compile=off", "-o", paths["trained"] + "-tune"]
    if arguments[1] in ("encode", "generate"):  # without a race of all engines
        arguments += ["--engine", "torch"]
    if arguments[1] == "generate":
        arguments += ["--max-new-tokens", "4", "--overwrite"]  # another line may have written this file
    assert upshift(*arguments[1:]).code == 0


def test_the_demo_names_a_program_that_the_shell_finds(monkeypatch, tmp_path):
    for on_path in ("/bin/upshift", None):
        monkeypatch.setattr(shutil, "which", lambda name, found=on_path: found)
        for folder in (tmp_path, Path(sys.prefix)):  # `make demo` runs in the folder of the environment
            monkeypatch.chdir(folder)
            words = program_words()
            assert words == ["upshift"] if on_path else Path(words[0]).is_file()


def test_python_example(paths):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), flags=re.S)
    for name in ("MODEL", "PATH"):
        example = example.replace(f'"{name}"', repr(paths[name]))
    example = example.replace('"trained"', repr(paths["trained"] + "-python"))
    example = example.replace(
        "global_batch=8)\nprint(record", "global_batch=8, trial_seconds=0, fixed=('torch_compile=off',))\nprint(record"
    )
    exec(compile(example, "README.md", "exec"), {})


@pytest.mark.parametrize("page", ["README.md", "docs/planning.md"])
def test_does_it_fit(page, upshift, tmp_path):
    """The plan that a page shows is what is printed: each line of it, in its order, but for spaces and what is left out."""
    pytest.importorskip("peft", reason="needs pip install '.[peft]'")
    LlamaConfig(  # the sizes of Llama 3.1 8B
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    (shown,) = re.findall(r"```text\n\$ (upshift plan .*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    command, *lines = shown.splitlines()
    answer = upshift(*[str(tmp_path) if word == "MODEL" else word for word in shlex.split(command)[1:]])
    assert answer.code == 0, answer.err
    printed = iter([" ".join(line.split()) for line in answer.out.splitlines()])
    missing = [line for line in lines if line.strip(". ") and " ".join(line.split()) not in printed]
    assert missing == [], answer.out


@pytest.mark.parametrize("line", SHORT)
def test_commands_of_the_start_page(line, paths, upshift):
    assert f"`{line}`" in START
    arguments = shlex.split(line)[1:]
    if arguments[0] == "launch":
        arguments.insert(1, "--dry-run")
    answer = upshift(*[paths.get(word, word) for word in arguments])
    assert answer.code == 0 and answer.out


@pytest.mark.parametrize("page", ["training_one_gpu", "hardware", "inference_gpu"])
def test_python_of_a_guide(page, paths, capfd):
    (block,) = [block for block in blocks(ROOT / "docs" / f"{page}.md") if block.language == "python"]
    example = "\n".join(block.lines[1:-1]).replace('"MODEL"', repr(paths["MODEL"]))
    exec(compile(example, page, "exec"), {})
    prints_nothing = page == "inference_gpu"
    assert bool(capfd.readouterr().out) != prints_nothing
