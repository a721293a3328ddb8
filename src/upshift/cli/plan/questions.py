"""Answer the questions of ``upshift plan`` that come with a ranking (--why, --shadow-prices, --lock) or in place of one
(--largest, --compare, --check), and reject the options that a question does not use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from upshift.cli import tables
from upshift.cli.options import LAYOUT_FLAGS, command_line_options, option
from upshift.cli.usage.help_page import Panel
from upshift.errors import NothingFits, RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile, Variant
from upshift.models.source import AdapterOptions, ModelSource
from upshift.models.tracing.profile_model import Profiler, profile_model
from upshift.planning.analysis.compare_hosts import (
    ENERGY_NOTE,
    Comparison,
    ComparisonTerms,
    compare,
    read_duration,
    read_hosts,
    read_prices,
    read_tokens,
)
from upshift.planning.analysis.lock_file import (
    MOVED_SHARE,
    Change,
    Check,
    check_identity,
    check_lock,
    lock_plan,
    needed_variants,
    read_lock,
    write_lock,
)
from upshift.planning.analysis.max_size import LargestResult, find_largest
from upshift.planning.analysis.what_if import Counterfactual, ShadowPrice, explain_choice, read_choice, shadow_prices
from upshift.planning.cost.process_memory import unknown_memory
from upshift.planning.cost.time import SampleUnit
from upshift.planning.planner import Planning, check_fixed, find_host, plan_training
from upshift.planning.search.space import WEIGHT_OFFLOAD, automatic_weight_places, fixes_weight_offload, with_disk_rate
from upshift.planning.trials.calibration import NO_RECORDS, read_calibration
from upshift.planning.workload import LengthHistogram, Workload
from upshift.units import format_count, format_seconds

Instead = Literal["--largest", "--compare", "--check"]  # questions whose answers replace the ranking
Question = Literal["--train", "--generate", "--encode", Instead]
OF_TRAINING = (
    "train", "objective", "data", "text_column", "data_format", "loss_on", "chat_template", "split", "long_rows", "risk",
    "max_grad_norm", "steps", "images_", "kto_loss",
    *AdapterOptions.model_fields,
    "why", "shadow_prices", "largest", "compare", "price", "tokens", "deadline", "lock", "check", "html", "from_",
)  # fmt: skip
OF_SEQUENCES = ("sequence_length", "global_batch")
OF_PROMPTS = ("prompt_length", "output_length", "concurrency")
OF_ANSWERS = ("max_ttft_ms", "max_tpot_ms")
LIMITS = ("max_latency_ms", *OF_ANSWERS)
OF_A_RANKING = ("html", "rows", "write")
FOUND: dict[str | None, tuple[str, ...]] = {  # what --largest finds itself
    "batch": ("global_batch",),
    "sequence": ("sequence_length",),
}
# The lock has these: --check asks whether the same job still fits.
OF_THE_LOCK = (
    "data", "text_column", "data_format", "loss_on", "chat_template", "split", "long_rows", "objective", "risk",
    "max_grad_norm", "steps", "images_", "kto_loss", "set_", "allow", "lock", "from_", "program", *OF_SEQUENCES, *LAYOUT_FLAGS,
)  # fmt: skip
UNUSED: dict[Question, tuple[str, ...]] = {
    "--train": (*OF_PROMPTS, *LIMITS),
    "--generate": (*OF_TRAINING, *OF_SEQUENCES, "max_latency_ms"),
    "--encode": (*OF_TRAINING, *OF_PROMPTS, *OF_ANSWERS, "write", "program"),
    "--largest": (*OF_PROMPTS, *LIMITS, *OF_A_RANKING),
    "--compare": (*OF_PROMPTS, *LIMITS, *OF_A_RANKING, "nproc"),  # it counts processes of one host, and the hosts differ
    "--check": (*OF_PROMPTS, *LIMITS, *OF_A_RANKING, *OF_THE_LOCK),
}


def refuse_unused(context: typer.Context, question: Question, *, largest: str | None = None) -> None:
    """Raise RequestError that names every option on the command line that the question does not use.

    ``largest``: the value of --largest."""
    options = command_line_options(context)
    found = FOUND.get(largest, ())
    names = (*UNUSED[question], *found)
    unused = [options[name] for name in names if name in options]
    if not unused:
        return
    subject: str = "a training plan" if question == "--train" else question
    if found:
        subject = f"--largest {largest}"
    alternative = ", or ask with --generate or --encode" if question == "--train" else ""
    pronoun = "them" if len(unused) > 1 else "it"
    raise RequestError(f"{subject} does not use {', '.join(unused)}; leave {pronoun} out{alternative}")


Why = Annotated[
    list[str] | None,
    option(
        "--why", text="Explain why the best plan does not have this value: compare the two.", panel=Panel.QUESTIONS,
        metavar="FIELD=VALUE",
    ),
]  # fmt: skip
ShadowPrices = Annotated[
    bool,
    option(
        "--shadow-prices", panel=Panel.QUESTIONS,
        text="Show what more memory, faster links and each name of --allow would gain. Takes one search for each.",
    ),
]  # fmt: skip
LargestOption = Annotated[
    str | None,
    option(
        "--largest", text="Find the largest size that fits; model counts layers", panel=Panel.QUESTIONS, metavar="NAME",
        choices=("sequence", "batch", "model"),
    ),
]  # fmt: skip
Compare = Annotated[
    str | None,
    option(
        "--compare", text="Compare machines, such as 8xh100,2x8xa100-80gb.", panel=Panel.QUESTIONS, metavar="HOST,HOST"
    ),
]  # fmt: skip
Price = Annotated[
    str | None,
    option(
        "--price", text="With --compare: the price of one device, such as h100=2.5/h,a100-80gb=1.2/h.", panel=Panel.QUESTIONS,
        metavar="NAME=PRICE/h",
    ),
]  # fmt: skip
Tokens = Annotated[
    str | None,
    option(
        "--tokens", text="With --compare: the tokens to train on, such as 300B or 1e12.", panel=Panel.QUESTIONS, metavar="COUNT",
        default="those of --steps",
    ),
]  # fmt: skip
Deadline = Annotated[
    str | None,
    option(
        "--deadline", text="With --compare: the longest run, such as 90min, 72h or 3d.", panel=Panel.QUESTIONS,
        metavar="TIME",
    ),
]  # fmt: skip
Lock = Annotated[
    Path | None,
    option(
        "--lock", text="Write the best plan with its versions to this file, for a later --check.", panel=Panel.QUESTIONS,
        metavar="PATH",
    ),
]  # fmt: skip
CheckFile = Annotated[
    Path | None,
    option(
        "--check", panel=Panel.QUESTIONS, metavar="PATH",
        text="Predict the plan that --lock wrote again, with today's libraries. Exit code 1: the prediction changed.",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Request:
    """The job and the host that the questions are about."""

    source: ModelSource
    workload: Workload
    on: str | None
    fixed: tuple[str, ...]
    as_json: bool
    lengths_at: Callable[[int], LengthHistogram | None] | None = None  # of --data, cut at so many tokens
    profiler: Profiler = profile_model

    def trace(self, sequence_length: int, variants: tuple[Variant, ...]) -> ModelProfile:
        with tables.bar(f"Tracing {sequence_length:,} tokens on fake tensors") as progress:
            return self.profiler(self.source, sequence_length=sequence_length, variants=variants, progress=progress)

    def plan(self, host: Host, progress: Callable[[int, int], None]) -> Planning:
        described = self.on is not None
        return plan_training(
            self.source, host, self.workload, fixed=self.fixed, progress=progress, described=described, profiler=self.profiler
        )

    def host(self) -> Host:
        with tables.step("Measuring this machine" if self.on is None else f"Looking up {self.on}"):
            host = find_host(self.on)
        needs_disk = self.on is None and fixes_weight_offload(self.fixed)
        return with_disk_rate(host, self.source) if needs_disk else host

    def unmeasured_host(self) -> Host:
        """Return the host with the rates of the tables alone."""
        return find_host(self.on, probe=False)

    def print(self, document: dict[str, Any], table: Callable[[], None]) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(document) + "\n")
        else:
            table()


@dataclass(frozen=True)
class Questions:
    """The questions, by their options as the user wrote them."""

    why: tuple[str, ...] = ()
    shadow_prices: bool = False
    largest: str | None = None
    compare: str | None = None
    price: str | None = None
    tokens: str | None = None
    deadline: str | None = None
    lock: Path | None = None
    locked: Path | None = None

    @property
    def instead(self) -> list[Instead]:
        """Return the questions whose answers replace the ranking."""
        values: dict[Instead, object] = {"--largest": self.largest, "--compare": self.compare, "--check": self.locked}
        return [name for name, value in values.items() if value is not None]

    def check(self, on: str | None) -> None:
        """Raise RequestError for questions that exclude each other. It needs no model."""
        with_ranking = {"--why": self.why, "--shadow-prices": self.shadow_prices, "--lock": self.lock}
        clashing: list[str] = list(self.instead)
        if clashing:
            clashing += [name for name, value in with_ranking.items() if value]
        if len(clashing) > 1:
            raise RequestError(f"{' and '.join(clashing)} are questions of their own; ask one at a time")
        for name, value in (("--price", self.price), ("--tokens", self.tokens), ("--deadline", self.deadline)):
            if value is not None and self.compare is None:
                raise RequestError(f"{name} {value!r} is for comparing hosts; add --compare, such as --compare 8xh100,8xb200")
        if self.compare is not None and on is not None:
            raise RequestError(f"--compare names the hosts itself; leave out --on {on}")
        for choice in self.why:
            read_choice(choice)

    def answer_instead(self, request: Request) -> bool:
        """Print the answer that replaces the ranking; return False if there is no such question.

        Raise typer.Exit(1) if a locked plan moved."""
        if self.largest is not None:
            _answer_largest(request, self.largest)
        elif self.compare is not None:
            _answer_compare(request, self)
        elif self.locked is not None:
            _answer_check(request, self.locked)
        return bool(self.instead)

    def answers(self, request: Request, planning: Planning) -> Answers:
        """Return the answers that come with the ranking, and write the lock file."""
        if self.lock is not None:
            described = request.on is not None
            write_lock(self.lock, lock_plan(planning, request.source, fixed=request.fixed, described=described))
            tables.dim(f"Locked the best plan in {self.lock}", tables.err)
        counterfactuals = tuple(explain_choice(planning, choice, fixed=request.fixed, trace=request.trace) for choice in self.why)
        prices = None
        if self.shadow_prices:
            with tables.step("Searching again for each shadow price"):
                prices = shadow_prices(planning, fixed=request.fixed)
        return Answers(counterfactuals, prices)


@dataclass(frozen=True)
class Answers:
    """The answers that come with the ranking. ``shadow_prices``: None if not requested."""

    why: tuple[Counterfactual, ...]
    shadow_prices: tuple[ShadowPrice, ...] | None

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {}
        if self.why:
            document["why"] = [answer.model_dump(mode="json") for answer in self.why]
        if self.shadow_prices is not None:
            document["shadow_prices"] = [price.model_dump(mode="json") for price in self.shadow_prices]
        return document

    def print(self, takes: SampleUnit) -> None:
        for answer in self.why:
            speed = "" if answer.gain is None or answer.outcome == "chosen" else f", {answer.gain:+.1%} {takes}/s"
            memory = "" if answer.gain is None or not answer.more_gib else f", {answer.more_gib:+.2f} GiB"
            outcome = f": {answer.outcome}{speed}{memory}; {answer.why}"
            tables.out.print(Text.assemble((f"Why not {answer.asked}", "bold"), outcome))
        if self.shadow_prices is not None:
            table = tables.new_table("Shadow prices", "change", "with", numbers=(f"{takes}/s",))
            for price in self.shadow_prices:
                table.add_row(price.change, price.why, tables.percent(price.gain))
            tables.out.print(table)


def _answer_largest(request: Request, dimension: str) -> None:
    host = request.host()
    check_fixed(request.fixed, host, request.source, request.workload)
    largest = find_largest_with_offload(request, host, dimension)
    document = {
        "host": host.model_dump(mode="json"), "workload": request.workload.model_dump(mode="json"),
        "largest": largest.model_dump(mode="json"),
    }  # fmt: skip
    request.print(document, lambda: _print_largest(largest, host))


def find_largest_with_offload(request: Request, host: Host, dimension: str) -> LargestResult:
    """Return the largest size that fits. If none does, frozen weights wait outside the memory, as in a plan of a given size.

    Raise NothingFits if no size fits then, either."""
    calibration = NO_RECORDS if request.on is not None else read_calibration(host)

    def find(host: Host, fixed: tuple[str, ...]) -> LargestResult:
        return find_largest(
            dimension, host, request.workload, fixed=fixed, trace=request.trace, lengths_at=request.lengths_at,
            calibration=calibration,
        )  # fmt: skip

    try:
        return find(host, request.fixed)
    except NothingFits as nothing_fits:
        source = request.source
        has_frozen_files = source.adapter is not None and source.quantized_from is None and source.directory is not None
        if not has_frozen_files or fixes_weight_offload(request.fixed):
            raise
        host = host if request.on is not None else with_disk_rate(host, source)
        for place in automatic_weight_places(host):
            with suppress(NothingFits):
                return find(host, (*request.fixed, f"{WEIGHT_OFFLOAD}={place}"))
        raise nothing_fits


def _print_largest(largest: LargestResult, host: Host) -> None:
    batch = "images at once" if largest.takes == "images" else "sequences at once"
    units = {"sequence": "tokens", "batch": batch, "model": f"layers, {format_count(largest.parameters)} parameters"}
    size = f"{largest.value:,} {units[largest.what]}"
    tables.out.print(Text.assemble((size, "bold"), f" fit {host.name}: {largest.plan.label()}"))
    numbers = largest.predicted
    memory = f"{tables.gib(numbers.peak_gib)}/{tables.gib(numbers.resident_gib)} GiB peak/held"
    tables.out.print(f"{tables.number(numbers.tokens_per_second)} {largest.takes}/s predicted, {memory}", highlight=False)
    tables.dim(f"Beyond it: {largest.limited_by}")


def _answer_compare(request: Request, questions: Questions) -> None:
    hosts = read_hosts(questions.compare or "")
    terms = ComparisonTerms(
        prices=read_prices(questions.price) if questions.price is not None else {},
        tokens=read_tokens(questions.tokens) if questions.tokens is not None else None,
        deadline_seconds=read_duration(questions.deadline) if questions.deadline is not None else None,
    )

    def plan_on(host: Host, workload: Workload) -> Planning:
        with tables.bar(f"Planning for {host.name}") as progress:
            return plan_training(
                request.source, host, workload, fixed=request.fixed, progress=progress, described=True, profiler=request.profiler
            )

    comparison = compare(hosts, request.workload, terms, plan_on=plan_on)
    document = {"workload": request.workload.model_dump(mode="json"), "comparison": comparison.model_dump(mode="json")}
    memory_notes = [note for note in map(unknown_memory, hosts) if note]
    request.print(document, lambda: _print_comparison(comparison, memory_notes))


def _print_comparison(comparison: Comparison, memory_notes: list[str]) -> None:
    limit = "" if comparison.deadline_seconds is None else f", within {format_seconds(comparison.deadline_seconds)}"
    title = f"{format_count(comparison.tokens)} {comparison.takes}{limit}, by {comparison.sorted_by}"
    has_money = any(row.money is not None for row in comparison.hosts)
    deadline = ["in time"] if limit else []
    columns = (tables.RATES[comparison.takes], "time", "device h", "kWh*", *(["money"] if has_money else []), *deadline)
    table = tables.new_table(title, "host", numbers=columns)
    table.caption = f"* {ENERGY_NOTE}"
    lines = []  # the plans' labels go below the table, which is wide enough with the numbers
    for row in comparison.hosts:
        if row.plan is None or row.predicted is None or row.seconds is None:
            lines.append(Text.assemble((row.host, "bold"), f": {row.why or ''}"))
            continue
        lines.append(Text.assemble((row.host, "bold"), f": {row.plan.label()}"))
        cells = [
            row.host, tables.number(row.predicted.tokens_per_second), format_seconds(row.seconds),
            tables.number(row.device_hours, 1), tables.number(row.energy_kwh, 1),
        ]  # fmt: skip
        cells += [tables.number(row.money, 2)] if has_money else []
        table.add_row(*cells, *(["yes" if row.in_time else "no"] if deadline else []))
    tables.out.print(table)
    for line in (*lines, *comparison.notes, *memory_notes):
        tables.out.print(line, highlight=False)


def _answer_check(request: Request, path: Path) -> None:
    locked = read_lock(path)
    lock = locked.lock
    host = request.unmeasured_host() if request.on is not None or not lock.described else None
    check_identity(locked, request.source, host)
    check = check_lock(locked, request.trace(lock.workload.sequence_length, needed_variants(locked)))
    request.print({"check": check.model_dump(mode="json")}, lambda: _print_check(check, locked.plans[0].plan.label()))
    if check.moved:
        raise typer.Exit(1)


def _print_check(check: Check, plan: str) -> None:
    verdict = "moved" if check.moved else f"nothing moved beyond {MOVED_SHARE:.0%}"
    tables.out.print(Text.assemble((plan, "bold"), f": {verdict}"))
    if check.problem is not None:
        tables.out.print(f"It cannot run any more: {check.problem}", highlight=False)
    table = tables.new_table("Predicted when it was locked, and now", "", numbers=("then", "now", "change"))
    rows = [(check.peak_gib, "GiB"), *((change, "GiB") for change in check.parts_gib)]
    rows += [(check.step_ms, "ms"), *((change, "ms") for change in check.terms_ms)]
    for change, unit in rows:
        table.add_row(f"{change.name}, {unit}", *_cells(change))
    tables.out.print(table)
    if check.segments:
        tables.out.print(f"Traced differently: {', '.join(check.segments)}", highlight=False)
    for name, (then, now) in check.versions.items():
        tables.out.print(f"{name} {then or 'not there'} -> {now or 'not there'}", highlight=False)


def _cells(change: Change) -> tuple[str, str, str]:
    return tables.number(change.before, 2), tables.number(change.now, 2), tables.percent(change.share)
