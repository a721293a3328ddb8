"""A sample of benchmarks/cases/model_matrix.py: cheap model types, each cell held against transformers; and the case."""

from __future__ import annotations

import json
from pathlib import Path

import model_matrix
import model_matrix_cells
import pytest
import torch
from model_matrix_cells import NoReference, TinyModel, Wrong, cells, outcome_of
from tiny_models import every_model

from upshift.errors import RequestError
from upshift.hardware import describe

SAMPLE = {  # the cells that are not ok, in words that say why
    "causal gpt2": {}, "causal llama": {}, "causal opt": {"packed": "refused"}, "causal xglm": {"packed": "refused"},
    "causal bart": {"packed": "refused"},  # its labels are shifted by the rows
    "masked bert": {"packed": "refused", "generate": "refused"}, "seq2seq bart": {"packed": "refused"},
}  # fmt: skip
UNTRACED = {"inspect", "plan"}  # tested by test_profile.py and test_architectures.py, and slow
CLASSES = {f"{kind} {model_type}": name for kind, model_type, name in every_model(model_matrix.KINDS)}


@pytest.mark.parametrize("name", SAMPLE)
def test_no_cell_is_wrong(name: str, tmp_path: Path) -> None:
    kind, model_type = name.split()
    model = TinyModel(kind, model_type, CLASSES[name], tmp_path, describe(model_matrix.HOST))
    found = {cell: outcome_of(run) for cell, run in cells(model).items() if cell not in UNTRACED}
    expected = {cell: SAMPLE[name].get(cell, "ok") for cell in model_matrix.CELLS if cell not in UNTRACED}
    assert {cell: outcome for cell, (outcome, _) in found.items()} == expected, found


