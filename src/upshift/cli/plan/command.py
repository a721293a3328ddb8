"""Run ``upshift plan``: print ranked plans with memory, time and reasons. It loads no weights and needs no accelerator.

With ``--data``, plan for the lengths of its sequences: cut as the request says, and for ``--largest`` cut at other lengths.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from upshift.cli import tables
from upshift.cli.options import (
    GlobalBatch,
    Html,
    Images,
    Json,
    MaxGradNorm,
    MaxLatency,
    MaxTpot,
    MaxTtft,
    Model,
    ObjectiveOption,
    OutputLength,
    PromptLength,
    SequenceLength,
    Set,
    option,
    split_names,
    with_adapter_options,
    with_layout_flags,
    with_row_options,
)
from upshift.cli.plan import exchange, questions, quick, ranking
from upshift.cli.plan import inference as plan_inference
from upshift.cli.plan.questions import refuse_unused
from upshift.cli.plan.quick import ESTIMATED
from upshift.cli.train import KtoLossOption
from upshift.cli.usage.help_page import Panel
from upshift.cli.usage.messages import ABOVE_ZERO
from upshift.errors import RequestError
from upshift.hardware.catalog.lookup import ALL_NAMES, all_products
from upshift.hardware.spec import Host
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import AdapterOptions, ModelSource
from upshift.planning.analysis.what_if import hint_at_allow
from upshift.planning.cost.process_memory import unknown_memory
from upshift.planning.cost.time import sample_unit
from upshift.planning.inference.plan import CHANGES_MATHEMATICS
from upshift.planning.plan import changes_of_mathematics
from upshift.planning.planner import MAX_SHOWN_PLANS, Planning, choose_profiler, find_source, length_in_config
from upshift.planning.program import OWN, read_program
from upshift.planning.search.space import check_allow
from upshift.planning.workload import LengthHistogram, Workload
from upshift.training.data.data_options import DataOptions

if TYPE_CHECKING:
    from pathlib import Path

    from upshift.training.data.dataset import WholeDocuments


def list_products(host: str) -> str:
    """Return the described host. For the word ``list``, print all products and end the command."""
    if host.strip().lower() != ALL_NAMES:
        return host
    for product in all_products():
        memory = "" if product.memory_gib is None else f"{product.memory_gib:.0f} GiB"
        sys.stdout.write(f"{product.key:<24} {memory:>8}  {product.name}\n")
    raise typer.Exit


On = Annotated[
    str | None,
    option(
        "--on", text="Plan for a described machine, such as 8xh100 or 8x8xh100@ib-ndr.", panel=Panel.PLAN, metavar="HOST",
        default="this machine", check=list_products, is_eager=True,
    ),
]  # fmt: skip
Data = Annotated[
    str | None,
    option(
        "--data", text="Plan for the lengths of these texts: a file or a folder, as in upshift train.", panel=Panel.MODEL,
        metavar="PATH", default="every sequence is full",
    ),
]  # fmt: skip
AllowAny = Annotated[
    str,
    option(
        "--allow", panel=Panel.PLAN, metavar="NAME,NAME", default="none",
        text=f"Allow choices that change the mathematics. Training: {', '.join(changes_of_mathematics())}. "
        f"With --generate or --encode: {', '.join(CHANGES_MATHEMATICS)}.",
    ),
]  # fmt: skip
Risk = Annotated[
    float | None,
    option(
        "--risk", text="The accepted probability of running out of memory, from 0 to 0.5.", panel=Panel.PLAN,
        metavar="X", default="keep 5 % free", least=ABOVE_ZERO, most=0.5,
    ),
]  # fmt: skip
Train = Annotated[bool, option("--train", text="Plan a training run. This is the default.", panel=Panel.TASK)]
Steps = Annotated[
    int,
    option(
        "--steps", text="Optimizer steps of the run. One-time costs, such as compiling, are spread over them.",
        panel=Panel.OPTIMIZATION, metavar="N", least=1,
    ),
]  # fmt: skip
Rows = Annotated[
    int | None,
    option(
        "--rows", text="How many plans to show.", default=f"{tables.SHOWN_PLANS}; {MAX_SHOWN_PLANS} with --json",
        panel=Panel.OUTPUT, metavar="N", least=1,
    ),
]  # fmt: skip


@with_layout_flags
@with_adapter_options
@with_row_options
def command(
    context: typer.Context, model: Model, adapter: AdapterOptions, row_options: dict[str, Any],
    sequence_length: SequenceLength = None, global_batch: GlobalBatch = 8, on: On = None, is_quick: quick.Quick = False,
    set_: Set = None, allow: AllowAny = "", data: Data = None, images_: Images = None, objective: ObjectiveOption = None,
    kto_loss: KtoLossOption = "kto", risk: Risk = None, max_grad_norm: MaxGradNorm = 1.0, steps: Steps = 1000,
    train: Train = True, generate: plan_inference.Generate = False, encode: plan_inference.Encode = False,
    prompt_length: PromptLength = None, output_length: OutputLength = None, concurrency: plan_inference.Concurrency = None,
    max_latency_ms: MaxLatency = None, max_ttft_ms: MaxTtft = None, max_tpot_ms: MaxTpot = None, why: questions.Why = None,
    shadow_prices: questions.ShadowPrices = False, largest: questions.LargestOption = None, compare: questions.Compare = None,
    price: questions.Price = None, tokens: questions.Tokens = None, deadline: questions.Deadline = None,
    lock: questions.Lock = None, check: questions.CheckFile = None, from_: exchange.From = None, write: exchange.Write = None,
    program: exchange.Program = None, rows: Rows = None, html: Html = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Rank the plans for a model by predicted speed, with their memory and the reason for each choice. Runs nothing."""
    quick.check_options(context, quick=is_quick)
    if generate or encode:
        generation, limits = (prompt_length, output_length, concurrency), (max_latency_ms if encode else max_ttft_ms, max_tpot_ms)
        plan_inference.check_one_task(generate, encode)
        refuse_unused(context, "--generate" if generate else "--encode")
        target = exchange.write_target(write, serves=True)
        generation, length = plan_inference.fill_lengths(model, encode, generation, sequence_length, quick=is_quick)
        allowed, fixed = split_names(allow), tuple(set_ or ())
        inference = plan_inference.read_workload(generate, encode, generation, (length, global_batch), limits, allowed, program)
        plan_inference.run(model, inference, plan_inference.Output(rows, as_json, target), on=on, fixed=fixed, is_quick=is_quick)
        return
    asked = questions.Questions(tuple(why or ()), shadow_prices, largest, compare, price, tokens, deadline, lock, check)
    refuse_unused(context, asked.instead[0] if asked.instead else "--train", largest=largest)
    asked.check(on)
    target = exchange.write_target(write)
    fixed = exchange.fixed_by_file(from_, tuple(set_ or ()))
    options = DataOptions.from_fields({**row_options, "objective": objective})
    _check_options(risk, data, options, largest, html, kto_loss)
    allowed = check_allow(split_names(allow))
    source = find_source(model, adapter, has_reward_head=options.has_reward_head, images=images_, quick=is_quick)
    has_images = _has_images(source.images_per_row, {"--data": data, "--objective": objective, "--quick": is_quick or None})
    _check_takes_pairs(source, options)
    length = length_in_config(source, sequence_length) if is_quick else sequence_length_of(source, sequence_length)
    workload = Workload(
        sequence_length=length, global_batch=global_batch * options.rows_together, allow=allowed, total_steps=steps, risk=risk,
        clips_gradients=max_grad_norm > 0, rows_together=options.rows_together, has_ratings=options.has_ratings,
        has_kl_pass=kto_loss == "kto", lengths=_read_lengths(source, data, length, options),
        program=read_program(program, has_images=has_images),
    )  # fmt: skip
    lengths_at = None if data is None or options.has_pairs else _lengths_at(source, data, options)
    request = questions.Request(source, workload, on, fixed, as_json, lengths_at, choose_profiler(source, quick=is_quick))
    if asked.answer_instead(request):
        return
    host = request.host()
    with tables.bar("Comparing plans" if is_quick else "Tracing the model on fake tensors") as progress:
        planning = request.plan(host, progress)
    answers = asked.answers(request, planning)
    exchange.write_plan(target, request, planning, model, adapter, data)
    _write_page(html, planning, model)
    if as_json:
        sys.stdout.write(json.dumps(planning.document(num_plans=rows or MAX_SHOWN_PLANS) | answers.document()) + "\n")
    else:
        _print_planning(planning, tables.adapter_line(adapter), rows=rows or tables.SHOWN_PLANS, fixed=request.fixed)
        _print_below(answers, planning, source)
        exchange.print_next_command(context, model, planning)


