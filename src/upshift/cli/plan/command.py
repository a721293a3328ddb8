"""Run ``upshift plan``: print ranked plans with memory, time and reasons. It loads no weights and needs no accelerator.

Read the lengths of the sequences of data: as the request cuts them, and cut at other lengths from one reading.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from upshift.cli import tables
from upshift.cli.options import with_layout_flags
from upshift.cli.plan import inference as plan_inference
from upshift.cli.plan import questions
from upshift.cli.plan.questions import refuse_unused
from upshift.errors import RequestError
from upshift.models.sequence_length import SEQUENCE_HELP, sequence_length_of
from upshift.models.source import find_to_train
from upshift.planning.cost.process_memory import unknown_memory
from upshift.planning.cost.time import takes
from upshift.planning.plan import changes_of_mathematics
from upshift.planning.planner import Planning, plan_training
from upshift.planning.search.space import check_allow
from upshift.planning.workload import LengthHistogram, Workload


def read_lengths(model: str, data: str | None, *, sequence_length: int, text_column: str | None = None) -> LengthHistogram | None:
    """Return the lengths of the sequences, or None if every sequence is full or there is no data."""
    if data is None:
        return None
    from upshift.training.run import length_histogram  # reading data needs tokenizers

    with tables.step(f"Reading the lengths of {data}"):
        found: LengthHistogram | None = length_histogram(model, data, sequence_length=sequence_length, text_column=text_column)
    return found


def lengths_at(model: str, data: str, *, text_column: str | None = None) -> Callable[[int], LengthHistogram | None]:
    """Return a function that gives the lengths of the data cut at any length, or None if all sequences are full then."""

    @cache
    def documents() -> tuple[int, ...]:
        from upshift.models.source import find_model
        from upshift.training.data.corpus import read_corpus
        from upshift.training.data.tokenizer import load_tokenizer, tokenize

        with tables.step(f"Reading the documents of {data}"):
            corpus, source = read_corpus(data, text_column=text_column), find_model(model)
            tokenizer = None if corpus.is_tokenized else load_tokenizer(source.directory or source.reference)
            offsets = tokenize(corpus.documents, tokenizer).offsets.tolist()
        return tuple(end - start for start, end in itertools.pairwise(offsets))

    @cache
    def at(sequence_length: int) -> LengthHistogram | None:
        found = LengthHistogram.of_documents(documents(), sequence_length)
        return None if found.mean >= found.sequence_length else found

    return at


LARGEST_BATCH = 10_000_000  # sequences; a plan for the lengths of data draws so many
Model = Annotated[str, typer.Argument(metavar="MODEL", help="local Hugging Face directory, a config.json, or a hub id")]
SequenceLength = Annotated[
    int | None, typer.Option("--sequence-length", min=2, help=f"tokens of the longest sequence; {SEQUENCE_HELP}")
]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", min=1, max=LARGEST_BATCH, help="sequences per optimizer step; no plan changes it")
]
On = Annotated[str | None, typer.Option("--on", help="a described host such as 8x8xh100@ib-ndr; default: this machine")]
Set = Annotated[list[str] | None, typer.Option("--set", help="fix a field of the plan: field=value (repeatable)")]
Allow = Annotated[
    str,
    typer.Option(
        "--allow", help=f"allowed to change the mathematics: {','.join(changes_of_mathematics())}; {plan_inference.ALLOW_HELP}"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]
Html = Annotated[Path | None, typer.Option("--html", help="write the plans, drawn, to this file: one page that works offline")]
Data = Annotated[str | None, typer.Option("--data", help="plan for the lengths of its sequences: a file or folder, as in train")]
TextColumn = Annotated[str | None, typer.Option("--text-column", help="of --data, the column that holds the text, if not text")]
Risk = Annotated[float | None, typer.Option("--risk", help="accepted probability of running out of memory, such as 0.01")]
Train = Annotated[bool, typer.Option("--train", help="plan a training run (default)")]
MaxGradNorm = Annotated[float, typer.Option("--max-grad-norm", min=0.0, help="0: gradients are not clipped")]
Steps = Annotated[int, typer.Option("--steps", min=1, help="optimizer steps that one-time costs are spread over")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="plans to show")]
LoraRank = Annotated[
    int | None, typer.Option("--lora-rank", min=1, help="train LoRA of this rank around every linear layer but the head")
]
FourBits = Annotated[bool, typer.Option("--load-in-4bit", help="QLoRA: below --lora-rank the weights are stored in NF4")]


@with_layout_flags
def command(
    context: typer.Context, model: Model, sequence_length: SequenceLength = None, global_batch: GlobalBatch = 8, on: On = None,
    set_: Set = None, allow: Allow = "", data: Data = None, text_column: TextColumn = None, risk: Risk = None,
    max_grad_norm: MaxGradNorm = 1.0,
    steps: Steps = 1000, lora_rank: LoraRank = None, load_in_4bit: FourBits = False,
    train: Train = True, generate: plan_inference.Generate = False, encode: plan_inference.Encode = False,
    prompt_length: plan_inference.PromptLength = None, output_length: plan_inference.OutputLength = None,
    concurrency: plan_inference.Concurrency = None,
    max_ttft_ms: plan_inference.MaxTtft = None, max_tpot_ms: plan_inference.MaxTpot = None,
    why: questions.Why = None, shadow_prices: questions.ShadowPrices = False, largest: questions.Largest_ = None,
    compare: questions.Compare = None, price: questions.Price = None, tokens: questions.Tokens = None,
    deadline: questions.Deadline = None, lock: questions.Lock = None, check: questions.CheckFile = None,
    rows: Rows = 5, html: Html = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Ranked plans for MODEL, with predicted memory and time and the reason for each choice."""
    fixed = tuple(set_ or ())
    if generate or encode:
        generation, limits = (prompt_length, output_length, concurrency), (max_ttft_ms, max_tpot_ms)
        plan_inference.check_one_task(generate, encode)
        refuse_unused(context, "--generate" if generate else "--encode")
        generation, length = plan_inference.fill_lengths(model, encode, generation, sequence_length)
        sizes = (length, global_batch)
        inference = plan_inference.read_workload(generate, encode, generation, sizes, limits, split(allow))
        plan_inference.run(model, inference, on=on, fixed=fixed, rows=rows, as_json=as_json)
        return
    asked = questions.Questions(tuple(why or ()), shadow_prices, largest, compare, price, tokens, deadline, lock, check)
    refuse_unused(context, asked.instead[0] if asked.instead else "--train")
    if html is not None:
        from upshift.reports.document import check_page_path  # a page's parts take a tenth of the start of a plan

        check_page_path(html)
    asked.check(on)
    _check(risk, data, text_column)
    allowed = check_allow(split(allow))
    source = find_to_train(model, lora_rank=lora_rank, load_in_4bit=load_in_4bit)
    length = sequence_length_of(source, sequence_length)
    workload = Workload(
        sequence_length=length, global_batch=global_batch, allow=allowed, total_steps=steps, clips_gradients=max_grad_norm > 0,
        lengths=read_lengths(model, data, sequence_length=length, text_column=text_column), risk=risk,
    )  # fmt: skip
    recut = None if data is None else lengths_at(model, data, text_column=text_column)
    request = questions.Request(source, workload, on, fixed, as_json, recut)
    if asked.answered_instead(request):
        return
    host = request.host()
    with tables.bar("Tracing the model on fake tensors") as progress:
        planning = plan_training(request.source, host, workload, fixed=fixed, progress=progress, described=on is not None)
    answers = asked.answers(request, planning)
    if html is not None:
        from upshift.reports.plan.page import write_plan_page

        write_plan_page(html, planning, model=model)
        tables.err.print(f"Page: {html}", markup=False, highlight=False)
    if as_json:
        sys.stdout.write(json.dumps(planning.document() | answers.document()) + "\n")
        return
    if lora_rank is not None:
        tables.out.print(adapter_line(lora_rank, load_in_4bit), highlight=False)
    _print(planning, rows=rows)
    answers.print(takes(planning.profile))


