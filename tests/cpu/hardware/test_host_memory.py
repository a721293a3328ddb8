"""What goes to the host: activations and no weights, and pinned memory of any size."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from upshift.errors import JobFailed
from upshift.loading.offload.gpu_copy import pinned_memory
from upshift.training.prepare import _WeightStorages


def test_only_the_present_memory_of_a_weight_is_a_weights() -> None:
    """FSDP frees a layer's gathered weights after it, and activations get their addresses."""
    layer = nn.Linear(8, 4, bias=False)
    weights = _WeightStorages(layer)
    gathered = layer.weight.detach()
    assert weights.contain(gathered.t()) and weights.contain(layer.weight[1:])
    layer.weight = nn.Parameter(torch.ones(4, 8))
    assert weights.contain(layer.weight.t()) and not weights.contain(gathered)
    assert not weights.contain(torch.ones(4, 8))


@pytest.mark.parametrize("from_shards", [False, True])
def test_a_gathered_weight_with_padding_is_recognized(from_shards: bool) -> None:
    """Two ranks gather three rows as four."""
    layer = nn.Linear(8, 3, bias=False)
    padded = torch.zeros(4 * 8)
    whole = nn.Parameter(padded[: 3 * 8].view(3, 8))
    if from_shards:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            layer.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 8), mesh, [Shard(0)], shape=(3, 8), stride=(8, 1)))
            weights = _WeightStorages(layer)
        finally:
            dist.destroy_process_group()
        layer.weight = whole
    else:
        layer.weight = whole
        weights = _WeightStorages(layer)
    assert weights.contain(layer.weight.t()) and not weights.contain(torch.zeros(4 * 8))


def test_nothing_is_pinned_where_there_is_nothing_and_a_refusal_has_its_own_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA answers cudaHostRegister of 0 bytes with an error."""
    calls: list[int] = []

    def register(address: int, num_bytes: int, flags: int) -> int:
        calls.append(num_bytes)
        return 1

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    device = torch.device("cuda", 0)
    assert pinned_memory(0, device, advice="").numel() == 0 and not calls
    with pytest.raises(JobFailed, match="could not be pinned .*; use optim_offload=False"):
        pinned_memory(8, device, advice="use optim_offload=False")
    assert calls == [8]
