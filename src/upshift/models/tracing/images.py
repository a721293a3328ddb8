# needs torch
"""Run a model's tower for images in a trace, and put its features among the text's embeddings, as the model's own forward does.

Towers look at numbers: how many patches an image has, which patches attend to each other, and which images are padding. These
numbers follow from the sizes of the images, so a trace computes them beside its fake tensors. Two answers are assumed: no image
is empty, and a mask without values keeps everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import RequestError
from upshift.internals.torch_names import CONSTANT_LIMIT, NO_MODES, OPERATOR, dispatch_mode, tree_leaves
from upshift.models.build import find_architecture, find_stacks, sample_inputs
from upshift.models.profile import Images
from upshift.models.tasks import inputs_of, tasks_of

ATEN = torch.ops.aten
KNOWN_ELEMENTS = 1 << 22  # of the largest tensor whose values a trace computes: the positions of some hundred images
FACTORIES = (ATEN.arange, ATEN.linspace, ATEN.zeros, ATEN.ones, ATEN.full, ATEN.empty, ATEN.scalar_tensor)
OF_NUMBERS = (ATEN.arange, ATEN.linspace)  # whose values are computed for floating-point numbers, too
MASKED = (ATEN.index, ATEN.index_put, ATEN.index_put_)
FREE_SIDE = 896  # pixels of an image whose size the config leaves open
TILES = 2  # a tower that cuts an image into tiles gets one of so many a side


def choose_image_class(config: PretrainedConfig, reference: str) -> type[PreTrainedModel]:
    """Return the class of a model that reads images beside text. Raise RequestError for one that is not planned with images."""
    model_class = find_architecture(config, reference).model_class
    name = model_class.__name__
    reads_images = "image" in inputs_of(model_class)
    if not reads_images or not any(task.name == "image-text-to-text" for task in tasks_of(name)):
        raise RequestError(f"{reference!r} ({name}) reads no images beside its text; leave --images out")
    if config.is_encoder_decoder:
        raise RequestError(
            f"{reference!r} ({name}) has an encoder and a decoder, and rows with images are planned for models of one text "
            "sequence; leave --images out"
        )
    takes_embeddings = "inputs_embeds" in inspect.signature(model_class.forward).parameters
    if not callable(getattr(model_class, "get_image_features", None)) or not takes_embeddings:
        raise RequestError(
            f"{reference!r} ({name}) does not put the features of its images among the embeddings of its text "
            "(get_image_features), so rows with images are not planned; leave --images out, or use another model"
        )
    return model_class


def runs_each_image(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> bool:
    """Return whether a tower runs operators for each image: images have grids of their own, or are cut into tiles."""
    return has_grids(model_class) or bool(getattr(config, "image_grid_pinpoints", None))


def has_grids(model_class: Any) -> bool:
    """Return whether the tower of a class takes images of any size, each with its grid of patches."""
    return "image_grid_thw" in inspect.signature(model_class.get_image_features).parameters


@contextmanager
def known_values() -> Iterator[None]:
    """Let torch compute the values of what follows from known numbers alone, while the context is open."""
    with CONSTANT_LIMIT.replaced(KNOWN_ELEMENTS):
        yield


def _answer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator of a tower. Make values known, and replace masks, whose results have no size without values."""
    kind = OPERATOR.of(function)
    if kind in MASKED:
        indices = [part for index in args[1] for part in _without_mask(index)]
        return function(args[0], indices, *args[2:], **kwargs)
    result = function(*args, **kwargs)
    if kind is ATEN.ne and result.constant is None:  # counts of pixels that are zero: no image is empty
        return _known(torch.ones, result.shape, result.dtype)
    if kind in FACTORIES and (kind in OF_NUMBERS or not result.is_floating_point()) and result.numel() <= KNOWN_ELEMENTS:
        with NO_MODES.get()():
            value = function(*args, **{**kwargs, "device": "cpu"})
        return ATEN.lift_fresh.default(value)
    return result


def _known(make: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    with NO_MODES.get()():
        value = make(shape, dtype=dtype)
    return ATEN.lift_fresh.default(value)  # type: ignore[no-any-return]


def _without_mask(index: Any) -> list[Any]:
    """Return an index, or in place of a mask the indices of what it keeps, one for each dimension."""
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    constant = getattr(index, "constant", None)
    if constant is None:
        number = index.numel()
        return [torch.empty(number, dtype=torch.long) for _ in index.shape]
    with NO_MODES.get()():
        kept = constant.nonzero(as_tuple=True)
    return [ATEN.lift_fresh.default(part) for part in kept]


def _size_of(model: PreTrainedModel) -> tuple[int, int] | None:
    """Return the height and width of an image as the config says them, or None if it does not."""
    config = model.config
    for part in (getattr(config, "vision_config", None), config):
        size = getattr(part, "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return size[0], size[1]
    return None


def _first_of(config: Any, names: tuple[str, ...], default: int) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value[0] if isinstance(value, list | tuple) else value for value in values if value), default)