def _check(risk: float | None, data: str | None, text_column: str | None) -> None:
    if text_column is not None and data is None:
        raise RequestError(f"--text-column {text_column} names a column of --data; add --data, or leave it out")
    if risk is not None and not 0.0 < risk < 0.5:
        raise RequestError(f"--risk {risk} is no probability to accept; use one between 0 and 0.5, such as 0.01")


def adapter_line(lora_rank: int, load_in_4bit: bool) -> str:
    weights = ", whose weights are stored in NF4" if load_in_4bit else ""
    return f"LoRA of rank {lora_rank} around every linear layer but the head{weights}"


def _print(planning: Planning, *, rows: int) -> None:
    host, workload = planning.host, planning.workload
    images = takes(planning.profile) == "images"
    size = f"global batch {workload.global_batch}" + (" images" if images else f" x {workload.sequence_length} tokens")
    tables.out.print(f"[bold]{planning.profile.architecture}[/bold] on [bold]{host.name}[/bold], {size}")
    network = host.origin.get("inter_node")
    if host.num_nodes > 1 and network is not None:
        tables.out.print(f"[dim]Between nodes: {network}[/dim]", highlight=False)
    best = planning.ranking.candidates[0]
    numbers = planning.numbers(best)
    tables.out.print(tables.plans_table(planning, rows=rows))
    tables.out.print(tables.time_line(best), highlight=False)
    tables.out.print(tables.memory_table(planning, best))
    tables.out.print(tables.reasons_table(planning))
    rejected = tables.rejected_table(planning)
    if rejected is not None:
        tables.out.print(rejected)
    tables.out.print(unknown_memory(host) or planning.shadow_price, markup=False)
    for line in tables.sureness(numbers):
        tables.out.print(f"[dim]{line}[/dim]", highlight=False)
    for name, candidate in (("The best plan", best), ("The plain default", planning.default)):
        for reason in planning.life.does_not_fit(candidate):
            tables.out.print(f"{name}: {reason}", highlight=False)


def split(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not names:
        raise RequestError(f"--allow {text!r} names nothing; give names separated by commas")
    return names
