"""Every language and image model of transformers that can be made tiny, by XLA against torch: what is equal, and what is missing.

    python benchmarks/cases/xla_parity.py [--quick] [--kinds image] [--only bert,llama] [--bfloat16] [--seconds 1500]

A model is two layers of width 32 or so with random weights (transformers' own, and 0.1 of deviation added, so that every part
shows), saved, and read by upshift.xla.build. Logits are of two prompts of which one is padded, or of two images. A row a model:

error           the largest difference of a logit from torch's in float32
largest         the largest logit, to judge it by
bf16            with --bfloat16: XLA's difference from torch's bfloat16, and of each from float32 over the same rounded weights
refused         in place of those, the one line that says why a model does not run
not_tiny        in place of those, why this script could not make the model: says nothing of XLA

and one of all, with counts over the newest row of each model. Models that have a row (with bfloat16, where it is asked for) are
not run again; to do so, give another --results.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from upshift.benchmarking.case import Case, command_line
from upshift.benchmarking.figures import Figure, Source, Table
from upshift.errors import RequestError
from upshift.hardware import detect
from upshift.xla.needs import need_tensorflow

ROOT = Path(__file__).parents[1]
LENGTH, SECONDS_OF_ONE = 16, 90
LIMITS = {"float32": 1e-5, "bf16": 2e-2}  # of a difference, and of its share of the largest logit
QUICK = "bert,gpt2"
OUTCOMES = ("not_tiny", "refused", "broken", "equal", "different")
SIZES = {
    32: "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size word_embed_proj_dim d_embed lru_width "
        "attention_hidden_size decoder_hidden_size model_dim encoder_hidden_dim",
    48: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim ffn_hidden_size "
        "shared_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_experts_per_tok moe_topk moe_k num_key_value_heads num_kv_heads n_kv_heads depth",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
        "num_local_experts n_routed_experts linear_num_key_heads linear_num_value_heads",
    8: "head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim linear_key_head_dim "
        "linear_value_head_dim patch_size",
    16: "moe_intermediate_size q_lora_rank kv_lora_rank shared_expert_intermediate_size vocab_size_per_layer_input "
        "hidden_size_per_layer_input expert_ffn_hidden_size",
    96: "vocab_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions "
        "max_sequence_length context_length",
    1: "n_shared_experts first_k_dense_replace n_group topk_group",
    0: "pad_token_id",
}  # fmt: skip
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}  # fmt: skip


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
    Figure(name="all-made", of=Source(row="all", value="details.made")),
    Figure(name="all-equal", of=Source(row="all", value="details.equal")),
    Figure(name="all-refused", of=Source(row="all", value="details.refused")),
    Figure(name="all-share", of=Source(row="all", value="details.worst_share"), scale=1e6),
    Figure(name="bf16-models", of=Source(row="all", value="details.bf16_models")),
    Figure(name="bf16-within", of=Source(row="all", value="details.bf16_within")),
    Figure(name="bf16-share-within", of=Source(row="all", value="details.bf16_share_within")),
    Figure(name="bf16-worst", of=Source(row="all", value="details.bf16_worst_share"), scale=100),
    Figure(name="bf16-nearer", of=Source(row="all", value="details.bf16_nearer_than_torch")),
    Figure(name="bf16-torch-true", of=Source(row="all", value="details.bf16_torch_within_of_true")),
    Figure(name="bf16-xla-true", of=Source(row="all", value="details.bf16_xla_within_of_true")),
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


def every_model(kinds: str) -> Iterator[tuple[str, str, str]]:
    """(kind, model type, class); the first class of a type and kind."""
    for kind in kinds.split(","):
        for model_type, found in KINDS[kind].items():
            yield kind, model_type, found if isinstance(found, str) else found[0]


OTHERWISE: tuple[dict[str, int | None], ...] = ({}, {"num_key_value_heads": 4}, {"head_dim": None})  # None: as it is


def tiny_config(config_class: Any, otherwise: dict[str, int | None]) -> Any:
    default = config_class()
    sizes = {name: size for size, names in SIZES.items() for name in names.split()}
    asked = {name: size for name, size in sizes.items() if isinstance(getattr(default, name, None), int)}
    for name in ("bos_token_id", "eos_token_id"):
        if isinstance(getattr(default, name, None), int | list):
            asked[name] = 1
    asked |= {name: 32 for name in ("image_size",) if isinstance(getattr(default, name, None), int)}
    if hasattr(default, "use_cache"):
        asked["use_cache"] = False
    asked = {name: size for name, size in (asked | otherwise).items() if size is not None and name in default.to_dict()}
    return config_class(**asked)


def made_tiny(model_type: str, architecture: str, folder: Path, otherwise: dict[str, int | None]) -> Any:
    """Raises what making it raises: a config whose fields this script does not know."""
    config = tiny_config(transformers.CONFIG_MAPPING[model_type], otherwise)
    config.architectures = [architecture]
    torch.manual_seed(0)
    with torch.device("meta"):
        parameters = sum(one.numel() for one in getattr(transformers, architecture)(config).parameters())
    if parameters > 20e6:
        raise ValueError(f"{parameters / 1e6:.0f} M parameters with the sizes that are known here")
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.config


def inputs_of(kind: str, config: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if kind == "image":
        side = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        return {"pixel_values": torch.rand(2, getattr(config, "num_channels", 3), side, side)}
    ids, mask = torch.randint(5, 90, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 12:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    return given | {"decoder_input_ids": ids} if kind == "seq2seq" else given


def by_torch(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**_in_dtype(inputs, model.dtype)).logits.float()
    return found


def by_xla(folder: Path, inputs: dict[str, torch.Tensor], dtype: Any) -> torch.Tensor:
    import tensorflow as tf

    from upshift.xla.build import build
    from upshift.xla.exported import export
    from upshift.xla.lowering.program import as_constant, lower

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


def newest_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Details by (kind, model type)."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [row["details"] for row in map(json.loads, lines) if "model" in row["details"] and not row["details"]["quick"]]
    return {(details["kind"], details["model"]): details for details in found}


def outcome(details: dict[str, Any]) -> str:
    failed = next((name for name in OUTCOMES if name in details), None)
    return failed or ("equal" if details["error"] <= LIMITS["float32"] * max(1.0, details["largest"]) else "different")


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ran = [details for details in rows if "error" in details]
    half = [details["bf16"] for details in ran if "bf16" in details]
    near = [one["from_torch"] <= LIMITS["bf16"] for one in half]
    shares = sorted(one["from_torch"] / one["largest"] for one in half)
    kinds_of_end = {name: 0 for name in OUTCOMES} | Counter(map(outcome, rows))
    return kinds_of_end | {
        "models": len(rows), "made": len(rows) - kinds_of_end["not_tiny"],
        "worst_share": max((one["error"] / one["largest"] for one in ran), default=0.0),
        "bf16_models": len(half), "bf16_within": sum(near), "bf16_share_within": sum(one <= LIMITS["bf16"] for one in shares),
        "bf16_worst_share": shares[-1] if shares else 0.0,
        "bf16_nearer_than_torch": sum(one["xla_from_true"] <= one["torch_from_true"] for one in half),
        "bf16_torch_within_of_true": sum(one["torch_from_true"] <= LIMITS["bf16"] for one in half),
        "bf16_xla_within_of_true": sum(one["xla_from_true"] <= LIMITS["bf16"] for one in half),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--kinds", default=",".join(KINDS), help="in this order")
    parser.add_argument("--only", help="model types, with commas")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no model after this")
    options = parser.parse_args(arguments)
    need_tensorflow("this check")
    transformers.logging.set_verbosity_error()
    start, only = time.monotonic(), QUICK if options.quick else options.only
    settings = {"bfloat16": options.bfloat16, "length": LENGTH}
    case = Case("xla_parity", options.results, detect(), options.quick, settings)
    known = newest_rows(case.path)
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
        case.add(f"{kind} {model_type}", plan={}, measured=None, details=found, failure=failure)
        known[kind, model_type] = found
    for kind in KINDS:
        case.add(kind, plan={}, measured=None, details=counted([details for (of, _), details in known.items() if of == kind]))
    case.add("all", plan={}, measured=None, details=counted(list(known.values())))
    print(json.dumps(case.rows[-1].details))
    return 0


if __name__ == "__main__":
    sys.exit(main())
