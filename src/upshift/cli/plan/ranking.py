"""Print a ranking of training plans: the plans in columns, the best one's memory and time, the reasons, rejected plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from upshift.cli import tables
from upshift.cli.plan.columns import Row, choices_by_kind, print_rows
from upshift.hardware.spec import Host
from upshift.models.profile import Images, ModelProfile
from upshift.planning.analysis.rejections import Lesson
from upshift.planning.cost.process_memory import unknown_memory
from upshift.planning.cost.time import sample_unit
from upshift.planning.cost.uncertainty import Number
from upshift.planning.plan import CHOICE_KINDS
from upshift.planning.planner import Planning
from upshift.planning.search.ranking import Candidate
from upshift.record import Basis, Numbers
from upshift.units import GIB

SAME = 0.01  # relative difference of time or memory that no prediction can tell apart
SMALL_GIB = 0.005  # a smaller part of the memory is not printed
COLUMN_SPACE = 2  # beside the text of a column
NUMBER_WIDTH = 9  # of a column of the memory table, with its space
NUMBERS: tuple[Number, ...] = ("step", "allocated", "held")
TIERS = {"measured": "measured here", "transferred": "corrected by other runs here", "formula": "formula"}


def plans_title(ranked: int, rejected: int, host: Host) -> str:
    that_fit = " that fit" if unknown_memory(host) is None else ""
    return f"Best of {ranked:,} plans{that_fit} ({rejected:,} rejected)"


def subject_line(architecture: str, host: Host, size: str) -> Text:
    """Return the first line of the answers of ``upshift plan``: the model, the host, and the size of the work."""
    return Text.assemble((architecture, "bold"), " on ", (host.name, "bold"), f", {size}")


def print_uncounted(config: Mapping[str, Any], profile: ModelProfile) -> None:
    """Print that a plan of a model with a tower for images or sounds counts texts alone."""
    if sample_unit(profile) != "tokens" or profile.images is not None:
        return
    towers = [name.removesuffix("_config") for name in ("vision_config", "audio_config") if config.get(name)]
    if towers and "text_config" in config:
        tables.dim(f"Counted for texts alone: the inputs of the {' and '.join(towers)} part, and its work on them, come on top")


def print_images(images: Images | None, sequence_length: int) -> None:
    """Print the images that a plan assumes."""
    if images is None:
        return
    takes = f"{images.tokens_per_row:,} of the {sequence_length:,} tokens"
    tables.out.print(f"Assumed in each row: {images.describe()}, {takes} (--images)", highlight=False)
    tables.dim("upshift train trains such rows by transformers' Trainer without a plan: at most 8 at once, fp32 or bf16")


def print_plans(planning: Planning, *, rows: int) -> None:
    """Print the best plans in columns, one row for plans that are alike, and a line for the plain default below them."""
    ranking = planning.ranking
    title = plans_title(len(ranking.candidates), ranking.num_rejected, planning.host)
    tables.out.print(Text(title, "bold"))
    folded = folded_rows(ranking.candidates, rows=rows)
    tiers = [_tiers(candidate) for _, candidate, _ in folded]
    differ = len(set("".join(tiers))) > 1
    shown = []
    for (rank, candidate, num_alike), tier in zip(folded, tiers, strict=True):
        cells = _number_cells(planning, candidate) | ({"tier": tier} if differ else {})
        shown.append(Row(rank, choices_by_kind(candidate.plan.choices()), cells, num_alike))
    speed = tables.RATES[sample_unit(planning.profile)]
    important = (speed, "held", "step ms", "tier", "alloc.", "resv.", "bound by")
    columns = print_rows(shown, CHOICE_KINDS, priority=[name for name in important if name in shown[0].numbers])
    known = [f"{tier[0]} {text}" for tier, text in TIERS.items() if any(tier[0] in letters for letters in tiers)]
    legend = f"tier, of time, alloc. and held: {'; '.join(known)}" if differ else f"all numbers: {known[0][2:]}"
    whole = "device" if planning.host.device == "cuda" else "process"
    meanings = {"alloc.": "tensors at the peak", "resv.": "what the allocator holds", "held": f"the whole {whole}"}
    explained = "".join(f"{name}: {meaning}; " for name, meaning in meanings.items() if name in columns)
    tables.dim(f"Memory in GiB. {explained}{legend}.")
    tables.out.print(f"{_plain_line(planning)}\n", highlight=False)


def _tiers(candidate: Candidate) -> str:
    """Return the first letter of the tier of each number."""
    return "".join(candidate.basis(name).tier[0] for name in NUMBERS)


def _number_cells(planning: Planning, candidate: Candidate) -> dict[str, str]:
    numbers = planning.numbers(candidate)
    cells = {
        "bound by": numbers.binding_term or "",
        tables.RATES[sample_unit(planning.profile)]: tables.number(numbers.tokens_per_second),
        "step ms": tables.number(numbers.step_ms.p50 if numbers.step_ms else None),
        "alloc.": tables.gib(numbers.peak_gib),
    }
    if planning.host.device == "cuda":  # its allocator holds whole segments
        cells["resv."] = tables.gib(numbers.reserved_gib)
    return cells | {"held": tables.gib(numbers.resident_gib)}


def _plain_line(planning: Planning) -> str:
    """Return a line about transformers' Trainer with its defaults."""
    default = planning.default
    cells = _number_cells(planning, default)
    memory = f"alloc. {cells['alloc.']}, held {cells['held']} GiB"
    unit = tables.RATES[sample_unit(planning.profile)]
    outcome = f"does not fit: {memory}"
    if planning.job_memory.fits(default):
        outcome = f"{cells[unit]} {unit}, {cells['step ms']} ms a step, {memory}"
    return f"The plain default ({default.plan.label()}): {outcome}"


