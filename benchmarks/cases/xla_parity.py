"""Every language and image model of transformers that can be made tiny, by XLA against torch: what is equal, and what is missing.

    python benchmarks/cases/xla_parity.py [--quick] [--kinds image] [--only bert,llama] [--bfloat16] [--every-rounding]

A model is two layers of width 32 or so with random weights (transformers' own, and 0.1 of deviation added, so that every part
shows), saved, and read by upshift.xla.build. Logits are of two prompts of which one is padded, or of two images. A row a model:

error           the largest difference of a logit from torch's in float32
largest         the largest logit, to judge it by
bf16            with --bfloat16: XLA's difference from torch's bfloat16, and of each from float32 over the same rounded weights
refused         in place of those, the one line that says why a model does not run
not_tiny        in place of those, why this script could not make the model: says nothing of XLA

XLA leaves out a rounding to bfloat16 whose result is widened at once. With --every-rounding it keeps all that the program has
(--xla_allow_excess_precision=false): what then differs from torch is the lowering's doing. Nobody runs it so.

A last row has counts over the newest row of each model. Models that have a row (with bfloat16, where it is asked for) are not run
again; to do so, give another --results.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import KINDS, LENGTH, OTHERWISE, every_model, inputs_of, made_tiny

from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.claims import Claim, Figure, Source, Table
from upshift.errors import RequestError
from upshift.hardware import detect
from upshift.xla.tensorflow import need_tensorflow

SUITE = "--only bert,llama,t5,vit,mixtral"
ROOT = Path(__file__).parents[1]
SECONDS_OF_ONE = 90
LIMITS = {"float32": 1e-5, "bf16": 2e-2}  # of a difference, and of its share of the largest logit
QUICK = "bert,gpt2"
OUTCOMES = ("not_tiny", "refused", "broken", "equal", "different")
CLAIMS = (
    Claim(
        name="float32", text="logits are torch's in float32", ours="XLA", baseline="transformers in torch", better="lower",
        unit="of the largest logit", goal=1e-5, of=Source(row="all", value="details.worst_share"),
    ),
    Claim(
        name="bf16-share", text="logits are torch's in bfloat16", ours="XLA", baseline="transformers in torch", better="lower",
        options="--bfloat16", unit="of the largest logit", goal=2e-2, of=Source(row="all", value="details.of_bf16.worst_share"),
    ),
    Claim(
        name="bf16-types-within", text="logits of bfloat16 are within 2e-2 of torch's as they stand", ours="XLA",
        baseline="transformers in torch", options="--bfloat16", unit="architectures", goal=30,
        of=Source(row="all", value="details.of_bf16.types_within"),
    ),
)  # fmt: skip
FIGURES = (
    Figure(name="causal-made", of=Source(row="causal", value="details.made")),
    Figure(name="causal-equal", of=Source(row="causal", value="details.equal")),
    Figure(name="causal-refused", of=Source(row="causal", value="details.refused")),
    Figure(name="causal-share", of=Source(row="causal", value="details.worst_share"), scale=1e6),
    Figure(name="masked-made", of=Source(row="masked", value="details.made")),
    Figure(name="masked-equal", of=Source(row="masked", value="details.equal")),
    Figure(name="masked-refused", of=Source(row="masked", value="details.refused")),
    Figure(name="masked-share", of=Source(row="masked", value="details.worst_share"), scale=1e6),
    Figure(name="seq2seq-made", of=Source(row="seq2seq", value="details.made")),
    Figure(name="seq2seq-equal", of=Source(row="seq2seq", value="details.equal")),
    Figure(name="seq2seq-refused", of=Source(row="seq2seq", value="details.refused")),
    Figure(name="seq2seq-share", of=Source(row="seq2seq", value="details.worst_share"), scale=1e6),
    Figure(name="image-made", of=Source(row="image", value="details.made")),
    Figure(name="image-equal", of=Source(row="image", value="details.equal")),
    Figure(name="image-refused", of=Source(row="image", value="details.refused")),
    Figure(name="image-share", of=Source(row="image", value="details.worst_share"), scale=1e6),
    Figure(name="bf16-models", of=Source(row="all", value="details.of_bf16.models")),
    Figure(name="bf16-within", of=Source(row="all", value="details.of_bf16.within")),
    Figure(name="bf16-types", of=Source(row="all", value="details.of_bf16.types")),
    Figure(name="bf16-worst", of=Source(row="all", value="details.of_bf16.worst_share"), scale=100),
    Figure(name="bf16-nearer", of=Source(row="all", value="details.of_bf16.nearer_than_torch")),
    Figure(name="rounded-models", of=Source(row="all, every rounding", value="details.of_bf16.models")),
    Figure(name="rounded-within", of=Source(row="all, every rounding", value="details.of_bf16.within")),
    Figure(name="rounded-same", of=Source(row="all, every rounding", value="details.of_bf16.same")),
    Figure(name="rounded-worst", of=Source(row="all, every rounding", value="details.of_bf16.worst_share"), scale=100),
    Figure(name="bf16-torch-true", of=Source(row="all", value="details.of_bf16.torch_within_of_true")),
    Figure(name="bf16-xla-true", of=Source(row="all", value="details.of_bf16.xla_within_of_true")),
)
TABLES = (
    Table(
        name="models",
        header=("", "models", "equal to torch", "refused", "largest error over the largest logit"),
        rows=(
            ("decoders", "{causal-made:.0f}", "{causal-equal:.0f}", "{causal-refused:.0f}", "{causal-share:.1f}e-06"),
            ("encoders", "{masked-made:.0f}", "{masked-equal:.0f}", "{masked-refused:.0f}", "{masked-share:.1f}e-06"),
            ("encoder-decoders", "{seq2seq-made:.0f}", "{seq2seq-equal:.0f}", "{seq2seq-refused:.0f}", "{seq2seq-share:.1f}e-06"),
            ("image classifiers", "{image-made:.0f}", "{image-equal:.0f}", "{image-refused:.0f}", "{image-share:.1f}e-06"),
        ),
    ),
)


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs).logits


def by_torch(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**_in_dtype(inputs, model.dtype)).logits.float()
    return found


def by_xla(folder: Path, inputs: dict[str, torch.Tensor], dtype: Any) -> torch.Tensor:
    import tensorflow as tf

    from upshift.xla.lowering.program import as_constant, lower
    from upshift.xla.model import build
    from upshift.xla.model_export import export

    built = build(str(folder), dtype=dtype)
    if hasattr(built.config, "use_cache"):
        built.config.use_cache = False
    given = _in_dtype(inputs, getattr(torch, dtype))
    program = lower(export(Logits(built.torch_model), given))
    compiled = tf.function(lambda *values: program(values, built.weights)[0], jit_compile=True, autograph=False)
    found = compiled(*[as_constant(given[name]) for name in program.inputs])
    return torch.from_numpy(tf.cast(found, tf.float32).numpy())


def _in_dtype(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def row_of(kind: str, model_type: str, architecture: str, *, bfloat16: bool) -> dict[str, Any]:
    """Each way to fail is a row of its own."""
    with tempfile.TemporaryDirectory(prefix="upshift-parity-") as name:
        folder = Path(name)
        why = ""
        for otherwise in OTHERWISE:
            try:
                config = made_tiny(model_type, architecture, folder, otherwise)
                inputs = inputs_of(kind, config)
                reference = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager").eval()
                expected = by_torch(reference, inputs)
                break
            except Exception as error:  # any of 400 configs and models may refuse these sizes in its own way
                why = why or f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        else:
            return {"not_tiny": why}
        real = inputs["attention_mask"].bool() if expected.ndim == 3 and kind != "seq2seq" else ...
        try:
            found = by_xla(folder, inputs, "float32")
            row = {"error": float((found - expected)[real].abs().max()), "largest": float(expected[real].abs().max())}
            return row | ({"bf16": _bfloat16(folder, reference, inputs, real)} if bfloat16 else {})
        except RequestError as error:
            return {"refused": str(error)}
        except Exception as error:  # what the lowering or XLA raises unasked is a defect, and its row says so
            return {"broken": f"{type(error).__name__}: {error}".replace("\n", " ")[:300]}


def _bfloat16(folder: Path, reference: Any, inputs: dict[str, torch.Tensor], real: Any) -> dict[str, float]:
    half = type(reference).from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ours, torchs = by_xla(folder, inputs, "bfloat16")[real], by_torch(half, inputs)[real]
    floating = {name: value for name, value in reference.state_dict().items() if value.is_floating_point()}
    reference.load_state_dict({name: value.to(torch.bfloat16).float() for name, value in floating.items()}, strict=False)
    true = by_torch(reference, inputs)[real]
    pairs = {"from_torch": (ours, torchs), "xla_from_true": (ours, true), "torch_from_true": (torchs, true)}
    return {name: float((one - other).abs().max()) for name, (one, other) in pairs.items()} | {"largest": float(true.abs().max())}


def _too_long(*_: Any) -> None:
    raise RequestError(f"not done in {SECONDS_OF_ONE} s")


def newest_rows(path: Path, *, every_rounding: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """Details by (kind, model type)."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [row["details"] for row in map(json.loads, lines) if "model" in row["details"] and not row["details"]["quick"]]
    asked = [details for details in found if details["settings"]["every_rounding"] == every_rounding]
    return {(details["kind"], details["model"]): details for details in asked}


