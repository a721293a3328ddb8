"""Tiny models that segment images, with their image processors, and images with label images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

SIZE = {"height": 32, "width": 32}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 2,
        "drop_path_rate": 0.0, "out_features": ["stage1", "stage2", "stage3", "stage4"]}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "layer_type": "basic",
          "out_features": ["stage1", "stage2", "stage3", "stage4"]}  # fmt: skip
VIT = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 32,
       "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
QUERIES = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16, "encoder_layers": 1,
           "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 16, "num_queries": 6, "dropout": 0.0,
           "train_num_points": 64}  # fmt: skip


def _segformer(names: dict[str, Any]) -> Any:
    sizes = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "sr_ratios": [2, 1], "strides": [4, 2],
             "patch_sizes": [7, 3], "mlp_ratios": [2, 2], "num_encoder_blocks": 2, "decoder_hidden_size": 16}  # fmt: skip
    dropout = {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
    return transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**sizes, **dropout, **names))


def _beit(names: dict[str, Any]) -> Any:
    config = transformers.BeitConfig(
        **VIT, out_indices=[1, 2, 3, 4], pool_scales=[1, 2], drop_path_rate=0.0, auxiliary_channels=8, **names
    )
    return transformers.BeitForSemanticSegmentation(config)


def _dpt(names: dict[str, Any]) -> Any:
    config = transformers.DPTConfig(
        **VIT, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
        semantic_classifier_dropout=0.0, **names,
    )  # fmt: skip
    return transformers.DPTForSemanticSegmentation(config)


def _tipsv2(names: dict[str, Any]) -> Any:
    sizes = {name: size for name, size in VIT.items() if "prob" not in name}
    backbone = {"model_type": "tipsv2_vision_model", "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False, **sizes}
    config = transformers.Tipsv2DptConfig(backbone_config=backbone, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, **names)
    return transformers.Tipsv2DptForSemanticSegmentation(config)


def _upernet(names: dict[str, Any]) -> Any:
    backbone = transformers.SwinConfig(**SWIN)
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=8, pool_scales=[1, 2], auxiliary_in_channels=32, auxiliary_channels=8, **names
    )
    return transformers.UperNetForSemanticSegmentation(config)


def _mobilevit(names: dict[str, Any]) -> Any:
    config = transformers.MobileViTConfig(
        hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16], num_attention_heads=2, image_size=32,
        aspp_out_channels=8, atrous_rates=[2, 4, 6], hidden_dropout_prob=0.0, classifier_dropout_prob=0.0,
        aspp_dropout_prob=0.0, **names,
    )  # fmt: skip
    return transformers.MobileViTForSemanticSegmentation(config)


def _maskformer(names: dict[str, Any]) -> Any:
    detr = transformers.DetrConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, num_queries=6, dropout=0.0,
    )  # fmt: skip
    config = transformers.MaskFormerConfig(
        fpn_feature_size=32, mask_feature_size=16, backbone_config=transformers.SwinConfig(**SWIN), decoder_config=detr, **names
    )
    return transformers.MaskFormerForInstanceSegmentation(config)


def _mask2former(names: dict[str, Any]) -> Any:
    backbone = transformers.SwinConfig(**SWIN)
    return transformers.Mask2FormerForUniversalSegmentation(
        transformers.Mask2FormerConfig(backbone_config=backbone, **QUERIES, **names)
    )


def _eomt(names: dict[str, Any]) -> Any:
    config = transformers.EomtConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=8, num_blocks=1, num_queries=6,
        num_upscale_blocks=1, train_num_points=64, num_register_tokens=0, **names,
    )  # fmt: skip
    return transformers.EomtForUniversalSegmentation(config)


def _oneformer(names: dict[str, Any]) -> Any:
    sizes = {"conv_dim": 32, "mask_dim": 32, "query_dec_layers": 1, "text_encoder_width": 16, "text_encoder_num_layers": 1}
    queries = {name: size for name, size in QUERIES.items() if name not in ("feature_size", "mask_feature_size")}
    return transformers.OneFormerForUniversalSegmentation(
        transformers.OneFormerConfig(backbone_config=transformers.SwinConfig(**SWIN), **sizes, **queries, **names)
    )


def _save_oneformer_processor(folder: Path, labels: tuple[str, ...]) -> None:
    """Write a processor with the names of the classes, and a tokenizer for the name of the task."""
    names = folder / "class_info.json"
    names.write_text(json.dumps({number: {"isthing": 1, "name": name} for number, name in enumerate(labels)}))
    pixels = transformers.OneFormerImageProcessorPil(repo_path=None, class_info_file=str(names), num_text=4, size=SIZE)
    tokenizer = transformers.CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1, "a</w>": 2}, merges=[])
    transformers.OneFormerProcessor(pixels, tokenizer).save_pretrained(folder)


SEMANTIC = {
    "segformer": (_segformer, transformers.SegformerImageProcessorPil),
    "beit": (_beit, transformers.BeitImageProcessorPil),
    "dpt": (_dpt, transformers.DPTImageProcessorPil),
    "upernet": (_upernet, transformers.SegformerImageProcessorPil),
    "mobilevit": (_mobilevit, transformers.MobileViTImageProcessorPil),
}
if hasattr(transformers, "Tipsv2DptConfig"):  # it has no batch normalization, so rows do not change each other's results
    SEMANTIC["tipsv2"] = (_tipsv2, transformers.DPTImageProcessorPil)
OF_PARTS = {
    "maskformer": (_maskformer, transformers.MaskFormerImageProcessorPil),
    "mask2former": (_mask2former, transformers.Mask2FormerImageProcessorPil),
    "eomt": (_eomt, transformers.EomtImageProcessorPil),
    "oneformer": (_oneformer, None),
}


def save_segmenter(folder: Path, kind: str, *labels: str, **options: Any) -> Path:
    """Write a model of a kind of SEMANTIC or OF_PARTS. ``options``: those of its image processor."""
    build, processor = (SEMANTIC | OF_PARTS)[kind]
    names = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
    torch.manual_seed(0)
    build(names).save_pretrained(folder)
    if processor is None:
        _save_oneformer_processor(folder, labels)
        return folder
    sizes: dict[str, Any] = {"size": SIZE}
    if kind == "mobilevit":
        sizes = {"size": {"shortest_edge": 32}, "crop_size": SIZE}
    if kind == "eomt":
        sizes = {"size": {"shortest_edge": 32, "longest_edge": 32}, "do_pad": True}
    processor(**{**sizes, **options}).save_pretrained(folder)
    return folder


def make_pictures(folder: Path, *sizes: tuple[int, int], classes: int = 3) -> list[np.ndarray]:
    """Write an image of each width and height, ``0.png`` and so on. Return label images of rectangles of ``classes`` classes."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    label_images = []
    for number, (width, height) in enumerate(sizes):
        label_image = np.zeros((height, width), dtype=np.uint8)
        label_image[:, width // 2 :] = 1 + number % (classes - 1)
        label_image[height // 2 :, : width // 3] = (2 + number) % classes
        pixels = np.random.default_rng(number).integers(0, 80, (height, width, 3)) + 60 * label_image[..., None]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        label_images.append(label_image)
    return label_images


def write_masks(folder: Path, arrays: list[np.ndarray], **columns: Any) -> Path:
    """Write label images beside their images, and rows of both. ``columns``: a list with the value of each row, or one value."""
    from PIL import Image

    rows = []
    for number, array in enumerate(arrays):
        Image.fromarray(array).save(folder / f"{number}-mask.png")
        more = {name: value[number] if isinstance(value, list) else value for name, value in columns.items()}
        rows.append({"image": f"{number}.png", "mask": f"{number}-mask.png", **more})
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file
