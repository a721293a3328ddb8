"""The space of training plans: all layouts that the rules leave, the values of each choice, and what excludes each other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from made_profile import LAYERS, make_profile
from made_requests import measured_cpus, model_of

from upshift.errors import RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Plan
from upshift.planning.search.constraints import conflict, is_redundant, read_base
from upshift.planning.search.enumerate import PlanSpace, Sharing
from upshift.planning.search.layouts import check_processes, enumerate_layouts, rank_counts, shares_work
from upshift.planning.search.search import _first_round_values, search
from upshift.planning.search.space import choices, fixes_weight_offload, legal_values, parse_fixed, weight_places
from upshift.planning.workload import LengthHistogram, Workload

PROFILE = make_profile()
WORKLOAD = Workload(sequence_length=1024, global_batch=48)


# --- layouts ---------------------------------------------------------------------------------------------------------


def expected_layouts(host: Host, profile: ModelProfile, workload: Workload) -> set[tuple[int, Layout]]:
    """Return every layout of GPUs that the rules leave, by trying all numbers."""
    devices = host.num_devices
    queries, keys = profile.heads or (1, 1)
    layouts = set()
    for tensor, context, pipeline, experts in itertools.product(range(1, devices + 1), repeat=4):
        data = devices / (tensor * context * pipeline)
        is_divided = data == int(data) and workload.global_batch % int(data) == 0 and profile.tensor_parallel is not None
        if not is_divided or host.gpus_per_node % tensor or profile.tensor_parallel.divisor % tensor or LAYERS % pipeline:  # type: ignore[union-attr]
            continue
        if context > 1 and workload.sequence_length < 4096 * context:  # shorter parts gain nothing
            continue
        count = profile.experts.count if profile.experts else 1
        replicas = int(data) * context  # ranks that sum gradients, among which experts may be
        if count % experts or replicas % experts:
            continue
        in_node = host.gpus_per_node // tensor
        sizes = {replicas, *([in_node] if replicas % in_node == 0 and in_node < replicas else [])} - {1}
        zero = [("no", 1), *itertools.product(("optimizer", "gradients", "weights"), sizes)]
        stages = [stages for stages in (2, 4) if LAYERS % (pipeline * stages) == 0]
        schedules = [("1f1b", 1), ("zero_bubble", 1), *(("interleaved_1f1b", number) for number in stages)]
        has_heads = queries % (tensor * context) == 0 and keys % (tensor * context) == 0
        kinds = [["ring"], ["ulysses"] if has_heads else []][context > 1]  # no ring is built; one rank has the plain value
        for shard, schedule, kind in itertools.product(zero, schedules if pipeline > 1 else [("1f1b", 1)], kinds):
            if schedule[0] == "zero_bubble" and shard[0] == "weights":
                continue
            layouts.add(
                (int(data), Layout(
                    fully_shard=shard[0], shard_size=shard[1], tensor_parallel=tensor, sequence_parallel=tensor > 1,  # type: ignore[arg-type]
                    context_parallel=context, context_kind=kind, pipeline_parallel=pipeline, pipeline_schedule=schedule[0],  # type: ignore[arg-type]
                    virtual_stages=schedule[1], expert_parallel=experts,
                ))
            )  # fmt: skip
    return layouts


@pytest.mark.parametrize("kind", ["full", "mixture"])
@pytest.mark.parametrize(("host", "sequence"), [("6xh100", 1024), ("2x4xh100", 4096), ("2x4xh100", 8192), ("2x6xh100", 1024)])
def test_layouts_are_all_that_the_rules_leave(host: str, sequence: int, kind: str) -> None:
    """Four heads of keys, which two or four ranks may exchange, and six may not."""
    profile = model_of(kind, "causal-lm", longest=8192).changed(heads=(16, 4))
    described = describe(host)
    workload = WORKLOAD.changed(sequence_length=sequence)
    found = list(enumerate_layouts(described, profile, workload))
    assert set(found) == expected_layouts(described, profile, workload)
    assert len(found) == len(set(found))


def test_fields_of_layouts_that_are_set_on_request_alone() -> None:
    """Each where the layout can have it."""
    host = describe("4xh100")
    for name in ("master_weights", "gather_again", "vocabulary_parallel"):
        assert not any(getattr(layout, name) for _, layout in enumerate_layouts(host, PROFILE, WORKLOAD))
        asked = [layout for _, layout in enumerate_layouts(host, PROFILE, WORKLOAD, fixed={name: True})]
        assert asked and all(getattr(layout, name) for layout in asked)
        kinds = {(layout.fully_shard == "optimizer", layout.tensor_parallel > 1) for layout in asked}
        assert kinds <= ({(True, False), (True, True)} if name == "master_weights" else {(True, True), (False, True)})
    apart = [layout for _, layout in enumerate_layouts(host, PROFILE, WORKLOAD, fixed={"overlap": False})]
    assert apart and not any(layout.overlap for layout in apart)
    masked = PROFILE.changed(objective="masked-lm")
    assert not list(enumerate_layouts(host, masked, WORKLOAD, fixed={"vocabulary_parallel": True}))
    gpipe = [layout for _, layout in enumerate_layouts(host, PROFILE, WORKLOAD, fixed={"pipeline_schedule": "gpipe"})]
    assert gpipe and all(layout.pipeline_parallel > 1 for layout in gpipe)


def test_processes_of_a_cpu_exchange_heads_and_may_keep_whole_states() -> None:
    """No ring is built; a scatter between processes moves as much as a sum."""
    host = describe("epyc-9654-768gb")
    layouts = [layout for _, layout in enumerate_layouts(host, PROFILE, WORKLOAD.changed(sequence_length=8192), ranks=4)]
    assert {layout.context_kind for layout in layouts if layout.context_parallel > 1} == {"ulysses"}
    assert {layout.context_parallel for layout in layouts} == {1, 2}
    assert {layout.sequence_parallel for layout in layouts if layout.tensor_parallel > 1} == {True, False}
    odd = PROFILE.changed(heads=(6, 6))
    longer = WORKLOAD.changed(sequence_length=16384)
    others = [layout for _, layout in enumerate_layouts(host, odd, longer, ranks=4) if layout.tensor_parallel == 1]
    assert {layout.context_parallel for layout in others} == {1, 2}


@pytest.mark.parametrize(
    ("host", "fixed", "counts"),
    [
        ("8xh100", {}, [8]), ("epyc-9654", {"num_processes": 3}, [3]), ("epyc-9654", {}, [2]),
        ("epyc-9654", {"tensor_parallel": 4}, [4]), ("epyc-9654", {"tensor_parallel": 2, "pipeline_parallel": 3}, [6]),
        ("epyc-9654", {"context_parallel": 4, "pipeline_parallel": 2}, [8]), ("epyc-9654", {"fully_shard": "weights"}, [2]),
        ("epyc-9654", {"fully_shard": "weights", "shard_size": 6, "tensor_parallel": 2}, [12]),
        ("epyc-9654", {"expert_parallel": 4, "context_parallel": 6}, [12]), ("2xepyc-9654", {"tensor_parallel": 2}, [4]),
        ("2xepyc-9654", {"pipeline_parallel": 3}, [6]), ("2xepyc-9654", {"pipeline_parallel": 4}, [4]),
    ],
)  # fmt: skip
def test_ranks_are_as_many_as_the_degrees_need(host: str, fixed: dict[str, Any], counts: list[int]) -> None:
    described = describe(host)
    if described.cpu is not None:
        described = described.changed(cpu=described.cpu.changed(numa_nodes=1))
    assert rank_counts(described, fixed) == counts


def test_a_process_for_each_numa_node_where_the_degrees_divide_them() -> None:
    host = describe("epyc-9654")
    assert host.cpu is not None
    nodes = host.changed(cpu=host.cpu.changed(numa_nodes=4))
    assert rank_counts(nodes, {}) == [2, 4]
    assert rank_counts(nodes, {"tensor_parallel": 3}) == [3]
    assert rank_counts(nodes, {"tensor_parallel": 8}) == [8]


def test_when_ranks_share_the_job() -> None:
    cpu = describe("epyc-9654")
    cases: list[tuple[Host, dict[str, Any], bool]] = [
        (describe("8xh100"), {}, True), (describe("h100"), {"tensor_parallel": 2}, False), (describe("2xepyc-9654"), {}, True),
        (cpu, {}, False), (cpu, {"num_processes": 1}, False), (cpu, {"num_processes": 2}, True),
        (cpu, {"tensor_parallel": 1}, False), (cpu, {"tensor_parallel": 2}, True), (cpu, {"precision": "bf16"}, False),
    ]  # fmt: skip
    assert [shares_work(host, fixed) for host, fixed, _ in cases] == [expected for _, _, expected in cases]


@pytest.mark.parametrize(
    ("host", "requested", "words"),
    [
        ("8xh100", 8, None), ("8xh100", 4, "one for each of its GPUs, 8"), ("8xh100", 16, "one for each of its GPUs, 8"),
        ("epyc", 64, None), ("epyc", 65, "use at most 64"), ("2xepyc", 128, None), ("2xepyc", 130, "use at most 128"),
        ("2xepyc", 3, "does not divide among 2 hosts"), ("2xepyc", 1, None),
    ],
)  # fmt: skip
def test_processes_that_a_host_can_run(host: str, requested: int, words: str | None) -> None:
    """At most four on each of 16 cores."""
    described = describe(host.replace("epyc", "epyc-9654"))
    if described.cpu is not None:
        described = described.changed(cpu=described.cpu.changed(usable_cores=16))
    if words is None:
        check_processes({"num_processes": requested}, described)
        return
    with pytest.raises(RequestError, match=words):
        check_processes({"num_processes": requested}, described)


@pytest.mark.parametrize(
    ("layout", "label"),
    [
        (ALONE, ""), (Layout(fully_shard="weights", shard_size=8), "zero3 8"),
        (Layout(fully_shard="optimizer", shard_size=2, master_weights=True), "zero1 2 master weights"),
        (Layout(tensor_parallel=2), "tp 2"), (Layout(tensor_parallel=2, sequence_parallel=True), "tp 2 sp"),
        (Layout(tensor_parallel=4, sequence_parallel=True, gather_again=True, vocabulary_parallel=True),
         "tp 4 sp gathered again vocabulary"),
        (Layout(context_parallel=2, context_kind="ulysses"), "cp 2 ulysses"), (Layout(pipeline_parallel=2), "pp 2 1f1b"),
        (Layout(pipeline_parallel=4, virtual_stages=2, pipeline_schedule="interleaved_1f1b"), "pp 4 x 2 interleaved_1f1b"),
        (Layout(expert_parallel=8, overlap=False), "ep 8 · no overlap"),
        (Layout(tensor_parallel=2, pipeline_parallel=3, fully_shard="gradients", shard_size=2), "zero2 2 · tp 2 · pp 3 1f1b"),
    ],
)  # fmt: skip
def test_labels_of_layouts(layout: Layout, label: str) -> None:
    assert layout.label() == label


# --- choices ---------------------------------------------------------------------------------------------------------


def test_values_of_each_choice_on_a_probed_cpu() -> None:
    """A quarter, a half, three quarters and all of 24 layers, where each has its own switch."""
    profile = model_of("full", "causal-lm", longest=4096)
    ragged = LengthHistogram(sequence_length=1024, lengths=(512,), counts=(9,), num_tokens=9 * 512)
    host = measured_cpus().changed(num_nodes=1)
    values = choices(host, profile, WORKLOAD.changed(lengths=ragged, clips_gradients=False))
    assert values.pop("host_memory") in (["keep", "system"], ["system"])  # by this machine's C library
    assert values.pop("optim")[:2] == ["adamw_torch_fused", "adamw_torch"]
    assert values == {
        "precision": ["fp32", "tf32", "bf16"], "activation_checkpointing": [0, 6, 12, 18, 24],
        "recompute_granularity": ["full", "selective"], "attention": ["sdpa", "block", "eager"],
        "torch_compile": ["off", "layer", "model"], "optimizer_in_backward": [False, True], "loss_chunk_tokens": [0, 512],
        "packing": [False, True], "num_processes": [1, 2],
    }  # fmt: skip
    plain = PROFILE.changed(declares=PROFILE.declares.changed(gradient_checkpointing=False))
    assert choices(host, plain, WORKLOAD)["activation_checkpointing"] == [0]
    whole = PROFILE.changed(declares=PROFILE.declares.changed(gradient_checkpointing_per_layer=False))
    assert choices(host, whole, WORKLOAD)["activation_checkpointing"] == [0, LAYERS]
    assert choices(host, PROFILE, WORKLOAD)["optimizer_in_backward"] == [False]
    assert choices(host, PROFILE, WORKLOAD)["packing"] == [False]
    quantized = model_of("qlora", "causal-lm", longest=4096)
    assert choices(host, quantized, WORKLOAD)["torch_compile"] == ["off"]


def test_rows_are_packed_where_a_model_isolates_texts_and_rows_have_room() -> None:
    def packs(mean: int, *, together: int = 1, objective: str = "causal-lm") -> bool:
        lengths = LengthHistogram(sequence_length=1024, lengths=(mean,), counts=(4,), num_tokens=4 * mean)
        workload = WORKLOAD.changed(lengths=lengths, rows_together=together)
        return choices(describe("h100"), PROFILE.changed(objective=objective), workload)["packing"] == [False, True]

    assert packs(900) and packs(993) and not packs(994) and not packs(1024)  # 97 % of 1,024 are 993.28
    assert not packs(900, together=2) and not packs(900, objective="masked-lm")
    leaking = PROFILE.changed(isolation=PROFILE.isolation.changed(proven=False))
    lengths = LengthHistogram(sequence_length=1024, lengths=(9,), counts=(4,), num_tokens=36)
    assert choices(describe("h100"), leaking, WORKLOAD.changed(lengths=lengths))["packing"] == [False]


def test_kernels_of_each_device() -> None:
    profile = model_of("full", "causal-lm", longest=4096)
    flex = profile.changed(declares=profile.declares.changed(attention_kernels=("sdpa", "flex_attention")))
    assert choices(describe("epyc-9654"), flex, WORKLOAD)["attention"] == ["sdpa", "block", "eager"]
    assert choices(describe("h100"), flex, WORKLOAD)["attention"] == ["sdpa", "eager", "flex_attention"]
    assert choices(describe("2xh100"), flex, WORKLOAD)["attention"] == ["sdpa", "eager"]
    without = flex.changed(steps=tuple(step for step in flex.steps if step.attention == "eager"))
    assert choices(describe("h100"), without, WORKLOAD)["attention"] == ["eager"]


@pytest.mark.parametrize(
    ("cores", "nodes", "batch", "counts"),
    [
        (16, 1, 48, [1, 2]), (16, 4, 48, [1, 2, 4]), (16, 4, 6, [1, 2]), (16, 3, 48, [1, 2]), (1, 1, 48, [1]),
        (15, 3, 48, [1, 3]), (2, None, 48, [1, 2]), (2, None, 3, [1]),
    ],
)  # fmt: skip
def test_processes_of_a_cpu_by_its_cores_and_nodes(cores: int, nodes: int | None, batch: int, counts: list[int]) -> None:
    host = describe("epyc-9654")
    assert host.cpu is not None
    described = host.changed(cpu=host.cpu.changed(usable_cores=cores, numa_nodes=nodes))
    assert choices(described, PROFILE, WORKLOAD.changed(global_batch=batch))["num_processes"] == counts


def test_optimizers_that_are_allowed_and_run_here() -> None:
    """transformers has two names for bitsandbytes' AdamW: both may be asked for, one is searched."""
    workload = WORKLOAD.changed(allow=("8bit-optimizer", "sgd"))
    searched = choices(describe("h100"), PROFILE, workload)["optim"]
    asked = legal_values(describe("h100"), PROFILE, workload)["optim"]
    assert "sgd" in searched and "adafactor" not in searched
    assert ("adamw_bnb_8bit" in searched) == ("adamw_8bit" in asked)
    assert "adamw_8bit" not in searched
    assert set(asked) - set(searched) <= {"adamw_8bit"}
    on_cpu = legal_values(describe("epyc-9654"), PROFILE, workload)["optim"]
    assert not {"adamw_bnb_8bit", "adamw_8bit"} & {*on_cpu}
    for name in ("adamw_bnb_8bit", "adamw_8bit"):
        with pytest.raises(RequestError, match="bitsandbytes is for CUDA devices"):
            parse_fixed((f"optim={name}",), describe("epyc-9654"), PROFILE, workload)


