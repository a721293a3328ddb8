"""upshift.load_model gives what transformers' from_pretrained gives, tensor by tensor, and holds less on the way."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.hardware import detect
from upshift.loading.load import load_model
from upshift.units import GIB

WIDTH = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
ENCODER = WIDTH | {"intermediate_size": 48, "max_position_embeddings": 64}
DECODER = ENCODER | {"num_key_value_heads": 2}
EXPERTS = DECODER | {"num_experts_per_tok": 2}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28}
TINY_VISION = VISION | {"patch_size": 14}
LATENT = {  # attention of DeepSeek
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {  # name -> config class, model class, arguments
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "llama, long rope": (
        "LlamaConfig", "LlamaForCausalLM",
        DECODER | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", DECODER | {"head_dim": 8, "sliding_window": 16}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96, "n_positions": 64}),
    "t5": (
        "T5Config", "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", SEQ2SEQ),
    "bert": ("BertConfig", "BertForMaskedLM", ENCODER),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", ENCODER | {"embedding_size": 16}),
    "modernbert": (
        "ModernBertConfig", "ModernBertForMaskedLM", ENCODER | {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "deberta": (
        "DebertaV2Config", "DebertaV2ForSequenceClassification",
        ENCODER | {"relative_attention": True, "pos_att_type": ["c2p"]},
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", TINY_VISION),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS | {"num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", EXPERTS | LATENT | {"num_hidden_layers": 3}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", EXPERTS | {"num_local_experts": 4, "head_dim": 8}),
    "opt": ("OPTConfig", "OPTForCausalLM", WIDTH | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 96}),
    "falcon": ("FalconConfig", "FalconForCausalLM", WIDTH),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", DECODER | {"pad_token_id": 0}),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96}),
    "jamba": (
        "JambaConfig", "JambaForCausalLM",
        EXPERTS | {
            "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "pad_token_id": 0, "use_mamba_kernels": False,
        },
    ),
    "whisper": (
        "WhisperConfig", "WhisperForConditionalGeneration",
        SEQ2SEQ | {"num_mel_bins": 8, "pad_token_id": 0, "max_source_positions": 32, "max_target_positions": 32},
    ),
    "clip": ("CLIPConfig", "CLIPModel", {"text_config": ENCODER, "vision_config": TINY_VISION, "projection_dim": 16}),
    "wav2vec2": (
        "Wav2Vec2Config", "Wav2Vec2ForCTC",
        ENCODER | {
            "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2,
        },
    ),
    "llava": (
        "LlavaConfig", "LlavaForConditionalGeneration",
        {"text_config": DECODER | {"model_type": "llama"}, "image_token_index": 95,
         "vision_config": TINY_VISION | {"model_type": "clip_vision_model"}},
    ),
    "qwen2-vl": (
        "Qwen2VLConfig", "Qwen2VLForConditionalGeneration",
        {"text_config": DECODER | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
         "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Made when first asked for: a model with random weights, written by save_pretrained."""
    home = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = home / name.replace(" ", "-")
        if not path.exists():
            config_class, architecture, arguments = MODELS[name]
            torch.manual_seed(0)
            config = getattr(transformers, config_class)(**arguments)
            getattr(transformers, architecture)(config).save_pretrained(path, max_shard_size="40KB" if len(name) % 2 else "5GB")
        return path

    return folder


def weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def ties(model: PreTrainedModel) -> list[list[str]]:
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return sorted(map(sorted, by_identity.values()))


def assert_same(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    assert type(ours) is type(theirs) and ours.training == theirs.training
    found, expected = weights(ours), weights(theirs)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].requires_grad) == (tensor.dtype, tensor.requires_grad), name
        assert found[name].is_contiguous() == tensor.is_contiguous() and torch.equal(found[name], tensor), name
    assert ties(ours) == ties(theirs)
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.config._attn_implementation == theirs.config._attn_implementation
    generation = [model.generation_config.to_dict() if model.can_generate() else None for model in (ours, theirs)]
    assert generation[0] == generation[1]


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_that_of_transformers(name, dtype, folders):
    path, kind = folders(name), getattr(transformers, MODELS[name][1])
    assert_same(load_model(str(path), dtype=dtype), kind.from_pretrained(path, dtype=dtype or "auto"))


def test_a_model_from_the_weights_of_another_head(folders):
    """The base model from the whole one's files, a classifier from a language model's: what is missing is initialized as
    transformers does, with the same numbers from the same seed."""
    for name, other in (
        ("gpt2", "GPT2Model"), ("bert", "BertModel"), ("bert", "BertForSequenceClassification"), ("t5", "T5EncoderModel"),
    ):  # fmt: skip
        path, kind = folders(name), getattr(transformers, other)
        torch.manual_seed(1)
        ours = load_model(str(path), model_class=kind)
        torch.manual_seed(1)
        assert_same(ours, kind.from_pretrained(path))
    auto = load_model(str(folders("vit")), model_class=transformers.AutoModelForImageClassification)
    assert_same(auto, transformers.ViTForImageClassification.from_pretrained(folders("vit")))
    with pytest.raises(RequestError, match="AutoModelForCausalLM has no class"):
        load_model(str(folders("vit")), model_class=transformers.AutoModelForCausalLM)