def image_arguments(model: Any, *, rows: int, images: int) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return the arguments of ``get_image_features`` for some rows with ``images`` images each, and the pixels of an image."""
    vision = getattr(model.config, "vision_config", model.config)
    names = inspect.signature(model.get_image_features).parameters
    number = rows * images
    channels = _first_of(vision, ("num_channels", "in_channels", "in_chans"), 3)
    dtype = model.dtype
    if has_grids(type(model)):
        patch = _first_of(vision, ("patch_size",), 14)
        merged = patch * _first_of(vision, ("spatial_merge_size", "merge_size"), 2)
        side = max(round(FREE_SIDE / merged), 1) * merged
        patches = side // patch
        features = channels * _first_of(vision, ("temporal_patch_size",), 1) * patch * patch
        grid = torch.tensor([[1, patches, patches]] * number)
        pixels = torch.empty(number * patches * patches, features, dtype=dtype)
        return {"pixel_values": pixels, "image_grid_thw": grid}, (side, side)
    selected = _selected_layers(model) if "vision_feature_layer" in names else {}
    height, width = _size_of(model) or (FREE_SIDE, FREE_SIDE)
    if "pixel_attention_mask" in names:  # images of any size, cut into patches that are joined
        unit = _first_of(vision, ("patch_size",), 1) * _first_of(model.config, ("scale_factor",), 1)
        height, width = (max(side // unit, 1) * unit for side in (height, width))
    if "image_sizes" in names and getattr(model.config, "image_grid_pinpoints", None):
        size = (TILES * height, TILES * width)
        pixels = torch.empty(number, 1 + TILES * TILES, channels, height, width, dtype=dtype)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([size] * number), **selected}, size
    pixels = torch.empty(number, channels, height, width, dtype=dtype)
    if "pixel_attention_mask" in names:
        pixels = pixels.view(rows, images, channels, height, width)
    is_needed = "image_sizes" in names and names["image_sizes"].default is inspect.Parameter.empty
    sizes = {"image_sizes": torch.tensor([(height, width)] * number)} if is_needed else {}
    return {"pixel_values": pixels, **sizes, **selected}, (height, width)


def _selected_layers(model: PreTrainedModel) -> dict[str, Any]:
    """Return the argument that names the layers whose outputs are the features, in a model with fewer layers than its config.

    An inner layer of the model stands for all inner layers. State 0 is the input of the first layer."""
    vision = getattr(model.config, "vision_config", None)
    chosen = getattr(model.config, "vision_feature_layer", None)
    depth = getattr(vision, "num_hidden_layers", None)
    decoder = model.get_decoder()
    inside = {id(module) for module in decoder.modules()} if decoder is not None else set()
    left = next((len(layers) for _, layers in find_stacks(model) if id(layers) not in inside), None)
    if chosen is None or depth is None or left is None or left == depth:
        return {}

    def state_of(number: int) -> int:
        state = number % (depth + 1)
        return left if state == depth else min(state, max(left - 1, 1))

    states = [state_of(number) for number in chosen] if isinstance(chosen, list | tuple) else state_of(chosen)
    return {"vision_feature_layer": states}


def image_features(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """Return the features of all images [tokens, width of the text's embeddings]."""
    with dispatch_mode(_answer):
        output = model.get_image_features(**arguments)
    features = _joined(getattr(output, "pooler_output", output))
    for beside in getattr(output, "deepstack_features", None) or ():  # added to the inputs of the text's first layers
        features = features + _joined(beside)
    return features


def _joined(features: Any) -> torch.Tensor:
    """Return the features of all images, which a tower may keep apart, in one tensor [tokens, width]."""
    parts = [leaf for leaf in tree_leaves(features) if isinstance(leaf, torch.Tensor)]
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def image_inputs(model: PreTrainedModel, *, batch: int, sequence: int, masked: bool, images: int) -> dict[str, Any]:
    """Return the inputs of one training step: the embeddings of text with the features of images among them, and labels.

    ``sequence`` counts the places of the images. The tower runs now, so call this within the step."""
    inputs = sample_inputs(model, "causal-lm", batch=batch, sequence=sequence, masked=masked)
    ids = inputs.pop("input_ids")
    embeddings = model.get_input_embeddings()(ids)
    features = image_features(model, image_arguments(model, rows=batch, images=images)[0])
    places = torch.empty(features.shape[0], dtype=torch.long)
    joined = embeddings.flatten(0, 1).index_copy(0, places, features.to(embeddings.dtype))
    inputs["inputs_embeds"] = joined.view_as(embeddings)
    if "token_type_ids" in inspect.signature(model.forward).parameters:  # which tokens are an image's, and see each other
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


def measure_images(model: PreTrainedModel, images: int) -> Images:
    """Return the size of an image, and the places that it takes in a row. Run it on fake tensors."""
    arguments, (height, width) = image_arguments(model, rows=1, images=images)
    with torch.no_grad():
        places = image_features(model, arguments).shape[0]
    return Images(per_row=images, tokens=places // images, height=height, width=width)