def _write_page(html: Path | None, planning: Planning, model: str) -> None:
    if html is not None:
        from upshift.reports.plan.page import write_plan_page

        write_plan_page(html, planning, model=model)
        tables.err.print(f"Page: {html}", highlight=False)


def _check_page(html: Path | None) -> None:
    """Raise RequestError if the page cannot be written."""
    if html is not None:
        from upshift.reports.document import check_page_path  # importing it takes a tenth of the start of a plan

        check_page_path(html)


def _check_options(
    risk: float | None, data: str | None, options: DataOptions, largest: str | None, html: Path | None, kto_loss: str
) -> None:
    """Raise RequestError for options that exclude each other, and for a page that cannot be written."""
    _check_page(html)
    if options.has_pairs and largest is not None:
        raise RequestError(f"--largest {largest} is not for --objective {options.objective}; leave one of the two out")
    for name, value in options.model_dump().items():
        if value is not None and data is None and value != options.pair_objective:  # for which a plan needs no data
            raise RequestError(f"--{name.replace('_', '-')} {value} is about --data; add --data, or leave it out")
    if risk is not None and not 0.0 < risk < 0.5:
        raise RequestError(f"--risk {risk} is no probability to accept; use one between 0 and 0.5, such as 0.01")
    if kto_loss != "kto" and not options.has_ratings:
        raise RequestError(f"--kto-loss {kto_loss} is for --objective kto; add --objective kto, or leave --kto-loss out")


