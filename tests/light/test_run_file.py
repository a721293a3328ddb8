"""A YAML file with the options of ``upshift train``: the same as words, refused in one line, and written by ``--init``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from test_train_request import ARGUMENTS, WRITTEN
from test_wrong_options import check_refusal

from upshift.cli.main import app
from upshift.cli.train import expand, parse
from upshift.cli.usage.help_page import is_option, long_name
from upshift.errors import RequestError

COMMAND: Any = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
NEEDED = ["MODEL", "--data", "DATA"]
WORDS = [words.split() for words, _ in WRITTEN.values()]
WORDS += [[f"--{name.replace('_', '-')}", str(value)] for name, value in ARGUMENTS.items()]
WORDS += [["--load-best"], ["--json"], ["--backend", "xla"], ["--tensor-parallel", "2"], ["--fully-shard", "weights"]]
NOT_OF_A_FILE = {"config", "init", "from-axolotl", "from-llama-factory"}


def options(*words: str) -> dict[str, Any]:
    """Return the options by name, without those that name files of options."""
    return {name: value for name, value in parse(words).items() if name not in ("config", "init")}


def written(path: Path, *words: str) -> Path:
    with pytest.raises(typer.Exit):
        parse([*words, "--init", str(path)])
    return path


def file_of(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_an_option_of_a_file_is_that_of_the_words(words: list[str], tmp_path: Path) -> None:
    expected = options(*NEEDED, *words)
    assert expected != options(*NEEDED)
    assert options("--config", str(written(tmp_path / "run.yaml", *NEEDED, *words))) == expected
    by_hand = {long_name(COMMAND_OPTIONS[word.partition("=")[0]])[2:]: True for word in words if word.startswith("--")}
    for word, value in zip(words, words[1:], strict=False):
        if word.startswith("--") and not value.startswith("--"):
            by_hand[word[2:]] = value  # type: ignore[assignment]
    text = yaml.safe_dump({"model": "MODEL", "data": "DATA", **by_hand})
    assert options("--config", file_of(tmp_path, text)) == expected
    assert options("--config", file_of(tmp_path, text.replace("-", "_")), *NEEDED) == expected or "-" in str(by_hand.values())


COMMAND_OPTIONS = {name: option for option in COMMAND.params if is_option(option) for name in option.opts}


def test_the_file_that_is_written_has_every_option_with_its_default(tmp_path: Path) -> None:
    path = written(tmp_path / "run.yaml")
    assert yaml.safe_load(path.read_text()) is None  # nothing is set
    keys = re.findall(r"^# ([a-z0-9-]+): (.+)$", path.read_text(), re.MULTILINE)
    expected = {name[2:] for name in map(long_name, COMMAND_OPTIONS.values())} - NOT_OF_A_FILE | {"model"}
    assert sorted(name for name, _ in keys) == sorted(expected)
    metavars = {str(parameter.metavar) for parameter in COMMAND.params}
    with_default = {name: value for name, value in keys if value not in metavars}
    assert len(with_default) > 15
    text = "".join(f"{name}: {value}\n" for name, value in with_default.items())
    assert options("--config", file_of(tmp_path / "..", text), *NEEDED) == options(*NEEDED)


def test_words_replace_the_options_of_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, "model: OTHER\ndata: d\nseed: 3\nlearning-rate: 2e-3\nset: [precision=bf16, packing=true]\n")
    found = options("MODEL", "--config", path, "--seed", "5", "--set", "precision=fp32")
    assert (found["model"], found["data"], found["seed"], found["learning_rate"]) == ("MODEL", "d", 5, 2e-3)
    assert found["set_"] == ["precision=fp32"]
    assert options("--config", path)["set_"] == ["precision=bf16", "packing=true"]


def test_words_set_aside_what_excludes_them(tmp_path: Path) -> None:
    path = file_of(tmp_path, "max-steps: 100\noverwrite: true\n")
    assert (options("--config", path, *NEEDED)["max_steps"], options("--config", path, *NEEDED)["overwrite"]) == (100, True)
    values = options("--config", path, *NEEDED, "--epochs", "3", "--resume")
    assert (values["max_steps"], values["epochs"]) == (None, 3.0)
    assert (values["overwrite"], values["resume"]) == (False, True)


EXCLUSIVE = (  # options of which each excludes the other
    ("--warmup-steps 5", "--warmup-ratio 0.1"),
    ("--resume", "--overwrite"),
)


@pytest.mark.parametrize("pair", EXCLUSIVE)
@pytest.mark.parametrize("turn", [1, -1])
def test_each_of_two_that_exclude_each_other_may_be_typed(pair: tuple[str, str], turn: int, tmp_path: Path) -> None:
    typed, of_the_file = pair[::turn]
    path = str(written(tmp_path / "run.yaml", *NEEDED, *of_the_file.split()))
    assert options("--config", path, *typed.split()) == options(*NEEDED, *typed.split())


@pytest.mark.parametrize("form", [["--config", "PATH"], ["--config=PATH"]], ids=" ".join)
def test_the_words_of_another_host_need_no_file(form: list[str], tmp_path: Path) -> None:
    path = file_of(tmp_path, "model: OTHER\nseed: 3\nset: [precision=bf16, packing=true]\nload-best: true\neval-steps: 2\n")
    words = ["--data", "d", *(word.replace("PATH", path) for word in form), "--seed", "5"]
    expected = options(*words)
    expanded = expand(words)
    Path(path).unlink()
    assert options(*expanded) == expected and not any("config" in word for word in expanded)
    assert expand(NEEDED) == NEEDED


def test_the_help_page_does_not_read_the_file(tmp_path: Path) -> None:
    with pytest.raises(typer.Exit):
        parse(["--help", "--config", str(tmp_path / "none")])


def test_a_list_may_stand_for_names_with_commas(tmp_path: Path) -> None:
    path = file_of(tmp_path, "report-to: [tensorboard, wandb]\nallow: bf16-weights\n")
    found = options("--config", path, *NEEDED)
    assert (found["report_to"], found["allow"]) == ("tensorboard,wandb", "bf16-weights")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning-rate: 1", "unknown key 'lerning-rate'; did you mean learning-rate or find-learning-rate?"),
        ("config: other.yaml", "unknown key 'config'"),
        ("--seed: 1", "unknown key '--seed'"),
        ("max-steps: 2.5", "key 'max-steps': --max-steps 2.5 is not a whole number of at least 1"),
        ("max-steps: many", "key 'max-steps': --max-steps many is not a whole number"),
        ("max-steps: 0", "key 'max-steps': --max-steps 0 is not a whole number of at least 1"),
        ("learning-rate: .nan", "key 'learning-rate': --learning-rate .nan is not a number above 0"),
        ("learning-rate: true", "key 'learning-rate' must be --learning-rate X (got true)"),
        ("learning-rate: [1, 2]", "key 'learning-rate' must be one value (got a list)"),
        ("learning-rate: {low: 1}", "key 'learning-rate' must be one value (got a mapping)"),
        ("learning-rate:", "key 'learning-rate' has no value"),
        ("resume: 1", "key 'resume' must be true or false (got '1')"),
        ("resume: 'true'", "key 'resume' must be true or false (got 'true')"),
        ("lr-scheduler-type: cosin", "key 'lr-scheduler-type': --lr-scheduler-type 'cosin' is not known; use one of linear, "),
        ("report-to: [wandb, tensorbord]", "key 'report-to': --report-to 'tensorbord' is not known"),
        ("data: ''", "key 'data': --data is empty"),
        ("seed: 1\nseed: 2", "key 'seed' is given twice"),
        ("eval-steps: 1\neval_steps: 2", "key 'eval_steps' is given twice"),
        ("- seed", "is no mapping of options"),
        ("? [seed]\n: 1", "has a list as a key"),
        ("resume: !!bool x", "key 'resume' must be true or false (got 'x')"),
        ("model: --overwrite", "key 'model' must not begin with a dash"),
        ("seed: [1", "is not YAML"),
        ("seed: 1\x00", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(text: str, words: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, text)
    line = check_refusal("train", *NEEDED, "--config", path, names=path)
    assert words in line


def test_a_wrong_value_is_refused_although_words_replace_it(tmp_path: Path) -> None:
    path = file_of(tmp_path, "seed: many")
    with pytest.raises(RequestError, match="key 'seed': --seed many is not a whole number"):
        parse([*NEEDED, "--config", path, "--seed", "3"])


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("seed: 1 # \xe9".encode("latin-1"))
    check_refusal("train", "--config", str(tmp_path / "none"), names=f"--config {tmp_path}/none does not exist")
    check_refusal("train", "--config", str(tmp_path), names=f"--config {tmp_path} is a folder")
    check_refusal("train", "--config", str(tmp_path / "latin.yaml"), names="is not UTF-8 text")
    check_refusal("train", "--init", str(tmp_path / "latin.yaml"), names="latin.yaml exists; give the path of a new file")
    check_refusal("train", "--init", str(tmp_path / "none" / "run.yaml"), names="cannot be written")
    check_refusal("train", "--init", str(tmp_path / "new.yaml"), "--seed", "many", names="--seed many is not")
    assert not (tmp_path / "new.yaml").exists()


def test_what_the_file_lacks_is_named(tmp_path: Path) -> None:
    check_refusal("train", "--config", file_of(tmp_path, "# nothing\n"), names="needs MODEL and --data PATH")
    check_refusal("train", "--config", file_of(tmp_path, "model: M\n"), names="needs --data PATH")
    check_refusal("launch", "--slurm", "--", "train", "--config", file_of(tmp_path, "sed: 1\n"), names="unknown key 'sed'")