@pytest.fixture
def llama(folders, tmp_path):
    """A copy of its folder, in one file, to be changed."""
    transformers.LlamaForCausalLM.from_pretrained(folders("llama")).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_missing_and_unexpected_weights_of_an_asked_class_are_reported_as_by_transformers(llama, caplog):
    stored = load_file(llama / "model.safetensors")
    stored["nobody.weight"] = stored.pop("model.norm.weight")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, llama / "model.safetensors")
    reports, models = [], []
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)
    try:
        model_class = transformers.LlamaForCausalLM
        for load in (lambda: load_model(str(llama), model_class=model_class), lambda: model_class.from_pretrained(llama)):
            caplog.clear()
            torch.manual_seed(1)
            models.append(load())
            reports.append(caplog.text.partition("LOAD REPORT")[2])
    finally:
        logger.removeHandler(caplog.handler)
    assert "MISSING" in reports[0] and "UNEXPECTED" in reports[0]
    assert [line.split("|")[:2] for line in reports[0].splitlines()] == [line.split("|")[:2] for line in reports[1].splitlines()]
    assert_same(*models)


def test_a_weight_of_another_shape_is_one_error_before_anything_is_read(llama):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(RequestError, match=r"mlp\.\w+_proj\.weight is \[.*\] in the files and \[.*\] in the model, and 5 more"):
        load_model(str(llama))


def test_experts_that_do_not_become_one_tensor_are_an_error(folders, tmp_path):
    transformers.MixtralForCausalLM.from_pretrained(folders("mixtral")).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(name for name in stored if ".experts.1.w1" in name)
    stored[name] = stored[name][:-1].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match="do not become model.layers.0.mlp.experts.gate_up_proj"):
        load_model(str(tmp_path))


def test_what_cannot_be_loaded_is_one_error(llama):
    for options, message in (
        ({"dtype": "int7"}, "dtype 'int7' cannot compute a model; use one of auto, float32"),
        ({"quantize": "int3"}, "quantize='int3' is not known; use int8 or int4"),
    ):
        with pytest.raises(RequestError, match=message):
            load_model(str(llama), **options)
    (llama / "model.safetensors").unlink()
    with pytest.raises(RequestError, match="model.safetensors"):
        load_model(str(llama))


def test_training_in_place_never_writes_to_the_file(llama):
    before = (llama / "model.safetensors").read_bytes()
    model = load_model(str(llama)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(16)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert (llama / "model.safetensors").read_bytes() == before
    assert load_model(str(llama)).model.norm.weight.max() == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process has mapped")
def test_one_mapping_for_each_file(folders):
    """Linux maps 65,530 stretches of a process at most, and models have had more tensors."""
    path = folders("llama")
    model = load_model(str(path))
    shards, mapped = list(path.glob("*.safetensors")), Path("/proc/self/maps").read_text()
    assert len(shards) > 1 and len(model.state_dict()) > 2 * len(shards)
    assert [mapped.count(str(shard)) for shard in shards] == [1] * len(shards)


def test_a_saved_copy_has_the_names_that_it_was_loaded_from(folders, tmp_path):
    model = load_model(str(folders("qwen3-moe")))
    model.save_pretrained(tmp_path / "ours")
    transformers.Qwen3MoeForCausalLM.from_pretrained(folders("qwen3-moe")).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and "model.layers.0.mlp.experts.0.up_proj.weight" in ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("bits", "library"), [("int8", "torchao"), ("int4", "bitsandbytes")])
def test_quantized_on_the_way_as_transformers_does(bits, library, tmp_path):
    pytest.importorskip(library)
    ids = torch.arange(8)[None]
    for name in ("llama, tied", "mixtral"):
        config_name, class_name, fields = MODELS[name]
        model_class, folder = getattr(transformers, class_name), tmp_path / name
        # bitsandbytes' kernels of CPUs with bf16 take no fewer inputs than a block of 64.
        config = getattr(transformers, config_name)(**fields | {"hidden_size": 64, "intermediate_size": 128})
        model_class(config).save_pretrained(folder)
        ours = load_model(str(folder), quantize=bits)
        config = ours.config.quantization_config
        theirs = model_class.from_pretrained(folder, quantization_config=config)
        assert type(ours.model.layers[0].self_attn.q_proj.weight) is type(theirs.model.layers[0].self_attn.q_proj.weight)
        with torch.no_grad():
            assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_what_is_stored_quantized_is_loaded_by_transformers(folders, tmp_path):
    pytest.importorskip("torchao")
    load_model(str(folders("llama")), quantize="int8").save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    again, first = load_model(str(tmp_path)), load_model(str(folders("llama")), quantize="int8")
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, first(input_ids=ids).logits)
    with pytest.raises(RequestError, match="quantized already"):
        load_model(str(tmp_path), quantize="int8")