def test_optimizers_that_compile_their_update_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a CPU that was not measured nothing is known."""
    monkeypatch.setattr("upshift.planning.search.space.find_spec", lambda name: object())
    workload = WORKLOAD.changed(allow=("8bit-optimizer", "4bit-optimizer"))
    probed = measured_cpus().changed(num_nodes=1)
    assert probed.measured is not None
    without = probed.changed(measured=probed.measured.changed(compiler=False))
    for host, compiles in ((probed, True), (without, False), (describe("epyc-9654"), True)):
        optims = {*choices(host, PROFILE, workload)["optim"]}
        assert ("adamw_torch_8bit" in optims, "adamw_torch_4bit" in optims) == (compiles, compiles)
        assert {"adamw_torch_fused", "adamw_torch"} <= optims


def test_where_frozen_weights_may_be() -> None:
    gpu = describe("h100")
    disk = gpu.changed(disk_bytes_per_second=1e9)
    assert gpu.gpu is not None
    shared = disk.changed(gpu=gpu.gpu.changed(shares_host_memory=True))
    assert weight_places(gpu) == ["none", "host"]
    assert weight_places(disk) == ["none", "host", "disk"]
    assert weight_places(shared) == ["none", "disk"]
    assert weight_places(disk.changed(host_to_device=None)) == ["none"]
    assert weight_places(describe("2xh100").changed(disk_bytes_per_second=1e9)) == ["none"]
    assert weight_places(describe("epyc-9654").changed(disk_bytes_per_second=1e9)) == ["none", "disk"]
    assert weight_places(describe("epyc-9654")) == ["none"]
    assert fixes_weight_offload(("precision=bf16", "weight_offload = disk")) and not fixes_weight_offload(("precision=bf16",))
    offloads = [legal_values(host, PROFILE, WORKLOAD)["optim_offload"] for host in (gpu, shared, describe("epyc-9654"))]
    assert offloads == [[False, True], [False], [False]]


def test_the_first_round_takes_the_cheapest_that_changes_nothing() -> None:
    values: dict[str, list[Any]] = {
        "precision": ["fp32", "fp16", "bf16"], "torch_compile": ["off", "layer", "model"], "optim": ["adamw_torch_fused", "sgd"],
        "loss_chunk_tokens": [0, 512], "packing": [False, True],
    }  # fmt: skip
    assert _first_round_values(values) == {
        "precision": ["bf16"], "torch_compile": ["off", "layer"], "optim": ["adamw_torch_fused"],
        "optimizer_in_backward": [False], "loss_chunk_tokens": [512], "packing": [True],
    }  # fmt: skip
    assert _first_round_values({**values, "precision": ["fp32", "tf32"]})["precision"] == ["fp32"]


# --- plans -----------------------------------------------------------------------------------------------------------


def test_micro_batches_make_up_the_global_batch() -> None:
    def sizes(data: int, *, together: int = 1, **fixed: int) -> list[int]:
        workload = WORKLOAD.changed(global_batch=24, rows_together=together)
        return PlanSpace(describe("2xh100"), PROFILE, workload, fixed=fixed).micro_batches(Sharing(2, data, ALONE))

    assert sizes(2) == [1, 2, 3, 4, 6, 12]
    assert sizes(2, together=2) == [2, 4, 6, 12]
    assert sizes(2, per_device_train_batch_size=4) == [4]
    assert sizes(2, per_device_train_batch_size=5) == []
    assert sizes(2, gradient_accumulation_steps=4) == [3]
    assert sizes(2, gradient_accumulation_steps=5) == []
    both = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    assert sizes(2, **both) == [4] and sizes(1, **both) == []
    with pytest.raises(RequestError, match="=4 x .*=4 are not the global batch of 24 with 1, 2 data-parallel ranks; leave one"):
        sizes(2, per_device_train_batch_size=4, gradient_accumulation_steps=4)


def test_plans_that_are_far_too_big_are_counted_without_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan of the first round is a candidate, or rejected, or not looked at, whatever the memory is."""
    monkeypatch.setattr("upshift.planning.search.search._best_layouts", lambda ranking, host: [])
    monkeypatch.setattr("upshift.planning.search.search._leanest_values", lambda *request: None)
    profile = model_of("full", "causal-lm", longest=4096)
    workload = WORKLOAD.changed(sequence_length=4096, global_batch=8)
    host = describe("2xh100")
    assert host.gpu is not None
    totals = set()
    unseen = []
    for gib in (10_000, 20, 1):
        limited = host.changed(gpu=host.gpu.changed(memory_bytes=gib * 2**30))
        ranking = search(limited, profile, workload, fixed={})
        totals.add(len(ranking.candidates) + ranking.num_rejected)
        unseen.append(ranking.num_unseen)
    assert len(totals) == 1
    assert 0 == unseen[0] < unseen[1] < unseen[2]