def scale_reference(model: TinyModel, weight: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply a weight of the reference behind the back of the cells."""
    right = model.reference

    def changed() -> torch.nn.Module:
        reference = right()
        with torch.no_grad():
            reference.get_parameter(weight).mul_(factor)
        return reference

    monkeypatch.setattr(model, "reference", changed)


def test_another_result_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells can fail: a weight that is changed behind their back shows in every one that computes."""
    model = TinyModel("causal", "gpt2", "GPT2LMHeadModel", tmp_path, describe(model_matrix.HOST))
    scale_reference(model, "transformer.ln_f.weight", 3.0, monkeypatch)
    for cell in ("load", "train plain", "encode", "generate"):
        assert outcome_of(cells(model)[cell])[0] == "WRONG", cell


@pytest.mark.parametrize("cell", ["train plain", "packed"])
def test_noise_in_training_is_no_error_and_hides_none(cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PhiMoE's router draws its experts in training."""
    model = TinyModel("causal", "phimoe", CLASSES["causal phimoe"], tmp_path, describe(model_matrix.HOST))
    ids = torch.arange(5, 25)[None]
    inputs = {"input_ids": ids, "labels": ids}
    assert model_matrix_cells.draws_in_training(model.reference(), inputs)
    assert outcome_of(cells(model)[cell])[0] == "ok"
    scale_reference(model, "model.norm.weight", 1.01, monkeypatch)
    assert outcome_of(cells(model)[cell])[0] == "WRONG"


def test_a_model_without_noise_draws_nothing(tmp_path: Path) -> None:
    model = TinyModel("causal", "llama", CLASSES["causal llama"], tmp_path, describe(model_matrix.HOST))
    ids = torch.arange(5, 25)[None]
    assert not model_matrix_cells.draws_in_training(model.reference(), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(RequestError("no"), "refused"), (Wrong("1"), "WRONG"), (NoReference("x"), "none"), (KeyError("crash"), "WRONG")],
)
def test_outcomes(error: Exception, outcome: str) -> None:
    def run() -> str:
        raise error

    assert outcome_of(run)[0] == outcome


def test_a_cell_that_ends_its_process_is_wrong_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    class Made:
        def __init__(self, *_: object) -> None: ...

    def made_cells(_: object) -> dict[str, object]:
        return {name: (lambda: "1") if name != "plan" else (lambda: os._exit(3)) for name in model_matrix.CELLS}

    monkeypatch.setattr(model_matrix_cells, "TinyModel", Made)
    monkeypatch.setattr(model_matrix_cells, "cells", made_cells)
    found = model_matrix.run_model("causal", "gpt2", "GPT2LMHeadModel")["cells"]
    assert {name: outcome for name, (outcome, _) in found.items() if outcome != "ok"} == {"plan": "WRONG"}
    assert found["plan"][1].startswith("its process ended")


def test_a_cell_that_computes_for_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        def __init__(self, *_: object) -> None: ...

    def spin() -> str:
        while True:
            pass

    def made_cells(_: object) -> dict[str, object]:
        return {name: (lambda: "1") if name != "plan" else spin for name in model_matrix.CELLS}

    monkeypatch.setattr(model_matrix, "SECONDS_OF_A_CELL", 1)
    monkeypatch.setattr(model_matrix_cells, "TinyModel", Made)
    monkeypatch.setattr(model_matrix_cells, "cells", made_cells)
    found = model_matrix.run_model("causal", "gpt2", "GPT2LMHeadModel")["cells"]
    assert {name for name, (outcome, _) in found.items() if outcome != "ok"} == {"plan"}
    assert found["plan"][1].startswith("not done in 1 s of a processor")


def test_the_page_has_every_model_and_every_reason() -> None:
    cells = {name: ["ok", "1e-7"] for name in model_matrix.CELLS}
    rows = {
        ("causal", "one"): {"cells": cells}, ("masked", "two"): {"cells": cells | {"packed": ["refused", "why | not"]}},
        ("causal", "three"): {"not_tiny": "too large"},
    }  # fmt: skip
    page = model_matrix.page(rows)
    assert "| one | causal | ok |" in page and "- packed: why \\| not. two (masked)" in page
    assert "17 ok, 1 refused, 0 WRONG, 0 none." in page and "types tiny: three." in page


def test_the_page_of_what_runs_what_counts_each_task() -> None:
    cells = {name: ["ok", "1e-7"] for name in model_matrix.CELLS}
    words = "the model is a TwoForMaskedLM, which writes no text (its task is fill-mask)"
    rows = {
        ("causal", "one"): {"cells": cells}, ("causal", "three"): {"cells": cells | {"generate": ["WRONG", "logits differ"]}},
        ("masked", "two"): {"cells": cells | {"generate": ["refused", words]}}, ("causal", "four"): {"not_tiny": "too large"},
    }  # fmt: skip
    page = model_matrix.what_runs(rows)
    assert "| text-generation | 2 of 2 | 2 of 2 | 2 of 2 | 2 of 2 | 2 of 2 | 1 of 2 |" in page
    assert "- refused, fill-mask: writes no text (its task is fill-mask). Types: two." in page
    assert "- WRONG, text-generation: logits differ. Types: three." in page
    assert "| text-generation | AutoModelForCausalLM | AutoTokenizer | text | causal-lm |" in page


def test_rows_of_some_cells_add_up(tmp_path: Path) -> None:
    """What has been run is not run again, and a newer outcome of a cell takes the place of an older one."""

    def details(**cells: list[str]) -> str:
        made = {"kind": "causal", "model": "one", "versions": model_matrix.versions(), "cells": cells}
        return json.dumps({"details": made})

    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([details(load=["WRONG", "1"], plan=["ok", "3 plans"]), details(load=["ok", "0"])]))
    known = model_matrix.newest_rows(path)
    assert known["causal", "one"]["cells"] == {"load": ["ok", "0"], "plan": ["ok", "3 plans"]}
    page = model_matrix.page(known)
    assert "| one | causal | - | ok | ok | - |" in page and "2 ok, 0 refused, 0 WRONG, 0 none. 7 cells have not been run" in page


def test_a_sample_is_spread_over_all_types() -> None:
    every = model_matrix.chosen(None, None)
    few = model_matrix.chosen(None, 12)
    assert len(few) == 12 and {kind for kind, _, _ in few} == {"causal", "masked", "seq2seq", "image-text"}
    assert len(every) > 250 and few == model_matrix.chosen(None, 12)
    assert [entry[1] for entry in model_matrix.chosen("bert", None)] == ["bert", "bert"]
