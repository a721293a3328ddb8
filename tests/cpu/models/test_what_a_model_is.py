"""What a model is: the class that its config names, its config decoded as transformers decodes it, and files that hold its
weights; on every road the same answer."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto

import upshift
from upshift.errors import RequestError
from upshift.inference.encoding.engines.base import check_encodes
from upshift.inference.encoding.model_config import is_encoder, read_encoding_config
from upshift.inference.generation.model import check_weights as check_generates
from upshift.inference.generation.model import generation_task
from upshift.models.build import choose_class, find_architecture
from upshift.models.config import config_text, decode_floats, encode_floats, heads_of, padding_of, positions_in, text_configs
from upshift.models.profile_cache import positions_of
from upshift.models.source import ModelSource, find_model
from upshift.training.prepare import check_weights as check_trains

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 96}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = transformers.LlamaConfig(**SMALL, **TOKENS)
BERT = transformers.BertConfig(**SMALL)
T5 = transformers.T5Config(d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=96)
MEGATRON = transformers.MegatronBertConfig(**SMALL)


def saved(model_class: type, config: PretrainedConfig, folder: Path, **changed: Any) -> Path:
    """``changed``: what its config.json says otherwise; None: nothing."""
    model_class(config).save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({name: value for name, value in written.items() if value is not None}))
    return folder


def every_config() -> list[PretrainedConfig]:
    """Of the installed transformers, all that are made without arguments."""
    return [config for model_type in transformers.CONFIG_MAPPING if (config := default_config(model_type)) is not None]


def default_config(model_type: str) -> PretrainedConfig | None:
    try:
        return transformers.CONFIG_MAPPING[model_type]()
    except Exception:  # each class has its own kinds for a config that needs parts, as encoder-decoder does
        return None


def test_sizes_of_layers_that_differ_are_the_largest() -> None:
    """transformers raises where one value is asked for all of them."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "per_layer_config": {1: {"head_dim": 32}}}
    config = transformers.Gemma4UnifiedTextConfig(**SMALL, **TOKENS, num_key_value_heads=1, head_dim=16, **layers)
    with pytest.raises(RuntimeError, match="head_dim"):
        _ = config.head_dim
    assert heads_of(config) == (2, 1, 32)


def test_every_config_is_decoded_as_by_transformers() -> None:
    configs, tagged = every_config(), 0
    assert len(configs) > 400
    for config in configs:
        text = config.to_json_string(use_diff=False)
        tagged += "__float__" in text
        written = json.loads(text)
        assert repr(decode_floats(written)) == repr(PretrainedConfig._decode_special_floats(written)), config.model_type
        assert repr(decode_floats(json.loads(config_text(decode_floats(written))))) == repr(decode_floats(written))
    assert tagged >= 4, "some configs have such numbers"
    odd = {"a": [math.inf, -math.inf, {"b": math.nan}], "c": {"__float__": "other"}, "d": {"__float__": "NaN", "e": 1}}
    assert encode_floats(odd) == PretrainedConfig._encode_special_floats(odd)
    assert repr(decode_floats(encode_floats(odd))) == repr(odd)


@pytest.mark.parametrize("model_type", ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_numbers_that_json_has_not(model_type: str, tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    assert '"Infinity"' in (tmp_path / "config.json").read_text()
    source, theirs = find_model(str(tmp_path)), AutoConfig.from_pretrained(tmp_path)
    again = ModelSource.from_json(source.to_json())
    assert again == source and again.model_hash == source.model_hash and "Infinity" in source.to_json()
    for ours in (source.hf_config, again.hf_config, source.changed(reference="m").hf_config):
        assert {**vars(ours), "_name_or_path": ""} == {**vars(theirs), "_name_or_path": ""}


TEXT = {**SMALL, "num_key_value_heads": 1, "max_position_embeddings": 48, "pad_token_id": 3}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
COMPOSITES: dict[str, PretrainedConfig] = {  # the text config inside, at several depths
    "text_config": transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config={**VISION, "model_type": "clip_vision_model"}
    ),
    "thinker_config.text_config": transformers.Qwen2_5OmniConfig(thinker_config={"text_config": TEXT}),
    "a model of a model": transformers.LlavaOnevisionConfig(
        text_config={**TEXT, "model_type": "qwen2"}, vision_config={**VISION, "model_type": "siglip_vision_model"}
    ),
    "decoder": transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**SMALL, max_position_embeddings=80), transformers.LlamaConfig(**TEXT)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSITES)
def test_every_question_about_a_composite_has_the_answer_of_its_text_part(name: str) -> None:
    config, inside = COMPOSITES[name], transformers.LlamaConfig(**TEXT)
    text = text_configs(config)[-1]
    assert text is config.get_text_config(decoder=True)
    assert heads_of(text) == heads_of(inside) == (2, 1, 16)
    assert positions_in(text) == 48 and padding_of(text) == 3 and text.vocab_size == 96 and text.num_hidden_layers == 2


