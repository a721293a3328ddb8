"""Whatever a loss, a data set or a collator keeps is seen when it changes, and put back; what is no state is left alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from upshift.training.hf_trainer.loss_state import (
    MAX_CONTAINER_ITEMS,
    MAX_DEPTH,
    StateSnapshot,
    _is_equal,
    is_library_class,
    refuse_exchanges,
)

CALLS = 0
TOTALS = {"seen": 0}


class Kept:
    """An object of a script, with all kinds of state."""

    def __init__(self) -> None:
        self.number = 1
        self.text = "a"
        self.items = [1, 2, 3]
        self.names = {"a", "b"}
        self.queue = deque([1, 2], maxlen=9)
        self.table = {"a": 1, "nested": {"b": [1]}}
        self.pair = ([1], (2, {"c": 3}))
        self.tensor = torch.arange(4.0)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.python_generator = random.Random(1)
        self.old_generator = np.random.RandomState(1)
        self.generator = np.random.default_rng(1)
        self.inner: Any = None


def count_globally(limit: list[int] = [3]) -> int:  # noqa: B006
    global CALLS
    CALLS += 1
    TOTALS["seen"] += 1

    def inner() -> int:
        return len(limit) + TOTALS["seen"]

    return inner()


class Averaging(nn.Module):
    """A model of a script: a buffer, and a number that its forward pass counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))
        self.steps = 0
        self.history = [0.0]
        self.config = {"width": 2}

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


def generator_draws(kept: Kept) -> list[Callable[[], Any]]:
    return [
        lambda: torch.rand(1, generator=kept.torch_generator), kept.python_generator.random, kept.old_generator.rand,
        kept.generator.random,
    ]  # fmt: skip


def changes_of(kept: Kept) -> list[Callable[[], Any]]:
    return [
        lambda: setattr(kept, "number", 2), lambda: setattr(kept, "text", "b"), lambda: setattr(kept, "new", 1),
        lambda: delattr(kept, "text"), lambda: setattr(kept, "number", True), lambda: kept.items.append(4), kept.items.pop,
        kept.items.reverse, lambda: kept.items.__setitem__(1, 9), lambda: kept.names.add("c"), lambda: kept.queue.append(3),
        lambda: kept.table.update(a=2), lambda: kept.table.update(z=2), lambda: kept.table.pop("a"),
        lambda: kept.table["nested"]["b"].append(2), lambda: kept.pair[0].append(2), lambda: kept.pair[1][1].update(c=4),
        lambda: kept.tensor.add_(1), lambda: kept.tensor[3].mul_(2), *generator_draws(kept),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(len(changes_of(Kept()))))
def test_each_change_is_seen_and_put_back(number: int) -> None:
    """As an attribute of a root, and of an object that the root refers to."""
    for is_nested in (False, True):
        kept = Kept()
        root = Kept()
        root.inner = kept
        state = StateSnapshot(root=root if is_nested else kept)
        assert state.changed() is None
        changes_of(kept)[number]()
        assert state.changed() is not None
        state.restore()
        assert state.changed() is None
        fresh = Kept()
        for name in ("number", "text", "items", "names", "queue", "table", "pair"):
            assert getattr(kept, name) == getattr(fresh, name), name
        assert torch.equal(kept.tensor, fresh.tensor) and not hasattr(kept, "new")
        assert [float(draw()) for draw in generator_draws(kept)] == [float(draw()) for draw in generator_draws(fresh)]


def test_functions_keep_state_in_closures_defaults_and_globals() -> None:
    cell = 0
    shared = [1]

    def closing() -> None:
        nonlocal cell
        cell += 1
        shared.append(2)

    def late() -> Any:
        return unbound  # noqa: F821

    if cell:
        unbound = 1  # the cell stays empty
    for function in (closing, count_globally):
        state = StateSnapshot(function=function)
        assert state.changed() is None
        before = (cell, [*shared], CALLS, {**TOTALS})
        function()
        assert (cell, shared, CALLS, TOTALS) != before
        assert state.changed() is not None
        state.restore()
        assert (cell, shared, CALLS, TOTALS) == before and state.changed() is None
    defaults: Any = count_globally.__defaults__
    state = StateSnapshot(function=count_globally, late=late)
    defaults[0].append(4)
    assert state.changed() is not None
    state.restore()
    assert defaults[0] == [3]


