"""Run ``upshift plan --generate`` and ``--encode``: rank the plans for serving a model, or for encoding with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from upshift.cli import tables
from upshift.cli.options import option
from upshift.cli.plan.columns import Row, choices_by_kind, print_rows
from upshift.cli.plan.quick import ESTIMATED
from upshift.cli.plan.ranking import SAME, plans_title, print_rejected, print_uncounted, subject_line
from upshift.cli.usage.help_page import Panel
from upshift.errors import RequestError
from upshift.models.sequence_length import DEFAULT_SEQUENCE_LENGTH, prompt_and_answer_lengths, sequence_length_of
from upshift.models.source import find_model
from upshift.planning.cost.process_memory import unknown_memory
from upshift.planning.inference.plan import CHOICE_KINDS, OWN, PROGRAM_NAMES, InferencePlan, InferenceWorkload, ProgramName
from upshift.planning.inference.planner import MAX_SHOWN_PLANS, InferenceNumbers, InferencePlanning, plan_inference
from upshift.planning.inference.space import check_allow, fix_stored_weights
from upshift.planning.planner import choose_profiler, find_host, length_in_config
from upshift.planning.programs import tensorrt_llm

Generate = Annotated[bool, option("--generate", text="Plan generation: prompts in, tokens out.", panel=Panel.TASK)]
Encode = Annotated[
    bool,
    option("--encode", text="Plan encoding: --global-batch texts of --sequence-length tokens at a time.", panel=Panel.TASK),
]
LENGTHS = (512, 256)  # of a prompt and its answer
Concurrency = Annotated[
    int | None,
    option(
        "--concurrency", text="With --generate: requests at once.", panel=Panel.TEXT, metavar="N",
        default="the number with the highest throughput", least=1,
    ),
]  # fmt: skip


def check_one_task(generate: bool, encode: bool) -> None:
    if generate and encode:
        raise RequestError("--generate and --encode are two tasks; give one of them")


def fill_lengths(
    model: str, encode: bool, generation: tuple[int | None, int | None, int | None], sequence_length: int | None, *, quick: bool
) -> tuple[tuple[int, int, int | None], int]:
    """Return (prompt length, output length, concurrency) and the sequence length, with defaults for those that are None.

    Raise RequestError for more tokens than the model has positions for."""
    source = find_model(model)
    prompt, output, concurrency = generation
    if quick:
        return (prompt or LENGTHS[0], output or LENGTHS[1], concurrency), length_in_config(source, sequence_length)
    if encode:
        return (*LENGTHS, concurrency), sequence_length_of(source, sequence_length)
    options = ("--prompt-length", "--output-length")
    lengths = prompt_and_answer_lengths(source, prompt, output, defaults=LENGTHS, options=options)
    return (*lengths, concurrency), DEFAULT_SEQUENCE_LENGTH


def read_workload(
    generate: bool, encode: bool, generation: tuple[int, int, int | None], sequences: tuple[int, int],
    limits: tuple[float | None, float | None], allow: tuple[str, ...], program: str | None = None,
) -> InferenceWorkload:  # fmt: skip
    """Return the workload of a task.

    ``generation``: prompt length, output length and concurrency of ``--generate``. ``sequences``: length and batch of
    ``--encode``. ``limits``, in ms: the longest time to the first token, or of a batch of ``--encode``, and of a later token."""
    check_one_task(generate, encode)
    ttft, tpot = limits
    allowed = check_allow(allow)
    if encode:
        return InferenceWorkload(
            task="encode", prompt_length=sequences[0], concurrency=sequences[1], max_ttft_ms=ttft, allow=allowed
        )
    prompt, output, concurrency = generation
    return InferenceWorkload(
        prompt_length=prompt, output_length=output, concurrency=concurrency, max_ttft_ms=ttft, max_tpot_ms=tpot, allow=allowed,
        program=_read_program(program),
    )  # fmt: skip


def _read_program(name: str | None) -> ProgramName:
    """Return the program of ``--program``. Raise RequestError for one that serves nothing."""
    known = next((program for program in PROGRAM_NAMES if program == (name or OWN)), None)
    if known is None:
        raise RequestError(f"--program {name!r} is no program that serves; use one of {', '.join(PROGRAM_NAMES)}")
    return known


class Output(NamedTuple):
    """Hold what is printed and written. ``rows``: how many plans; None: the default of a table, or of a JSON document."""

    rows: int | None
    as_json: bool
    target: tuple[str, Path] | None  # the program whose configuration is written, and the file


def run(
    model: str, workload: InferenceWorkload, output: Output, *, on: str | None, fixed: tuple[str, ...], is_quick: bool
) -> None:
    """Print the ranked plans."""
    source = find_model(model)
    with tables.step("Measuring this machine" if on is None else f"Looking up {on}"):
        host = find_host(on)
    with tables.bar("Reading the model on fake tensors") as progress:
        profile_by = choose_profiler(source, quick=is_quick)
        as_stored = fix_stored_weights(source.config, host, workload, fixed)
        workload, fixed = as_stored or (workload, fixed)
        planning = plan_inference(source, host, workload, fixed=fixed, progress=progress, profiler=profile_by)
    is_stored = as_stored is not None
    if output.target is not None:
        _write_configuration(planning, *output.target, is_stored=is_stored)
    if output.as_json:
        sys.stdout.write(json.dumps(planning.document(num_plans=output.rows or MAX_SHOWN_PLANS)) + "\n")
        return
    _print_planning(planning, rows=output.rows or tables.SHOWN_PLANS, is_stored=is_stored)
    print_uncounted(source.config, planning.profile)
    stored = source.config.get("quantization_config")
    if stored:
        counted = "as they are stored" if is_stored else "as they were before, in the precision of the table"
        method = stored.get("quant_method", "a quantization")
        tables.dim(f"{model} is stored with {method}. The plans count the weights {counted}")


def vllm_options(plan: InferencePlan, *, longest: int, is_stored: bool) -> dict[str, Any]:
    """Return the options of ``vllm serve MODEL --config``. Raise RequestError for a plan that vLLM cannot run."""
    from upshift.inference.engine_environment import arguments_of_plan

    arguments = arguments_of_plan(plan, is_stored=is_stored)
    if arguments is None:
        raise RequestError(
            f"a configuration of vllm cannot express {plan.label()}: it reads weights in 8 and 4 bit integers from their "
            "own files alone; leave the names of integers out of --allow"
        )
    return {name.replace("_", "-"): value for name, value in arguments.items()} | {"max-model-len": longest}


WRITERS: Mapping[str, Callable[..., Mapping[str, Any] | str]] = {"vllm": vllm_options, "trtllm": tensorrt_llm.config_of}


def _write_configuration(planning: InferencePlanning, program: str, path: Path, *, is_stored: bool) -> None:
    """Write the best plan as another server's configuration. Raise RequestError for a plan that it cannot run."""
    from upshift.planning.programs.write import write_document

    document = WRITERS[program](planning.best.plan, longest=planning.workload.longest, is_stored=is_stored)
    write_document(path, document)
    tables.err.print(f"Wrote {path}", highlight=False)


