"""Plans of rows with images, against the model's own step on pixels and tokens: its FLOPs by torch's counter, and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from upshift.benchmarking.meters import allocated_peak, tensor_bytes
from upshift.hardware import detect
from upshift.models.build import build_model, find_architecture
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.profile import ModelProfile, PassCost, StepTrace, Variant
from upshift.models.profile_cache import images_of
from upshift.models.source import AdapterOptions, ModelSource, find_model_to_train
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.cost.memory import predict_memory
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.optimizers.build import build_optimizer

ROWS = 3
LENGTH = 64
IMAGE = 90  # the token of an image's place
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
LLAMA = {"model_type": "llama", **TEXT}
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
QWEN = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


def _configs() -> dict[str, transformers.PretrainedConfig]:
    siglip = {"model_type": "siglip_vision_model", **VISION}
    grid = {"depth": 4, "num_heads": 4, "patch_size": 56, "intermediate_size": 48}
    return {
        "Llava": transformers.LlavaConfig(
            text_config=LLAMA, vision_config={"model_type": "clip_vision_model", **VISION}, image_token_index=IMAGE
        ),
        "PaliGemma": transformers.PaliGemmaConfig(
            text_config={"model_type": "gemma", **TEXT}, vision_config=siglip, projection_dim=64, image_token_index=IMAGE
        ),
        "Idefics3": transformers.Idefics3Config(text_config=LLAMA, vision_config=VISION, image_token_id=IMAGE, scale_factor=2),
        "Gemma3": transformers.Gemma3Config(
            text_config={**TEXT, "sliding_window": 4096}, vision_config=siglip, mm_tokens_per_image=4, image_token_index=IMAGE
        ),
        "Qwen2VL": transformers.Qwen2VLConfig(
            text_config={**TEXT, **ROPE}, vision_config={**grid, "embed_dim": 32, "hidden_size": 64}, **QWEN
        ),
        "Qwen2_5_VL": transformers.Qwen2_5_VLConfig(
            text_config={**TEXT, **ROPE},
            vision_config={
                **grid, "hidden_size": 32, "out_hidden_size": 64, "window_size": 224, "fullatt_block_indexes": [3]
            },
            **QWEN,
        ),
        "Qwen3VL": transformers.Qwen3VLConfig(
            text_config={**TEXT, **ROPE},
            vision_config={
                **grid, "hidden_size": 32, "out_hidden_size": 64, "depth": 6, "deepstack_visual_indexes": [1, 2, 4],
                "num_position_embeddings": 16,
            },
            **QWEN,
        ),
    }  # fmt: skip


class Case(NamedTuple):
    source: ModelSource
    profile: ModelProfile
    tokens: int


NAMES = ("Llava", "PaliGemma", "Idefics3", "Gemma3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL")


def source_of(name: str, folder: Path, adapter: AdapterOptions | None = None, images: int = 2) -> ModelSource:
    config = _configs()[name]
    config.architectures = [f"{name}ForConditionalGeneration"]
    config.save_pretrained(folder)
    return find_model_to_train(str(folder), adapter).changed(images_per_row=images)


def step_inputs(source: ModelSource, *, rows: int, length: int) -> dict[str, Any]:
    """Real tokens with a text token behind the places of each image, and real pixels, as a processor returns them."""
    images = images_of(source)
    ids = torch.randint(1, 80, (rows, length))
    for number in range(images.per_row):
        start = number * (images.tokens + 1)
        ids[:, start : start + images.tokens] = IMAGE
    number = rows * images.per_row
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    pixels = torch.rand(number, 3, images.height, images.width) + 0.1
    kind = source.config["model_type"]
    if kind.startswith("qwen"):
        vision = source.hf_config.vision_config
        side = images.height // vision.patch_size
        features = 3 * vision.temporal_patch_size * vision.patch_size**2
        return inputs | {
            "pixel_values": torch.rand(number * side * side, features),
            "image_grid_thw": torch.tensor([[1, side, side]] * number), "mm_token_type_ids": (ids == IMAGE).int(),
        }  # fmt: skip
    if kind == "idefics3":
        pixels = pixels.view(rows, images.per_row, *pixels.shape[1:])
    if kind in ("paligemma", "gemma3"):
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return inputs | {"pixel_values": pixels}


def real_model(source: ModelSource) -> Any:
    config = source.hf_config
    config.use_cache = False
    torch.manual_seed(0)
    return build_model(config, find_architecture(config, source.reference).model_class, dtype=torch.float32)


def traced_flops(profile: ModelProfile, trace: StepTrace, rows: int, length: int) -> float:
    def of(cost: PassCost) -> float:
        return cost.matmul_flops.at(rows, length) + cost.attention_flops.at(rows, length)

    segments = list(trace.gaps)
    for stack, measured in zip(profile.stacks, trace.stacks, strict=True):
        segments += [measured.plain[position] for position in stack.assignment]
    return sum(of(segment.forward) + of(segment.backward) for segment in segments)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_images_has_the_flops_and_the_memory_of_the_models_own(name: str, tmp_path: Path) -> None:
    source = source_of(name, tmp_path)
    images = images_of(source)
    length = images.tokens_per_row + LENGTH
    profile = profile_model(source, sequence_length=length, variants=(Variant("fp32", "eager", False),))
    trace = profile.steps[0]
    model = real_model(source)
    model.set_attn_implementation("eager")
    inputs = step_inputs(source, rows=ROWS, length=length)
    with FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    assert traced_flops(profile, trace, ROWS, length) == pytest.approx(counter.get_total_flops(), rel=1e-3)

    for recomputed in (0, profile.num_layers):
        plan = Plan(
            device="cpu", host=detect().fingerprint, model=profile.model_hash, sequence_length=length, precision="fp32",
            per_device_train_batch_size=ROWS, gradient_accumulation_steps=1, activation_checkpointing=recomputed,
            attention="eager",
        )  # fmt: skip
        recompute_layers(model, recomputed, "full")
        optimizer = build_optimizer(model, plan, Arguments(max_steps=10))

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            (model(**inputs).loss * 0.5).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with allocated_peak("cpu", resident_bytes=tensor_bytes(model, optimizer, *inputs.values())) as peak:
            step()
        assert peak.bytes is not None
        error = predict_memory(profile, trace, plan).peak / peak.bytes - 1
        print(name, images, recomputed, f"{error:+.2%}")
        assert abs(error) < 0.03, (recomputed, error)
