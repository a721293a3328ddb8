"""``upshift.Trainer`` and ``upshift.Seq2SeqTrainer``: change one import, and each step runs the way a plan says.

What transformers.Trainer promises (callbacks, logs, schedules, samplers, metrics) is its own code. Replaced are: how a
global batch is cut and computed, what evaluation holds in memory, and what a checkpoint is made of.
"""

from __future__ import annotations

from importlib.util import find_spec

import transformers

from upshift.errors import MissingExtra
from upshift.training.trainer.checkpoints import PlainCheckpoints
from upshift.training.trainer.evaluation import StreamedEvaluation
from upshift.training.trainer.planned import PlannedTraining

if find_spec("accelerate") is None:
    raise MissingExtra(library="accelerate", extra="trainer", purpose="upshift.Trainer")


class Trainer(PlannedTraining, StreamedEvaluation, PlainCheckpoints, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer with ``plan``, ``fixed``, ``allow`` and ``trial_seconds`` besides (see PlannedTraining)."""

    _upshift_library_class = transformers.Trainer


class Seq2SeqTrainer(PlannedTraining, StreamedEvaluation, PlainCheckpoints, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """transformers.Seq2SeqTrainer in the same way: evaluation by generation."""

    _upshift_library_class = transformers.Seq2SeqTrainer
