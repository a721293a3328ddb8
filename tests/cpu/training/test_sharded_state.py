"""The state of optimizers that update shards, or copies on the host, is saved, named and read back, whatever wraps what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from upshift.errors import RequestError
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.batches.sampler import Position
from upshift.training.checkpoint import by_ranks, sharded
from upshift.training.checkpoint.async_save import BackgroundWriter
from upshift.training.checkpoint.by_ranks import describe_all_ranks, load_schedule, load_sharded_checkpoint, save_shards
from upshift.training.checkpoint.checkpoint import TrainState, capture_rng
from upshift.training.checkpoint.optimizer import class_name, describe_optimizer
from upshift.training.checkpoint.sharded import updated_names
from upshift.training.distributed.mesh import Mesh
from upshift.training.hf_trainer.checkpoint_files import check_optimizer
from upshift.training.optimizers.cpu_offload import HostOptimizer
from upshift.training.optimizers.schedule import build_schedule
from upshift.training.optimizers.sharded import ShardedOptimizer
from upshift.training.optimizers.stochastic_adamw import StochasticAdamW

PLAN = Plan(device="cpu", host="", model="", sequence_length=4, per_device_train_batch_size=1)
ARGUMENTS = Arguments(max_steps=6, learning_rate=1e-2, warmup_steps=2)
Build = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


class Rows:
    """An UpdateSharding: this rank updates some rows of each weight, in place or as fp32 copies."""

    def __init__(self, first: int = 0, end: int | None = None, *, masters: bool = False) -> None:
        self.first, self.end, self.masters = first, end, masters

    def shard(self, parameter: Tensor) -> Tensor:
        rows = parameter.detach()[self.first : self.end]
        return rows.float().clone() if self.masters else rows

    def rows(self, parameter: Tensor) -> tuple[int, int] | None:
        return None if self.end is None else (min(self.first, len(parameter)), min(self.end, len(parameter)))

    def gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        return gradient[self.first : self.end].float() if self.masters else gradient[self.first : self.end]

    def is_used(self, parameter: Any) -> bool:
        return parameter.grad is not None

    def drop_gradient(self, parameter: Any) -> None:
        parameter.grad = None

    def sharded_along(self, parameter: Tensor) -> Any:
        return ()

    def publish(self, shards: dict[Tensor, Tensor]) -> None:
        for parameter, shard in shards.items():
            parameter[self.first : self.end].copy_(shard)

    def forget(self) -> None:
        pass


class Config:
    def save_pretrained(self, directory: Path) -> None:
        (directory / "config.json").write_text("{}")


def a_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    model.config = Config()  # type: ignore[assignment]
    return model


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def on_host(groups: Any) -> torch.optim.Optimizer:
    return HostOptimizer(groups, adamw)


class Run:
    def __init__(self, build: Build | None, *, dtype: torch.dtype = torch.float32, masters: bool = False) -> None:
        self.model = a_model(dtype)
        groups = [{"params": list(self.model.parameters())}]
        if build is None:
            self.optimizer = adamw(groups)
        else:
            self.optimizer = ShardedOptimizer(groups, build, Rows(masters=masters))
        self.schedule = build_schedule(self.optimizer, ARGUMENTS)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            given = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(given.to(next(self.model.parameters()).dtype)).float().square().mean()
            loss.backward()
            if isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.take_gradients()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, step: int) -> Path:
        state = TrainState(step=step, position=Position(), seed=3, tokens_seen=step, plan=PLAN.model_dump())
        writer = BackgroundWriter()
        path, seal = save_shards(
            directory, model=self.model, tokenizer=None, optimizer=self.optimizer, scheduler_state=self.schedule.state_dict(),
            scaler_state=None, state=state, rngs=[capture_rng(torch.device("cpu"))], mesh=Mesh(PLAN), writer=writer,
        )  # fmt: skip
        writer.wait()
        seal()
        return path

    def load(self, checkpoint: Path) -> None:
        load_sharded_checkpoint(
            checkpoint, model=self.model, optimizer=self.optimizer, scheduler=self.schedule, scaler=None, mesh=Mesh(PLAN)
        )


BF16 = {"dtype": torch.bfloat16, "masters": True}
KINDS: dict[str, tuple[Build | None, dict[str, Any]]] = {
    "shards": (adamw, {}),
    "copies of shards on the host": (on_host, {}),
    "fp32 shards": (adamw, BF16),
    "copies of fp32 shards on the host": (on_host, BF16),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    build, options = KINDS[name]
    whole, first, second = (Run(build, **options) for _ in range(3))
    expected = whole.train(range(6))
    losses = first.train(range(3))
    second.train(range(2))  # what it has by then is of no use
    second.load(first.save(tmp_path, 3))
    assert losses + second.train(range(3, 6)) == expected
    if not options:
        assert expected == Run(None).train(range(6))
    assert class_name(whole.optimizer) == "AdamW"


@pytest.mark.parametrize("saved", ["shards", "copies of shards on the host"])
@pytest.mark.parametrize("loaded", ["shards", "copies of shards on the host"])
def test_where_shards_are_updated_is_no_part_of_the_checkpoint(saved: str, loaded: str, tmp_path: Path) -> None:
    first, second = Run(KINDS[saved][0]), Run(KINDS[loaded][0])
    first.train(range(3))
    second.load(first.save(tmp_path, 3))
    assert first.train(range(3, 6)) == second.train(range(3, 6))


def test_only_ranks_with_elements_count_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four ranks, each has one row; the last of them has none of the matrices. A resumed one counts from 0 again."""
    model = a_model(torch.bfloat16)
    descriptions = []
    for rank in range(4):
        optimizer = ShardedOptimizer(
            [{"params": list(model.parameters())}],
            lambda groups: StochasticAdamW(groups, lr=0.0, betas=(0.9, 0.99), eps=1e-8, seed=0),
            Rows(rank, rank + 1),
        )
        has_elements = {shard: bool(shard.numel()) for shard in optimizer.shards}
        for shard, has in has_elements.items():
            optimizer.state[shard] = {"step": 7 if has else 2}
        names = updated_names(model, optimizer)
        assert len(names) == 4 and all(has_elements.values()) == (rank < 2)
        descriptions.append(describe_optimizer(optimizer, names))
    for order in permutations(descriptions):
        monkeypatch.setattr(by_ranks, "all_gather_objects", lambda value, plan, order=order: list(order))
        saved = describe_all_ranks(model, optimizer, Mesh(PLAN))
        assert saved.numbers == {name: {"step": 7} for name, _ in model.named_parameters()}


