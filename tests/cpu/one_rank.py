"""One rank of a job that shares a model, as PyTorch and transformers do it: the bytes that a steady optimizer step allocates.

Real ranks exchange through gloo, and the allocator's own events are read. In a fake world there is one process, all
other ranks are fake, and so are the tensors: their storages are counted instead. Cases come as JSON, one process runs them all.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from upshift.benchmarking.meters import allocated_peak
from upshift.models.measure import fake_masks
from upshift.models.recompute import recompute_layers
from upshift.models.tracker import LiveTracker

SETTLE_SECONDS = 0.01  # gloo's threads hold what they sent or summed a moment longer than wait() does
Step = Callable[[], None]
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


class Job:
    """What a case asks for, and this rank's place in it."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.layout: dict[str, Any] = case["layout"]
        self.batch, self.sequence, self.micro_batches = case["batch"], case["sequence"], case["micro_batches"]
        self.recomputed, self.bf16 = case["recomputed"], case["precision"] == "bf16"
        self.config = AutoConfig.from_pretrained(case["model"])
        tensor, pipeline = self.layout["tensor_parallel"], self.layout["pipeline_parallel"]
        self.shard = self.layout["shard_size"] if self.layout["fully_shard"] != "no" else 1
        replicas = dist.get_world_size() // (tensor * pipeline * self.shard)
        names = ("pipeline", "replicas", "shard", "tensor")
        self.mesh = init_device_mesh("cpu", (pipeline, replicas, self.shard, tensor), mesh_dim_names=names)
        self.stage = self.mesh.get_local_rank("pipeline")
        self.sharding = self.mesh["replicas", "shard"] if replicas > 1 else self.mesh["shard"]

    def ids(self, rows: int) -> torch.Tensor:
        return torch.zeros((rows, self.sequence // self.layout["context_parallel"]), dtype=torch.long)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config).train()
        recompute_layers(model, self.recomputed)
        return model

    def share(self, model: nn.Module, base: nn.Module) -> None:
        """``base`` has the layers of ``model`` that this rank runs."""
        if self.layout["tensor_parallel"] > 1:
            tied = {"lm_head.weight"} - dict(model.named_parameters()).keys()
            plan = {name: style for name, style in model._expand_parallel_plan(model.tp_plan).items() if name not in tied}
            apply_tensor_parallelism(model, self.mesh["tensor"], plan)
            model.tie_weights()
        if self.layout["expert_parallel"] > 1:
            self.share_experts(model)
        if self.layout["fully_shard"] != "no":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            settings = {"mesh": self.sharding, "reshard_after_forward": self.layout["fully_shard"] == "weights"}
            settings |= {"mp_policy": policy} if self.bf16 else {}
            for layer in base.layers:
                fully_shard(layer, **settings)
            fully_shard(model, **settings)

    def share_experts(self, model: nn.Module) -> None:
        """Every rank has sequences of its own. Each expert gets as many tokens as any other: routes are set, not learned."""
        plan = model._expand_parallel_plan(model.ep_plan)
        apply_expert_parallelism(model, self.mesh["replicas"], self.mesh["tensor"], plan)
        count = self.config.num_experts if hasattr(self.config, "num_experts") else self.config.num_local_experts

        def set_routes(module: nn.Module, args: Any, routed: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            logits, scores, indices = routed
            return logits, scores, torch.arange(indices.numel()).remainder(count).view(indices.shape)

        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(set_routes)


class Exchanged(torch.autograd.Function):
    """All-to-all: ranks that had a part of one dimension of a tensor get a part of another one."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, scattered: int, gathered: int, ranks: int) -> torch.Tensor:
        context.way = scattered, gathered, ranks
        sent = torch.stack([part.contiguous() for part in tensor.chunk(ranks, scattered)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(list(received.unbind(0)), gathered)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        scattered, gathered, ranks = context.way
        return Exchanged.apply(gradient, gathered, scattered, ranks), None, None, None


def ulysses(ranks: int) -> str:
    """The name of an attention in which each rank has all tokens of some heads (Jacobs et al. 2023)."""

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **settings: Any) -> tuple[torch.Tensor, None]:
        query, key, value = (Exchanged.apply(tensor, 1, 2, ranks) for tensor in (query, key, value))
        out, _ = sdpa_attention_forward(module, query, key, value, None, is_causal=True, scaling=settings.get("scaling"))
        return Exchanged.apply(out, 1, 2, ranks), None

    AttentionInterface.register("ulysses", attend)
    AttentionMaskInterface.register("ulysses", lambda *_, **__: None)
    return "ulysses"


class Stage(nn.Module):
    """Some layers of a model; the first has the embedding, the last the head. The model's own forward runs them."""

    def __init__(self, model: nn.Module, index: int, count: int) -> None:
        super().__init__()
        base = model.model
        per_stage = len(base.layers) // count
        base.layers = nn.ModuleList(list(base.layers)[index * per_stage : (index + 1) * per_stage])
        base.config.num_hidden_layers = per_stage
        self.is_first, self.is_last = index == 0, index == count - 1
        if not self.is_first:
            base.embed_tokens = None
        if not self.is_last:
            base.norm = nn.Identity()
        self.base, self.head = base, model.lm_head if self.is_last else None

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": tensor} if self.is_first else {"inputs_embeds": tensor}
        hidden = self.base(use_cache=False, **given).last_hidden_state
        return hidden if self.head is None else self.head(hidden)


def new_optimizer(modules: list[nn.Module]) -> torch.optim.Optimizer:
    """Fused kernels do not take tensors of several kinds; one by one they allocate what fused ones do, but for the largest."""
    parameters = [one for module in modules for one in module.parameters()]
    kinds = {(one.device_mesh, one.placements) if isinstance(one, DTensor) else None for one in parameters}
    return torch.optim.AdamW(parameters, lr=1e-3, fused=len(kinds) == 1, foreach=False)


def whole_model(job: Job) -> Step:
    model, ranks = job.model(), job.layout["context_parallel"]
    job.share(model, model.model)
    given: dict[str, torch.Tensor] = {}
    if ranks > 1:
        model.set_attn_implementation(ulysses(ranks))
        given["position_ids"] = torch.arange(job.sequence // ranks)[None] + dist.get_rank() * (job.sequence // ranks)
    optimizer, ids = new_optimizer([model]), job.ids(job.batch)

    def step() -> None:
        for _ in range(job.micro_batches):
            (model(input_ids=ids, labels=ids, **given).loss * 0.5).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(job: Job) -> Step:
    ranks, each = job.layout["pipeline_parallel"], job.layout["virtual_stages"]
    count = ranks * each
    mine = [job.stage + chunk * ranks for chunk in range(each)]
    models = [job.model() for _ in mine]
    modules = [Stage(model, index, count) for model, index in zip(models, mine, strict=True)]
    for module in modules:
        job.share(module, module.base)
    dtype = torch.bfloat16 if job.bf16 else torch.float32
    ids = job.ids(job.batch)
    hidden = torch.empty((*ids.shape, job.config.hidden_size), device="meta", dtype=dtype, requires_grad=True)
    logits = torch.empty((*ids.shape, job.config.vocab_size), device="meta", dtype=dtype, requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            module, index, count, torch.device("cpu"), group=job.mesh.get_group("pipeline"),
            input_args=(ids.to("meta") if module.is_first else hidden,), output_args=(logits if module.is_last else hidden,),
        )
        for module, index in zip(modules, mine, strict=True)
    ]  # fmt: skip
    loss_of = models[0].loss_function

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(logits=output, labels=target, vocab_size=job.config.vocab_size)

    name = job.layout["pipeline_schedule"]
    one_or_more: Any = stages[0] if name in ("gpipe", "1f1b") else stages
    schedule = SCHEDULES[name](one_or_more, n_microbatches=job.micro_batches, loss_fn=loss)
    optimizer, all_ids = new_optimizer(modules), job.ids(job.batch * job.micro_batches)

    def step() -> None:
        inputs = (all_ids,) if modules[0].is_first else ()
        schedule.step(*inputs, **({"target": all_ids} if modules[-1].is_last else {}), return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensors() -> dict[int, torch.Tensor]:
    """Every plain tensor that Python can see, one for each storage."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor)]
    return {tensor.untyped_storage()._cdata: tensor for tensor in found if tensor.device.type == "cpu"}


def made(job: Job) -> tuple[Step, list[torch.Tensor]]:
    """The step of the job, run once, and what the rank holds between two of them."""
    before = tensors()
    step = (pipeline if job.layout["pipeline_parallel"] > 1 else whole_model)(job)
    step()
    return step, [tensor for key, tensor in tensors().items() if key not in before]


def measure_real(job: Job) -> dict[str, float]:
    step, held = made(job)
    held_bytes = sum(tensor.untyped_storage().nbytes() for tensor in held)
    with allocated_peak("cpu", resident_bytes=held_bytes) as peak:
        step()
        time.sleep(SETTLE_SECONDS)
    assert peak.bytes is not None
    return {"peak": peak.bytes, "held": held_bytes, "left": peak.left}


class FakeRank(LiveTracker):
    """Counts fake storages, also those that fully_shard resizes; not the tensors of whole size that DTensors are planned with."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._apart = 0, 0

    def _add(self, tensor: torch.Tensor) -> None:
        if not self._apart and tensor.device.type == "cpu":
            super()._add(tensor)
            self.peak = max(self.peak, self.live_bytes)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        return super().__torch_dispatch__(function, types, args, kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        resize, plan = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage._cdata in self._storages:
                self.live_bytes += size - self._storages[storage._cdata]
                self._storages[storage._cdata] = size
                self.peak = max(self.peak, self.live_bytes)
            return result

        def planned(*args: Any, **kwargs: Any) -> Any:
            self._apart += 1
            try:
                return plan(*args, **kwargs)
            finally:
                self._apart -= 1

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", planned),
            self,
        ):
            yield


def measure_fake(job: Job) -> dict[str, float]:
    with FakeTensorMode(allow_non_fake_inputs=True), fake_masks(masked=False):
        step, held = made(job)
        tracker = FakeRank()
        tracker.adopt(held)
        held_bytes = tracker.live_bytes
        with tracker.watching():
            step()
    return {"peak": tracker.peak, "held": held_bytes, "left": tracker.live_bytes - held_bytes}


def leave_fakes(*names: str) -> None:
    """Meshes are made of numbers that must be known: these methods of theirs compute outside the fake mode."""
    for name in names:
        plain = DeviceMesh.__dict__[name]
        kind = type(plain) if isinstance(plain, staticmethod | classmethod) else None
        setattr(DeviceMesh, name, (kind or (lambda function: function))(_real(plain.__func__ if kind else plain)))


class Transfer:
    """Holds what it sends for as long as somebody holds it, as one of gloo's does."""

    def __init__(self, operation: dist.P2POp) -> None:
        self.tensor = operation.tensor

    def wait(self) -> None:
        pass


def vote_at_home(stages: list[Any]) -> None:
    """Stages vote on whether shapes are known, by a number that a fake tensor does not have: here they are."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def settle() -> None:
    """Wait a moment after every wait, so that what gloo's threads held is gone."""

    def settled(wait: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done = wait(*args, **kwargs)
            time.sleep(SETTLE_SECONDS)
            return done

        return call

    dist.Work.wait = settled(dist.Work.wait)
    functional.wait_tensor = settled(functional.wait_tensor)


def run_real(cases: dict[str, Any], rank: int, ranks: int, store: str) -> dict[str, Any]:
    settle()
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = {name: measure_real(Job(case)) for name, case in cases.items()}
    dist.barrier()
    return {f"{name} rank {rank}": result for name, result in found.items()}


def run_fake(cases: dict[str, Any]) -> dict[str, Any]:
    leave_fakes("__init__", "__getitem__", "_get_slice_mesh_layout", "_create_sub_mesh", "get_coordinate")
    schedules._PipelineSchedule._warmup_p2p = lambda self, stages, *_: vote_at_home(stages)
    schedules._batch_p2p = lambda operations, *_, **__: [Transfer(operation) for operation in operations]
    found = {}
    for name, case in cases.items():
        for rank in case["ranks"]:
            dist.init_process_group("fake", rank=rank, world_size=case["world"], store=FakeStore())
            found[f"{name} rank {rank}"] = measure_fake(Job(case))
            dist.destroy_process_group()
    return found


def fork_ranks(worlds: dict[int, dict[str, Any]], output: str) -> int:
    """Real ranks of one world after the other, copies of this process: it has imported what they need. The number of those that
    failed."""
    failed = 0
    for ranks, cases in worlds.items():
        copies = []
        for rank in range(ranks):
            copies.append(os.fork())
            if not copies[-1]:
                try:
                    write(run_real(cases, rank, ranks, f"{output}-{ranks}.store"), output)
                except BaseException:
                    traceback.print_exc()
                    leave(1)
                leave(0)
        failed += sum(os.waitpid(copy, 0)[1] != 0 for copy in copies)
    return failed


def write(found: dict[str, Any], output: str) -> None:
    Path(f"{output}.{os.getpid()}").write_text(json.dumps(found))


def leave(code: int) -> NoReturn:
    """Gloo's threads abort a process that ends as usual."""
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """real or fake, CASES, OUTPUT: every real rank writes its own."""
    way, path, output = sys.argv[1:]
    torch.set_num_threads(1)
    gc.freeze()  # what was imported holds no tensor of a rank: ``tensors`` need not look there
    cases = json.loads(Path(path).read_text())
    if way == "fake":
        write(run_fake(cases), output)
        leave(0)
    worlds: dict[int, dict[str, Any]] = {}
    for name, case in cases.items():
        worlds.setdefault(case["world"], {})[name] = case
    leave(fork_ranks(worlds, output))


if __name__ == "__main__":
    main()
