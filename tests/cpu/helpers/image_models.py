"""Tiny models that read images beside text, with their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from upshift.inference.generation.media import MediaPrompt
from upshift.training.data.tokenizer import train_byte_level_bpe

WORDS = 260  # of the tokenizer, before the tokens of images
QWEN_MARKS = {
    "vision_start_token_id": WORDS, "vision_end_token_id": WORDS + 1, "image_token_id": WORDS + 2, "video_token_id": WORDS + 3
}  # fmt: skip
COLORS = {"red": (255, 0, 0), "blue": (0, 0, 255)}
PARTS = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def _save(folder: Path, model: Any, processor: Any) -> Path:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0)  # an image then changes the text
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(*marks: str) -> Any:
    tokenizer = train_byte_level_bpe(["a text of some words"], WORDS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    return tokenizer


def save_llava(folder: Path) -> Path:
    """Write a LLaVA, whose image has a place for each patch."""
    text = transformers.LlamaConfig(**TEXT)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=WORDS)
    torch.manual_seed(0)
    pixels = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.LlavaProcessor(
        image_processor=pixels, tokenizer=_tokenizer("<image>"), patch_size=8, vision_feature_select_strategy="default",
        chat_template=PARTS.replace("IMAGE", "<image>"), image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    return _save(folder, transformers.LlavaForConditionalGeneration(config), processor)


def save_qwen(folder: Path) -> Path:
    """Write a Qwen2-VL, whose image takes fewer positions than tokens. It has no processor, which would need torchvision."""
    text = {**TEXT, "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    text |= {"bos_token_id": 0, "eos_token_id": 0}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **QWEN_MARKS)
    torch.manual_seed(0)
    return _save(folder, transformers.Qwen2VLForConditionalGeneration(config), _tokenizer())


def qwen_prompt(color: float) -> MediaPrompt:
    """Return a prompt of one image between some tokens."""
    marks = QWEN_MARKS
    height, width = 8, 4  # patches; two by two become one token
    tokens = height * width // 4
    image = [marks["vision_start_token_id"], *[marks["image_token_id"]] * tokens, marks["vision_end_token_id"]]
    ids = [5, 6, 7, *image, 8, 9]
    kinds = [int(token == marks["image_token_id"]) for token in ids]
    pixels = torch.full((height * width, 3 * 2 * 4 * 4), color)
    inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
    return MediaPrompt(ids, {**inputs, "mm_token_type_ids": torch.tensor([kinds])})


# A chat template of models that read images, with a mark at the beginning and at the end of each turn.
TURNS = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURN_MARKS = ("<|user|>", "<|assistant|>", "<|end|>")
IDEFICS_MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def save_chat_model(folder: Path, kind: str) -> Path:
    """Write a model that chats about images: "llava", "idefics3", or, where torchvision is installed, "qwen2.5-vl"."""
    if kind == "llava":
        save_llava(folder)
        tokenizer = _tokenizer("<image>", *TURN_MARKS)
        processor = transformers.AutoProcessor.from_pretrained(folder)
        processor.tokenizer = tokenizer
        model = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
        mark = "<image>"
    elif kind == "idefics3":
        model, processor, mark = _make_idefics3()
    else:
        model, processor, mark = _make_qwen()
    model.config.get_text_config().pad_token_id = processor.tokenizer.pad_token_id
    processor.chat_template = TURNS.replace("IMAGE", mark)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _make_idefics3() -> tuple[Any, Any, str]:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    tokenizer = _tokenizer(*IDEFICS_MARKS, *places, *TURN_MARKS)
    pixels = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    processor = transformers.Idefics3Processor(pixels, tokenizer, image_seq_len=4)
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"image_size": 16, "patch_size": 4}
    text = {**TEXT, "model_type": "llama"}
    token = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.Idefics3Config(vision_config=vision, text_config=text, image_token_id=token, scale_factor=2)
    torch.manual_seed(0)
    return transformers.Idefics3ForConditionalGeneration(config), processor, "<image>"


def _make_qwen() -> tuple[Any, Any, str]:
    tokenizer = _tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", *TURN_MARKS)
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    pixels = transformers.Qwen2VLImageProcessorPil(**sizes, size={"shortest_edge": 64, "longest_edge": 1024})
    videos = transformers.Qwen2VLVideoProcessor(**sizes)
    processor = transformers.Qwen2_5_VLProcessor(image_processor=pixels, tokenizer=tokenizer, video_processor=videos)
    text = {**TEXT, "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    text |= {"bos_token_id": 0, "eos_token_id": 0}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "intermediate_size": 48, "out_hidden_size": 32}
    vision |= {"fullatt_block_indexes": [1], "window_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **QWEN_MARKS)
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return model, processor, "<|vision_start|><|image_pad|><|vision_end|>"
