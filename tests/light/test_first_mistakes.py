"""The first mistakes of a user end in about a second with one line, before torch is imported, and leave no file behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.planning.planner import plan
from upshift.training.arguments import TrainRequest

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "max_position_embeddings": 64}
SPACE = "learning_rate: [0.001, 0.002]\n"
MISTAKES = {
    "train model --data no.jsonl": "'no.jsonl' does not exist",
    "train modle --data rows.jsonl": "'modle' does not exist; .*did you mean model",
    "train model --data rows.jsonl -o used": "used is not empty .*--resume .*--overwrite",
    "train model --data mix.yaml": "'no.jsonl' does not exist",
    "train model --data rows.jsonl --eval-data no.jsonl": "'no.jsonl' does not exist",
    "train usde/model --data rows.jsonl": "did you mean used/model",
    "train usde/modle --data rows.jsonl": "did you mean used/model",
    "train ./usde/../usde/model/ --data rows.jsonl": "no local path|does not exist",
    "plan usde/model": "did you mean used/model",
    "data show model --data no.jsonl": "'no.jsonl' does not exist",
    "data show modle --data rows.jsonl": "'modle' does not exist",
    "data show model --data axolotl.yaml": "key 'datasets' is unknown; .*data_sets",
    "tune model --data no.jsonl --space space.yaml -o study": "'no.jsonl' does not exist",
    "tune modle --data rows.jsonl --space space.yaml -o study": "'modle' does not exist",
    "tune model --data rows.jsonl --space wrong.yaml -o study": "'weight_decy' .*did you mean weight_decay",
    "profile train model --data rows.jsonl": "no option --data; write .* after --: upshift profile -- train MODEL",
    "profile --stepz 4 -- train model": "no option --stepz; did you mean --steps",
    "launch train model --data rows.jsonl": "no option --data; write .* after --: upshift launch -- train MODEL",
    "launch -- train model --data rows.jsonl": "launch needs a launcher; use one of --hosts",
    "launch --slurm --ray -- train model --data rows.jsonl": "takes one launcher, not --slurm, --ray",
    "generate model --prompts rows.jsonl": "either --prompt TEXT, or --prompts FILE with --output .* was given --prompts$",
    "generate model --prompt hello -o a.jsonl": "was given --prompt, --output$",
}
PROGRAM = """
import contextlib, io, json, sys
import upshift.cli.main as program
answers = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["upshift", *words]
    code, written = 0, io.StringIO()
    with contextlib.redirect_stderr(written):
        try:
            program.main()
        except SystemExit as error:
            code = error.code
    answers.append((code, written.getvalue(), "torch" in sys.modules))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("first")
    for name in ("model", "used/model"):
        (made / name).mkdir(parents=True)
        (made / name / "config.json").write_text(json.dumps(CONFIG))
    (made / "used/notes.txt").write_text("mine")
    (made / "rows.jsonl").write_text('{"text": "one"}\n')
    (made / "space.yaml").write_text(SPACE)
    (made / "wrong.yaml").write_text("weight_decy: [0.0, 0.1]\n")
    (made / "mix.yaml").write_text("data_sets:\n  - path: rows.jsonl\n  - path: no.jsonl\n")
    (made / "axolotl.yaml").write_text("datasets:\n  - path: rows.jsonl\n")
    return made


def test_each_ends_in_one_line_before_torch_is_imported(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    words = json.dumps([line.split() for line in MISTAKES])
    code = f"import sys; sys.path[:] = {sys.path!r}\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", code, words], cwd=folder, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout.splitlines()[-1])
    for (line, expected), (status, written, imports_torch) in zip(MISTAKES.items(), answers, strict=True):
        (message,) = written.splitlines()
        assert re.search(expected, message), (line, message)
        assert (line, status, imports_torch) == (line, 2, False)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("reference", [None, 3, ["model"], {"model": 1}])
def test_a_model_that_is_no_text_and_no_path(reference: Any) -> None:
    with pytest.raises(RequestError, match="is not a text or a path; give a Hugging Face directory"):
        find_model(reference)


def test_paths_of_python_are_as_good_as_texts(folder: Path) -> None:
    assert find_model(folder / "model") == find_model(str(folder / "model"))
    paths: dict[str, Any] = {name: folder / name for name in ("model", "data", "eval_data")}
    texts = {name: str(path) for name, path in paths.items()}
    assert TrainRequest.of(paths, {}) == TrainRequest.of(texts, {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sequence_length": "long"}, "sequence_length: must be a whole number .got .long"),
        ({"global_batch": -8}, "global_batch: must be above 0 .got -8"),
        ({"total_steps": 0.5}, "total_steps: must be a whole number .got 0.5"),
    ],
)
def test_wrong_numbers_of_a_plan_are_named_in_our_words(options: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises(RequestError, match=words):
        plan(folder / "model", **{"sequence_length": 64, "global_batch": 8, **options})
