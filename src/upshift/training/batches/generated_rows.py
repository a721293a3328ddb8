"""Make rows with the shape of those that TRL's online trainers generate: a prompt, and a completion of the longest length.

GRPOTrainer and RLOOTrainer generate their batches from prompts, and score them by functions of the script. A plan calls neither:
the lengths of the prompts and the limit of the completions say how large a batch of the training can be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from upshift.errors import MissingInternal
from upshift.internals.transformers_names import PREPARE_INPUTS
from upshift.internals.trl_names import TOKENIZE_PROMPTS
from upshift.models.adapter import base_of, planned_part
from upshift.models.describe import max_positions
from upshift.training.batches.model_calls import TOKENS
from upshift.training.batches.user_batches import InseparableRows
from upshift.training.checkpoint.rng import preserved_rng

GENERATES = "the trainer generates the rows"  # why batches stay whole
OWN_BATCHES = "the script's own _prepare_inputs may make its batches, and a plan needs those of the data loader"
ONLINE_TRAINERS = ("GRPOTrainer", "RLOOTrainer")  # their batches hold one row for each completion
OTHER_ROWS = {  # attributes under which the rows are no prompts of the data set with completions
    "rollout_func": "rollout_func",
    "environment_factories": "environment_factory",
}
MEDIA = ("image", "images")  # columns


@dataclass(frozen=True)
class GeneratedRows:
    """Rows that stand in for one batch of the training, with no padding."""

    batch: Mapping[str, Tensor]
    num_prompts: int  # whose lengths were counted

    @property
    def covers(self) -> str:
        """Return the words that say what the numbers of a plan cover."""
        return (
            f"this speed and memory count only the training on rows of {self.batch[TOKENS].shape[1]} tokens: the longest of "
            f"{self.num_prompts} prompts, and a completion of the largest length; generation, rewards, a reference model and the "
            "script's loss cost more"
        )


def generates_rows(trainer: Any) -> bool:
    """Return whether the code of TRL that generates rows from prompts makes the trainer's batches."""
    method = getattr(trainer, PREPARE_INPUTS.attribute)
    owner, _, _ = getattr(method, "__qualname__", "").partition(".")
    return owner in ONLINE_TRAINERS and str(getattr(method, "__module__", "")).startswith("trl.")


def generated_rows(trainer: Any, draw_examples: Callable[[], Iterable[Any]]) -> GeneratedRows:
    """Return the largest rows that the trainer can generate from examples of its data set.

    Raise InseparableRows if other code makes its batches, or if the lengths of its rows are not known.
    """
    if not generates_rows(trainer):
        raise InseparableRows(OWN_BATCHES)
    other = next((name for attribute, name in OTHER_ROWS.items() if getattr(trainer, attribute, None) is not None), None)
    if other is not None:
        raise InseparableRows(f"{GENERATES}, and the lengths of those of {other} are not known")
    base = base_of(planned_part(trainer.model))
    if planned_part(trainer.model) is not trainer.model or not isinstance(base, PreTrainedModel):
        raise InseparableRows(f"{GENERATES}, and {type(trainer.model).__name__} is no transformers model")
    prompts = [_prompt_of(example) for example in draw_examples()]
    longest_prompt = max(map(len, _tokens_of(trainer, prompts)), default=0)
    width = sum(_padded(length, trainer.pad_to_multiple_of) for length in (longest_prompt, trainer.max_completion_length))
    limit = max_positions(base)
    shape = (trainer.args.per_device_train_batch_size, width if limit is None else min(width, limit))
    tokens = torch.ones(shape, dtype=torch.long)
    return GeneratedRows({TOKENS: tokens, "attention_mask": torch.ones_like(tokens)}, len(prompts))


def _prompt_of(example: Any) -> Any:
    if not isinstance(example, Mapping) or "prompt" not in example:
        raise InseparableRows(f"{GENERATES}, and a row of the data has no prompt")
    media = next((name for name in MEDIA if example.get(name) is not None), None)
    if media is not None:
        raise InseparableRows(f"{GENERATES}, and a plan does not count the tokens of the column {media}")
    return example["prompt"]


def _tokens_of(trainer: Any, prompts: list[Any]) -> list[list[int]]:
    try:
        token_ids, images, _ = TOKENIZE_PROMPTS.of(trainer)(prompts)
    except MissingInternal as error:
        raise InseparableRows(f"{GENERATES}, and this TRL does not say how long the prompts are ({error})") from None
    if images is not None:
        raise InseparableRows(f"{GENERATES}, and a plan does not count the tokens of images in the prompts")
    return token_ids  # type: ignore[no-any-return]


def _padded(length: int, multiple: int | None) -> int:
    return length if multiple is None else -(-length // multiple) * multiple


def forward_seconds(model: nn.Module, batch: Mapping[str, Tensor]) -> float:
    """Return the seconds of a forward pass of the model's layers, without a head. The model and the random numbers stay."""
    layers: Any = base_of(planned_part(model)).base_model
    inputs = {name: value.to(layers.device) for name, value in batch.items()}
    was_training = layers.training
    times = []
    layers.eval()
    try:
        with preserved_rng(), torch.no_grad():
            for _ in range(2):  # the first one is cold
                start = time.perf_counter()
                layers(**inputs, use_cache=False)
                if inputs[TOKENS].is_cuda:
                    torch.cuda.synchronize()  # else the time is that of starting the kernels
                times.append(time.perf_counter() - start)
    finally:
        layers.train(was_training)
    return min(times)
