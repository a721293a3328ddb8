"""Predicted memory of ranks that share a job, against the allocator's events of real gloo ranks of the same layout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from upshift.models.profile import ModelProfile
from upshift.models.source import find_model
from upshift.models.store import Variant, profile_model
from upshift.planning.cost.memory import predict_memory
from upshift.planning.cost.segments import trace_for
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.workload import Workload

RANKS, BATCH, SEQUENCE = 2, 4, 128
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        use_cache=False, architectures=["LlamaForCausalLM"],
    ),
    "qwen2 tied": Qwen2Config(
        hidden_size=128, intermediate_size=344, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1024, use_cache=False, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"],
    ),
}  # fmt: skip
LAYOUTS = {
    "zero3": Layout(fully_shard="weights", shard_size=RANKS),
    "zero2": Layout(fully_shard="gradients", shard_size=RANKS),
    "tensor parallel": Layout(tensor_parallel=RANKS),
}
TOLERANCE = 0.01

WORKER = '''
import json, os, sys, time, weakref
import torch, torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.distributed.tensor import DTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM
from upshift.benchmarking.meters import allocated_peak
from upshift.models.recompute import recompute_layers

class LiveBytes(TorchDispatchMode):
    """The most bytes of plain tensors' storages that operators made and that are still referenced."""

    def __init__(self, held):
        super().__init__()
        self.sizes, self.now = dict.fromkeys(held, 0), sum(held.values())
        self.peak = self.now

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) is torch.Tensor:
                self.add(leaf.untyped_storage())
        return result

    def add(self, storage):
        key = storage._cdata
        if key not in self.sizes and storage.data_ptr() not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.remove, key)

    def remove(self, key):
        self.now -= self.sizes.pop(key, 0)

# The profiler sees what this thread frees. gloo's threads hold what they sent a moment longer than wait() does.
wait_for = dist.Work.wait
def wait_and_settle(work, *args, **kwargs):
    done = wait_for(work, *args, **kwargs)
    time.sleep(0.01)
    return done
dist.Work.wait = wait_and_settle

folder, layout, batch, sequence, recomputed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).train()
recompute_layers(model, recomputed)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
if layout == "tensor parallel":
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    parallelize_module(model.model, mesh, {name: styles[style]() for name, style in model.config.base_model_tp_plan.items()})
else:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=layout == "zero3")
    fully_shard(model, mesh=mesh, reshard_after_forward=layout == "zero3")
one_by_one = layout == "tensor parallel"  # fused kernels do not take tensors of both kinds
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=not one_by_one, foreach=False)
ids = torch.zeros((batch, sequence), dtype=torch.long)
def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
def step():
    for _ in range(2):
        (model(input_ids=ids, labels=ids).loss * 0.5).backward()
    optimizer.step()
    optimizer.zero_grad()
step()
held = {}
for tensor in [*model.parameters(), *model.buffers(), *(v for s in optimizer.state.values() for v in s.values()), ids]:
    storage = local(tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor).untyped_storage()
    held[storage.data_ptr()] = storage.nbytes()
if layout == "tensor parallel":  # gloo's threads free sums that the profiler of this thread does not see
    with LiveBytes(held) as live:
        step()
    peak_bytes = live.peak
else:  # storages that are resized are seen by the allocator alone
    with allocated_peak("cpu", resident_bytes=sum(held.values())) as peak:
        step()
    peak_bytes = peak.bytes
if dist.get_rank() == 0:
    print("PEAK", json.dumps(peak_bytes))
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
'''


def measured_peak(folder: Path, layout: str, recomputed: int) -> int:
    script = folder / "worker.py"
    script.write_text(WORKER)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--rdzv-backend", "c10d",
         "--rdzv-endpoint", "localhost:0", str(script), str(folder), layout, str(BATCH), str(SEQUENCE), str(recomputed)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEAK")]
    assert lines, done.stderr[-3000:]
    return int(json.loads(lines[-1].removeprefix("PEAK")))


def predicted_peak(profile: ModelProfile, layout: Layout, recomputed: int) -> float:
    plan = Plan(
        device="cpu", host="", model=profile.model_hash, sequence_length=SEQUENCE, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2, num_processes=RANKS, layout=layout, activation_checkpointing=recomputed,
    )  # fmt: skip
    workload = Workload(sequence_length=SEQUENCE, global_batch=plan.global_batch)
    trace = trace_for(profile, plan, workload)
    assert trace is not None
    memory = predict_memory(profile, trace, plan)
    print({name: {part: round(size / 2**20, 2) for part, size in peak.parts.items()} for name, peak in memory.phases.items()})
    return memory.peak


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, ModelProfile]]:
    @cache
    def profile(name: str) -> tuple[Path, ModelProfile]:
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        CONFIGS[name].save_pretrained(folder)
        variants = (Variant("fp32", "sdpa", False, divided=True),)
        return folder, profile_model(find_model(str(folder)), sequence_length=SEQUENCE, variants=variants)

    return profile


@pytest.mark.parametrize(
    ("name", "layout", "recomputed"),
    [("llama", layout, recomputed) for layout in LAYOUTS for recomputed in (0, 6)] + [("qwen2 tied", one, 0) for one in LAYOUTS],
)
def test_memory_of_a_rank(
    name: str, layout: str, recomputed: int, profiles: Callable[[str], tuple[Path, ModelProfile]]
) -> None:
    folder, profile = profiles(name)
    predicted = predicted_peak(profile, LAYOUTS[layout], recomputed)
    measured = measured_peak(folder, layout, recomputed)
    print(f"{name}, {layout}, recompute {recomputed}: {predicted / 2**20:.2f} MiB predicted, {measured / 2**20:.2f} measured")
    assert predicted == pytest.approx(measured, rel=TOLERANCE)
