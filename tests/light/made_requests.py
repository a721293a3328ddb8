"""Requests for plans: the values that each option may take, and a set of requests in which any two of them meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args

from made_profile import FEED_FORWARD, HIDDEN, LAYER, LAYERS, OUTSIDE, make_profile, segment

from upshift.hardware import describe
from upshift.hardware.spec import Exchange, Host, Link, Measured, Rates
from upshift.models.profile import Experts, ModelProfile, ParameterShape, StepTrace

RANK = 16
ADAPTER = 2 * RANK * (4 * HIDDEN + 2 * HIDDEN + FEED_FORWARD)  # parameters of one layer's LoRA
NOTHING = segment(kept=0.0, work=0.0, flops=0.0)


def pairs_of(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return few requests in which every value of each option meets every value of each other one, greedily; always the same."""
    names = list(values)
    left = {
        (one, i, other, j)
        for one, other in itertools.combinations(names, 2)
        for i in range(len(values[one]))
        for j in range(len(values[other]))
    }
    found = []
    while left:
        first, i, second, j = min(left)
        chosen = {first: i, second: j}
        for name in names:
            if name not in chosen:
                met = [_new_pairs(chosen, name, place, names, left) for place in range(len(values[name]))]
                chosen[name] = met.index(max(met))
        left -= {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}
        found.append({name: values[name][chosen[name]] for name in names})
    return found


def _new_pairs(chosen: dict[str, int], name: str, place: int, names: list[str], left: set[tuple[str, int, str, int]]) -> int:
    order = {each: number for number, each in enumerate(names)}
    pairs = ((a, chosen[a], name, place) if order[a] < order[name] else (name, place, a, chosen[a]) for a in chosen)
    return sum(pair in left for pair in pairs)


@cache
def model_of(kind: str, objective: str, *, longest: int) -> ModelProfile:
    """Return a made profile. ``kind``: full, tied, lora, qlora, mixture or plain (shares nothing, splits no loss)."""
    profile = make_profile(longest=longest).changed(objective=objective)
    profile = profile.changed(steps=tuple(each for step in profile.steps for each in _ways(step)))
    if kind in ("lora", "qlora"):
        return _adapted(profile, quantized=kind == "qlora")
    if kind == "mixture":
        return _mixture(profile)
    if kind == "plain":
        return profile.changed(
            tensor_parallel=None, tensor_parallel_reason="the model declares nothing", heads=None,
            declares=profile.declares.changed(pipeline_parallel_plan=(), gradient_checkpointing=False),
        )  # fmt: skip
    if kind == "tied":
        parameters = profile.parameters
        return profile.changed(
            parameters=parameters.changed(
                total=parameters.total - OUTSIDE, trainable=parameters.total - OUTSIDE, head=0, tied=True,
                trainable_shapes=(*parameters.trainable_shapes[:-1], parameters.trainable_shapes[-1].changed(count=1)),
            )
        )  # fmt: skip
    return profile


def _ways(step: StepTrace) -> list[StepTrace]:
    """Return the step with its loss in chunks and selective recomputation, with and without a mask, and for each kernel."""
    whole = step.changed(
        chunked_gap=step.gaps[-1], gaps_recomputed={"full": step.gaps, "selective": step.gaps},
        stacks=tuple(stack.changed(recomputed={"full": stack.plain, "selective": stack.plain}) for stack in step.stacks),
    )  # fmt: skip
    masks = [whole, whole.changed(masked=True)]
    return [*masks, *(one.changed(attention="block") for one in masks), whole.changed(attention="eager")]


def _adapted(profile: ModelProfile, *, quantized: bool) -> ModelProfile:
    """Return the profile of LoRA around the layers: what comes before them does nothing in the backward pass."""
    whole, trained = profile.parameters, LAYERS * ADAPTER
    frozen = LAYERS * LAYER if quantized else 0
    parameters = whole.changed(
        total=whole.total + trained, layers=whole.layers + trained, trainable=trained, trainable_layers=trained, trainable_head=0,
        always_fp32=trained, quantized=frozen, quantized_bytes=frozen // 2,
        trainable_shapes=(
            ParameterShape(shape=(RANK, HIDDEN), count=6 * LAYERS), ParameterShape(shape=(HIDDEN, RANK), count=6 * LAYERS),
            ParameterShape(shape=(RANK, FEED_FORWARD), count=LAYERS), ParameterShape(shape=(FEED_FORWARD, RANK), count=LAYERS),
        ),
        frozen_shapes=whole.trainable_shapes,
    )  # fmt: skip

    def without_first(step: StepTrace) -> StepTrace:
        gaps = (NOTHING, *step.gaps[1:])
        return step.changed(gaps=gaps, gaps_recomputed=dict.fromkeys(step.gaps_recomputed, gaps))

    stacks = (profile.stacks[0].changed(layer_trainable=(ADAPTER,)),)
    return profile.changed(parameters=parameters, stacks=stacks, steps=tuple(map(without_first, profile.steps)))


def _mixture(profile: ModelProfile) -> ModelProfile:
    count = 8
    shapes = (
        ParameterShape(shape=(HIDDEN, HIDDEN), count=4 * LAYERS),
        ParameterShape(shape=(count, 3 * FEED_FORWARD // count, HIDDEN), count=LAYERS),
        profile.parameters.trainable_shapes[-1],
    )
    return profile.changed(
        parameters=profile.parameters.changed(trainable_shapes=shapes),
        experts=Experts(count=count, parameters=LAYERS * 3 * FEED_FORWARD * HIDDEN, per_token=2),
        declares=profile.declares.changed(expert_parallel=True),
    )


def measured_cpus() -> Host:
    """Return two hosts of 16 cores, probed, with a disk and a network."""
    host = describe("2xepyc-9654-64gb@ethernet-25")
    assert host.cpu is not None
    exchange = Link(name="gloo", bytes_per_second=5e9, latency_seconds=1e-4, measured=True)
    exchanges: tuple[Exchange, ...] = get_args(Exchange)
    measured = Measured(
        torch_version="2", transformers_version="5", num_threads=16,
        cpu=Rates(fp32=1e12, fp32_medium=1e12, bf16=2e12, memory_bytes_per_second=1e11), dispatch_seconds=1e-6,
        first_touch_seconds_per_byte=1e-10, base_resident_bytes=3 * 2**28, compiler=True, probe_seconds=1,
        exchanges=dict.fromkeys(exchanges, exchange),
    )  # fmt: skip
    return host.changed(
        cpu=host.cpu.changed(usable_cores=16, numa_nodes=2), measured=measured, disk_bytes_per_second=1e9,
    )  # fmt: skip