def outcome(details: dict[str, Any]) -> str:
    failed = next((name for name in OUTCOMES if name in details), None)
    return failed or ("equal" if details["error"] <= LIMITS["float32"] * max(1.0, details["largest"]) else "different")


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ends = {name: 0 for name in OUTCOMES} | Counter(map(outcome, rows))
    worst = max((one["error"] / one["largest"] for one in rows if "error" in one), default=0.0)
    half = [(one["model"], one["bf16"]) for one in rows if "bf16" in one]
    types = {name for name, _ in half}
    far = {name for name, one in half if one["from_torch"] > LIMITS["bf16"]}
    bf16 = {
        "models": len(half), "within": sum(one["from_torch"] <= LIMITS["bf16"] for _, one in half),
        "types": len(types), "types_within": len(types - far),
        "same": sum(one["from_torch"] == 0 for _, one in half),
        "worst_share": max((one["from_torch"] / one["largest"] for _, one in half), default=0.0),
        "nearer_than_torch": sum(one["xla_from_true"] <= one["torch_from_true"] for _, one in half),
        "torch_within_of_true": sum(one["torch_from_true"] <= LIMITS["bf16"] for _, one in half),
        "xla_within_of_true": sum(one["xla_from_true"] <= LIMITS["bf16"] for _, one in half),
    }  # fmt: skip
    return {"models": len(rows), "made": len(rows) - ends["not_tiny"], **ends, "worst_share": worst, "of_bf16": bf16}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--kinds", default=",".join(KINDS), help="in this order")
    parser.add_argument("--only", help="model types, with commas")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--every-rounding", action="store_true", help="with --bfloat16: XLA leaves none out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no model after this")
    options = parser.parse_args(arguments)
    if options.every_rounding:
        os.environ["XLA_FLAGS"] = "--xla_allow_excess_precision=false"  # read when TensorFlow first compiles
    need_tensorflow("this check")
    transformers.logging.set_verbosity_error()
    start, only = time.monotonic(), QUICK if options.quick else options.only
    settings = {"bfloat16": options.bfloat16, "every_rounding": options.every_rounding, "length": LENGTH}
    known_as = ", every rounding" if options.every_rounding else ""
    case = Case("xla_parity", options.results, detect(), options.quick, settings)
    known = newest_rows(case.path, every_rounding=options.every_rounding)
    signal.signal(signal.SIGALRM, _too_long)
    for kind, model_type, architecture in every_model(options.kinds):
        done = known.get((kind, model_type))
        is_done = done is not None and ("bf16" in done or "error" not in done or not options.bfloat16)
        if is_done or (only and model_type not in only.split(",")) or time.monotonic() - start > options.seconds:
            continue
        signal.alarm(SECONDS_OF_ONE)
        found = {"kind": kind, "model": model_type, "class": architecture}
        found |= row_of(kind, model_type, architecture, bfloat16=options.bfloat16)
        signal.alarm(0)
        print(json.dumps(found), flush=True)
        failure = found.get("refused") or found.get("broken")
        case.add(f"{kind} {model_type}{known_as}", plan={}, measured=None, details=found, failure=failure)
        known[kind, model_type] = found
    for kind in KINDS:
        of_kind = [details for (of, _), details in known.items() if of == kind]
        case.add(kind + known_as, plan={}, measured=None, details=counted(of_kind))
    case.add("all" + known_as, plan={}, measured=None, details=counted(list(known.values())))
    print(json.dumps(case.rows[-1].details))
    return 0


if __name__ == "__main__":
    sys.exit(main())
