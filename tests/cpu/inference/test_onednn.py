"""oneDNN's engine: encoders of many architectures give transformers' states, in fp32 and in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from upshift.errors import RequestError
from upshift.inference.encoding.engines.base import Batch, EncoderBuild
from upshift.inference.encoding.engines.onednn_engine import OneDnnEngine
from upshift.inference.encoding.engines.torch_engine import TorchEngine
from upshift.inference.encoding.model_config import read_encoding_config
from upshift.inference.race.types import cosines
from upshift.inference.registry import EngineSetup
from upshift.inference.weights import find_weights

SMALL = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Albert": {"embedding_size": 16},  # one layer's weights for all
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "MPNet": {},
    "MobileBert": {"embedding_size": 16, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "ModernBert": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},  # rotary, sliding windows
    "DebertaV2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"]},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8},  # causal, fewer heads of keys
    "FNet": {},  # Fourier transforms for attention, which bf16 has none of
}
WITHIN = {"fp32": 1e-5, "bf16": 3e-2}  # of the largest state
LOWEST = {"fp32": 0.999999, "bf16": 0.999}  # cosine of the states of the token that agrees least


def batches() -> list[Batch]:
    ids = np.random.default_rng(0).integers(5, 99, (4, 40))
    mask = np.ones_like(ids)
    mask[1, 30:] = mask[2, 3:] = 0
    return [Batch(ids, mask, [0, 1, 2, 3]), Batch(ids[:1, :7], mask[:1, :7], [0])]


def outputs(engine: type[Any], folder: Path, precision: Any, *, hint: Any = "throughput") -> list[np.ndarray]:
    source = find_weights(str(folder))
    setup = EngineSetup(engine="torch", precision=precision, threads=2, batch=256, hint=hint)
    built = engine(EncoderBuild(source, read_encoding_config(source), setup, folder, []))
    return [found for _, found in built.outputs(batches())]


@pytest.fixture(params=ARCHITECTURES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = getattr(transformers, f"{request.param}Config")(**SMALL | ARCHITECTURES[request.param])
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp(request.param)
    transformers.AutoModel.from_config(config).save_pretrained(made)
    return made


@pytest.mark.parametrize("precision", WITHIN)
def test_states_are_those_of_transformers(folder: Path, precision: Any) -> None:
    expected = outputs(TorchEngine, folder, "fp32")
    if "FNet" in folder.name and precision == "bf16":
        with pytest.raises(RequestError, match="torch.export cannot take .* with batches of any size: .*BFloat16"):
            outputs(OneDnnEngine, folder, precision)
        return
    try:
        states = outputs(OneDnnEngine, folder, precision)
    except RequestError as refusal:
        assert precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported(), refusal
        pytest.skip(str(refusal))
    for found, right, batch in zip(states, expected, batches(), strict=True):
        real = batch.mask > 0
        assert found.shape == right.shape and found.dtype == np.float32
        assert np.abs(found - right)[real].max() < WITHIN[precision] * np.abs(right[real]).max()
        assert cosines(found[real], right[real]).min() > LOWEST[precision]


def test_a_text_alone_takes_all_cores(tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    for found, right in zip(
        outputs(OneDnnEngine, tmp_path, "fp32", hint="latency"), outputs(OneDnnEngine, tmp_path, "fp32"), strict=True
    ):
        np.testing.assert_allclose(found, right, atol=1e-6)
