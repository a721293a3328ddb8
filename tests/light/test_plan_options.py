"""No option of ``upshift plan`` is ignored: what a question does not use is refused by name, before a model is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from upshift.cli.main import app
from upshift.cli.options import LAYOUT_FLAGS
from upshift.cli.plan import questions
from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe
from upshift.hardware.catalog.cpus import CPUS
from upshift.hardware.catalog.lookup import GPUS
from upshift.hardware.spec import Host
from upshift.models.source import ModelSource
from upshift.planning.workload import Workload

MODEL = "/no/such/model"
OF_TRAINING = (
    "--html p.html", "--lock l.json", "--why precision=bf16", "--shadow-prices", "--largest batch", "--compare 1xh100",
    "--price h100=1/h", "--data d", "--risk 0.01", "--tokens 1e9", "--deadline 3d", "--steps 5", "--max-grad-norm 0",
    "--check c.json", "--train", "--lora-rank 4", "--load-in-4bit", "--objective dpo",
)  # fmt: skip
OF_SEQUENCES = ("--sequence-length 64", "--global-batch 4")
OF_PROMPTS = ("--prompt-length 8", "--output-length 8", "--concurrency 1")
OF_THE_LOCK = ("--data d", "--risk 0.01", "--objective dpo", "--set precision=fp32", "--allow lion", "--steps 5", "--lock l.json")
OF_THE_LAYOUT = tuple(
    f"--{name.replace('_', '-')} {flag.choices[0] if flag.choices else 2}" for name, flag in LAYOUT_FLAGS.items()
)
INSTEAD = ("--largest batch", "--compare 1xh100", "--check c.json")
REFUSED = [
    *(("--generate", option) for option in (*OF_TRAINING, *OF_SEQUENCES, "--max-latency-ms 5")),
    *(("--encode", option) for option in (*OF_TRAINING, *OF_PROMPTS, "--max-ttft-ms 5", "--max-tpot-ms 5")),
    *((question, option) for question in INSTEAD for option in ("--html p.html", "--rows 3", *OF_PROMPTS)),
    *(("--check c.json", option) for option in (*OF_THE_LOCK, *OF_SEQUENCES, *OF_THE_LAYOUT)),
    ("--largest batch", "--global-batch 4"),
    ("--largest sequence", "--sequence-length 64"),
    ("--compare 1xh100", "--nproc 2"),
    *(("", option) for option in (*OF_PROMPTS, "--max-ttft-ms 5", "--max-tpot-ms 5", "--max-latency-ms 5")),
]


@pytest.mark.parametrize(("question", "option"), REFUSED)
def test_what_is_not_used_is_refused(question: str, option: str) -> None:
    with pytest.raises(RequestError) as problem:
        app(["plan", MODEL, *question.split(), *option.split()], standalone_mode=False)
    asked = question.split()[0] if question else "a training plan"
    asked = question if question in ("--largest batch", "--largest sequence") else asked
    assert str(problem.value).startswith(f"{asked} does not use {option.split()[0]}; leave it out")


def test_all_of_them_are_named_at_once() -> None:
    with pytest.raises(RequestError, match="does not use --steps, --html, --sequence-length; leave them out"):
        app(["plan", MODEL, "--generate", "--html=p", "--steps=5", "--sequence-length=8"], standalone_mode=False)


@pytest.mark.parametrize(
    "used",
    [
        "--generate --prompt-length 8 --output-length 8 --concurrency 1 --max-ttft-ms 5 --rows 3 --json --set weights=bf16",
        "--encode --sequence-length 64 --global-batch 4 --max-latency-ms 5 --rows 3 --on 1xh100",
        "--html p.html --rows 3 --sequence-length 64 --global-batch 4 --steps 5 --lora-rank 4 --on 1xh100",
        "--largest batch --sequence-length 64 --json --on 1xh100",
        "--largest sequence --global-batch 4",
        "--compare 1xh100 --steps 5 --global-batch 4",
    ],
)
def test_what_is_used_is_not(used: str) -> None:
    with pytest.raises(RequestError, match=MODEL):  # which is looked for next
        app(["plan", MODEL, *used.split()], standalone_mode=False)


def test_a_batch_that_nobody_trains_with() -> None:
    with pytest.raises(RequestError, match="from 1 to 10000000"):
        app(["plan", MODEL, "--global-batch", "1000000000000"], standalone_mode=False)


def test_largest_offloads_frozen_weights_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plan of a given size does: on a CPU alone, and only if the user did not fix where the weights are."""
    asked: list[tuple[str, ...]] = []

    def find(dimension: str, host: Host, workload: Workload, *, fixed: tuple[str, ...], **others: object) -> tuple[str, ...]:
        asked.append(fixed)
        if fixed[-1:] != ("weight_offload=disk",):
            raise NothingFits("nothing fits")
        return fixed

    monkeypatch.setattr(questions, "find_largest", find)
    source = ModelSource(reference="m", directory=Path("m"), config={}, adapter={"r": 4})
    workload = Workload(sequence_length=64, global_batch=8)

    def largest(on: str, source: ModelSource, fixed: tuple[str, ...] = ()) -> object:
        asked.clear()
        request = questions.Request(source, workload, on, fixed, as_json=True)
        host = describe(on).changed(disk_bytes_per_second=2e9)
        return questions.find_largest_with_offload(request, host, "sequence")

    assert largest("epyc-9654-768gb", source, ("precision=fp32",)) == ("precision=fp32", "weight_offload=disk")
    for on, other, fixed in (
        ("h100", source, ()),
        ("epyc-9654-768gb", source.changed(adapter=None), ()),
        ("epyc-9654-768gb", source, ("weight_offload=none",)),
    ):
        with pytest.raises(NothingFits):
            largest(on, other, fixed)
        assert asked == [fixed]


@pytest.mark.parametrize("arguments", [["--on", "list"], ["--on= LIST "], [MODEL, "--on=list"], ["--on=list", "--generate"]])
def test_the_list_of_hardware_needs_no_model(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    app(["plan", *arguments], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*GPUS, *CPUS]
    for line in lines:
        assert describe(line.split()[0]).name == line.split()[0]
