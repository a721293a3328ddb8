"""The notebooks of examples/ run from the first cell to the last, in one kernel, and print what they promise."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))}
LONGEST_SECONDS = 600  # of a cell, on a machine that does other work, too


CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")  # colours, and what erases a line


def text_of(cell: dict[str, Any]) -> str:
    """Return what a notebook shows of a cell's standard output: what stands behind the last carriage return of each line."""
    text = "".join("".join(output.get("text", "")) for output in cell["outputs"] if output.get("name") == "stdout")
    return "".join(line.rpartition("\r")[2] + "\n" for line in CODES.sub("", text).replace("\r\n", "\n").split("\n"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each notebook printed. One kernel runs all, so that torch is imported once."""
    nbformat = pytest.importorskip("nbformat", reason="needs pip install '.[dev]'")
    nbclient = pytest.importorskip("nbclient", reason="needs pip install '.[dev]'")
    pytest.importorskip("ipykernel", reason="needs pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("notebooks")
    together = nbformat.v4.new_notebook()
    for name, path in NOTEBOOKS.items():
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            cell.metadata["notebook"] = name
        together.cells += [cell for cell in notebook.cells if cell.cell_type == "code"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(together, timeout=LONGEST_SECONDS, kernel_name="python3", resources=resources).execute()
    texts = dict.fromkeys(NOTEBOOKS, "")
    for cell in together.cells:
        texts[cell.metadata["notebook"]] += text_of(cell)
    return texts


def test_the_notebooks_are_four() -> None:
    assert [*NOTEBOOKS] == ["encode", "fine_tune", "plan", "serve"]


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_installs_in_colab_first(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    assert [cell["execution_count"] for cell in cells] == [None] * len(cells)
    assert 'if "google.colab" in sys.modules:' in "".join(cells[0]["source"])


def test_the_model_answers_after_it_was_trained(outputs: dict[str, str]) -> None:
    text = outputs["fine_tune"]
    assert "30 chats" in text
    assert text.rstrip().splitlines()[-1] == "4 kilograms are 4000 grams."


def test_plans_are_printed(outputs: dict[str, str]) -> None:
    assert len(re.findall(r"^Best of [\d,]+ plans that fit", outputs["plan"], re.MULTILINE)) == 2


def test_the_search_finds_texts_with_the_same_words(outputs: dict[str, str]) -> None:
    shape, *found = [line for line in outputs["encode"].splitlines() if line]
    assert shape == "(5, 64)"
    assert found[0].endswith("Matrices are multiplied row by row.")


def test_the_server_answers_and_stops(outputs: dict[str, str]) -> None:
    assert "Serving at http://127.0.0.1:" in outputs["serve"]
    assert "'completion_tokens': 8" in outputs["serve"]
    assert outputs["serve"].rstrip().endswith("exit code 0")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_progress_is_one_line_and_nothing_is_cut(name: str, outputs: dict[str, str]) -> None:
    assert "…" not in outputs[name]
    assert outputs[name].count("Step ") <= 1
