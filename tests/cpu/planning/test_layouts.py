"""What ranks that share a job allocate and exchange, as predicted, against real gloo ranks that upshift trains in that layout
(real_ranks.py), and against one rank of a larger fake world (one_rank.py), which is held against the real ones first."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig
from warm_processes import WarmProcesses

from upshift.hardware import describe
from upshift.models.profile import ModelProfile, Variant
from upshift.models.source import find_model
from upshift.models.tracing.profile_model import profile_model
from upshift.planning.cost.communication import RowShares, Transfer, Volumes, rank_groups
from upshift.planning.cost.memo import Memo
from upshift.planning.cost.memory import micro_batch_memory, step_memory
from upshift.planning.cost.partition import share_of, stage_of
from upshift.planning.cost.segments import plan_trace
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.workload import Workload

HELPERS = Path(__file__).parents[1] / "helpers"

SCRIPTS = {way: HELPERS / name for way, name in (("real", "real_ranks.py"), ("fake", "one_rank.py"))}
TIMEOUT_SECONDS = 600
BATCH, SEQUENCE, LAYERS = 4, 128, 2
DEEPER_LAYERS = 4  # for four pipeline stages; and where the edges of two layers are more than the layers
SIZES: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "use_cache": False}
LLAMA: dict[str, Any] = SIZES | {
    "intermediate_size": 384, "num_key_value_heads": 8, "vocab_size": 512, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**LLAMA),
    "deeper llama": LlamaConfig(**LLAMA | {"num_hidden_layers": DEEPER_LAYERS}),
    "qwen2 tied": Qwen2Config(
        **SIZES, intermediate_size=384, num_key_value_heads=2, vocab_size=1024, tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    ),
    "mixture": Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": DEEPER_LAYERS}, moe_intermediate_size=128, num_key_value_heads=8, head_dim=16,
        vocab_size=512, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[], architectures=["Qwen3MoeForCausalLM"],
    ),
}  # fmt: skip
VARIANTS = {
    "llama": (Variant("fp32", "sdpa", False, divided=True), Variant("bf16-pure", "sdpa", False)),
    "deeper llama": (Variant("fp32", "sdpa", False, divided=True), Variant("bf16-pure", "sdpa", False)),
    "qwen2 tied": (Variant("fp32", "sdpa", False, divided=True),),
    "mixture": (Variant("fp32", "sdpa", False, divided=True),),
}


@dataclass(frozen=True)
class Case:
    world: int
    layout: Layout
    model: str = "llama"
    micro_batches: int = 2
    recomputed: int = 0
    precision: str = "fp32"
    ranks: tuple[int, ...] = (0,)  # one of each pipeline stage
    rated: bool = False  # answers are learned by KTO, and every second row has a forward pass alone

    def plan(self, model: str) -> Plan:
        return Plan(
            device="cpu", host="", model=model, sequence_length=SEQUENCE, per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=self.micro_batches, num_processes=self.world, layout=self.layout,
            activation_checkpointing=self.recomputed, precision=self.precision,
        )  # fmt: skip

    def described(self, folder: Path) -> dict[str, Any]:
        plan = self.plan(self.model).model_dump(mode="json")
        return {"model": str(folder / self.model), "plan": plan, "ranks": self.ranks, "rated": self.rated}


def sharded(ranks: int, stage: str = "weights", **layout: Any) -> Layout:
    return Layout(fully_shard=stage, shard_size=ranks, **layout)


def piped(ranks: int, schedule: str = "1f1b", **layout: Any) -> Layout:
    return Layout(pipeline_parallel=ranks, pipeline_schedule=schedule, **layout)


ULYSSES: dict[str, Any] = {"context_parallel": 2, "context_kind": "ulysses"}
SEQUENCE_PARALLEL: dict[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
REAL = {
    "data parallel": Case(2, Layout()),
    "zero1": Case(2, sharded(2, "optimizer")),
    "zero3": Case(2, sharded(2)),
    "zero3, recomputed": Case(2, sharded(2), "deeper llama", recomputed=DEEPER_LAYERS),
    "zero3, bf16": Case(2, sharded(2), precision="bf16"),
    "zero2, recomputed": Case(2, sharded(2, "gradients"), recomputed=LAYERS),
    "tensor": Case(2, Layout(tensor_parallel=2)),
    "tensor, recomputed": Case(2, Layout(tensor_parallel=2), recomputed=LAYERS),
    "tensor, tied": Case(2, Layout(tensor_parallel=2), "qwen2 tied"),
    "tensor, one micro-batch": Case(2, Layout(tensor_parallel=2), micro_batches=1),
    "sequence": Case(2, Layout(**SEQUENCE_PARALLEL)),
    "sequence, recomputed": Case(2, Layout(**SEQUENCE_PARALLEL), recomputed=LAYERS),
    "gpipe": Case(2, piped(2, "gpipe"), "deeper llama", 4, ranks=(0, 1)),
    "1f1b": Case(2, piped(2), "deeper llama", 4, ranks=(0, 1)),
    "1f1b, recomputed": Case(2, piped(2), "deeper llama", 4, DEEPER_LAYERS, ranks=(0, 1)),
    "interleaved": Case(2, piped(2, "interleaved_1f1b", virtual_stages=2), "deeper llama", 4, ranks=(0, 1)),
    "zero bubble": Case(2, piped(2, "zero_bubble"), "deeper llama", 4, ranks=(0, 1)),
    "ulysses": Case(2, Layout(**ULYSSES)),
    "ulysses, recomputed": Case(2, Layout(**ULYSSES), recomputed=LAYERS),
    "ulysses, few keys": Case(2, Layout(**ULYSSES), "qwen2 tied"),
    "experts": Case(2, Layout(expert_parallel=2), "mixture"),
    "1f1b of 4": Case(4, piped(4), "deeper llama", 5, ranks=(0, 1, 3)),
    "hybrid zero3": Case(4, sharded(2)),
    "hybrid zero2, recomputed": Case(4, sharded(2, "gradients"), recomputed=LAYERS),
    "zero1 x tensor": Case(4, sharded(2, "optimizer", tensor_parallel=2)),
    "zero3 x tensor": Case(4, sharded(2, tensor_parallel=2)),
    "zero2 x tensor, recomputed": Case(4, sharded(2, "gradients", tensor_parallel=2), recomputed=LAYERS),
    "zero2 x 1f1b": Case(4, sharded(2, "gradients", pipeline_parallel=2), "deeper llama", 4, ranks=(0, 2)),
    "zero3 x 1f1b": Case(4, sharded(2, pipeline_parallel=2), "deeper llama", 4, ranks=(0, 2)),
    "zero3 x ulysses": Case(4, sharded(4, **ULYSSES)),
    "tensor x ulysses": Case(4, Layout(tensor_parallel=2, **ULYSSES)),
    "zero3 x experts": Case(4, sharded(4, expert_parallel=2), "mixture"),
}
EXCHANGED = {  # their memory is not traced
    "tensor, bf16": Case(2, Layout(tensor_parallel=2), precision="bf16"),
    "sequence, bf16": Case(2, Layout(**SEQUENCE_PARALLEL), precision="bf16"),
    "ulysses, bf16": Case(2, Layout(**ULYSSES), precision="bf16"),
    "tensor x experts": Case(4, Layout(tensor_parallel=2, expert_parallel=2), "mixture"),
    "sequence x experts, recomputed": Case(
        4, Layout(**SEQUENCE_PARALLEL, expert_parallel=2), "mixture", recomputed=DEEPER_LAYERS
    ),
    "zero1 with master weights": Case(2, sharded(2, "optimizer", master_weights=True), precision="bf16"),
    "zero3 of rated answers": Case(2, sharded(2), rated=True),
    "zero2 of rated answers": Case(2, sharded(2, "gradients"), rated=True),
    "tensor of rated answers": Case(2, Layout(tensor_parallel=2), rated=True),
    "zero3 x tensor of rated answers": Case(4, sharded(2, tensor_parallel=2), rated=True),
}
FAKE = {
    "zero3 of 8": Case(8, sharded(8), "deeper llama"),
    "zero2 of 8, recomputed": Case(8, sharded(8, "gradients"), "deeper llama", recomputed=DEEPER_LAYERS),
    "tensor of 8": Case(8, Layout(tensor_parallel=8), "deeper llama"),
    "ulysses of 8": Case(8, Layout(context_parallel=8, context_kind="ulysses"), "deeper llama"),
    "zero3 4 x tensor 2": Case(8, sharded(4, tensor_parallel=2), "deeper llama"),
    "zero3 of 64, bf16, recomputed": Case(64, sharded(64), "deeper llama", precision="bf16", recomputed=DEEPER_LAYERS),
    "hybrid 8 x 8": Case(64, sharded(8), "deeper llama"),
    "zero3 8 x tensor 8": Case(64, sharded(8, tensor_parallel=8), "deeper llama"),
}
ALSO_FAKED = ("zero3", "tensor", "sequence", "ulysses", "hybrid zero3", "zero3 x tensor")
Measured = dict[str, dict[str, Any]]


def rows(cases: dict[str, Case]) -> list[tuple[str, int]]:
    return [(name, rank) for name, case in cases.items() for rank in case.ranks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    for name, config in CONFIGS.items():
        config.save_pretrained(path / name)
    return path


def measure(folder: Path, way: str, cases: dict[str, Case], warm_processes: WarmProcesses) -> Measured:
    """``real`` ranks, or ``fake`` ones."""
    given = folder / f"{way}.json"
    given.write_text(json.dumps({name: case.described(folder) for name, case in cases.items()}))
    ended = warm_processes.run(SCRIPTS[way], str(given), str(folder / way), timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    files = [folder / "fake"] if way == "fake" else list(folder.glob("real.[0-9]*-[0-9]*"))
    return {key: result for file in files for key, result in json.loads(file.read_text()).items()}


@pytest.fixture(scope="module")
def profiles(folder: Path) -> dict[str, ModelProfile]:
    return {
        name: profile_model(find_model(str(folder / name)), sequence_length=SEQUENCE, variants=variants)
        for name, variants in VARIANTS.items()
    }


@pytest.fixture(scope="module")
def fake(folder: Path, warm_processes: WarmProcesses) -> Measured:
    return measure(folder, "fake", {**{name: REAL[name] for name in ALSO_FAKED}, **FAKE}, warm_processes)


@pytest.fixture(scope="module")
def real(folder: Path, warm_processes: WarmProcesses) -> Measured:
    return measure(folder, "real", {**REAL, **EXCHANGED}, warm_processes)


@pytest.fixture(scope="module")
def predicted(profiles: dict[str, ModelProfile]) -> Callable[[Case, int], float]:
    def predict(case: Case, rank: int) -> float:
        model = profiles[case.model]
        plan = case.plan(model.model_hash)
        trace = plan_trace(model, plan, Workload(sequence_length=SEQUENCE, global_batch=plan.global_batch))
        assert trace is not None
        stage = stage_of(model, plan, rank * case.layout.pipeline_parallel // case.world)
        walk = micro_batch_memory(model, trace, plan, stage, shape=(BATCH, SEQUENCE))
        return step_memory(walk, model, plan, stage, share_of(model, plan, stage)).peak

    return predict


def show(name: str, rank: int, *numbers: float) -> None:
    print(f"{name}, rank {rank}: " + ", ".join(f"{number / 2**20:.3f}" for number in numbers) + " MiB")


@pytest.mark.parametrize(("name", "rank"), [(name, rank) for name, rank in rows(REAL) if name in ALSO_FAKED])
def test_a_fake_rank_allocates_what_a_real_one_does(name: str, rank: int, real: Measured, fake: Measured) -> None:
    """Less what kernels need inside."""
    one, other = real[f"{name} rank {rank}"], fake[f"{name} rank {rank}"]
    show(name, rank, one["peak"], other["peak"])
    assert other["held"] == pytest.approx(one["held"], abs=1024)
    assert other["peak"] == pytest.approx(one["peak"], rel=0.01)


@pytest.mark.parametrize(("name", "rank"), rows(REAL))
def test_memory_of_a_real_rank(name: str, rank: int, real: Measured, predicted: Callable[[Case, int], float]) -> None:
    check_peak(name, rank, real, predicted(REAL[name], rank))


@pytest.mark.parametrize(("name", "rank"), rows(FAKE))
def test_memory_of_a_rank_of_many(name: str, rank: int, fake: Measured, predicted: Callable[[Case, int], float]) -> None:
    check_peak(name, rank, fake, predicted(FAKE[name], rank))


def check_peak(name: str, rank: int, measured_ranks: Measured, expected: float) -> None:
    measured = measured_ranks[f"{name} rank {rank}"]
    show(name, rank, expected, measured["peak"])
    assert measured["left"] < 4096
    assert expected == pytest.approx(measured["peak"], rel=0.02)


def test_mean_error(real: Measured, predicted: Callable[[Case, int], float]) -> None:
    errors = [abs(predicted(REAL[name], rank) / real[f"{name} rank {rank}"]["peak"] - 1.0) for name, rank in rows(REAL)]
    print(f"mean {100 * mean(errors):.2f} %, worst {100 * max(errors):.2f} %")
    assert mean(errors) < 0.01


@pytest.mark.parametrize("name", {**REAL, **EXCHANGED})
def test_what_ranks_exchange(name: str, real: Measured, profiles: dict[str, ModelProfile]) -> None:
    """By operation and ranks, to one percent; but for losses and flags, of a few bytes, and how many tokens go where."""
    case = {**REAL, **EXCHANGED}[name]
    model, plan = profiles[case.model], case.plan("")
    expected: Counter[tuple[str, tuple[int, ...]]] = Counter()
    rows = RowShares(0.5, 0.5) if case.rated else RowShares()
    for moved in Volumes(model, plan, stage_of(model, plan, 0), Memo(), rows).step_transfers():
        expected[moved.operation, ranks_of(moved, plan)] += moved.num_bytes * moved.times
    found = {(operation, tuple(ranks)): size for operation, ranks, size, _ in real[f"{name} rank 0"]["moved"] if len(ranks) > 1}
    exchanged = sorted(key for key in expected.keys() | found.keys() if len(key[1]) > 1)
    assert exchanged
    for key in exchanged:
        print(f"{name}, {key}: {expected[key]:.0f}, {found.get(key, 0)} bytes")
        assert expected[key] == pytest.approx(found.get(key, 0), rel=0.01, abs=128)


def ranks_of(moved: Transfer, plan: Plan) -> tuple[int, ...]:
    """With whom rank 0 exchanges."""
    groups = rank_groups(describe("8xh100"), plan)
    if moved.group == "pipeline":
        return (0, groups.pipeline.stride) if plan.layout.pipeline_parallel == 2 else tuple(range(plan.num_processes))
    group = getattr(groups, moved.group)
    shared = plan.layout.expert_parallel if moved.same_experts else 1
    return tuple(range(0, group.stride * group.size, group.stride * shared))