def plan_of(**fields: Any) -> Plan:
    plain = {"device": "cuda", "host": "h", "model": "m", "sequence_length": 1024, "per_device_train_batch_size": 2}
    return Plan(**{**plain, "precision": "bf16", **fields})


SELECTIVE = {"recompute_granularity": "selective", "activation_checkpointing": 1}
MUP = {"mup_base": "hidden_size=8"}
IN_BACKWARD = {"optimizer_in_backward": True}
OFFLOADED = {"optim_offload": True}
FROM_DISK = {"weight_offload": "disk"}
HALF_WEIGHTS = {"precision": "bf16-weights"}
STAGES = Layout(pipeline_parallel=2, pipeline_schedule="zero_bubble")
INTERLEAVED = Layout(pipeline_parallel=4, pipeline_schedule="interleaved_1f1b", virtual_stages=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None), (SELECTIVE, None), ({**SELECTIVE, "torch_compile": "layer"}, "one when it is compiled"),
        ({**SELECTIVE, "activation_checkpointing": 0, "torch_compile": "layer"}, None),
        ({"torch_compile": "layer", "activation_checkpointing": 1}, None),
        (MUP, None), ({**MUP, "optim": "adamw_torch_8bit"}, None), ({**MUP, "optim": "sgd"}, "not of optim=sgd"),
        ({**MUP, "layout": Layout(tensor_parallel=2), "num_processes": 2}, "compares whole parameters"),
        ({"optim": "sgd"}, None),
        (OFFLOADED, None), ({**OFFLOADED, "optim": "adamw_torch_8bit"}, "torch's own optimizers"),
        ({**OFFLOADED, "precision": "fp16"}, "overflows of fp16"), ({"precision": "fp16"}, None),
        ({"optim": "adamw_torch_8bit"}, None),
        (FROM_DISK, None), ({**FROM_DISK, "num_processes": 2}, "use num_processes=1"),
        ({**FROM_DISK, "torch_compile": "layer"}, "a compiled one does not wait"), ({**FROM_DISK, **SELECTIVE}, "chosen from"),
        ({**FROM_DISK, "activation_checkpointing": 1}, None), ({**FROM_DISK, "precision": "fp8"}, "fp8 converts them"),
        ({"layout": Layout(fully_shard="optimizer", shard_size=2, master_weights=True), "num_processes": 2}, None),
        ({"layout": Layout(fully_shard="optimizer", shard_size=2, master_weights=True), "num_processes": 2, "precision": "fp32"},
         "precision=fp32 has no use for"),
        ({"precision": "fp32"}, None),
        ({"fused_kernels": True}, None), ({"fused_kernels": True, "torch_compile": "layer"}, "nothing to fuse"),
        ({"fused_kernels": True, **SELECTIVE}, "no operators to choose"),
        ({"fused_kernels": True, "activation_checkpointing": 1}, None),
        ({"loss_kernel": "fused"}, None), ({"loss_kernel": "fused", "loss_chunk_tokens": 512}, "all logits at once"),
        ({"loss_chunk_tokens": 512}, None),
        (IN_BACKWARD, None), ({**IN_BACKWARD, "gradient_accumulation_steps": 2}, "whole global batch"),
        ({**IN_BACKWARD, "num_processes": 2}, "whole global batch"), ({**IN_BACKWARD, "precision": "fp16"}, "cannot skip a step"),
        ({**IN_BACKWARD, **OFFLOADED}, "exclude each other"),
        (HALF_WEIGHTS, None), ({**HALF_WEIGHTS, "optim": "sgd"}, "loses small ones"),
        ({**HALF_WEIGHTS, "optim": "adamw_torch_8bit"}, None), ({**HALF_WEIGHTS, "optim": "adamw_torch_4bit"}, None),
        ({**HALF_WEIGHTS, "num_processes": 2}, None),
        ({**HALF_WEIGHTS, "optim": "adamw_torch_4bit", "num_processes": 2}, "differently"),
        ({"layout": STAGES, "num_processes": 2}, None),
        ({"layout": STAGES, "num_processes": 2, "loss_chunk_tokens": 512}, "chunks of it are gone"),
        ({"layout": STAGES, "num_processes": 2, "torch_compile": "layer"}, "one when compiled"),
        ({"layout": STAGES, "num_processes": 2, "activation_checkpointing": 1}, "keeps recomputed layers"),
        ({"layout": STAGES.changed(fully_shard="weights", shard_size=2), "num_processes": 4}, "has let go of them"),
        ({"layout": STAGES.changed(fully_shard="optimizer", shard_size=2, master_weights=True), "num_processes": 4},
         "does not see"),
        ({"layout": STAGES.changed(pipeline_schedule="1f1b"), "num_processes": 2, "activation_checkpointing": 1}, None),
        ({"layout": INTERLEAVED, "num_processes": 4, "gradient_accumulation_steps": 8}, None),
        ({"layout": INTERLEAVED, "num_processes": 4, "gradient_accumulation_steps": 6}, "not a multiple of it"),
        ({"attention": "flash_attention_2", "packing": True}, None),
        ({"attention": "flash_attention_2", "packing": True, "precision": "tf32"}, "16 bits only"),
        ({"attention": "flex_attention", "packing": True, "precision": "fp32"}, None),
        ({"attention": "flex_attention", "packing": True, **SELECTIVE}, "would run them again"),
    ],
    ids=str,
)  # fmt: skip
def test_choices_that_exclude_each_other(fields: dict[str, Any], words: str | None) -> None:
    """Each rule with the plan that it refuses, and the nearest that it does not."""
    found = conflict(plan_of(**fields), clips_gradients=False)
    assert found is None if words is None else words in (found or "")
    if fields.get("optimizer_in_backward"):
        clipped = conflict(plan_of(**fields), clips_gradients=True)
        assert clipped is not None and "norm of all gradients" in clipped


