"""Plans of rows with images, against the model's own step on pixels and tokens: its FLOPs by torch's counter, and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from upshift.benchmarking.meters import allocated_peak, tensor_bytes
from upshift.errors import RequestError
from upshift.hardware import detect
from upshift.models.adapter import check_module_names
from upshift.models.build import build_model, find_architecture
from upshift.models.describe import count_parameters
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.profile import Variant
from upshift.models.profile_cache import images_of
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import AdapterOptions, ModelSource, find_model_to_train
from upshift.models.tracing.polynomials import Measurement
from upshift.models.tracing.profile_model import profile_model
from upshift.models.tracing.segments import Tracer
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
    grid = {"depth": 4, "num_heads": 4, "patch_size": 112, "intermediate_size": 48}
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
        "Qwen2_5_VL": transformers.Qwen2_5_VLConfig(
            text_config={**TEXT, **ROPE},
            vision_config={
                **grid, "hidden_size": 32, "out_hidden_size": 64, "window_size": 448, "fullatt_block_indexes": [3]
            },
            **QWEN,
        ),
    }  # fmt: skip


EAGER = Variant("fp32", "eager", False)


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


def traced_flops(tracer: Tracer, run: Measurement) -> float:
    """Return the FLOPs of a run of a cut model for all layers of the full one."""
    total = 0.0
    for name, interval in (*run.forward.items(), *run.backward.items()):
        fields = name.split()
        number = tracer.stacks[int(fields[-2])].assignment.count(int(fields[-1])) if "layer" in fields else 1
        total += number * (interval.matmul_flops + interval.attention_flops)
    return total


def counted_flops(model: Any, inputs: dict[str, Any]) -> int:
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**inputs).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["PaliGemma", "Gemma3", "Qwen2_5_VL"])
def test_a_step_with_images_has_the_flops_of_the_models_own(name: str, tmp_path: Path) -> None:
    source = source_of(name, tmp_path)
    tracer = Tracer(source)
    length = images_of(source).tokens_per_row + LENGTH
    run = tracer.measure(EAGER, batch=ROWS, sequence=length)
    inputs = step_inputs(source, rows=ROWS, length=length)
    assert traced_flops(tracer, run) == counted_flops(real_model(source), inputs)


def test_a_frozen_tower_is_priced_as_frozen(tmp_path: Path) -> None:
    whole = source_of("Llava", tmp_path)
    tower = ("model.vision_tower", "model.multi_modal_projector")
    frozen = whole.changed(frozen=tower)
    length = images_of(whole).tokens_per_row + LENGTH
    inputs = step_inputs(whole, rows=ROWS, length=length)
    model = real_model(whole)
    expected = [counted_flops(model, inputs)]
    for path in tower:
        model.get_submodule(path).requires_grad_(False)
    expected.append(counted_flops(model, inputs))
    tracers = [Tracer(source) for source in (whole, frozen)]
    runs = [tracer.measure(EAGER, batch=ROWS, sequence=length) for tracer in tracers]
    assert [traced_flops(tracer, run) for tracer, run in zip(tracers, runs, strict=True)] == expected
    parts = [count_parameters(tracer.full_model(torch.float32), (), always_fp32=0) for tracer in tracers]
    frozen_weights = sum(weight.numel() for path in tower for weight in model.get_submodule(path).parameters())
    assert parts[0].trainable - parts[1].trainable == frozen_weights


def test_modules_of_lora_are_checked_in_the_class_with_images(tmp_path: Path) -> None:
    """The class of texts alone had been built, which LLaVA does not have."""
    check_module_names(*_named_modules(tmp_path, ("q_proj",)))
    with pytest.raises(RequestError, match="no_such_proj"):
        check_module_names(*_named_modules(tmp_path, ("no_such_proj",)))


def _named_modules(folder: Path, names: tuple[str, ...]) -> tuple[ModelSource, AdapterOptions]:
    options = AdapterOptions(lora_rank=4, lora_target=names)
    return source_of("Llava", folder, options), options


def test_lora_is_in_the_language_model_alone(tmp_path: Path) -> None:
    tracer = Tracer(source_of("Llava", tmp_path, AdapterOptions(lora_rank=4)))
    trained = [name for name, weight in tracer.full_model(torch.float32).named_parameters() if weight.requires_grad]
    assert trained and all("language_model" in name and "lora_" in name for name in trained)


@pytest.mark.parametrize("name", ["Llava", "Idefics3"])
def test_a_step_with_images_has_the_memory_of_the_models_own(name: str, tmp_path: Path) -> None:
    source = source_of(name, tmp_path)
    length = images_of(source).tokens_per_row + LENGTH
    profile = profile_model(source, sequence_length=length, variants=(EAGER,))
    assert profile.images == images_of(source)
    model = real_model(source)
    model.set_attn_implementation("eager")
    inputs = step_inputs(source, rows=ROWS, length=length)
    plan = Plan(
        device="cpu", host=detect().fingerprint, model=profile.model_hash, sequence_length=length, precision="fp32",
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=1, activation_checkpointing=0, attention="eager",
    )  # fmt: skip
    for recomputed in (0, profile.num_layers):
        recompute_layers(model, recomputed, "full")
        optimizer = build_optimizer(model, plan, Arguments(max_steps=10))

        def step(optimizer: Any = optimizer) -> None:
            (model(**inputs).loss * 0.5).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with allocated_peak("cpu", resident_bytes=tensor_bytes(model, optimizer, *inputs.values())) as peak:
            step()
        assert peak.bytes is not None
        planned = plan.changed(activation_checkpointing=recomputed)
        error = predict_memory(profile, profile.steps[0], planned).peak / peak.bytes - 1
        print(name, recomputed, f"{error:+.2%}")
        assert abs(error) < 0.03, (recomputed, error)


def test_images_leave_a_place_for_text(tmp_path: Path) -> None:
    source = source_of("Llava", tmp_path, images=3)
    places = images_of(source).tokens_per_row
    assert places == 3 * (32 // 8) ** 2
    assert sequence_length_of(source, None) == 512 + places
    with pytest.raises(RequestError, match=rf"--sequence-length {places} leaves no place for text: 3 images of 32 x 32 pixels"):
        sequence_length_of(source, places)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.LlamaConfig(**TEXT, architectures=["LlamaForCausalLM"]), "reads no images beside its text"),
        (transformers.BlipConfig(architectures=["BlipForConditionalGeneration"]), "does not put the features of its images"),
    ],
)
def test_other_models_are_refused_with_images(config: Any, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=words):
        images_of(find_model_to_train(str(tmp_path)).changed(images_per_row=1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--program", "megatron"), "--program megatron is not planned for rows with images; use one of transformers"),
        (("--quick",), "--quick does not work with --images 1"),
        (("--images", "2", "--objective", "dpo"), "--objective does not work with --images 2"),
        (("--images", "2", "--sequence-length", "32"), "2 images of 32 x 32 pixels take 32 tokens of a row"),
    ],
)
def test_what_rows_with_images_do_not_have_is_refused(options: tuple[str, ...], words: str, tmp_path: Path, upshift: Any) -> None:
    source_of("Llava", tmp_path)
    result = upshift("plan", tmp_path, "--on", "8xh100", *options)
    assert result.code == 2
    assert words in " ".join(result.err.split())