def test_positions_are_those_of_the_shorter_of_two_models(tmp_path: Path) -> None:
    """The decoder's config has more than the encoder reads, or fewer."""
    for encoder, decoder in ((24, 80), (80, 24)):
        parts = [transformers.BertConfig(**SMALL, max_position_embeddings=limit) for limit in (encoder, decoder)]
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts, decoder_start_token_id=1, pad_token_id=0)
        config.architectures = ["EncoderDecoderModel"]
        config.save_pretrained(tmp_path / str(encoder))
        assert positions_of(find_model(str(tmp_path / str(encoder)))) == 24


PART = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NOT_TRAINED = {  # by the class that the config names
    "CLIPModel": transformers.CLIPConfig(
        text_config={**PART, "vocab_size": 64}, vision_config={**PART, "image_size": 8, "patch_size": 4}
    ),
    "SiglipModel": transformers.SiglipConfig(
        text_config={**PART, "vocab_size": 64}, vision_config={**PART, "image_size": 8, "patch_size": 4}
    ),
    "SegformerForSemanticSegmentation": transformers.SegformerConfig(),
    "BertModel": BERT, "LlamaModel": LLAMA, "BertForPreTraining": BERT, "BertForMultipleChoice": BERT, "T5EncoderModel": T5,
    "MllamaForConditionalGeneration": transformers.MllamaConfig(),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_TRAINED)
def test_a_class_is_never_taken_for_another(name: str) -> None:
    config = NOT_TRAINED[name]
    config.architectures = [name]
    found = find_architecture(config, "m")
    assert (found.model_class.__name__, found.objective) == (name, None)
    with pytest.raises(RequestError, match=f"'m' \\({name}\\)"):
        choose_class(config, "m")


def test_every_class_that_is_named_is_the_class() -> None:
    """Of every table of transformers' auto classes. A class that is made for a part of the config is refused."""
    tables = [table for name, table in vars(modeling_auto).items() if name.startswith("MODEL_") and name.endswith("_NAMES")]
    pairs = {(kind, name) for table in tables for kind, names in table.items() for name in as_tuple(names)}
    configs = {model_type: default_config(model_type) for model_type, _ in pairs if model_type in transformers.CONFIG_MAPPING}
    count = 0
    for model_type, name in sorted(pairs):
        config, model_class = configs.get(model_type), getattr(transformers, name, None)
        if config is None or not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
            continue
        config.architectures = [name]
        if model_class.config_class in config.sub_configs.values():
            with pytest.raises(RequestError, match="which is of another"):
                find_architecture(config, "m")
        else:
            assert find_architecture(config, "m").model_class is model_class
            count += 1
    assert count > 900


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