def folded_rows(candidates: list[Candidate], *, rows: int) -> list[tuple[str, Candidate, int]]:
    """Return (rank, plan, number of other plans that are alike) for each row.

    Plans are alike if their predicted times differ by at most 1 %, and their predicted memory, too."""
    groups: list[tuple[str, list[Candidate]]] = []
    for rank, candidate in enumerate(candidates, start=1):
        alike = next((group for _, group in groups if _is_alike(candidate, group[0])), None)
        if alike is not None:
            alike.append(candidate)
        elif len(groups) < rows:
            groups.append((str(rank), [candidate]))
        elif candidate.tokens_per_second < (1 - SAME) * groups[-1][1][0].tokens_per_second:
            break  # slower than every row: no later plan is alike
    return [(rank, group[0], len(group) - 1) for rank, group in groups]


def _is_alike(candidate: Candidate, first: Candidate) -> bool:
    pairs = (
        (candidate.tokens_per_second, first.tokens_per_second),
        (candidate.time.total, first.time.total),
        (candidate.memory.peak, first.memory.peak),
        (candidate.resident, first.resident),
    )
    return all(abs(value - reference) <= SAME * reference for value, reference in pairs)


def time_line(candidate: Candidate) -> str:
    """Return a line about the parts of the best plan's step, the longest first."""
    terms = sorted(candidate.time.terms.items(), key=lambda item: -item[1])
    shares = [f"{name} {seconds / candidate.time.total:.0%}" for name, seconds in terms if seconds > 0.005 * candidate.time.total]
    return f"Its step is bound by {', '.join(shares)}\n"


def memory_table(planning: Planning, candidate: Candidate) -> Table:
    """Return a row for each phase. Its parts share one column, because a column for each would not fit."""
    numbers = planning.numbers(candidate)
    on_gpu = candidate.plan.device == "cuda"
    columns = ("alloc.", *(["resv."] if on_gpu else []), "held")
    table = tables.new_table("Its memory, GiB at the highest moment of each phase", "phase", numbers=(*columns, "of it"))
    table.columns[-1].justify = "left"
    phase_width = max(map(len, numbers.memory), default=0) + COLUMN_SPACE
    width = max(tables.out.width - phase_width - len(columns) * NUMBER_WIDTH - 1, 24)
    for phase, row in numbers.memory.items():
        total = sum(row.values())
        held = planning.job_memory.held_bytes(candidate, total * GIB) / GIB
        sizes = [total, *([planning.job_memory.reserved_bytes(candidate, total * GIB) / GIB] if on_gpu else []), held]
        parts = sorted(((part, size) for part, size in row.items() if size >= SMALL_GIB), key=lambda item: -item[1])
        texts = [f"{part} {tables.gib(size)}" for part, size in parts]
        table.add_row(phase, *(tables.gib(size) for size in sizes), tables.wrap_items(texts, width))
    return table


def uncertainty_lines(numbers: Numbers) -> list[str]:
    """Return a line for each predicted number: its basis, and the factors between which the measured one should lie."""
    step_basis = Basis(tier=numbers.tier, interval=numbers.interval, num_records=numbers.num_records)
    lines = []
    for name, basis in (("Time", step_basis), ("Allocated", numbers.peak_basis), ("Held", numbers.resident_basis)):
        if basis is None or basis.interval is None:
            continue
        low, high = basis.interval
        runs = f" ({basis.num_records:,} {'run' if basis.num_records == 1 else 'runs'})" if basis.num_records else ""
        lines.append(f"{name}: {TIERS.get(basis.tier, basis.tier)}{runs}; expect {low:.2f}x to {high:.2f}x")
    probability = numbers.out_of_memory_probability
    if probability is not None:
        lines.append(f"Probability of running out of memory: {probability:.1%}")
    return lines


def reasons_table(planning: Planning) -> Table:
    wide = tables.out.width >= 120
    columns = ("choice", "value", "runner-up", "its cost", *(["it trades"] if wide else []))
    table = tables.new_table("Why, and what the runner-up would cost", *columns)
    for reason in planning.reasons:
        row = [reason.choice, reason.value, reason.runner_up, reason.runner_up_cost]
        table.add_row(*row, *([reason.why] if wide else []))
    return table


def print_rejected(lessons: Sequence[Lesson], *, rows: int = 4) -> None:
    """Print the rejected plans that teach something: how fast each would have been, and its reason in the next line."""
    if not lessons:
        return
    tables.out.print(Text("Rejected: the fastest for each reason", "bold"))
    for lesson in lessons[:rows]:
        speed = "" if lesson.speed is None else f" ({lesson.speed - 1:+.1%})"
        tables.out.print(Padding(Text(f"{lesson.plan.label()}{speed}"), (0, 0, 0, 1)))
        tables.out.print(Padding(Text(lesson.reason), (0, 0, 0, 3)))
    tables.out.print()