def _print_planning(planning: InferencePlanning, *, rows: int, is_stored: bool) -> None:
    host = planning.host
    workload = planning.workload
    lengths = f"{workload.prompt_length}"
    if workload.task == "generate":
        lengths += f" + {workload.output_length}"
    concurrency = f", {workload.concurrency} at once" if workload.concurrency else ""
    tables.out.print(subject_line(planning.profile.architecture, host, f"{lengths} tokens{concurrency}"))
    _print_plans(planning, rows=rows)
    if planning.preference is not None:
        tables.out.print(f"{planning.preference}\n", highlight=False)
    numbers = planning.numbers(planning.best)
    tables.out.print(_time_line(numbers), highlight=False)
    tables.out.print(_memory_table(numbers))
    tables.out.print(_reasons_table(planning))
    print_rejected(planning.lessons)
    if workload.task == "generate" and workload.program in (OWN, "vllm"):
        _print_vllm_command(planning, is_stored=is_stored)
    expected_error = "the error for such devices is unknown"
    if numbers.interval is not None:
        expected_error = f"expect {numbers.interval[0]:.2g}x to {numbers.interval[1]:.2g}x of the tokens/s"
    unknown = unknown_memory(host)
    if unknown is not None:
        tables.out.print(unknown)
    if planning.profile.is_estimated:
        tables.dim(ESTIMATED)
    program = "" if workload.program == OWN else f" for {workload.program}"
    tables.dim(f"Predicted{program}, untried: {expected_error}.")


def _print_vllm_command(planning: InferencePlanning, *, is_stored: bool) -> None:
    """Print the command that starts vLLM by the best plan."""
    from upshift.inference.engine_environment import arguments_of_plan
    from upshift.inference.weights import MAX_UNMEASURED_QUALITY

    arguments = arguments_of_plan(planning.best.plan, is_stored=is_stored)
    if arguments is None:
        tables.dim("vLLM has no arguments for this plan: it reads weights in 8 and 4 bit integers from their own files alone")
        return
    arguments["max_model_len"] = planning.workload.longest
    tables.out.print(f"By vLLM: vllm serve MODEL {' '.join(command_words(arguments))}", soft_wrap=True, highlight=False)
    _print_serve_command(planning, arguments, quality=f" --quality {MAX_UNMEASURED_QUALITY}" if is_stored else "")


