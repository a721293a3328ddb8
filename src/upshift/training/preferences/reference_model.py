"""Compute the log-probabilities of all answers by the model before the training, which DPO and KTO compare with, once for a run.

So no second model is in memory. They lie in the output folder, because a resumed run starts from weights that have changed.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from upshift.errors import JobFailed, RequestError
from upshift.training.batches.collate import MicroBatch, every_second_row
from upshift.training.batches.layout import Layout
from upshift.training.batches.objective import Objective
from upshift.training.batches.sampler import GlobalBatch, evaluation_batches
from upshift.training.checkpoint.directory import REFERENCE_NAME, replace_bytes, writing
from upshift.training.data.dataset import TrainingData
from upshift.training.data.tokens import Sequences
from upshift.training.distributed.mesh import Mesh, all_reduce_max, rank_0_first
from upshift.training.forward_passes import ForwardPasses
from upshift.training.prepare import chunked_loss, compute_log_probabilities

_RUN = "run"  # the name of the run's id in the file


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """Finds the log-probabilities of each sequence's labels by the model before the training. All ranks call its methods."""

    passes: ForwardPasses  # of the model as it was loaded
    mesh: Mesh
    layout: Layout
    objective: Objective
    global_batch: int  # sequences that are computed together
    output: Path  # the folder of the run, in which the log-probabilities are kept
    run_id: str
    check_stop: Callable[[], None]  # called between batches. It raises Interrupted
    has_kl_pass: bool = True  # of rated answers: False: nothing is compared with the mismatched ones, so they are left out

    def read(self, data: TrainingData) -> TrainingData:
        """Return the data with the log-probabilities in the file. Raise RequestError if there is no such file of these pairs."""
        return self._add_arrays(data, self._read_arrays())

    def recall(self, data: TrainingData) -> TrainingData | None:
        """Return the data with the log-probabilities that this run computed before it ended without a checkpoint.

        Return None if there are none, or if the model gives the first batch others than the file has.
        """
        recalled: TrainingData | None = None
        with suppress(RequestError):  # then they are computed
            arrays = self._read_arrays()
            if str(arrays.get(_RUN)) == self.run_id:
                recalled = self._add_arrays(data, arrays)
        if all_reduce_max(int(recalled is None), self.mesh.plan) or recalled is None:
            return None
        batch = next(self._batches(data.training))
        values = self._compute_batches(len(data.training), [batch])[batch.sequence_ids]
        assert recalled.training.reference is not None
        is_same = np.array_equal(values, recalled.training.reference[batch.sequence_ids])
        return None if all_reduce_max(int(not is_same), self.mesh.plan) else recalled

    def compute(self, data: TrainingData) -> TrainingData:
        """Return the data with the log-probabilities, and write them. Raise JobFailed if one of them is not finite."""
        evaluation = None if data.evaluation is None else self._add_to(data.evaluation)
        data = replace(data, training=self._add_to(data.training), evaluation=evaluation)
        with rank_0_first(self.mesh.plan):
            if self.mesh.rank == 0:
                self._write(data)
        return data

    def _add_to(self, sequences: Sequences) -> Sequences:
        values = self._compute_batches(len(sequences), self._batches(sequences))
        num_wrong = int((~np.isfinite(values.reshape(-1, 2))).any(axis=1).sum())
        if num_wrong:
            precision = self.mesh.plan.precision
            advice = "check its weights" if precision == "fp32" else "use --set precision=fp32, or check its weights"
            raise JobFailed(
                f"the model before the training gives {num_wrong:,} of {len(values) // 2:,} {self.objective.examples} no finite "
                f"log-probability with precision={precision}; {advice}"
            )
        return replace(sequences, reference=values)

    def _batches(self, sequences: Sequences) -> Iterator[GlobalBatch]:
        batches = evaluation_batches(sequences, global_batch=self.global_batch, layout=self.layout, objective=self.objective)
        return iter(batches)

    def _compute_batches(self, num_sequences: int, batches: Iterable[GlobalBatch]) -> NDArray[np.float32]:
        """Return the log-probability of each sequence's labels [num_sequences], and 0 for those that are not computed.

        Each rank computes its part of every batch.
        """
        plan = self.mesh.plan
        model = self.passes.model
        every = 2 if self.objective.has_ratings and not self.has_kl_pass else 1  # row that is computed

        def compute(micro_batch: MicroBatch) -> torch.Tensor:
            computed = micro_batch if every == 1 else every_second_row(micro_batch, first=0)
            return compute_log_probabilities(model, plan, computed).cpu()

        values = torch.zeros(num_sequences, dtype=torch.float32)
        was_training = model.training
        model.train(False)
        with chunked_loss(model, plan):
            for batch in batches:
                self.check_stop()
                parts = self.passes.run(batch.micro_batches, compute, of="reference")
                _put_rows(values, [part for part in batch.micro_batches if self.passes.runs(part)], parts, every=every)
        model.train(was_training)
        if plan.num_processes > 1:
            on_device = values.to(plan.device)
            dist.all_reduce(on_device)
            values = on_device.cpu()
        return np.asarray(values.numpy(), np.float32)

    def _write(self, data: TrainingData) -> None:
        parts: dict[str, Any] = {_RUN: np.array(self.run_id), "training": data.training.reference}
        if data.evaluation is not None:
            parts["evaluation"] = data.evaluation.reference
        content = io.BytesIO()
        np.savez(content, **parts)
        with writing(self.output, name=REFERENCE_NAME, temporary=None):
            replace_bytes(self.output / REFERENCE_NAME, content.getvalue())

    def _read_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the file by name. Raise RequestError if it cannot be read."""
        path = self.output / REFERENCE_NAME
        try:
            with np.load(path, allow_pickle=False) as parts:
                return {name: parts[name] for name in parts.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise RequestError(
                f"{path} cannot be read ({str(error)[:80]}), and without it a run with --objective {self.objective.name} "
                "cannot go on, because the model has changed; copy it back from a backup, or start anew in another output folder"
            ) from None

    def _add_arrays(self, data: TrainingData, arrays: dict[str, NDArray[Any]]) -> TrainingData:
        """Return the data with the log-probabilities. Raise RequestError if they are of other data."""
        for name, part in (("training", data.training), ("evaluation", data.evaluation)):
            if len(arrays.get(name, ())) != (0 if part is None else len(part)):
                raise RequestError(
                    f"{self.output / REFERENCE_NAME} is of other data; resume with the data of that run, or start anew in "
                    "another output folder"
                )
        evaluation = None
        if data.evaluation is not None:
            evaluation = replace(data.evaluation, reference=np.asarray(arrays["evaluation"], np.float32))
        training = replace(data.training, reference=np.asarray(arrays["training"], np.float32))
        return replace(data, training=training, evaluation=evaluation)


def _put_rows(values: torch.Tensor, micro_batches: Sequence[MicroBatch], parts: Sequence[torch.Tensor], *, every: int) -> None:
    """Put the rows of the parts [rows each], which follow each other as in the micro-batches, in the places of their sequences.

    ``every``: 2 if the parts have the first of every two rows alone. A micro-batch without sequences, and a stand-in after the
    others, has rows that belong to none.
    """
    rows = torch.cat([*parts, torch.zeros(0)])
    start = 0
    for micro_batch in micro_batches:
        ids = torch.from_numpy(micro_batch.sequence_ids[::every])
        values[ids] = rows[start : start + len(ids)]
        start += micro_batch.shape[0] // every
