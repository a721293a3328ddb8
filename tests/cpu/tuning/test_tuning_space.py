"""One space means the same to every search library: read from what a user writes, and drawn from."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshift.errors import RequestError
from upshift.tuning.backends import check_sweep, draw_values, optuna_distributions, space_of_sweep, wandb_parameters
from upshift.tuning.space import Choices, Range, Space, make_space, read_space

DRAWS = 4000
WRITTEN: dict[str, Any] = {
    "learning_rate": {"low": 1e-5, "high": 1e-2, "log": True},
    "weight_decay": {"low": 0, "high": 1},
    "warmup_steps": {"low": 0, "high": 30, "step": 10},
    "seed": {"low": 1, "high": 5},
    "lora_rank": {"low": 2, "high": 64, "log": True},
    "lr_scheduler_type": ["linear", "cosine"],
    "global_batch": 8,
}
SPACE = make_space(WRITTEN)


def test_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("learning_rate: {low: 1e-5, high: 1e-2, log: true}\nadam_beta1: [0.9, 1e-1]\nglobal_batch: 8\n")
    read = read_space(path)
    assert read.parameters["learning_rate"] == Range(low=1e-5, high=1e-2, log=True)  # YAML says that 1e-5 is a word
    assert read.parameters["adam_beta1"] == Choices(choices=(0.9, 0.1))
    assert read.fixed == {"global_batch": 8} and set(read.searched) == {"learning_rate", "adam_beta1"}
    assert isinstance(SPACE.parameters["weight_decay"], Range) and not SPACE.parameters["weight_decay"].is_whole
    path.write_text(json.dumps(WRITTEN))
    assert read_space(path) == SPACE
    assert Space.from_json(SPACE.to_json()) == SPACE


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"lr": [1e-3]}, "'lr' is not a hyper-parameter that is searched; use one of adam_beta1"),
        ({"per_device_train_batch_size": [4]}, "search global_batch: its micro-batch is planned"),
        ({"learning_rate": {"low": 2, "high": 1}}, "learning_rate is not a valid Range: low must be below high (got"),
        ({"learning_rate": {"low": "small", "high": 1}}, "learning_rate is not a valid Range: low: must be a number (got"),
        ({"weight_decy": [0.1]}, "did you mean weight_decay?"),
        ({"learning_rate": {"low": 0, "high": 1, "log": True}}, "begins above 0"),
        ({"learning_rate": {"low": 0, "hihg": 1}}, "hihg"),
        ({"learning_rate": ["small"]}, "is not of numbers"),
        ({"seed": []}, "nothing to choose from"),
        ({"seed": [-1]}, "seed: must be at least 0"),
        ({"seed": [2**32]}, "seed: must be below 4294967296"),
        ({"global_batch": [0]}, "global_batch: must be above 0"),
        ({"global_batch": [8, True]}, "global_batch takes whole numbers, not true; write numbers such as 16"),
        ({"global_batch": {"low": 1, "high": 8, "step": 0.5}}, "global_batch takes whole numbers, not 0.5"),
        ({"warmup_steps": {"low": 0.0, "high": 9.0}}, "warmup_steps takes whole numbers, not 0.0"),
        ({"sequence_length": [1]}, "sequence_length: must be at least 2"),
        ({"lora_rank": {"low": 0, "high": 8}}, "lora_rank: must be above 0"),
        ({"lora_rank": [2.0]}, "lora_rank takes whole numbers, not 2.0"),
        ({"epochs": [0]}, "epochs: must be above 0"),
        ({"weight_decay": [True]}, "is not of numbers"),
        ({"adam_beta1": [1.0]}, "adam_beta1: must be below 1"),
        ({"adam_epsilon": [-1.0]}, "adam_epsilon: must be at least 0"),
    ],
)
def test_what_is_refused(written: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        make_space(written)


def test_files_that_hold_no_space(tmp_path: Path) -> None:
    for text, words in (("", "holds no hyper-parameters"), ("a: [", "is not YAML"), ("- 1", "holds no hyper-parameters")):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(RequestError, match=words):
            read_space(tmp_path / "x.yaml")
    with pytest.raises(RequestError, match="cannot read"):
        read_space(tmp_path / "none.yaml")


def by_optuna() -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [draw_values(study.ask(), SPACE) for _ in range(DRAWS)]


def by_ray() -> list[dict[str, Any]]:
    import numpy as np

    from upshift.tuning.backends import ray_domains

    np.random.seed(0)
    random.seed(0)
    found = ray_domains(SPACE)
    return [
        {name: one.sample() if hasattr(one, "sample") else one for name, one in found.items()} for _ in range(DRAWS)
    ]  # fmt: skip


def by_wandb() -> list[dict[str, Any]]:
    """As its documentation says that it draws."""
    chance = random.Random(0)

    def one(said: dict[str, Any]) -> Any:
        if "values" in said or "value" in said:
            return chance.choice(said.get("values", [said.get("value")]))
        low, high = said["min"], said["max"]
        if said["distribution"] == "int_uniform":
            return chance.randint(low, high)
        if "log" not in said["distribution"]:
            return chance.uniform(low, high)
        drawn = math.exp(chance.uniform(math.log(low), math.log(high)))
        return round(drawn / said["q"]) * said["q"] if "q" in said else drawn

    return [{name: one(said) for name, said in wandb_parameters(SPACE).items()} for _ in range(DRAWS)]


@pytest.fixture(scope="module")
def of_optuna() -> list[dict[str, Any]]:
    return by_optuna()


@pytest.mark.parametrize("other", [by_ray, by_wandb])
@pytest.mark.parametrize("name", WRITTEN)
def test_the_same_space_is_the_same_everywhere(name: str, other: Any, of_optuna: list[dict[str, Any]]) -> None:
    """Kolmogorov-Smirnov's distance of two samples of 4,000: above 0.05 once in 10,000 times for equal distributions."""
    ours, theirs = ([row[name] for row in rows] for rows in (of_optuna, other()))
    assert {type(value) for value in ours} == {type(value) for value in theirs}
    values = sorted({*ours, *theirs})
    one, two, apart, counts = 0, 0, 0.0, (Counter(ours), Counter(theirs))
    for value in values:
        one, two = one + counts[0][value], two + counts[1][value]
        apart = max(apart, abs(one - two) / DRAWS)
    assert apart < 0.05, (name, apart)


