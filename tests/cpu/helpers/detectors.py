"""Tiny models that find objects in images, with their image processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": [32, 40],
         "patch_size": 8, "num_detection_tokens": 5, "use_mid_position_embeddings": False, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}  # fmt: skip
BACKBONE = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}
DETR = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_queries": 5, "dropout": 0.0}  # fmt: skip


def save_detector(folder: Path, kind: str, *labels: str) -> Path:
    """Write a detector of a kind: "yolos" or "detr"."""
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
    torch.manual_seed(0)
    if kind == "yolos":
        model: Any = transformers.YolosForObjectDetection(transformers.YolosConfig(**SIZES, **names))
        processor: Any = transformers.YolosImageProcessor(size={"shortest_edge": 32, "longest_edge": 40})
    else:
        backbone = transformers.ResNetConfig(**BACKBONE)
        model = transformers.DetrForObjectDetection(transformers.DetrConfig(backbone_config=backbone, **DETR, **names))
        processor = transformers.DetrImageProcessor(size={"shortest_edge": 32, "longest_edge": 40})
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
