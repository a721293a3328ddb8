"""Compare the same training on several hosts by time, device-hours, energy and money for a number of tokens, and a deadline."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from upshift.errors import NothingFits, RequestError
from upshift.hardware import GpuFacts, describe
from upshift.hardware.catalog.lookup import find_product
from upshift.hardware.spec import Host
from upshift.planning.cost.rates import FITTED_TO_RUNS_OF
from upshift.planning.cost.time import SampleUnit, sample_unit, tokens_per_step
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning
from upshift.planning.workload import Workload
from upshift.record import Numbers
from upshift.value import Value

HOUR = 3600.0
# A larger number is a typing error.
MAX_TOKENS = 1e18
MAX_PRICE = 1e9
DURATIONS = {"s": 1.0, "min": 60.0, "h": HOUR, "d": 24 * HOUR, "w": 7 * 24 * HOUR}
COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(e[+-]?\d+)?"
JOULES_PER_KWH = 3.6e6
ENERGY_NOTE = "an upper bound: every device at its thermal design power all the time; hosts, network and cooling are not in it"


class HostResult(Value):
    """The result for one host. If it has no plan, ``why`` has the reason."""

    host: str
    num_devices: int
    plan: Plan | None = None
    predicted: Numbers | None = None
    seconds: float | None = Field(None, description="for all tokens, one-time costs included")
    device_hours: float | None = None
    energy_kwh: float | None = Field(None, description=ENERGY_NOTE)
    price: float | None = Field(None, description="of a device and hour; None: not given")
    money: float | None = None
    in_time: bool | None = Field(None, description="whether the deadline holds; None: there is none")
    why: str | None = None


class Comparison(Value):
    tokens: int = Field(description="or images, where the model takes these")
    takes: SampleUnit = Field("tokens", description="what the model is given")
    deadline_seconds: float | None
    sorted_by: str = Field(description="money, where every host that has a plan has a price; else time")
    hosts: tuple[HostResult, ...]
    notes: tuple[str, ...] = Field((), description="why the numbers of the hosts may not be compared")


@dataclass(frozen=True)
class ComparisonTerms:
    """The terms of a comparison besides speed. ``tokens``: None means the tokens of the workload's steps."""

    prices: dict[str, float]
    tokens: int | None = None
    deadline_seconds: float | None = None


def read_duration(text: str, *, option: str = "--deadline") -> float:
    """Return the seconds of ``72h``, ``3d`` or ``90min``."""
    match = re.fullmatch(rf"{NUMBER}\s*({'|'.join(DURATIONS)})", text.strip().lower(), flags=re.ASCII)
    seconds = float(match[1] + (match[2] or "")) * DURATIONS[match[3]] if match else 0.0
    if not 0.0 < seconds < math.inf:
        form = f"write a number above 0 and one of {', '.join(DURATIONS)}, such as 72h, 3d or 90min"
        raise RequestError(f"{option} {text!r} is no duration; {form}")
    return seconds


def read_tokens(text: str, *, option: str = "--tokens") -> int:
    """Return the number of tokens of ``1e12``, ``300B`` or ``15T``."""
    match = re.fullmatch(rf"{NUMBER}\s*([KMBT]?)", text.strip().replace("_", ""), flags=re.IGNORECASE | re.ASCII)
    count = float(match[1] + (match[2] or "")) * COUNTS[match[3].upper()] if match else 0.0
    if not 1.0 <= count <= MAX_TOKENS:
        raise RequestError(
            f"{option} {text!r} is no number of tokens; write a number of at least 1, with K, M, B or T for thousands to "
            "10**12, such as 1e12, 300B or 15T"
        )
    return round(count)


def read_prices(text: str) -> dict[str, float]:
    """Return the prices of one device and hour by the device's name, from ``h100=2.5/h,a100-80gb=1.2/h``."""
    prices: dict[str, float] = {}
    for entry in filter(None, (text_of_price.strip().lower() for text_of_price in text.split(","))):
        match = re.fullmatch(rf"([^=]*[^=\s])\s*=\s*{NUMBER}\s*/\s*h", entry, flags=re.ASCII)
        price = float(match[2] + (match[3] or "")) if match else math.inf
        if match is None or not price <= MAX_PRICE:
            raise RequestError(f"--price {entry!r} is no price; write NAME=AMOUNT/h of one device, such as h100=2.5/h")
        if match[1] in prices:
            raise RequestError(f"--price names {match[1]!r} twice; give one for each name, such as h100=2.5/h,a100-80gb=1.2/h")
        prices[match[1]] = price
    if not prices:
        raise RequestError(f"--price {text!r} names no price; write NAME=AMOUNT/h of one device, such as h100=2.5/h")
    return prices


def read_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of ``8xh100,2x8xa100-80gb``."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise RequestError(f"--compare {text!r} names no host; give them separated by commas, such as 8xh100,8xa100-80gb")
    hosts = tuple(describe(name) for name in dict.fromkeys(names))
    for host in hosts:
        if host.mixed_gpus:
            raise RequestError(f"--compare {host.name} has different devices, which are not planned for; give hosts of one kind")
    return hosts


def price_names(host: Host) -> tuple[str, ...]:
    """Return the names under which a price for the host's devices may be given.

    They are the user's name of the host without counts and links, and the key of the table.
    """
    written = re.sub(r"^(?:[0-9]+x){0,2}", "", host.name.strip().lower()).partition("@")[0]
    if host.gpu is None:
        names: tuple[str, ...] = (written, re.sub(r"-[0-9]+gb$", "", written))  # without the memory of the host
    else:
        names = (written, host.gpu.table_key or "", host.gpu.name.lower())
    return tuple(dict.fromkeys(name for name in names if name))