def _has_images(number: int, others: Mapping[str, object]) -> bool:
    """Return whether rows have images. Raise RequestError for the first of the ``others`` that has a value then."""
    name = next((name for name, value in others.items() if value is not None), None)
    if number and name is not None:
        raise RequestError(
            f"{name} does not work with --images {number}; leave {name} out, or plan rows of text alone with --images 0"
        )
    return number > 0


def _check_takes_pairs(source: ModelSource, options: DataOptions) -> None:
    """Raise RequestError for a model that ``upshift train`` refuses for pairs because of its loss or its rewards."""
    if not options.has_pairs:
        return
    with tables.step("Testing whether the model can compare pairs"):
        from upshift.models.ops.sequence_loss import check_rewards, check_sequence_losses  # it imports torch

        check = check_rewards if options.has_reward_head else partial(check_sequence_losses, objective=options.objective or "")
        check(source)


def _read_lengths(source: ModelSource, data: str | None, sequence_length: int, options: DataOptions) -> LengthHistogram | None:
    """Return the lengths of the sequences of ``data``, or None if every sequence is full or there is no data."""
    if data is None:
        return None
    from upshift.training.data.dataset import prepare_data  # reading data needs tokenizers

    with tables.step(f"Reading the lengths of {data}"):
        return prepare_data(source, data, sequence_length=sequence_length, options=options).histogram.unless_full()


def _lengths_at(source: ModelSource, data: str, options: DataOptions) -> Callable[[int], LengthHistogram | None]:
    """Return a function of a sequence length: the lengths of ``data`` cut at it, or None if every sequence is full then.

    It reads the documents once, when it is first called."""

    @cache
    def read_documents() -> WholeDocuments:
        from upshift.training.data.dataset import read_whole_documents  # reading data needs tokenizers

        with tables.step(f"Reading the documents of {data}"):
            return read_whole_documents(source, data, options)

    @cache
    def lengths_at(sequence_length: int) -> LengthHistogram | None:
        return read_documents().histogram(sequence_length).unless_full()

    return lengths_at


def _print_host_notes(host: Host) -> None:
    """Print how many nodes are planned as one, and the network between nodes that the user did not name."""
    if (joined := host.origin.get("num_nodes", "described")) != "described" and host.num_nodes > 1:
        tables.dim(f"{host.name} is planned as {host.num_nodes}x{host.gpus_per_node}: {joined}")
    network = host.origin.get("inter_node")
    if host.num_nodes > 1 and network is not None:
        tables.dim(f"Between nodes: {network}")


def _print_below(answers: questions.Answers, planning: Planning, source: ModelSource) -> None:
    """Print what the plans leave out, and the answers to questions about them."""
    ranking.print_uncounted(source.config, planning.profile)
    answers.print(sample_unit(planning.profile))


def _print_planning(planning: Planning, adapter: str | None, *, rows: int, fixed: tuple[str, ...] = ()) -> None:
    if adapter is not None:
        tables.out.print(adapter, highlight=False)
    host = planning.host
    workload = planning.workload
    unit = " images" if sample_unit(planning.profile) == "images" else f" x {workload.sequence_length} tokens"
    pairs = ""
    if workload.rows_together > 1:
        pairs = " rated completions" if workload.has_ratings else " pairs"
    size = f"global batch {workload.num_units}{pairs}{unit}"
    tables.out.print(ranking.subject_line(planning.profile.architecture, host, size))
    _print_host_notes(host)
    ranking.print_images(planning.profile.images, workload.sequence_length)
    best = planning.ranking.candidates[0]
    numbers = planning.numbers(best)
    if workload.program != OWN:
        tables.out.print(f"Predicted for {workload.runs_in.title} (--program {workload.program})", highlight=False)
    ranking.print_plans(planning, rows=rows)
    if planning.preference is not None:
        tables.out.print(f"{planning.preference}\n", highlight=False)
    hint = hint_at_allow(planning, fixed=fixed)
    if hint is not None:
        tables.out.print(f"{hint}\n", highlight=False)
    tables.out.print(ranking.time_line(best), highlight=False)
    tables.out.print(ranking.memory_table(planning, best))
    tables.out.print(ranking.reasons_table(planning))
    ranking.print_rejected(planning.lessons)
    tables.out.print(unknown_memory(host) or planning.shadow_price)
    if planning.profile.is_estimated:
        tables.dim(ESTIMATED)
    for line in ranking.uncertainty_lines(numbers):
        tables.dim(line)
    for name, candidate in (("The best plan", best), ("The plain default", planning.default)):
        for reason in planning.job_memory.describe_problems(candidate):
            tables.out.print(f"{name}: {reason}", highlight=False)