def command_words(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's engine arguments as words of its command line."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in arguments.items()}
    return [word for flag, value in flags.items() for word in ([flag] if value is True else [flag, str(value)])]


def _print_serve_command(planning: InferencePlanning, arguments: dict[str, Any], *, quality: str) -> None:
    """Print the command that serves by the best plan with the engine vllm, or what the plan needs beyond it.

    ``quality``: the option that quantized weights need."""
    host = planning.host
    plan = planning.best.plan
    devices = max(host.gpus_per_node, 1)
    shards = plan.tensor_parallel * plan.pipeline_parallel
    if shards > devices:
        hosts = -(-shards // devices)
        tables.dim(
            f"upshift serve keeps each replica within a host, and this plan divides it over {hosts}: use vLLM's command, or "
            "upshift launch --kubernetes --kind LeaderWorkerSet"
        )
        return
    replicas = plan.replicas // host.num_nodes or 1  # on a host
    fixed = {name: value for name, value in arguments.items() if name != "data_parallel_size"}
    if replicas > 1:
        fixed["data_parallel_size"] = replicas
    settings = " ".join(f"--engine-set {name}={str(value).lower() if value is True else value}" for name, value in fixed.items())
    concurrency = (plan.max_concurrency or 1) * replicas
    serve = f"serve MODEL --engine vllm{quality} --concurrency {concurrency} {settings}"
    nodes = -(-plan.replicas // replicas)
    if nodes > 1:
        size = f"--nodes {nodes} --gpus {host.gpus_per_node} --image IMAGE --cpus N --memory SIZE"
        serve = f"launch --kubernetes {size} -- {serve}"
    tables.out.print(f"By Upshift: upshift {serve}", soft_wrap=True, highlight=False)


def _print_plans(planning: InferencePlanning, *, rows: int) -> None:
    """Print the best plans in columns, one row for plans with the same numbers."""
    ranking = planning.ranking
    title = plans_title(len(ranking.candidates), len(ranking.rejected), planning.host)
    tables.out.print(Text(title, "bold"))
    shown: list[Row] = []
    compared: list[InferenceNumbers] = []
    for rank, candidate in enumerate(ranking.candidates, start=1):
        numbers = planning.numbers(candidate)
        alike = next((index for index, first in enumerate(compared) if _is_alike(numbers, first)), None)
        if alike is not None:
            shown[alike] = replace(shown[alike], num_alike=shown[alike].num_alike + 1)
        elif len(shown) < rows:
            shown.append(Row(str(rank), choices_by_kind(candidate.plan.choices()), _number_cells(numbers)))
            compared.append(numbers)
        elif not _is_close(numbers.tokens_per_second, compared[-1].tokens_per_second):
            break  # slower than every row: no later plan is alike
    important = ("tok/s", "TPOT ms", "TTFT ms", "GiB", "per device", "req/s", "bound by")
    print_rows(shown, CHOICE_KINDS, priority=important)


def _is_alike(numbers: InferenceNumbers, first: InferenceNumbers) -> bool:
    names = ("tokens_per_second", "ttft_ms", "tpot_ms", "peak_gib")
    return all(_is_close(getattr(numbers, name) or 0.0, getattr(first, name) or 0.0) for name in names)


def _is_close(value: float, reference: float) -> bool:
    return abs(value - reference) <= SAME * reference


def _number_cells(numbers: InferenceNumbers) -> dict[str, str]:
    return {
        "bound by": numbers.binding_term,
        "tok/s": tables.number(numbers.tokens_per_second),
        "per device": tables.number(numbers.tokens_per_second_per_device),
        "req/s": tables.number(numbers.requests_per_second, 2),
        "TTFT ms": tables.number(numbers.ttft_ms, 1),
        "TPOT ms": "" if numbers.tpot_ms is None else tables.number(numbers.tpot_ms, 1),
        "GiB": tables.gib(numbers.peak_gib),
    }


def _time_line(numbers: InferenceNumbers) -> str:
    """Return the terms of the best plan's step, the longest first, as shares of its time."""
    total = sum(numbers.step_ms.values())
    terms = sorted(numbers.step_ms.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {milliseconds / total:.0%}" for name, milliseconds in terms if milliseconds > 0.005 * total)
    return f"Its step takes {total:.1f} ms: {shares}\n"


def _memory_table(numbers: InferenceNumbers) -> Table:
    table = tables.new_table("Memory of its fullest device, when every sequence is at its full length", "", numbers=("GiB",))
    for part, size in numbers.memory.items():
        if size > 0.0005:
            table.add_row(part, f"{size:.2f}")
    table.add_row("total", tables.gib(numbers.peak_gib))
    table.add_row("usable", tables.gib(numbers.limit_gib))
    if numbers.largest_concurrency is not None:
        table.add_row("sequences that fit at once, on all devices", f"{numbers.largest_concurrency:,}")
    return table


def _reasons_table(planning: InferencePlanning) -> Table:
    table = tables.new_table("Why, and what the runner-up would cost", "choice", "value", "runner-up", "its cost")
    for reason in planning.reasons:
        table.add_row(reason.choice, reason.value, reason.runner_up, reason.runner_up_cost)
    return table