def price_names_of(host: Host, prices: dict[str, float]) -> list[str]:
    """Return the names in ``prices`` that mean this host's device, in any spelling that --on accepts."""
    return [name for name in prices if name in price_names(host) or _is_product_of(name, host)]


def _is_product_of(name: str, host: Host) -> bool:
    try:
        facts = find_product(name)
    except RequestError:
        return False
    if isinstance(facts, GpuFacts):
        return host.gpu is not None and host.gpu.table_key == facts.gpu.table_key
    return host.gpu is None and host.cpu is not None and host.cpu.model_name == facts.cpu.model_name


def check_prices(prices: dict[str, float], hosts: tuple[Host, ...]) -> None:
    """Raise RequestError for a price of something that is not compared, and for two prices of one device."""
    valid = list(dict.fromkeys(name for host in hosts for name in price_names(host)))
    used = [price_names_of(host, prices) for host in hosts]
    for name in prices:
        if not any(name in names for names in used):
            raise RequestError(f"--price names {name!r}, which is not compared; use one of {', '.join(valid)}")
    for host, names in zip(hosts, used, strict=True):
        if len({prices[name] for name in names}) > 1:
            raise RequestError(f"--price names the device of {host.name} as {' and as '.join(names)}; give it one price")


def compare(
    hosts: tuple[Host, ...], workload: Workload, terms: ComparisonTerms, *, plan_on: Callable[[Host, Workload], Planning]
) -> Comparison:
    """Return the best plan on each host: the cheapest or fastest host first, hosts without a plan last.

    If no host has a plan, raise the problem of a host.
    """
    check_prices(terms.prices, hosts)
    rows: list[HostResult] = []
    problems: list[RequestError | NothingFits] = []
    tokens = terms.tokens
    unit: SampleUnit = "tokens"
    if tokens is not None:  # one-time costs are spread over the steps of this run
        mean = workload.lengths.mean if workload.lengths else workload.sequence_length
        steps = max(math.ceil(tokens / (workload.global_batch * mean)), 1)
        workload = workload.changed(total_steps=steps)
    for host in hosts:
        try:
            planning = plan_on(host, workload)
        except (RequestError, NothingFits) as problem:
            problems.append(problem)
            rows.append(HostResult(host=host.name, num_devices=host.num_devices, why=str(problem)))
            continue
        unit = sample_unit(planning.profile)
        if unit == "images" and terms.tokens is not None:
            raise RequestError(f"--tokens counts tokens, and {planning.profile.architecture} takes images; use --steps")
        tokens = tokens or round(workload.total_steps * tokens_per_step(planning.profile, workload))
        rows.append(_host_result(planning, tokens, terms))
    if tokens is None or len(problems) == len(hosts):
        raise next((problem for problem in problems if isinstance(problem, NothingFits)), problems[0])
    planned = [row for row in rows if row.plan is not None]
    by_money = all(row.money is not None for row in planned)
    planned.sort(key=lambda row: (row.money if by_money else row.seconds) or 0.0)
    ordered = (*planned, *(row for row in rows if row.plan is None))
    return Comparison(
        tokens=tokens,
        takes=unit,
        deadline_seconds=terms.deadline_seconds,
        sorted_by="money" if by_money else "time",
        hosts=ordered,
        notes=factor_notes(hosts),
    )


def factor_notes(hosts: tuple[Host, ...]) -> tuple[str, ...]:
    """Return a sentence if the factors of the hosts' GPUs come from different programs, or are not known for each of them.

    The difference between two chips is then also one between programs.
    """
    origins: dict[str, list[str]] = {}
    for host in hosts:
        if host.gpu is not None and host.device == "cuda":
            origin = FITTED_TO_RUNS_OF.get(host.gpu.compute_capability or (0, 0), "")
            names = origins.setdefault(origin, [])
            names += [host.name] if host.name not in names else []
    if len(origins) < 2:
        return ()
    parts = [
        f"for {', '.join(names)}, from runs of {origin}" if origin else f"for {', '.join(names)}, the mean of other GPUs"
        for origin, names in origins.items()
    ]
    return (
        "The speeds of these hosts compare less well, because the predictions were corrected with runs of different programs: "
        f"{'; '.join(parts)}",
    )


def _host_result(planning: Planning, tokens: int, terms: ComparisonTerms) -> HostResult:
    host = planning.host
    best = planning.ranking.candidates[0]
    steps = tokens / tokens_per_step(planning.profile, planning.workload)
    seconds = steps * best.time.total + best.time.one_time
    device_hours = seconds / HOUR * host.num_devices
    watts = host.gpu.tdp_watts if host.gpu else None
    price = next((terms.prices[name] for name in price_names_of(host, terms.prices)), None)
    return HostResult(
        host=host.name,
        num_devices=host.num_devices,
        plan=best.plan,
        predicted=planning.numbers(best),
        seconds=seconds,
        device_hours=device_hours,
        energy_kwh=None if watts is None else watts * host.num_devices * seconds / JOULES_PER_KWH,
        price=price,
        money=None if price is None else price * device_hours,
        in_time=None if terms.deadline_seconds is None else seconds <= terms.deadline_seconds,
    )
