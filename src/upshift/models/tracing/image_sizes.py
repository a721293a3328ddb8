# needs torch
"""Measure how many places the images of a row take, before the model is traced."""

from __future__ import annotations

import warnings

import torch
from transformers import PreTrainedModel

from upshift.errors import RequestError
from upshift.models.build import build_model, cut_stacks, explain_build_errors
from upshift.models.profile import Images
from upshift.models.source import ModelSource
from upshift.models.tracing.fast_fake_mode import fake_mode
from upshift.models.tracing.images import choose_image_class, image_arguments, image_features, known_values, measure_images
from upshift.models.tracing.op_counter import LiveTracker
from upshift.models.tracing.segments import materialize_on_cpu
from upshift.text import one_line


def images_of_source(source: ModelSource) -> Images:
    """Build the model of a source without weights, and measure the images of its rows.

    Raise RequestError for a model whose tower does not run on images of the size in its config."""
    config = source.hf_config
    model_class = choose_image_class(config, source.reference)
    with explain_build_errors(repr(source.reference)), torch.device("meta"):
        model = build_model(config, model_class, dtype=torch.float32)
    cut_stacks(model)
    fake = fake_mode()
    with fake:
        materialize_on_cpu(model)
    with known_values(), fake, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            images = measure_images(model, source.images_per_row)
            work = [_tower_flops(model, rows) for rows in (1, 2, 3)]
        except Exception as error:  # a tower may fail anywhere in its code
            raise RequestError(
                f"{source.reference!r} ({model_class.__name__}) is not planned with images: its get_image_features does not run "
                f"on the images that a plan assumes ({type(error).__name__}: {one_line(error, limit=160)}); check the sizes in "
                "its config, or use another model"
            ) from error
    if work[2] - work[1] != work[1] - work[0]:
        raise RequestError(
            f"{source.reference!r} ({model_class.__name__}) is not planned with images: its tower joins all images of a batch in "
            "one sequence, so its work grows with the square of the batch, which Upshift cannot predict; use another model"
        )
    return images


def _tower_flops(model: PreTrainedModel, rows: int) -> int:
    """Return the FLOPs of the tower for some rows with one image each."""
    with LiveTracker() as tracker, torch.no_grad():
        tracker.border("tower")
        image_features(model, image_arguments(model, rows=rows, images=1)[0])
        tracker.border(None)
    return sum(int(interval.matmul_flops + interval.attention_flops) for _, interval in tracker.intervals)