def test_modules_of_a_script_keep_buffers_and_attributes() -> None:
    changes: list[Callable[[Averaging], Any]] = [
        lambda model: model.mean.add_(1), lambda model: model.layer.running_mean.add_(1),
        lambda model: setattr(model, "steps", 1), lambda model: setattr(model, "other", 1),
        lambda model: model.history.append(1.0),
    ]  # fmt: skip
    for change in changes:
        model = Averaging()
        state = StateSnapshot(model=model)
        assert state.changed() is None
        change(model)
        assert state.changed() is not None
        state.restore()
        assert state.changed() is None and model.steps == 0 and model.history == [0.0] and not hasattr(model, "other")
        assert not model.mean.any() and not model.layer.running_mean.any()  # type: ignore[union-attr]
    model = Averaging()
    state = StateSnapshot(model=model)
    with torch.no_grad():
        model.layer.weight.add_(1)  # a parameter is trained, and no state of the loss
    model.config["width"] = 3
    assert state.changed() is None


def test_methods_keep_the_state_of_their_object() -> None:
    kept = Kept()
    state = StateSnapshot(method=kept.__init__)  # type: ignore[misc]
    kept.items.append(4)
    assert state.changed() is not None


def test_what_is_data_or_belongs_to_a_library_is_left_alone() -> None:
    kept = Kept()
    kept.inner = [0] * (MAX_CONTAINER_ITEMS + 1)
    large = torch.zeros(10**6 + 1)
    kept.table["large"] = large  # type: ignore[assignment]
    kept.table["meta"] = torch.empty(3, device="meta")  # type: ignore[assignment]
    fits = [0] * MAX_CONTAINER_ITEMS
    just_fits = torch.zeros(10**6)
    kept.table["fits"] = (fits, just_fits)  # type: ignore[assignment]
    state = StateSnapshot(kept=kept, without=frozenset({"queue"}))
    kept.inner.append(1)
    large.add_(1)
    kept.queue.append(1)
    assert state.changed() is None
    fits[0] = 1
    assert state.changed() is not None
    state.restore()
    just_fits.add_(1)
    assert state.changed() is not None
    assert is_library_class(nn.Linear) and is_library_class(dict) and not is_library_class(Kept)
    plain = StateSnapshot(function=torch.nn.functional.cross_entropy, number=3)
    assert plain.changed() is None


def test_the_search_ends_at_a_depth() -> None:
    chain: list[Any] = []
    links = [chain]
    for _ in range(2 * MAX_DEPTH):
        links.append([])
        links[-2].append(links[-1])
    state = StateSnapshot(chain=chain)
    reached = []
    for link in links:
        link.append(0)
        reached.append(state.changed() is not None)
        link.pop()
    assert reached == [True] * MAX_DEPTH + [False] * (len(links) - MAX_DEPTH)


def test_values_are_equal_by_what_they_hold() -> None:
    array = np.arange(3)
    equal: list[tuple[Any, Any]] = [
        (torch.ones(2), torch.ones(2)), (array, array.copy()), ({"a": array}, {"a": array.copy()}),
        ((1, array), (1, array.copy())),
        (3, 3), ("a", "a"),
    ]  # fmt: skip
    unequal: list[tuple[Any, Any]] = [
        (torch.ones(2), torch.zeros(2)), (torch.ones(2), torch.ones(3)), (array, array + 1), ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}), ((1, array), (1, array + 1)), ((1,), (1, 2)), (3, 4),
    ]  # fmt: skip
    assert all(_is_equal(*pair) for pair in equal)
    assert not any(_is_equal(*pair) for pair in unequal)


def test_an_exchange_with_other_ranks_is_refused() -> None:
    assert refuse_exchanges(torch.ops.aten.add.Tensor, (torch.ones(1), torch.ones(1)), {}) == 2.0
    for namespace in ("c10d", "_c10d_functional"):
        operator = type("Operator", (), {"namespace": namespace})()
        with pytest.raises(RuntimeError, match="exchanges data with other ranks"):
            refuse_exchanges(operator, (), {})


def test_gradients_of_a_losss_own_weights_are_put_back() -> None:
    """Else a loss that is only measured would move its weights in the first step."""
    inside = nn.Linear(2, 1)
    outside = nn.Linear(2, 1)
    kept = Kept()
    kept.inner = outside
    outside.bias.grad = first = torch.ones(1)
    snapshot = StateSnapshot(model=inside, loss=kept)
    assert snapshot.changed() is None
    inside(torch.ones(1, 2)).sum().backward()
    outside.weight.grad = torch.ones(1, 2)
    outside.bias.grad = None
    assert "the gradient of" in (snapshot.changed() or "")
    snapshot.restore()
    assert inside.weight.grad is inside.bias.grad is outside.weight.grad is None and outside.bias.grad is first
