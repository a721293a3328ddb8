"""Every language and image model of transformers that can be made tiny, by XLA against torch: what is equal, and what is missing.

    python benchmarks/cases/xla_parity.py --output rows.jsonl [--kinds image] [--only bert,llama] [--bfloat16] [--seconds 1500]

A model is two layers of width 32 or so with random weights (transformers' own, and 0.1 of deviation added, so that every part
shows), saved, and read by upshift.xla.build. Logits are of two prompts of which one is padded, or of two images. Rows:

error           the largest difference of a logit from torch's in float32
largest         the largest logit, to judge it by
bf16            with --bfloat16: XLA's difference from torch's bfloat16, and of each from float32 over the same rounded weights
refused         in place of those, the one line that says why a model does not run
not_tiny        in place of those, why this script could not make the model: says nothing of XLA

A file that has rows already is continued.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from upshift.errors import RequestError
from upshift.xla.needs import need_tensorflow

LENGTH, SECONDS_OF_ONE = 16, 90
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--kinds", default=",".join(KINDS), help="in this order")
    parser.add_argument("--only", help="model types, with commas")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no model after this")
    parser.add_argument("--shard", default="0/1", help="K/N: each N-th model from the K-th on")
    options = parser.parse_args()
    need_tensorflow("this check")
    transformers.logging.set_verbosity_error()
    start, (shard, shards) = time.monotonic(), map(int, options.shard.split("/"))
    known = options.output.read_text().splitlines() if options.output.exists() else []
    done = {(row["kind"], row["model"]) for row in map(json.loads, known)}
    only = options.only.split(",") if options.only else None
    signal.signal(signal.SIGALRM, _too_long)
    for number, (kind, model_type, architecture) in enumerate(every_model(options.kinds)):
        skipped = (kind, model_type) in done or number % shards != shard or (only is not None and model_type not in only)
        if skipped or time.monotonic() - start > options.seconds:
            continue
        signal.alarm(SECONDS_OF_ONE)
        found = row_of(kind, model_type, architecture, bfloat16=options.bfloat16)
        signal.alarm(0)
        row = {"kind": kind, "model": model_type, "class": architecture, **found}
        with options.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
