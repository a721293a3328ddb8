"""What tensor-parallel ranks exchange in a layer, counted in a world where the other rank is fake: as the cost model has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_runs import Case, a_config, a_plan
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from upshift.models.build import build_model, choose_class, find_stacks
from upshift.models.tracing.op_counter import LiveTracker
from upshift.planning.cost.communication import PAIRS_A_LAYER
from upshift.training.distributed.mesh import init_mesh
from upshift.training.distributed.tensor_parallel import shard_tensors

TENSOR = {"tensor_parallel": 2}
SEQUENCE = TENSOR | {"sequence_parallel": True}
SUM, GATHER, SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.fixture
def fake_world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def count(layout: dict[str, Any], model: str = "llama") -> tuple[dict[str, int], int]:
    """Of all layers, forward and backward: exchanges by kind, and bytes that are live between the two."""
    plan = a_plan(Case(model, 2, layout))
    config = a_config(model)
    built = build_model(config, choose_class(config, model)[0], dtype=torch.float32)
    shard_tensors(built, init_mesh(plan))
    ((_, layers),) = find_stacks(built)
    hidden = torch.zeros(2, 32, config.hidden_size, requires_grad=True)
    positions = torch.arange(32)[None]
    rotary = built.model.rotary_emb(hidden, positions)
    with CommDebugMode() as seen:
        with LiveTracker() as tracker:
            out = hidden
            for layer in layers:
                out = layer(out, position_embeddings=rotary, position_ids=positions, attention_mask=None)
        live = tracker.live_bytes
        out.sum().backward()
    counts = {kind: 0 for kind in (SUM, GATHER, SCATTER)}
    for packet, times in seen.get_comm_counts().items():
        counts[str(packet).rpartition(".")[2]] += times
    return counts, live


@pytest.mark.usefixtures("fake_world")
def test_a_part_is_entered_and_left_once() -> None:
    """However many matrices read its input; and the tokens are shared before the first layer and gathered after the last."""
    pairs = PAIRS_A_LAYER * 4
    assert count(TENSOR)[0] == {SUM: 2 * pairs, GATHER: 0, SCATTER: 0}
    assert count(SEQUENCE)[0] == {SUM: 0, GATHER: 2 * pairs + 2, SCATTER: 2 * pairs}
    assert count(SEQUENCE | {"gather_again": True})[0] == {SUM: 0, GATHER: 3 * pairs + 2, SCATTER: 2 * pairs}


@pytest.mark.usefixtures("fake_world")
def test_gathered_inputs_are_not_kept_when_they_are_gathered_again() -> None:
    whole, again = count(SEQUENCE)[1], count(SEQUENCE | {"gather_again": True})[1]
    others = 2 * 4 * (2 * 32 * 32 * 4) // 2  # parts x layers x bytes of the hidden states, less a rank's own tokens
    print(f"kept: {whole} bytes, {again} when gathered again")
    assert whole - again == others
