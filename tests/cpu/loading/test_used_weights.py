"""A weight that the files lack is a reason to refuse them if the result depends on it, and none otherwise.

The reference is transformers: each kind of weight is changed in its model, and the result changes or does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from upshift.errors import RequestError
from upshift.inference.encoding.engines import base
from upshift.inference.encoding.model_config import read_encoding_config
from upshift.inference.media import model as media
from upshift.models.source import ModelSource, find_model

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = {**SIZES, "vocab_size": 96, "max_position_embeddings": 80, "pad_token_id": 0}
LAYERS = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
LED = {
    "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96, "pad_token_id": 0,
    "attention_window": [8, 8], **dict.fromkeys(LAYERS, 2),
}  # fmt: skip
SPEECH = {
    **SIZES, "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 40,
}  # fmt: skip
VISION = {**SIZES, "image_size": 32, "patch_size": 8}
GLM_MOE = {
    **TEXT, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": TEXT,
    "BertForTokenClassification": TEXT,
    "BertForSequenceClassification": TEXT,
    "LongformerForMaskedLM": {**TEXT, "attention_window": 8},  # its code looks at the numbers in its tensors
    "LEDForConditionalGeneration": LED,  # so does this
    "PegasusForConditionalGeneration": {key: value for key, value in LED.items() if key != "attention_window"},  # frozen weights
    "Glm4MoeForCausalLM": GLM_MOE,  # a bias of the router only chooses experts
    "Wav2Vec2ForCTC": SPEECH,  # the vector that hides moments is for training
    "HubertForSequenceClassification": SPEECH,
    "ViTForImageClassification": VISION,
}  # fmt: skip


class Made(NamedTuple):
    """A saved model, how Upshift checks its files, and how transformers computes its result from a whole model."""

    source: ModelSource
    whole: Any
    model: Any  # the part that gives the result
    check: Callable[[], None]
    run: Callable[[Any], torch.Tensor]


def make(name: str, folder: Path) -> Made:
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**MODELS[name])).eval()
    model.save_pretrained(folder)
    source = find_model(str(folder))
    kind = model.main_input_name
    if kind == "input_values":
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    elif kind == "pixel_values":
        pytest.importorskip("PIL", reason="Pillow, which reads images, is not installed")
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    if kind == "input_ids":
        recipe = read_encoding_config(source)
        gives_states = recipe.output == "embeddings"
        inside = model.base_model if gives_states else model
        encoder = inside.get_encoder() if inside.config.is_encoder_decoder else inside
        ids = torch.arange(5, 55).reshape(2, 25)
        mask = torch.ones_like(ids)
        mask[1, 20:] = 0

        def states(_: Any) -> torch.Tensor:
            return encoder(input_ids=ids, attention_mask=mask)[0]

        return Made(source, model, inside, lambda: base.check_encodes(source, recipe), states)
    config = media.read_media_config(source)
    given = torch.randn(1, 8000) if kind == "input_values" else torch.rand(1, 3, 32, 32)
    keeps_states = config.kind == "pooled output"

    def run(whole: Any) -> torch.Tensor:
        return (whole.base_model if keeps_states else whole)(given)[0]

    return Made(source, model, model, lambda: media.check_weights(source, config), run)


def kinds_of(model: torch.nn.Module) -> dict[str, list[str]]:
    """The names of the parameters by their name without numbers."""
    kinds: dict[str, list[str]] = {}
    for name, weight in model.named_parameters():
        if weight.is_floating_point():
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return kinds


@torch.no_grad()
def changes_result(made: Made, names: list[str], before: torch.Tensor) -> bool:
    """Whether other values of some parameters give another result."""
    weights = [made.model.get_parameter(name) for name in names]
    kept = [weight.clone() for weight in weights]
    for weight in weights:
        weight.add_(30 * torch.randn_like(weight))
    after = made.run(made.model)
    for weight, values in zip(weights, kept, strict=True):
        weight.copy_(values)
    return not torch.equal(before, after)


def aliases(model: torch.nn.Module, names: list[str]) -> set[str]:
    """All names of some parameters, of which several may share one tensor."""
    places = {model.get_parameter(name).data_ptr() for name in names}
    return {name for name, tensor in model.state_dict().items() if tensor.data_ptr() in places}


def save_without(made: Made, names: list[str]) -> None:
    """Save the whole model without some weights of the part that gives the result."""
    places = {made.model.get_parameter(name).data_ptr() for name in names}
    kept = {name: tensor for name, tensor in made.whole.state_dict().items() if tensor.data_ptr() not in places}
    made.whole.save_pretrained(made.source.directory, state_dict=kept)


def evenly(names: list[str], count: int) -> Iterator[str]:
    return (names[index] for index in sorted({round(index * (len(names) - 1) / (count - 1)) for index in range(count)}))


@pytest.mark.parametrize("name", MODELS)
def test_only_weights_that_the_result_depends_on_must_be_in_the_files(name: str, tmp_path: Path) -> None:
    made = make(name, tmp_path)
    with torch.no_grad():
        before = made.run(made.model)
    kinds = kinds_of(made.model)
    used = [kind for kind, names in kinds.items() if changes_result(made, names, before)]
    frozen = {name for name, weight in made.model.named_parameters() if not weight.requires_grad}  # no gradient shows their use
    save_without(made, [name for kind, names in kinds.items() if kind not in used for name in names if name not in frozen])
    made.check()
    for kind in evenly(used, 4):
        lacking = kinds[kind][-1]
        save_without(made, [lacking])
        names = "|".join(map(re.escape, aliases(made.model, [lacking])))
        with pytest.raises(RequestError, match=f"lack .* of the weights of .*({names})"):
            made.check()


def test_without_gradients_every_weight_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make("BertForMaskedLM", tmp_path)
    monkeypatch.setattr(transformers.BertModel, "forward", torch.no_grad()(transformers.BertModel.forward))
    with pytest.raises(RequestError, match="pooler.dense.weight"):
        made.check()
