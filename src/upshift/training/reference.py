"""Compute the log-probabilities of all pairs by the model before the training, which DPO compares with, once for a run.

So no second model is in memory. They lie in the output folder, because a resumed run starts from weights that have changed.
"""

from __future__ import annotations

import io
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from upshift.atomic_file import write_whole
from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.training.batches.layout import Layout
from upshift.training.batches.objective import Objective
from upshift.training.batches.sampler import evaluation_batches
from upshift.training.checkpoint.directory import REFERENCE_NAME, writing
from upshift.training.data.dataset import TrainingData
from upshift.training.data.tokens import Sequences
from upshift.training.distributed.fsdp import reshard_weights
from upshift.training.distributed.mesh import Mesh, rank_0_first
from upshift.training.prepare import chunked_loss, compute_log_probabilities


@dataclass(frozen=True)
class ReferencePass:
    """The data with the log-probabilities, and the seconds that computing them took. 0.0: they were read."""

    data: TrainingData
    seconds: float


def add_reference(
    data: TrainingData, model: nn.Module, mesh: Mesh, layout: Layout, *, global_batch: int, output: Path, resumes: bool
) -> ReferencePass:
    """Return the data with the log-probabilities of each sequence's labels by the model. All ranks call it.

    Args:
        model: as it was loaded.
        global_batch: sequences that are computed together.
        output: the folder of the run, in which the log-probabilities are kept.
        resumes: whether the weights are those of a checkpoint. Then the log-probabilities are read.
    """
    if resumes:
        return ReferencePass(_read(data, output / REFERENCE_NAME), 0.0)
    start = time.perf_counter()

    def compute(sequences: Sequences) -> Sequences:
        values = _log_probabilities(sequences, model, mesh.plan, layout, data.objective, global_batch)
        return replace(sequences, reference=values)

    evaluation = None if data.evaluation is None else compute(data.evaluation)
    data = replace(data, training=compute(data.training), evaluation=evaluation)
    with rank_0_first(mesh.plan):
        if mesh.rank == 0:
            _write(data, output)
    return ReferencePass(data, time.perf_counter() - start)


def _log_probabilities(
    sequences: Sequences, model: nn.Module, plan: Plan, layout: Layout, objective: Objective, global_batch: int
) -> NDArray[np.float32]:
    """Return the log-probability of each sequence's labels. Each rank computes its part of every batch."""
    values = torch.zeros(len(sequences), dtype=torch.float32)
    batches = evaluation_batches(sequences, global_batch=global_batch, layout=layout, objective=objective)
    was_training = model.training
    model.train(False)
    with torch.no_grad(), chunked_loss(model, plan):
        for micro_batch in (micro_batch for batch in batches for micro_batch in batch.micro_batches):
            ids = torch.from_numpy(micro_batch.sequence_ids)
            if len(ids) or plan.layout.exchanges:
                values[ids] = compute_log_probabilities(model, plan, micro_batch)[: len(ids)].cpu()
    model.train(was_training)
    reshard_weights(model)
    if plan.num_processes > 1:
        on_device = values.to(plan.device)
        dist.all_reduce(on_device)
        values = on_device.cpu()
    return np.asarray(values.numpy(), np.float32)


def _write(data: TrainingData, output: Path) -> None:
    assert data.training.reference is not None
    content = io.BytesIO()
    if data.evaluation is None or data.evaluation.reference is None:
        np.savez(content, training=data.training.reference)
    else:
        np.savez(content, training=data.training.reference, evaluation=data.evaluation.reference)
    with writing(output, name=REFERENCE_NAME, temporary=None):
        write_whole(output / REFERENCE_NAME, content.getvalue())


def _read(data: TrainingData, path: Path) -> TrainingData:
    """Return the data with the log-probabilities in a file. Raise RequestError for a file that is not of these pairs."""
    try:
        with np.load(path, allow_pickle=False) as parts:
            arrays = {name: np.asarray(parts[name], np.float32) for name in parts.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RequestError(
            f"{path} cannot be read ({str(error)[:80]}), and without it a run with --objective dpo cannot go on, because the "
            "model has changed; copy it back from a backup, or start anew in another output folder"
        ) from None
    sequences = {"training": data.training, "evaluation": data.evaluation}
    for name, part in sequences.items():
        if len(arrays.get(name, ())) != (0 if part is None else len(part)):
            raise RequestError(
                f"{path} is of other data; resume with the data of that run, or start anew in another output folder"
            )
    evaluation = None
    if data.evaluation is not None:
        evaluation = replace(data.evaluation, reference=arrays["evaluation"])
    return replace(data, training=replace(data.training, reference=arrays["training"]), evaluation=evaluation)