@pytest.mark.parametrize(
    ("fields", "redundant"),
    [
        ({}, False), ({"attention": "flex_attention"}, True), ({"attention": "flex_attention", "packing": True}, False),
        ({"packing": True}, False), ({"recompute_granularity": "selective"}, True), (SELECTIVE, False),
        ({"optim": "adamw_torch"}, False), ({**HALF_WEIGHTS, "optim": "adamw_torch"}, True), (HALF_WEIGHTS, False),
        ({"optim": "adamw_8bit"}, True),
    ],
    ids=str,
)  # fmt: skip
def test_plans_that_run_as_another_one_does(fields: dict[str, Any], redundant: bool) -> None:
    assert is_redundant(plan_of(**fields)) is redundant


def test_bases_of_mup() -> None:
    assert read_base("hidden_size=64,num_attention_heads=2") == {"hidden_size": 64, "num_attention_heads": 2}
    for text in ("hidden_size", "hidden_size=", "=64", "hidden_size=0", "hidden_size=x", "hidden_size=64,", "a=1,b=0", "a=0,b=1"):
        with pytest.raises(RequestError, match="write the widths of the base"):
            read_base(text)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ("activation_checkpointing=24", None), ("activation_checkpointing=25", "has 24 layers to recompute"),
        ("activation_checkpointing=7", None), ("loss_chunk_tokens=77", None), ("loss_chunk_tokens=0", None),
        ("weight_offload=host", "train an adapter"), ("fused_kernels=true", "several CUDA devices alone"),
        ("torch_compile=layer", None), ("optim=sgd", "add --allow sgd"), ("recompute_granularity=selective", None),
    ],
)  # fmt: skip
def test_values_that_a_model_can_have(fixed: str, words: str | None) -> None:
    profile = model_of("full", "causal-lm", longest=4096)
    host = describe("h100")
    if words is None:
        assert [*parse_fixed((fixed,), host, profile, WORKLOAD)] == [fixed.partition("=")[0]]
        return
    with pytest.raises(RequestError, match=words):
        parse_fixed((fixed,), host, profile, WORKLOAD)


def test_all_layers_or_none_where_they_have_one_switch() -> None:
    whole = PROFILE.changed(declares=PROFILE.declares.changed(gradient_checkpointing_per_layer=False))
    assert parse_fixed(("activation_checkpointing=24",), describe("h100"), whole, WORKLOAD) == {"activation_checkpointing": 24}
    with pytest.raises(RequestError, match="has 24 layers to recompute"):
        parse_fixed(("activation_checkpointing=12",), describe("h100"), whole, WORKLOAD)
    plain = PROFILE.changed(declares=PROFILE.declares.changed(gradient_checkpointing=False))
    with pytest.raises(RequestError, match="activation_checkpointing=24"):
        parse_fixed(("activation_checkpointing=24",), describe("h100"), plain, WORKLOAD)