def test_wandb_there_and_back() -> None:
    back = space_of_sweep({"parameters": wandb_parameters(SPACE)})
    assert back.parameters["lora_rank"] == SPACE.parameters["lora_rank"]
    assert back.parameters["learning_rate"] == SPACE.parameters["learning_rate"]
    assert back.parameters["warmup_steps"] == Choices(choices=(0, 10, 20, 30))
    with pytest.raises(RequestError, match="'normal'; use one of uniform"):
        space_of_sweep({"parameters": {"a": {"distribution": "normal", "mu": 0, "sigma": 1}}})


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"values": [1, 2], "probabilities": [0.9, 0.1]}, "the sweep's x has 'probabilities', which is not used here"),
        ({"values": [1, 2], "min": 0}, "has 'min', which is not used"),
        ({"parameters": {"y": {"value": 1}}}, "has 'parameters', which is not used"),
        ({"distribution": "uniform", "min": 0.0}, "has distribution 'uniform' and no 'max'; give min and max"),
        ({"max": 3}, "has distribution 'int_uniform' and no 'min'"),
        ({"distribution": "uniform", "min": 0.0, "max": 1.0, "q": 0.1}, "has 'q', which is not used"),
        ({"distribution": "q_log_uniform_values", "min": 1, "max": 9, "q": 2}, "has q 2; only 1"),
        ({"distribution": "int_uniform", "min": 0.5, "max": 2}, "give whole numbers"),
        ({"min": "1e-5", "max": 1.0}, "write numbers such as 1.0e-4"),
        ({"min": 1.0, "max": 0.0}, "low must be below high"),
        ({"distribution": "log_uniform_values", "min": 0.0, "max": 1.0}, "begins above 0"),
        ({"values": []}, "nothing to choose from"),
        ({"values": 3}, "the sweep's x"),
        ({"distribution": "constant"}, "and no 'value'"),
        ({}, "and no 'min'"),
        (0.1, "write {'value': 0.1}"),
    ],
)
def test_a_parameter_of_a_sweep_that_would_be_another_is_refused(entry: Any, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        space_of_sweep({"parameters": {"x": entry}})


def test_entries_of_a_sweep_that_have_no_effect_are_refused() -> None:
    sweep = {"method": "random", "metric": {"name": "objective", "goal": "maximize"}, "parameters": {}}
    check_sweep(sweep, ["maximize"])
    check_sweep({"parameters": {}}, ["minimize", "maximize"])
    for changed, words in (
        ({"early_terminate": {"type": "hyperband"}}, "the sweep has 'early_terminate', which is not used here; give pruner="),
        ({"run_cap": 3}, "give n_trials="),
        ({"command": ["python"]}, "has 'command'"),
        ({"metric": {"name": "objective", "target": 1.0}}, "the sweep's metric has 'target'"),
        ({"metric": {"goal": "minimize"}}, "has goal 'minimize', and direction is maximize; use the same"),
    ):
        with pytest.raises(RequestError, match=words):
            check_sweep(sweep | changed, ["maximize"])


steps = st.none() | st.integers(min_value=1, max_value=7)


@given(low=st.integers(-1000, 1000), count=st.integers(1, 40), step=steps, scale=st.sampled_from([1, 0.25]))
def test_every_range_is_a_distribution(low: int, count: int, step: int | None, scale: float) -> None:
    one = Range(low=low * scale, high=(low + count * (step or 1)) * scale, step=None if step is None else step * scale)
    made = optuna_distributions(Space(parameters={"seed": one}))["seed"]
    assert (made.low, made.high) == (one.low, one.high)
    assert one.grid is None or (len(one.grid) == count + 1 and one.grid[-1] == one.high)
    assert all(made._contains(value) for value in one.grid or (one.low, one.high))