def test_an_optimizer_on_the_host_is_checked_by_the_weights_that_it_updates() -> None:
    model, other = a_model(), a_model()
    check_optimizer(HostOptimizer([{"params": list(model.parameters())}], adamw), model)
    with pytest.raises(RequestError, match="optimizer AdamW trains parameters that the model has not"):
        check_optimizer(adamw(other.parameters()), model)


@pytest.mark.parametrize("saved_groups", [1, 2, 3])
@pytest.mark.parametrize("own_groups", [1, 2, 3])
def test_a_schedule_goes_on_with_the_rates_of_its_own_groups(saved_groups: int, own_groups: int) -> None:
    """As a pipeline stage has fewer groups than the one that wrote, or more."""

    def schedule_of(count: int) -> LambdaLR:
        weights = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
        rates = [{"params": [weight], "lr": 0.1 * (number + 1)} for number, weight in enumerate(weights)]
        return build_schedule(torch.optim.SGD(rates, lr=0.1), ARGUMENTS)

    def advance(schedule: LambdaLR, steps: int) -> list[float]:
        for _ in range(steps):
            schedule.optimizer.step()
            schedule.step()
        return [float(rate) for rate in schedule.get_last_lr()]

    saved, own, undisturbed = schedule_of(saved_groups), schedule_of(own_groups), schedule_of(own_groups)
    advance(saved, 3)
    rates = advance(undisturbed, 3)
    for group, rate in zip(own.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # restore_options does so
    load_schedule(own, saved.state_dict())
    assert own.get_last_lr() == rates and own.last_epoch == 3
    assert advance(own, 2) == advance(undisturbed, 2)


def test_every_shard_has_a_state_under_the_name_of_its_weight() -> None:
    """Whatever wraps the optimizer of the shards: the keys of its state are the tensors that have a name."""
    for build, options in KINDS.values():
        run = Run(build, **options)
        run.train(range(1))
        names = updated_names(run.model, run.optimizer)
        assert names.keys() == run.optimizer.state.keys()
        assert [*names.values()] == [name for name, _ in run.model.named_parameters()]
        saved = dict(sharded.local_optimizer_state(run.model, run.optimizer))
        assert {name.rpartition(".")[0] for name in saved} == {*names.values()}