REFUSED = {
    "a class that transformers has not": (
        {"architectures": ["LLaMAForCausalLM"]}, "is a LLaMAForCausalLM, which is not in transformers.*LlamaForCausalLM",
    ),
    "a class of another type": (
        {"architectures": ["MistralForCausalLM"]}, "model_type 'llama' and architectures 'MistralForCausalLM'",
    ),
    "code beside the weights": (
        {"architectures": ["MyForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_my.MyForCausalLM"}},
        "is a MyForCausalLM, which is Python code beside the weights",
    ),
    "code beside the weights, and no architectures": (
        {"architectures": None, "auto_map": {"AutoModelForCausalLM": "modeling_my.MyForCausalLM"}},
        "is a MyForCausalLM, which is Python code beside the weights",
    ),
    "a type that is beside the weights": (
        {"model_type": "my", "auto_map": {"AutoConfig": "x--configuration_my.MyConfig"}},
        "model_type 'my'.*configuration_my.MyConfig",
    ),
    "another class's weights": (
        {"architectures": ["LlamaForTokenClassification"]}, "lack .*% of the weights of LlamaForTokenClassification",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_refused_on_every_road(case: str, tmp_path: Path) -> None:
    changed, words = REFUSED[case]
    folder = str(saved(transformers.LlamaForCausalLM, LLAMA, tmp_path, **changed))
    roads: dict[str, Any] = {
        "load_model": lambda: upshift.load_model(folder),
        "train": lambda: check_trains(find_model(folder)),
        "encode": lambda: check_encodes(find_model(folder), read_encoding_config(find_model(folder))),
        "generate": lambda: (generation_task(find_model(folder)), check_generates(find_model(folder))),
    }
    said = {}
    for road, run in roads.items():
        with pytest.raises(RequestError) as refused:
            run()
        said[road] = str(refused.value)
    if case == "another class's weights":  # what it does is asked before its files are
        words = "LlamaForTokenClassification"
    assert [road for road, text in said.items() if not re.search(words, text)] == [], said


def test_a_config_that_names_no_class_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(transformers.LlamaForCausalLM, LLAMA, tmp_path, architectures=None)
    assert type(upshift.load_model(str(folder))) is transformers.LlamaForCausalLM
    assert generation_task(find_model(str(folder))) == "generate"
    said = [record.message for record in caplog.records if "is taken for LlamaForCausalLM" in record.message]
    assert len(said) == 1 and str(folder) in said[0]


def damaged(folder: Path, *names: str, **more: torch.Tensor) -> Path:
    stored = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if name not in names}
    save_file(kept | more, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_missing_weights_are_never_random(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(transformers.LlamaForCausalLM, LLAMA, tmp_path)
    source = find_model(str(damaged(folder, "lm_head.weight")))
    check_encodes(source, read_encoding_config(source))  # the states do not depend on it
    for run in (lambda: upshift.load_model(str(folder)), lambda: check_trains(source), lambda: check_generates(source)):
        with pytest.raises(RequestError, match=r"lack 13\.0% of the weights of LlamaForCausalLM \(lm_head.weight\)"):
            run()
    damaged(folder, "model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(RequestError, match="of LlamaModel .*norm.weight"):
        check_encodes(source, read_encoding_config(source))
    loaded = upshift.load_model(str(folder), model_class=transformers.LlamaForCausalLM)  # the class is the caller's choice
    assert loaded.model.norm.weight.min() == 1.0


def test_weights_that_nobody_uses_are_said_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(transformers.LlamaForCausalLM, LLAMA, tmp_path)
    damaged(folder, **{"other.weight": torch.zeros(50, 32)})
    upshift.load_model(str(folder))
    assert any("belong to no part of LlamaForCausalLM (other.weight)" in record.message for record in caplog.records)
    damaged(folder, **{"other.weight": torch.zeros(5000, 32)})
    with pytest.raises(RequestError, match=r"8\d\.\d% of the weights .* belong to no part of LlamaForCausalLM \(other.weight\)"):
        upshift.load_model(str(folder))


ENCODERS = {  # what is saved, what the config names: texts become vectors with it, whatever head it has
    "BertForMaskedLM": (transformers.BertForMaskedLM, BERT, "BertModel"),
    "BertModel": (transformers.BertModel, BERT, "BertModel"),
    "LlamaModel": (transformers.LlamaModel, LLAMA, "LlamaModel"),
    "T5EncoderModel": (transformers.T5EncoderModel, T5, "T5Stack"),
    # Its files have no pooler, and the model inside makes a mask of its own where it is given none.
    "MegatronBertForMaskedLM": (transformers.MegatronBertForMaskedLM, MEGATRON, "MegatronBertModel"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_are_those_of_the_model_inside(name: str, tmp_path: Path) -> None:
    from upshift.inference.encoding.engines.base import load_forward

    model_class, config, inside = ENCODERS[name]
    folder = saved(model_class, config, tmp_path)
    source = find_model(str(folder))
    assert is_encoder(source)
    recipe = read_encoding_config(source)
    check_encodes(source, recipe)
    forward = load_forward(source, recipe)
    assert type(forward.model).__name__ == inside
    ids = torch.tensor([[3, 4, 5, 6]])
    reference = model_class.from_pretrained(folder).eval()
    states = reference.base_model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    assert torch.allclose(forward(ids, torch.ones_like(ids)), states, atol=1e-6)


def test_a_model_that_looks_at_its_numbers_is_refused_in_words(tmp_path: Path) -> None:
    config = transformers.XLMConfig(vocab_size=96, emb_dim=32, n_layers=2, n_heads=2, max_position_embeddings=64)
    folder = saved(transformers.XLMWithLMHeadModel, config, tmp_path)
    words = r"XLMModel \(modeling_xlm.py:\d+\) looks at the numbers in its tensors.*transformers.Trainer"
    with pytest.raises(RequestError, match=words) as told:
        upshift.inspect(str(folder), sequence_length=32)
    assert "Exception" not in str(told.value)


def test_a_layer_that_is_computed_again_saves_its_input_alone(tmp_path: Path) -> None:
    """Autocast's copies of its weights are freed after the forward pass. Those of other layers stay for the backward pass."""
    saved: dict[str, list[int]] = {"bf16": [], "fp32": []}
    for num_layers in (1, 3):
        config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": num_layers}, **TOKENS)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(tmp_path / str(num_layers))
        for row in upshift.inspect(str(tmp_path / str(num_layers)), sequence_length=4).activations[:2]:
            assert row.whole_model_recomputed is not None
            saved[row.precision.partition(",")[0]].append(row.whole_model_recomputed)
    growth = [many - few for few, many in saved.values()]
    assert len(growth) == 2
    assert all(0 < size <= 2 * 4 * SMALL["hidden_size"] * 4 for size in growth)  # two layers, four tokens, at most four bytes


def test_a_model_runs_at_the_positions_of_its_config_and_at_no_more(tmp_path: Path) -> None:
    """MPT's ALiBi is a table of ``max_seq_len`` entries."""
    config = transformers.MptConfig(d_model=32, n_heads=2, n_layers=1, max_seq_len=24, vocab_size=96)
    config.architectures = ["MptForCausalLM"]
    config.save_pretrained(tmp_path)
    limit = positions_of(find_model(str(tmp_path)))
    assert limit == 24
    with torch.device("meta"):
        model = transformers.MptForCausalLM(config)
        model(input_ids=torch.ones(1, limit, dtype=torch.long))
        with pytest.raises(RuntimeError):
            model(input_ids=torch.ones(1, limit + 1, dtype=torch.long))
