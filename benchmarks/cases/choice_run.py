"""What a process of choice.py runs: a race, or one of its contestants on the whole workload. Given: the file of its request."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from upshift.benchmarking.timing import time_with_load


def raced(request: dict[str, Any]) -> dict[str, Any]:
    """The race -> its setups within the bound, each at its best batch, and the chosen one."""
    import upshift
    from upshift.inference.race.types import read_quality

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
        "chosen": race.chosen.to_json(), "runs": [run.setup.to_json() for run in race.best() if run.meets(quality)],
        "forecasts": {run.setup.label(): [run.forecast_per_second, run.per_second] for run in race.best()},
    }  # fmt: skip


def whole(request: dict[str, Any]) -> None:
    """One setup for all texts, tokenization left out: once, and again for each line that comes."""
    from upshift.inference.registry import EngineSetup

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    setup = EngineSetup.from_json(request["setup"])
    run = _encode(request, setup) if request["kind"] == "encode" else _generate(request, setup)
    run()
    first = time_with_load(run)
    passes = max(min(int(0.5 / first["seconds"]), 50), 1)  # of what is short
    answers.write(json.dumps(first) + "\n")
    for _ in sys.stdin:
        found = time_with_load(lambda: [run() for _ in range(passes)])
        found |= {name: found[name] / passes for name in ("seconds", "cpu_seconds")}
        answers.write(json.dumps(found) + "\n")


def _encode(request: dict[str, Any], setup: Any) -> Any:
    from upshift.inference.encoding.encoder import Encoder
    from upshift.inference.encoding.raced_model import SAMPLE_TEXTS
    from upshift.inference.encoding.run import Encoding
    from upshift.inference.race.types import pick_evenly

    encoder = Encoder(request["model"])
    sample = encoder.tokenizer.tokenize(pick_evenly(request["texts"], SAMPLE_TEXTS))
    encoding = Encoding(encoder.source, encoder.config, setup, sample, pad=encoder.tokenizer.pad)
    return partial(encoding.rows, encoder.tokenizer.tokenize(request["texts"]))


def _generate(request: dict[str, Any], setup: Any) -> Any:
    from upshift.inference.generation.batching import decode
    from upshift.inference.generation.engines.base import DecoderBuild
    from upshift.inference.generation.generator import Generator
    from upshift.inference.generation.sequence import GeneratedSequence
    from upshift.inference.registry import build_engine
    from upshift.inference.weights import engine_folder

    generator = Generator(request["model"])
    options = generator.options(max_new_tokens=request["new_tokens"])
    ids = generator.read(request["texts"], options)
    folder = engine_folder("generate", generator.source, setup.engine)
    decoder = build_engine("generate", setup.engine, DecoderBuild(generator.source, setup, folder))

    def run() -> None:
        decoder.keep([])
        waiting = [GeneratedSequence(place, prompt, options, generator.prompts.tokenizer) for place, prompt in enumerate(ids)]
        for _ in decode(decoder, waiting, rows=setup.batch):
            pass

    return run


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    if asked["setup"] is None:
        print(json.dumps(raced(asked)))
    else:
        whole(asked)
