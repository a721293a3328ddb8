"""Run ``upshift load-test``: send requests to a server at a rate, whatever it answers, and report its answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from upshift.cli import tables
from upshift.cli.options import ApiKeyFile, Html, Json, argument, command_line_options, option, read_api_keys
from upshift.cli.progress import activity
from upshift.cli.tables import dim
from upshift.cli.usage.help_page import Panel
from upshift.cli.usage.messages import ABOVE_ZERO
from upshift.errors import MissingExtra, RequestError
from upshift.versions import installed_version

Url = Annotated[str, argument("URL", "The address of the server, such as http://127.0.0.1:8000.", panel=Panel.SERVER)]
Rate = Annotated[
    str,
    option(
        "--rate", text="Requests per second. Several rates run one after the other: 1,2,4.", panel=Panel.MEASUREMENT,
        metavar="X,X",
    ),
]  # fmt: skip
Duration = Annotated[
    float,
    option("--duration", text="The time of each rate, in seconds.", panel=Panel.MEASUREMENT, metavar="SECONDS", least=0.1),
]
ServedModel = Annotated[
    str | None,
    option(
        "--model", text="The model to ask, if the server has several.", panel=Panel.SERVER, metavar="NAME", default="the only one"
    ),
]
Prompts = Annotated[
    Path | None,
    option(
        "--prompts", text="A file with one prompt in each line.", panel=Panel.TEXT, metavar="PATH", default="made-up words"
    ),
]  # fmt: skip
PromptWords = Annotated[
    int,
    option("--prompt-words", text="The mean length of made-up prompts, in words.", panel=Panel.TEXT, metavar="N", least=1),
]
MaxTokens = Annotated[int, option("--max-tokens", text="The longest answer, in tokens.", panel=Panel.TEXT, metavar="N", least=1)]
PromisedTtft = Annotated[
    float | None,
    option(
        "--max-ttft-ms", panel=Panel.LIMITS, metavar="MS", default="what the server promises", least=ABOVE_ZERO,
        text="The longest time to the first token of an answer, in milliseconds. The report counts the answers within it.",
    ),
]  # fmt: skip
Seed = Annotated[
    int,
    option("--seed", text="The seed of the prompts and of the times of arrival.", panel=Panel.MEASUREMENT, metavar="N", least=0),
]


def command(
    context: typer.Context,
    url: Url,
    rate: Rate = "1",
    duration: Duration = 30.0,
    model: ServedModel = None,
    prompts: Prompts = None,
    prompt_words: PromptWords = 64,
    max_tokens: MaxTokens = 64,
    max_ttft_ms: PromisedTtft = None,
    api_key_file: ApiKeyFile = None,
    seed: Seed = 0,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Send requests to an OpenAI-compatible server at a given rate, and report its answers.

    The rate stays the same when answers are late (open loop).
    """
    if prompts is not None and "prompt_words" in command_line_options(context):
        raise RequestError(
            f"--prompt-words {prompt_words} is of random prompts, and --prompts {prompts} has its own; leave one out"
        )
    if installed_version("httpx2") is None:
        raise MissingExtra(library="httpx2", extra="serve", purpose="upshift load-test")
    from upshift.inference.race.types import read_limit
    from upshift.serving.load_test.run import load_test
    from upshift.serving.load_test.traffic import Traffic

    if html is not None:
        from upshift.reports.document import check_page_path

        check_page_path(html)
    synthetic = {"prompt_words": prompt_words, "max_tokens": max_tokens, "seed": seed}
    traffic = Traffic(rates=_read_rates(rate), seconds=duration, prompts=_read_prompts(prompts), **synthetic)
    key = None if api_key_file is None else read_api_keys(api_key_file)[0]
    promised_ms = read_limit("max-ttft-ms", max_ttft_ms)
    with tables.step(f"Asking {url}"), activity(f"Asking {url} {traffic.rates[0]:g} times a second") as current:

        def show_phase(phase: Any) -> None:
            current.update(text=f"at {phase.rate:g} requests/s it answered {phase.answered_per_second:.2f}/s")

        report = load_test(url, traffic, model=model, key=key, promised_ttft_ms=promised_ms, on_phase=show_phase)
    if html is not None:
        from upshift.serving.load_test.report import write_load_page

        write_load_page(html, report)
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
        return
    tables.out.print(_table(report))
    for phase in report.phases:
        statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(phase.statuses.items()))
        tables.out.print(f"Statuses at {phase.rate:g} requests/s: {statuses or 'none'}", highlight=False)
    if report.capacity is not None:
        dim(f"When the server started, it measured that it can answer {report.capacity:.2f} requests/s of the lengths it expects")


def _read_rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise RequestError(f"--rate {text!r} is not one or several rates above 0; write 2, or 1,2,4")
    return rates


def _read_prompts(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    from upshift.inference.generation.prompts import check_prompts, read_prompts

    check_prompts(path, "--prompts")
    prompts = tuple(read_prompts(path))
    texts = tuple(prompt for prompt in prompts if isinstance(prompt, str))
    if len(texts) < len(prompts):
        raise RequestError(f"--prompts {path} has chats; load-test sends texts: write a prompt a line")
    return texts


def _table(report: Any) -> Table:
    """Return a row for each rate. It has a column of answers within the promise if the server promises a time."""
    is_promised = any(phase.within_promise is not None for phase in report.phases)
    times = ("TTFT\np50", "TTFT\np95", "TTFT\np99", "token\np50", "token\np95")
    table = tables.new_table("", numbers=("sent\nper s", "answered\nper s", "tokens\nper s", *times))
    table.padding = (0, 0)
    if is_promised:
        table.add_column("in\npromise", justify="right")
    table.caption = "Times in ms. TTFT: to the first token; token: to each further token, the mean of an answer."
    for phase in report.phases:
        first_token_times = [_ms(phase.first_token.get(name)) for name in ("p50", "p95", "p99")]
        token_times = [_ms(phase.token.get(name)) for name in ("p50", "p95")]
        within_promise = "" if phase.within_promise is None else f"{phase.within_promise:.0%}"
        table.add_row(
            f"{phase.rate:g}", f"{phase.answered_per_second:.2f}", f"{phase.tokens_per_second:,.0f}",
            *first_token_times, *token_times, *([within_promise] if is_promised else []),
        )  # fmt: skip
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:,.0f}"
