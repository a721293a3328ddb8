"""The plans of ten questions at 80 and 120 columns: each choice is whole, under its own heading, in at most two lines."""

from __future__ import annotations

import io
from functools import cache, partial
from typing import Any

import pytest
from made_generators import LLAMA_8B, MIXTURE
from made_profile import make_profile
from made_sizes import Size, decoder

from upshift.cli import tables
from upshift.cli.plan import command, inference, ranking
from upshift.hardware import describe
from upshift.planning import plan as training_plan
from upshift.planning.inference import plan as inference_plan
from upshift.planning.inference.plan import InferenceWorkload
from upshift.planning.inference.planner import InferencePlanning, rank_plans
from upshift.planning.plan import SEPARATOR, plain_default
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate, cost_plan
from upshift.planning.search.search import search
from upshift.planning.search.space import parse_fixed
from upshift.planning.workload import Workload

SMALL = Size(768, 2048, 12, 12, 12, 32000)
LLAMA = Size(4096, 14336, 32, 32, 8)
EXPERTS = Size(4096, 14336, 32, 32, 8, 32000, experts=8, per_token=2)
TRAINING = {  # by name: size, host, sequence length, global batch, fixed fields, adapter
    "one card": (SMALL, "rtx-4090", 1024, 64, (), ""),
    "lora": (LLAMA, "rtx-4090", 2048, 8, (), "qlora"),
    "shards": (LLAMA, "8xa100-80gb", 2048, 64, (), ""),
    "pipelines": (LLAMA, "2x8xa100-80gb", 2048, 64, ("pipeline_parallel=4", "tensor_parallel=2"), ""),
    "experts": (EXPERTS, "8x8xh100@ib-ndr", 4096, 256, ("expert_parallel=8",), ""),
    "long": (LLAMA, "8xh100", 65536, 8, (), ""),
}
SERVING = {  # by name: profile, host, concurrency, what is allowed
    "one": (LLAMA_8B, "h100", 1, ()),
    "many": (LLAMA_8B, "8xh100", None, ("fp8-weights", "fp8-kv")),
    "rounded": (LLAMA_8B, "rtx-4090", 32, ("int4-weights", "int8-weights", "int8-kv")),
    "mixture": (MIXTURE, "8xl40s", None, ()),
}


@cache
def training_planning(name: str) -> Planning:
    size, on, length, batch, fixed, adapter = TRAINING[name]
    host, profile = describe(on), decoder(size, adapter=adapter)
    workload = Workload(sequence_length=length, global_batch=batch)
    found = search(host, profile, workload, fixed=parse_fixed(fixed, host, profile, workload))
    default = cost_plan(plain_default(host, profile, workload), host=host, profile=profile, workload=workload)
    assert isinstance(default, Candidate)
    return Planning(host, profile, workload, found, default)


@cache
def serving_planning(name: str) -> InferencePlanning:
    profile, on, concurrency, allow = SERVING[name]
    workload = InferenceWorkload(prompt_length=512, output_length=256, concurrency=concurrency, allow=allow)
    host = describe(on)
    return InferencePlanning(host, profile, workload, rank_plans(host, profile, workload, fixed={}))


def check_columns(text: str, width: int, plans: list[Any], kinds: tuple[str, ...]) -> None:
    """Check the printed table. ``plans``: all candidates, by rank."""
    lines = text.splitlines()
    assert max(len(line) for line in lines if not line.startswith("By ")) <= width and "…" not in text  # commands are copied
    top = next(index for index, line in enumerate(lines) if line.split()[:1] == ["#"])
    rule = next(index for index, line in enumerate(lines) if "──" in line)
    above, heading, second = " ".join(" ".join(lines[:top]).split()), lines[top], " ".join(lines[top + 1 : rule])
    headings = [kind for kind in kinds if f"  {kind} " in heading]
    assert "tok/s" in heading and 1 <= rule - top <= 2
    height = rule - top  # lines of a row
    table = lines[rule + 1 : lines.index("", rule)]
    rows = [table[index : index + height] for index in range(0, len(table), height)]
    assert len(rows) > 1
    for row in rows:
        for kind, choice in plans[int(row[0].split()[0]) - 1].choices():
            cell = {*choice.removeprefix(f"{kind} ").removesuffix(f" {kind}").split(SEPARATOR)}
            if kind in headings:
                column = row[0][heading.index(f"  {kind} ") + 2 :].split("  ")[0]
                assert cell <= {*column.split(SEPARATOR)}, (kind, choice, column)
            elif kind in second.split(SEPARATOR) or kind in second.split():
                assert cell <= {*row[1].strip().split(SEPARATOR)}, (kind, choice, row)
            else:
                assert choice in above, (kind, choice)


def printed(show: Any, planning: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    file = io.StringIO()
    monkeypatch.setattr(tables, "out", tables.new_console(file=file, width=width))
    show(planning, rows=5)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", TRAINING)
def test_training(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planning = training_planning(name)
    show = partial(command._print_planning, adapter=None)
    text = printed(show, planning, width, monkeypatch)
    check_columns(text, width, [entry.plan for entry in planning.ranking.candidates], training_plan.CHOICE_KINDS)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", SERVING)
def test_serving(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planning = serving_planning(name)
    show = partial(inference._print_planning, is_stored=False)
    text = printed(show, planning, width, monkeypatch)
    check_columns(text, width, [entry.plan for entry in planning.ranking.candidates], inference_plan.CHOICE_KINDS)


def test_a_plan_of_a_model_with_a_tower_says_that_it_counts_texts_alone(capsys: pytest.CaptureFixture[str]) -> None:
    profile = make_profile()
    ranking.print_uncounted({"vision_config": {}, "text_config": {}}, profile)  # no tower
    ranking.print_uncounted({"vision_config": {"depth": 2}}, profile)  # of images alone
    assert capsys.readouterr().out == ""
    ranking.print_uncounted({"vision_config": {"depth": 2}, "text_config": {}}, profile)
    assert "Counted for texts alone: the inputs of the vision part" in capsys.readouterr().out