@pytest.mark.parametrize("kind", ["files", "placed", "quantized now", "stored quantized"])
def test_progress_is_in_bytes_and_ends_with_all_of_them(kind, folders, tmp_path):
    seen: list[tuple[int, int]] = []
    folder, options = folders("mixtral"), {"dtype": "bfloat16"}
    if kind == "placed":
        options = {"device_map": "auto"}
    if "quantized" in kind:
        pytest.importorskip("torchao")
        folder, options = folders("llama"), {"quantize": "int8"}
    if kind == "stored quantized":
        load_model(str(folder), quantize="int8").save_pretrained(tmp_path)
        folder, options = tmp_path, {}
    load_model(str(folder), **options, progress=lambda done, total: seen.append((done, total)))
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] <= total < 1.3 * seen[-1][1]


def test_progress_ends_with_all_that_is_read_where_tensors_are_skipped(folders, tmp_path):
    """One stored tensor belongs to no part of the model, and one weight stays empty."""
    seen: list[tuple[int, int]] = []
    tensors = {name: tensor for file in folders("llama").glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file(tensors | {"of_another_model.weight": torch.zeros(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folders("llama") / "config.json", tmp_path)
    load_model(str(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(tensor.nbytes for tensor in tensors.values())


MEASURE = """
import gc, json, sys
sys.path.insert(0, sys.argv[1])
from load_run import run
found = []
for dtype in ("float32", "bfloat16"):
    found.append(run({"model": sys.argv[2], "contender": "upshift", "dtype": dtype, "cold": False, "tokens": 4, "options": {}}))
    gc.collect()
print(json.dumps(found))
"""


def test_memory_of_loading_two_gigabytes(tmp_path):
    """Load and first forward pass of 2 GB in fp32: as they are, nothing but the files' pages; in bf16, the converted model and a
    piece. The files have holes in place of numbers, which are read into as many pages."""
    free = detect().cpu
    if not sys.platform.startswith("linux") or free is None or (free.free_memory_bytes or 0) < 6 * GIB:
        pytest.skip("needs Linux and 6 GiB of free memory")
    cases = Path(__file__).parents[3] / "benchmarks" / "cases"
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=9, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=16_000, architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {name: list(weight.shape) for name, weight in transformers.LlamaForCausalLM(config).state_dict().items()}
    header, total = {}, 0
    for name, shape in shapes.items():
        nbytes = 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [total, total + nbytes]}
        total += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + total)
    child = subprocess.run([sys.executable, "-c", MEASURE, cases, tmp_path], capture_output=True, text=True, check=True)
    same, converted = json.loads(child.stdout.splitlines()[-1])
    assert total > 1.9e9
    assert same["load anonymous"] < 0.05 * total and same["anonymous"] < 0.05 * total and same["resident"] < 1.05 * total
    assert converted["load resident"] < 1.05 * total / 2 and converted["resident"] < 1.08 * total / 2


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ({"quant_method": "sparser"}, "which transformers"),
        ({"bits": 4}, "has no quant_method"),
        ({"quant_method": "gptq"}, "gptq"),
    ],
)
def test_quantized_weights_that_nothing_here_reads_are_one_line(tmp_path: Path, stored: dict[str, object], text: str) -> None:
    """transformers itself only warns of an unknown method, and reads the codes as weights."""
    save_quantized(tmp_path, stored)
    with pytest.raises(RequestError, match=text) as refused:
        load_model(str(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in fp8")
def test_weights_in_fp8_are_said_to_be_computed_wider(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = save_quantized(tmp_path, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]})
    name = "model.layers.0.mlp.up_proj.weight"
    weights |= {key: tensor.to(torch.float8_e4m3fn) for key, tensor in weights.items() if key.endswith("proj.weight")}
    scales = {f"{key}_scale_inv": torch.full(_blocks(tensor), 2.0) for key, tensor in weights.items() if "proj" in key}
    save_file({**weights, **scales}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(tmp_path))
    assert torch.equal(model.get_parameter(name).float(), 2.0 * weights[name].float())
    assert "are stored in fp8 and computed in float32" in caplog.text


def _blocks(tensor: torch.Tensor) -> tuple[int, int]:
    return -(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16)


def save_quantized(folder: Path, stored: dict[str, object]) -> dict[str, torch.Tensor]:
    """Save a tiny model whose config says that its weights are quantized. Return the weights."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": stored}))
    return load_file(folder / "model.safetensors")
