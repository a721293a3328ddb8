"""Processes that draw batches for upshift.Trainer: only for the training data, and only where they draw the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_trainer_options import a_trainer
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, IterableDataset, RandomSampler

from upshift.training.hf_trainer.choose_plan import NoSample, count_workers, draw_sample
from upshift.training.hf_trainer.loss_state import DataWatch


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from ({"input_ids": torch.arange(4)} for _ in range(8))


def stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input_ids": torch.stack([row["input_ids"] for row in rows])}


def test_a_stream_is_read_by_one_process() -> None:
    for data, num_workers in ((Stream(), 0), (list(Stream()), 2)):
        loader: Any = DataLoader(data, batch_size=2, collate_fn=stacked)  # type: ignore[arg-type]
        reason = draw_sample(loader, accumulation=1).why_no_workers
        found, message = count_workers(1.0, 1.0, device="cuda", num_cores=8, why_none=reason)
        assert (found, "repeat its rows" in message) == (num_workers, num_workers == 0)


class OneDataSetEach(BatchSampler):
    """Batches of one of two data sets each, in an order that its own generator draws."""

    def __init__(self, parts: list[range], generator: torch.Generator) -> None:
        super().__init__(RandomSampler(range(8), generator=generator), 2, drop_last=False)
        self.parts = parts
        self.generator = generator

    def __iter__(self) -> Iterator[list[int]]:
        for part in self.parts:
            order = torch.randperm(len(part), generator=self.generator).tolist()
            yield from ([part[index] for index in order[start : start + 2]] for start in range(0, len(part), 2))


def test_a_sampler_of_batches_in_a_way_of_its_own_is_asked_and_keeps_its_state() -> None:
    """Rows of two data sets have other columns, and only their sampler knows it. torch's own batches mix any examples."""
    wide = [{"input_ids": torch.arange(4)} for _ in range(4)]
    narrow = [{"input_ids": torch.arange(3)} for _ in range(4)]
    data: Any = ConcatDataset([wide, narrow])  # type: ignore[arg-type, list-item]
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    samplers = [OneDataSetEach([range(4), range(4, 8)], generator) for generator in generators]
    sample = draw_sample(DataLoader(data, batch_sampler=samplers[0], collate_fn=stacked), accumulation=1)
    assert [batch["input_ids"].shape for batch in sample.batches] == [(2, 4), (2, 4), (2, 3), (2, 3)]
    assert list(samplers[0]) == list(samplers[1])
    plain: Any = DataLoader(data, batch_size=2, shuffle=True, collate_fn=stacked)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        draw_sample(plain, accumulation=1)
    samplers[0].parts = (range(4) for _ in range(2))  # type: ignore[assignment]
    with pytest.raises(NoSample, match="sampler of batches cannot be copied"):
        draw_sample(DataLoader(data, batch_sampler=samplers[0], collate_fn=stacked), accumulation=1)


def test_batches_that_a_device_makes_are_drawn_by_its_process() -> None:
    """A device without memory stands in for CUDA. The batch itself is on the CPU, or the loader would pin no memory."""

    def embed(rows: list[dict[str, Any]]) -> dict[str, Any]:
        torch.ones(2, device="meta").sum()
        return stacked(rows)

    for collate, device in ((embed, "meta"), (stacked, "")):
        watch = DataWatch()
        loader: Any = DataLoader(list(Stream()), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
        sample = draw_sample(loader, accumulation=1, watch=watch)
        assert watch.device == device and bool(sample.why_no_workers) == bool(device)


def test_data_that_exchanges_with_other_ranks_gives_no_sample(tmp_path: Path) -> None:
    def sum_over_ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = stacked(rows)
        dist.all_reduce(batch["input_ids"])
        return batch

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        loader: Any = DataLoader(list(Stream()), batch_size=2, collate_fn=sum_over_ranks)  # type: ignore[arg-type]
        with pytest.raises(NoSample, match="exchanges data with other ranks"):
            draw_sample(loader, accumulation=1, watch=DataWatch())
    finally:
        dist.destroy_process_group()


def test_workers_are_for_the_training_data_alone(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    trainer.eval_dataset = trainer.train_dataset
    trainer._upshift_num_workers = 2  # as while a plan runs that has chosen two
    assert trainer.get_train_dataloader().num_workers == 2
    assert trainer.get_eval_dataloader().num_workers == trainer.args.dataloader_num_workers == 0


def test_every_rank_makes_the_loader_before_rank_0_plans(tmp_path: Path) -> None:
    """A loader of the script may wait for the other ranks, which rank 0 alone would do forever."""
    calls: list[str] = []
    trainer = a_trainer(tmp_path)
    make_loader = trainer.get_train_dataloader
    trainer.get_train_dataloader = lambda: calls.append("loader") or make_loader()  # type: ignore[method-assign, func-returns-value]
    choose = trainer._upshift_choose_locally
    trainer._upshift_choose_locally = lambda loader: calls.append("plan") or choose(loader)  # type: ignore[method-assign, func-returns-value]
    trainer.train()
    assert calls == ["loader", "plan", "loader"]
