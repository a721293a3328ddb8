"""A server under load: how much it answers, what it promised, and what it does with more than it holds.

    python benchmarks/cases/serving.py [--quick] [--seconds 20] [--concurrency 1,8,32] [--overload-seconds 300] [--rounds 1]

upshift QUALITY       upshift serve at this bound; its races were run before, as in a user's second run
transformers          transformers serve, on the CPU in fp32; batched: with --continuous-batching
llama.cpp, genai      llama.cpp's server and OpenVINO GenAI's batching, where they are installed (serving_peers.py)
vllm fp32             vLLM's own server, in the environment of `upshift engines install vllm` or of UPSHIFT_VLLM_PYTHON
upshift-vllm exact    upshift serve with the engine vllm in that environment: what our server costs before vLLM

A Llama of 124 M parameters with random weights, prompts of about 72 tokens, 64 tokens an answer. At each concurrency so many
clients ask again as soon as they are answered; servers in turn, each round, each started for so many clients (--concurrency of
ours, slots of llama.cpp's). With the most of them one client first asks with instructions of about 720 tokens, then with the
same and another end: the time to the first token. Then upshift alone: its capacity as predicted, as proven at the start, and as
measured with all rows busy; and twice that load in open loop under a promised first token.
OpenVINO Model Server has no package.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from generate import save_model
from serving_peers import PEERS, export_genai, installed, vllm_command

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source, Table
from upshift.benchmarking.harness import format_table
from upshift.hardware import detect
from upshift.record import Numbers
from upshift.serving.load_test.client import RequestResult, send_request
from upshift.serving.load_test.run import Phase, load_test
from upshift.serving.load_test.traffic import Traffic, arrivals
from upshift.training.rank_processes import free_port

CLAIMS = (
    Claim(
        name="promise",
        text="what a server promised it keeps when more comes than it holds",
        ours="upshift serve",
        baseline="its own promise",
        unit="of its peak",
        goal=0.9,
        of=Source(row="promise", value="details.goodput_over_peak"),
    ),
    Claim(
        name="genai",
        text="eight clients are served as fast as by OpenVINO GenAI",
        ours="upshift serve, exact",
        baseline="its continuous batching, fp32",
        goal=1.0,
        of=Source(row="upshift exact, 8", value="measured.tokens_per_second"),
        over=Source(row="genai fp32, 8", value="measured.tokens_per_second"),
    ),
    Claim(
        name="genai-alone",
        text="and one client",
        ours="upshift serve, exact",
        baseline="its continuous batching, fp32",
        goal=1.0,
        of=Source(row="upshift exact, 1", value="measured.tokens_per_second"),
        over=Source(row="genai fp32, 1", value="measured.tokens_per_second"),
    ),
    Claim(
        name="genai-int8",
        text="and at the quality of 8 bits",
        ours="upshift serve, 0.98",
        baseline="its continuous batching, 8 bits",
        goal=1.0,
        of=Source(row="upshift 0.98, 8", value="measured.tokens_per_second"),
        over=Source(row="genai int8, 8", value="measured.tokens_per_second"),
    ),
    Claim(
        name="genai-int8-alone",
        text="one client, too",
        ours="upshift serve, 0.98",
        baseline="its continuous batching, 8 bits",
        goal=1.0,
        of=Source(row="upshift 0.98, 1", value="measured.tokens_per_second"),
        over=Source(row="genai int8, 1", value="measured.tokens_per_second"),
    ),
    Claim(
        name="llama-cpp",
        text="and as fast as by llama.cpp's server",
        ours="upshift serve, 0.98",
        baseline="its own server, 8 bits",
        goal=1.0,
        of=Source(row="upshift 0.98, 8", value="measured.tokens_per_second"),
        over=Source(row="llama.cpp q8_0, 8", value="measured.tokens_per_second"),
    ),
    Claim(
        name="capacity",
        text="what a server holds is what it proved at its start",
        ours="measured",
        baseline="proven",
        goal=0.85,
        of=Source(row="promise", value="details.measured"),
        over=Source(row="promise", value="details.proven"),
    ),
)

FIGURES = (
    Figure(name="exact-1", of=Source(row="upshift exact, 1", value="measured.tokens_per_second")),
    Figure(name="exact-8", of=Source(row="upshift exact, 8", value="measured.tokens_per_second")),
    Figure(name="exact-32", of=Source(row="upshift exact, 32", value="measured.tokens_per_second")),
    Figure(name="genai-fp32-1", of=Source(row="genai fp32, 1", value="measured.tokens_per_second")),
    Figure(name="genai-fp32-8", of=Source(row="genai fp32, 8", value="measured.tokens_per_second")),
    Figure(name="genai-fp32-32", of=Source(row="genai fp32, 32", value="measured.tokens_per_second")),
    Figure(name="0.98-1", of=Source(row="upshift 0.98, 1", value="measured.tokens_per_second")),
    Figure(name="0.98-8", of=Source(row="upshift 0.98, 8", value="measured.tokens_per_second")),
    Figure(name="0.98-32", of=Source(row="upshift 0.98, 32", value="measured.tokens_per_second")),
    Figure(name="genai-int8-1", of=Source(row="genai int8, 1", value="measured.tokens_per_second")),
    Figure(name="genai-int8-8", of=Source(row="genai int8, 8", value="measured.tokens_per_second")),
    Figure(name="genai-int8-32", of=Source(row="genai int8, 32", value="measured.tokens_per_second")),
    Figure(name="llamacpp-q8-1", of=Source(row="llama.cpp q8_0, 1", value="measured.tokens_per_second")),
    Figure(name="llamacpp-q8-8", of=Source(row="llama.cpp q8_0, 8", value="measured.tokens_per_second")),
    Figure(name="llamacpp-q8-32", of=Source(row="llama.cpp q8_0, 32", value="measured.tokens_per_second")),
    Figure(name="proven", of=Source(row="promise", value="details.proven")),
    Figure(name="measured", of=Source(row="promise", value="details.measured")),
    Figure(name="goodput", of=Source(row="promise", value="details.goodput_over_peak"), scale=100.0),
    Figure(name="within", of=Source(row="promise", value="details.within_promise"), scale=100.0),
)
TABLES = (
    Table(
        name="servers",
        header=("tokens/s, of clients at once", "1", "8", "32"),
        rows=(
            ("`upshift serve`, exact", "{exact-1:.0f}", "{exact-8:.0f}", "{exact-32:.0f}"),
            ("OpenVINO GenAI, fp32", "{genai-fp32-1:.0f}", "{genai-fp32-8:.0f}", "{genai-fp32-32:.0f}"),
            ("`upshift serve --quality 0.98` (8 bits)", "{0.98-1:.0f}", "{0.98-8:.0f}", "{0.98-32:.0f}"),
            ("OpenVINO GenAI, 8 bits", "{genai-int8-1:.0f}", "{genai-int8-8:.0f}", "{genai-int8-32:.0f}"),
            ("llama.cpp's server, 8 bits", "{llamacpp-q8-1:.0f}", "{llamacpp-q8-8:.0f}", "{llamacpp-q8-32:.0f}"),
        ),
    ),
)

SUITE = "--contenders 'upshift exact,genai fp32' --concurrency 8 --seconds 10 --overload-seconds 30"
ROOT = Path(__file__).parents[1]
MAX_TOKENS = 64
WORDS = 12  # of about five letters: a token each here
INSTRUCTED, INSTRUCTION_WORDS = 5, 120
START_SECONDS = 600.0
PROMISE_MS = 2000.0
CONTENDERS = (
    "upshift exact", "upshift 0.99", "upshift 0.98", "genai fp32", "genai int8", "llama.cpp f16", "llama.cpp q8_0",
    "transformers", "transformers batched", "vllm fp32", "upshift-vllm exact",
)  # fmt: skip


def command_of(contender: str, model: Path, port: int, concurrency: int, promise: float | None) -> list[str]:
    name, _, how = contender.partition(" ")
    if name == "transformers":
        batched = ["--continuous-batching"] if how == "batched" else []
        program = str(Path(sys.executable).with_name("transformers"))
        return [program, "serve", str(model), "--port", str(port), "--device", "cpu", "--dtype", "float32", *batched]
    if name == "vllm":
        return vllm_command(model, port, concurrency)
    if name in PEERS:
        peer = str(Path(__file__).with_name("serving_peers.py"))
        return [sys.executable, peer, contender, str(model), str(port), str(concurrency)]
    limits = [] if promise is None else ["--max-ttft-ms", str(promise)]
    expected = ["--prompt-length", "72", "--output-length", str(MAX_TOKENS), "--concurrency", str(concurrency)]
    serve = [sys.executable, "-m", "upshift.cli.main", "serve", str(model), "--port", str(port), "--quality", how]
    engine = ["--engine", "vllm"] if name == "upshift-vllm" else []
    return [*serve, *expected, *limits, *engine]


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[tuple[str, float]]:
    """(url, seconds until it answered)."""
    start, url = time.perf_counter(), f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{command[0]} ended: {log.read_text()[-600:]}")
            with suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/v1/models").status_code == 200:
                    break
            if time.perf_counter() - start > START_SECONDS:
                raise RuntimeError(f"{command[0]} did not answer: {log.read_text()[-600:]}")
            time.sleep(0.2)
        yield url, time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()


async def closed(url: str, model: str, clients: int, seconds: float, seed: int) -> tuple[list[RequestResult], float]:
    """So many clients, each asking again when it is answered; after the time nobody asks any more."""
    prompts = [one.prompt for one in itertools.islice(arrivals(Traffic(seconds=1e9, prompt_words=WORDS, seed=seed), 1.0), 512)]
    chance, found = random.Random(seed), list[RequestResult]()
    async with httpx2.AsyncClient(base_url=url, timeout=300.0) as client:
        start = time.perf_counter()

        async def one() -> None:
            while (due := time.perf_counter() - start) < seconds:
                found.append(await send_request(client, model, chance.choice(prompts), MAX_TOKENS, due=due, start=start))

        await asyncio.gather(*(one() for _ in range(clients)))
        return found, time.perf_counter() - start


async def again(url: str, model: str, seed: int) -> dict[str, float]:
    """Seconds to the first token of instructions that were never asked before, and of the same with other ends."""
    first, later = [], []
    async with httpx2.AsyncClient(base_url=url, timeout=300.0) as client:
        for number in range(INSTRUCTED):
            traffic = Traffic(seconds=1e9, prompt_words=INSTRUCTION_WORDS, seed=seed + number)
            prompt = next(arrivals(traffic, 1.0)).prompt
            for end in range(4):
                start = time.perf_counter()
                found = await send_request(client, model, f"{prompt} {end}: {'abcd'[end] * 24}", 1, due=0.0, start=start)
                if end != 1 and found.first_seconds is not None:  # at the second it is found out that they come again
                    (later if end else first).append(found.first_seconds)
    return {"first": median(first), "again": median(later)} if first and later else {}


def throughput(case: Case, model: Path, scratch: Path, options: Any) -> dict[str, Any]:
    counts = [int(one) for one in options.concurrency.split(",")]
    rows: dict[str, list[dict[str, Any]]] = {}
    instructed: dict[str, list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for contender in options.contenders.split(","):
            if not installed(contender):
                print_progress(f"{contender} is not installed: serving_peers.py says how")
                continue
            print_progress(f"round {number + 1}: {contender}")
            if contender.startswith("genai"):  # before its start is timed
                export_genai(model, contender.partition(" ")[2])
            name = str(model) if contender.startswith("transformers") else model.name
            for count in counts:
                port = free_port()  # what an ended run left behind would answer at a fixed one
                command = command_of(contender, model, port, count, None)
                with running(command, port, scratch / "log") as (url, started):
                    asyncio.run(closed(url, name, 2, 1.0, options.seed))  # warm
                    if count == max(counts):
                        instructed.setdefault(contender, []).append(asyncio.run(again(url, name, options.seed)))
                    answers, seconds = asyncio.run(closed(url, name, count, options.seconds, options.seed))
                    done = [one for one in answers if one.is_answered]
                    first = sorted(one.first_seconds or 0.0 for one in done)
                    rows.setdefault(f"{contender}, {count}", []).append({
                        "tokens_per_second": sum(one.tokens for one in done) / seconds, "failed": len(answers) - len(done),
                        "first_token": median(first) if first else None, "started": started,
                        "why": next((one.why for one in answers if one.why), ""),
                    })  # fmt: skip
                if number == options.rounds - 1:  # at once, so that what ends the case later loses no hour
                    found = rows[f"{contender}, {count}"]
                    case.add(
                        f"{contender}, {count}", plan={"max_tokens": MAX_TOKENS}, details={"rounds": found},
                        measured=Numbers(tokens_per_second=_rate(found)),
                    )  # fmt: skip
    table = [_row(name, found) for name, found in rows.items()]
    print(format_table(("server, clients", "tokens/s", "first token ms", "failed", "why"), table))
    told = [[name, *(f"{1e3 * median(one[key] for one in found):.0f}" for key in ("first", "again"))]
            for name, found in instructed.items() if all(found)]  # fmt: skip
    case.add("instructions", plan={"words": INSTRUCTION_WORDS}, measured=Numbers(), details={"seconds": instructed})
    print(format_table(("server, first token of instructions", "ms", "again ms"), told))
    return {name: _rate(found) for name, found in rows.items()}


def _rate(found: list[dict[str, Any]]) -> float:
    return median(one["tokens_per_second"] for one in found)


def _row(name: str, found: list[dict[str, Any]]) -> list[str]:
    first = [one["first_token"] for one in found if one["first_token"] is not None]
    failed = sum(one["failed"] for one in found)
    return [name, f"{_rate(found):.1f}", f"{1e3 * median(first):.0f}" if first else "", str(failed), found[0]["why"][:40]]


def promise(case: Case, model: Path, scratch: Path, options: Any) -> dict[str, Any]:
    """Capacity, then twice as much."""
    quality = options.contenders.split(",")[0].partition(" ")[2]
    port = free_port()
    command = command_of(f"upshift {quality}", model, port, 8, options.promise_ms)
    with running(command, port, scratch / "log") as (url, _):
        said = httpx2.get(f"{url}/health").json()["models"][model.name]
        answers, seconds = asyncio.run(closed(url, model.name, said["rows"], options.seconds, options.seed))
        peak = sum(one.is_answered for one in answers) / seconds
        traffic = {"prompt_words": WORDS, "max_tokens": MAX_TOKENS, "seed": options.seed}
        found = load_test(url, Traffic(rates=(2 * peak,), seconds=options.overload_seconds, **traffic))
    (phase,) = found.phases
    outcome = {
        "predicted": said["predicted_capacity"], "proven": said["capacity"], "measured": peak, "rows": said["rows"],
        "setup": said["setup"], "goodput_over_peak": phase.goodput / peak, "within_promise": phase.within_promise,
    }  # fmt: skip
    case.add(
        "promise", plan={"promised_ttft_ms": options.promise_ms}, measured=Numbers(),
        details=outcome | {"phase": phase.model_dump()},
    )  # fmt: skip
    print(_told(outcome, phase))
    return outcome


def _told(outcome: dict[str, Any], phase: Phase) -> str:
    lines = [
        f"{outcome['setup']}, {outcome['rows']} rows: predicted {outcome['predicted'] or 0:.2f} requests/s, proven at the start "
        f"{outcome['proven']:.2f}, measured {outcome['measured']:.2f}",
        f"twice that for {phase.seconds:.0f} s: {phase.statuses}, goodput {outcome['goodput_over_peak']:.0%} of the peak, "
        f"{phase.within_promise or 0:.1%} of answers within the promise, first token p95 "
        f"{1e3 * phase.first_token.get('p95', 0.0):.0f} ms, 429 without Retry-After: {phase.without_retry_after}",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each concurrency")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--overload-seconds", type=float, default=300.0, help="0: leave out the promise")
    parser.add_argument("--promise-ms", type=float, default=PROMISE_MS)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="upshift first")
    parser.add_argument("--model", type=Path, help="folder of the model; written where there is none")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="upshift-serving-") as scratch:
        model = (options.model or Path(scratch) / "llama").resolve()
        if not model.is_dir():
            save_model(model, "quick" if options.quick else "125m", options.seed)
        settings = {"seconds": options.seconds, "rounds": options.rounds, "overload_seconds": options.overload_seconds}
        case = Case("serving", options.results, detect(), options.quick, settings)
        found = throughput(case, model, Path(scratch), options)
        outcome = promise(case, model, Path(scratch), options) if options.overload_seconds else None
    print(json.dumps({"case": "serving", "tokens_per_second": found, "promise": outcome}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
