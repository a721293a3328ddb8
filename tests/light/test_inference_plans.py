"""Planning of inference: memory against figures by hand, laws that time and memory obey, and one clear answer to any request."""

from __future__ import annotations

import cProfile
import json
import pstats
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_generators import ENCODER, LLAMA_8B, MIXTURE, SLIDING, cached

from upshift.cli.plan.inference import read_workload
from upshift.errors import NothingFits, RequestError
from upshift.hardware import describe
from upshift.hardware.spec import Host
from upshift.inference.engine_environment import arguments_of_plan
from upshift.models.profile import CachedLayers
from upshift.planning.inference.memory import (
    cached_bytes,
    mean_visible,
    memory_limit,
    products_of,
    prompt_attention_flops,
    replica_memory,
    weight_bytes,
)
from upshift.planning.inference.plan import CHANGES_MATHEMATICS, WEIGHTS, InferencePlan, InferenceWorkload, ReplicaShape
from upshift.planning.inference.planner import InferencePlanning, plan_profile, rank_plans
from upshift.planning.inference.space import ONE_GROUP, check_allow, fix_stored_weights, read_stored_weights
from upshift.planning.inference.time import build_engine
from upshift.units import GIB, KIB

ALL = tuple(CHANGES_MATHEMATICS)
ASK = InferenceWorkload(prompt_length=512, output_length=256)


MODELS = {"llama": LLAMA_8B, "sliding": SLIDING, "mixture": MIXTURE}
HOSTS = ("h100", "8xh100", "2x8xa100-80gb", "4xl40s", "t4", "8xb200", "epyc-9654-768gb", "xeon-8480-512gb", "mi300x")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, ("int4", 64)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, ("int4", ONE_GROUP)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, ("int8", None)),
        ({"quant_method": "gptq", "bits": 3, "group_size": 64}, None),
        ({"quant_method": "fp8"}, ("fp8", None)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("int4", ONE_GROUP)),
        ({"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}}, ("int4", 32)),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}, ("fp8", None)),
        ({"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}}, None),
        (None, None),
    ],
)
def test_stored_weights_are_planned_as_their_config_declares_them(stored: dict[str, Any] | None, expected: object) -> None:
    config = {"quantization_config": stored}
    assert read_stored_weights(config) == expected
    host = describe("h100")
    changed = fix_stored_weights(config, host, ASK, ())
    assert (changed is None) == (expected is None) and fix_stored_weights(config, host, ASK, ("weights=bf16",)) is None
    if changed is not None and expected is not None:
        ranking = plan_profile(LLAMA_8B, host, *changed).ranking
        assert {candidate.plan.weights for candidate in ranking.candidates} == {expected[0]}
        plain = plan_profile(LLAMA_8B, host, ASK).best.memory.weights
        assert ranking.candidates[0].memory.weights < 0.65 * plain


PLAIN = ReplicaShape("bf16", "bf16", tensor_parallel=1, pipeline_parallel=1, execution="graphs")


def test_a_plan_becomes_the_arguments_of_vllm() -> None:
    plan = plan_profile(LLAMA_8B, describe("8xh100"), ASK).best.plan
    split = plan.changed(
        weights="fp8", kv_cache="fp8", tensor_parallel=2, pipeline_parallel=2, replicas=2, max_concurrency=64,
        prefill_chunk_tokens=2048, execution="eager",
    )  # fmt: skip
    assert arguments_of_plan(split) == {
        "dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8", "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2, "data_parallel_size": 2, "max_num_seqs": 64, "max_num_batched_tokens": 2112,
        "enforce_eager": True,
    }  # fmt: skip
    plain = plan.changed(weights="fp16", kv_cache="fp16", tensor_parallel=1, pipeline_parallel=1, replicas=1, execution="graphs")
    assert {*(arguments_of_plan(plain) or {})} == {"dtype", "max_num_seqs", "max_num_batched_tokens"}
    stored = plan.changed(weights="int4", replicas=1)
    assert {*(arguments_of_plan(stored, is_stored=True) or {})} == {"max_num_seqs", "max_num_batched_tokens"}
    assert arguments_of_plan(stored) is None and arguments_of_plan(plan.changed(kv_cache="int8")) is None


def test_cache_of_grouped_heads() -> None:
    assert cached_bytes(LLAMA_8B, "bf16", 1) == 128 * KIB
    assert cached_bytes(LLAMA_8B, "bf16", 8192) == 1 * GIB
    assert cached_bytes(LLAMA_8B, "fp8", 8192) == GIB / 2
    assert cached_bytes(LLAMA_8B, "bf16", 8192, ranks=4) == GIB / 4
    # int8: a scale of 4 bytes for each vector of 128.
    assert cached_bytes(LLAMA_8B, "int8", 1) == 64 * KIB * (1 + 4 / 128)


def test_cache_of_sliding_windows_stops_growing() -> None:
    of_layer = 2048 * 2
    assert cached_bytes(SLIDING, "bf16", 512) == 24 * 512 * of_layer
    assert cached_bytes(SLIDING, "bf16", 32768) == (20 * 1024 + 4 * 32768) * of_layer


def test_a_head_that_all_share_is_on_every_rank() -> None:
    latent = LLAMA_8B.changed(cache=(cached(32, 576, 1),))
    assert cached_bytes(latent, "bf16", 100, ranks=8) == cached_bytes(latent, "bf16", 100) == 32 * 576 * 100 * 2


def test_states_do_not_grow() -> None:
    recurrent = SLIDING.changed(cache=(CachedLayers(count=24, per_token=0, per_sequence=1000, heads=1),))
    assert cached_bytes(recurrent, "bf16", 1) == cached_bytes(recurrent, "bf16", 10**5) == 24 * 1000 * 2


@pytest.mark.parametrize("window", [None, 1, 7, 100, 1000])
@pytest.mark.parametrize(("start", "steps"), [(0, 50), (90, 20), (5, 1), (400, 300)])
def test_mean_visible(window: int | None, start: int, steps: int) -> None:
    """Against the sum: in the middle of each step, half a token more than at its beginning."""
    seen = [min(start + step + 0.5, window or 10**9) for step in range(steps)]
    assert mean_visible(window, start, steps) == pytest.approx(sum(seen) / steps, abs=0.5)


def test_attention_of_a_prompt() -> None:
    # 4 FLOPs for each query head's element and each of the s * s / 2 pairs that causal attention computes.
    assert prompt_attention_flops(LLAMA_8B, 4096) == 32 * 4 * 4096 * 4096 * 4096 / 2


def test_weights() -> None:
    """8.03 B parameters: 14.96 GiB in bf16. Quantized: embedding and head stay, a group of 128 has 4 bytes of scale."""
    in_layers, outside = LLAMA_8B.parameters.layers, 2 * 128256 * 4096
    vectors = 64 * 4096
    one = {"tensor_parallel": 1, "pipeline_parallel": 1}
    assert in_layers + outside == 8_030_257_152
    assert weight_bytes(LLAMA_8B, "bf16", 128, **one) == 2 * 8_030_257_152
    expected = (in_layers - vectors) * (0.5 + 4 / 128) + 2 * (vectors + outside)
    assert weight_bytes(LLAMA_8B, "int4", 128, **one) == expected
    assert weight_bytes(LLAMA_8B, "bf16", 128, tensor_parallel=4, pipeline_parallel=1) == 2 * (in_layers / 4 + outside)
    assert weight_bytes(LLAMA_8B, "bf16", 128, tensor_parallel=1, pipeline_parallel=4) == 2 * (in_layers / 4 + outside / 2)


def test_tied_weights_count_once() -> None:
    embedding = 262144 * 2560
    in_layers = SLIDING.parameters.layers
    assert weight_bytes(SLIDING, "bf16", 128, tensor_parallel=1, pipeline_parallel=1) == 2 * (in_layers + embedding)
    assert weight_bytes(SLIDING, "bf16", 128, tensor_parallel=1, pipeline_parallel=2) == in_layers + 2 * embedding


def test_experts_that_a_batch_meets() -> None:
    experts = [item for item in products_of(MIXTURE) if item.experts > 1]
    assert sum(item.elements for item in experts) == 32 * 8 * 3 * 4096 * 14336
    touched = experts[0].touched
    assert touched(1) == pytest.approx(2.0)
    assert touched(2) == pytest.approx(8 * (1 - 0.75**2))
    assert touched(1000) == pytest.approx(8.0)
    assert products_of(LLAMA_8B)[0].touched(1) == 1.0


def test_a_mixture_decodes_as_fast_as_its_active_weights() -> None:
    def seconds(decoding: int) -> float:
        engine = build_engine(describe("4xh100"), MIXTURE, ASK, PLAIN._replace(tensor_parallel=4))
        assert engine is not None
        step = engine.step(0.0, decoding)
        assert step is not None
        return step.weights

    assert 3.2 < seconds(16) / seconds(1) < 4.0  # all of 8 experts over 2, beside attention and head
    assert seconds(64) == pytest.approx(seconds(32), rel=0.01)


@given(name=st.sampled_from(sorted(MODELS)), cache=st.sampled_from(["bf16", "fp8", "int8"]), sequences=st.integers(1, 4096))
@settings(max_examples=60, deadline=None)
def test_memory_grows_with_concurrency(name: str, cache: str, sequences: int) -> None:
    memory = replica_memory(describe("h100"), MODELS[name], ASK, PLAIN._replace(kv_cache=cache), chunk_tokens=2048)
    assert memory.total(sequences) < memory.total(sequences + 1)
    assert memory.total(sequences) == pytest.approx(sum(memory.parts(sequences).values()))
    assert memory.limit is not None and memory.largest_concurrency is not None
    largest = memory.largest_concurrency
    assert memory.total(largest + 1) > memory.limit
    assert not largest or memory.total(largest) <= memory.limit


@given(
    name=st.sampled_from(sorted(MODELS)), faster=st.floats(1.0, 4.0), prompt=st.integers(0, 8192), decoding=st.integers(0, 1024),
    weights=st.sampled_from(sorted(WEIGHTS)),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_more_bandwidth_is_never_slower(name: str, faster: float, prompt: int, decoding: int, weights: Any) -> None:
    def seconds(host: Host) -> float:
        engine = build_engine(host, MODELS[name], ASK, PLAIN._replace(weights=weights))
        assert engine is not None
        step = engine.step(float(prompt), float(decoding))
        assert step is not None
        return step.total

    host = describe("h100")
    assert host.gpu is not None and host.gpu.peak is not None
    rate = host.gpu.peak.memory_bytes_per_second
    assert rate is not None
    fast = host.changed(gpu=host.gpu.changed(peak=host.gpu.peak.changed(memory_bytes_per_second=rate * faster)))
    assert seconds(fast) <= seconds(host) * (1 + 1e-9)
    assert seconds(host) > 0


@given(name=st.sampled_from(sorted(MODELS)), prompt=st.integers(0, 4096), decoding=st.integers(1, 512))
@settings(max_examples=40, deadline=None)
def test_more_work_takes_no_less_time(name: str, prompt: int, decoding: int) -> None:
    engine = build_engine(describe("8xh100"), MODELS[name], ASK, PLAIN._replace(tensor_parallel=2))
    assert engine is not None
    step, more, longer = engine.step(prompt, decoding), engine.step(prompt, decoding + 1), engine.step(prompt + 64, decoding)
    assert step is not None and more is not None and longer is not None
    assert step.total <= more.total * (1 + 1e-9)
    assert step.total <= longer.total * (1 + 1e-9)


WORKLOADS = st.builds(
    InferenceWorkload,
    task=st.sampled_from(["generate", "encode"]),
    prompt_length=st.integers(1, 10000),
    output_length=st.integers(0, 3000),
    concurrency=st.none() | st.integers(1, 5000),
    max_ttft_ms=st.none() | st.floats(1e-3, 1e6),
    max_tpot_ms=st.none() | st.floats(1e-3, 1e4),
    allow=st.lists(st.sampled_from(ALL), unique=True, max_size=3).map(tuple),
)
FIXED = st.sampled_from(
    [
        (), (), ("weights=fp16",), ("weights=int4", "group_size=64"), ("kv_cache=int8",), ("tensor_parallel=2",),
        ("tensor_parallel=3",), ("pipeline_parallel=4",), ("max_concurrency=16",), ("prefill_chunk_tokens=1024",),
        ("execution=eager",), ("execution=fast",), ("weights",), ("max_concurrency=0",), ("replicas=2",),
    ]
)  # fmt: skip


@given(name=st.sampled_from([*sorted(MODELS), "encoder"]), host=st.sampled_from(HOSTS), workload=WORKLOADS, fixed=FIXED)
@settings(max_examples=80, deadline=None)
def test_any_request_has_one_clear_answer(name: str, host: str, workload: InferenceWorkload, fixed: tuple[str, ...]) -> None:
    described = describe(host)
    try:
        planning = plan_profile({**MODELS, "encoder": ENCODER}[name], described, workload, fixed)
    except (RequestError, NothingFits) as refused:
        assert str(refused) and "\n" not in str(refused)
        return
    best = planning.best
    assert best.fits and best.plan.num_devices == described.num_devices
    assert InferencePlan.model_validate(best.plan.model_dump()) == best.plan
    assert set(best.plan.changes_mathematics) <= set(workload.allow)
    numbers = planning.numbers(best)
    assert numbers.tokens_per_second > 0
    assert numbers.peak_gib == pytest.approx(sum(numbers.memory.values()))
    for assignment in fixed:
        field, _, value = assignment.partition("=")
        assert str(getattr(best.plan, field)) == value
    if workload.max_ttft_ms is not None:
        assert numbers.ttft_ms <= workload.max_ttft_ms
    json.dumps(planning.document())


def ranked(planning: InferencePlanning) -> list[str]:
    return [candidate.plan.label() for candidate in planning.ranking.candidates]


def test_ranking_is_deterministic_and_by_throughput() -> None:
    workload = ASK.changed(concurrency=64, allow=("fp8-weights", "fp8-kv"))
    first, second = (plan_profile(MIXTURE, describe("8xh100"), workload) for _ in range(2))
    assert ranked(first) == ranked(second)
    speeds = [candidate.tokens_per_second for candidate in first.ranking.candidates]
    assert speeds == sorted(speeds, reverse=True)
    assert len(set(ranked(first))) == len(speeds)


def test_little_s_law() -> None:
    """Requests that are inside = requests/s x the time each is inside, where prompts are the bottleneck."""
    workload = InferenceWorkload(prompt_length=4096, output_length=16, concurrency=256)
    candidates = plan_profile(LLAMA_8B, describe("8xh100"), workload).ranking.candidates[:50]
    assert len(candidates) >= 10
    for candidate in candidates:
        service = candidate.service
        assert service.tpot is not None
        inside = service.requests_per_second * (service.ttft + 15 * service.tpot)
        assert inside == pytest.approx(candidate.plan.max_concurrency, rel=0.5)


@pytest.mark.parametrize("host", ["h100", "8xh100", "mi300x"])
def test_more_requests_at_once_must_be_worth_the_wait(host: str) -> None:
    """The first plan answers soonest of those within 2 % that differ in their requests alone."""
    planning = plan_profile(LLAMA_8B, describe(host), ASK)
    best, *others = planning.ranking.candidates
    fastest = max(planning.ranking.candidates, key=lambda candidate: candidate.tokens_per_second)
    assert best.plan.max_concurrency < fastest.plan.max_concurrency
    for other in others:
        same = other.plan.changed(max_concurrency=1, prefill_chunk_tokens=1) == best.plan.changed(
            max_concurrency=1, prefill_chunk_tokens=1
        )
        if same and other.tokens_per_second > 0.98 * fastest.tokens_per_second:
            assert (other.service.tpot or 0.0) >= (best.service.tpot or 0.0)
    assert planning.preference is not None and "answers sooner" in planning.preference


def test_a_latency_limit_costs_throughput() -> None:
    free = plan_profile(LLAMA_8B, describe("h100"), ASK).best
    bound = plan_profile(LLAMA_8B, describe("h100"), ASK.changed(max_tpot_ms=12.0)).best
    assert free.service.tpot is not None and free.service.tpot > 0.012
    assert bound.service.tpot is not None and bound.service.tpot <= 0.012
    assert bound.tokens_per_second < free.tokens_per_second


def test_a_cpu_without_bf16_reads_rounded_weights_and_computes_in_fp32() -> None:
    host = describe("epyc-7763-256gb")
    assert host.supports("bf16") is False
    best = plan_profile(LLAMA_8B, host, ASK.changed(concurrency=1)).best
    rounded = plan_profile(LLAMA_8B, host, ASK.changed(concurrency=1, allow=("int8-weights",))).best
    assert (best.plan.weights, rounded.plan.weights, rounded.plan.kv_cache) == ("fp32", "int8", "fp32")
    assert 2.0 < rounded.tokens_per_second / best.tokens_per_second < 4.0  # of four times fewer bytes, read less evenly


def test_nothing_fits_names_the_nearest_plan() -> None:
    with pytest.raises(NothingFits, match="not one sequence fits beside the weights.*--allow"):
        plan_profile(LLAMA_8B, describe("t4"), ASK)
    assert plan_profile(LLAMA_8B, describe("t4"), ASK.changed(allow=("int4-weights",))).best.plan.weights == "int4"
    with pytest.raises(NothingFits, match="at most [0-9]+ fit at once"):
        plan_profile(LLAMA_8B, describe("h100"), ASK.changed(concurrency=4000))
    with pytest.raises(NothingFits, match="over --max-tpot-ms 0.1"):
        plan_profile(LLAMA_8B, describe("h100"), ASK.changed(max_tpot_ms=0.1))


@pytest.mark.parametrize(
    ("change", "fixed", "message"),
    [
        ({"output_length": 9000}, (), "longer than the model's 8192 positions; use at most 8192"),
        ({"output_length": 0}, (), "--output-length 0 generates nothing"),
        ({"concurrency": 4}, ("max_concurrency=8",), "give one of them"),
        ({}, ("weights=fp8",), "add --allow fp8-weights"),
        ({}, ("tensor_parallel=16",), "degrees divide 8"),
        ({}, ("tensor_parallel=8", "pipeline_parallel=2"), "does not divide the 8 devices"),
        ({}, ("sequence_length=8",), "names no plan field; use field=value with one of weights"),
        ({}, ("weights=int3",), "use one of fp32, bf16"),
        ({}, ("weights",), "lacks a '='; write field=value"),
        ({}, ("weights=bf16", "weights=fp32"), "fixes weights twice, to bf16 and to fp32"),
    ],
)
def test_a_wrong_request_says_what_would_be_right(change: dict[str, Any], fixed: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plan_profile(LLAMA_8B, describe("8xh100"), ASK.changed(**change), fixed)


def test_intervals_are_those_of_published_rows() -> None:
    def interval(host: str, *fixed: str) -> tuple[float, float] | None:
        planning = plan_profile(LLAMA_8B, describe(host), ASK.changed(concurrency=8), fixed)
        return planning.numbers(planning.best).interval

    assert interval("8xh100", "tensor_parallel=8") == interval("8xl40s", "tensor_parallel=1") == (0.44, 1.54)
    assert interval("8xl40s", "tensor_parallel=4") == (0.3, 1.54)
    assert interval("xeon-8480-512gb") is interval("8xmi300x") is None


def test_other_wrong_requests() -> None:
    with pytest.raises(RequestError, match="plan it with --encode"):
        plan_profile(ENCODER, describe("h100"), InferenceWorkload(prompt_length=64, output_length=64))
    with pytest.raises(RequestError, match="'fp8' is unknown; .* fp8-weights"):
        check_allow(("fp8",))


def test_every_rejection_keeps_its_reason() -> None:
    ranking = rank_plans(describe("2xl40s"), LLAMA_8B, ASK.changed(max_ttft_ms=400.0), fixed={})
    assert ranking.rejected and all(entry.reason for entry in ranking.rejected)
    assert any("of the" in entry.reason for entry in ranking.rejected)
    assert any("over --max-ttft-ms 400" in entry.reason for entry in ranking.rejected)


def test_cpus_are_planned() -> None:
    best = plan_profile(LLAMA_8B, describe("xeon-8480-512gb"), ASK.changed(concurrency=1)).best
    assert best.plan.device == "cpu" and best.plan.weights == "bf16"
    # One sequence reads 15 GB of weights (embedding apart) at three quarters of 307 GB/s, between 180 operators a layer.
    assert best.service.tpot == pytest.approx(7.5e9 * 2 / (307e9 * 0.75) + 32 * 180 * 1.2e-6, rel=0.05)
    assert memory_limit(describe("epyc-9654")) is None


def test_encoding() -> None:
    workload = InferenceWorkload(task="encode", prompt_length=128, concurrency=1024)
    planning = plan_profile(ENCODER, describe("h100"), workload)
    assert planning.best.service.tpot is None
    assert planning.best.tokens_per_second == pytest.approx(128 * planning.best.requests_per_second)
    assert 1e6 < planning.best.tokens_per_second < 989e12 / (2 * 85e6)


def test_no_more_is_counted_than_the_requests_there_are() -> None:
    """A rate is at most what so many requests, each as fast as the plan answers it, come to."""
    for concurrency in (1, 3, 9):
        ranking = plan_profile(LLAMA_8B, describe("8xh100"), ASK.changed(concurrency=concurrency)).ranking
        for candidate in ranking.candidates:
            service = candidate.service
            assert service.tpot is not None
            assert candidate.requests_per_second <= concurrency / (255 * service.tpot)
            assert candidate.tokens_per_second == pytest.approx(256 * candidate.requests_per_second)
        assert ranking.candidates[0].plan.replicas < 8
    encode = InferenceWorkload(task="encode", prompt_length=128, concurrency=9)
    for fixed in ((), ("max_concurrency=64",)):
        for candidate in plan_profile(ENCODER, describe("8xh100"), encode, fixed).ranking.candidates:
            fullest = -(-9 // candidate.plan.replicas)
            steps = max(fullest / candidate.plan.max_concurrency, 1.0)
            assert candidate.requests_per_second == pytest.approx(9 / (steps * candidate.service.step.total))


def test_no_memory_is_not_unlimited_memory() -> None:
    host = describe("h100")
    assert host.gpu is not None
    for sizes in ({"memory_bytes": 0}, {"free_memory_bytes": 0}):
        with pytest.raises(NothingFits, match="of the 0 B"):
            plan_profile(LLAMA_8B, host.changed(gpu=host.gpu.changed(**sizes)), ASK)


def test_images_are_no_tokens() -> None:
    pictures = ENCODER.changed(objective="image-classification")
    with pytest.raises(RequestError, match="takes images, and --encode plans for tokens"):
        plan_profile(pictures, describe("h100"), InferenceWorkload(task="encode", prompt_length=128))


def test_a_plan_costs_few_calls() -> None:
    """The work is counted, since a busy machine says nothing by its time: at 212 calls a plan an idle one costs 23,000 plans a
    second (docs/inference_planning.md)."""
    host, workload = describe("8xh100"), ASK.changed(allow=("fp8-weights", "fp8-kv"))
    profiler = cProfile.Profile()
    ranking = profiler.runcall(rank_plans, host, LLAMA_8B, workload, fixed={})
    assert ranking.num_plans > 1000
    assert pstats.Stats(profiler).total_calls < 300 * ranking.num_plans


def test_command_line_options() -> None:
    generation, sequences = (512, 256, 32), (128, 64)
    asked = read_workload(True, False, generation, sequences, (500.0, 30.0), ("fp8-kv",))
    assert asked == InferenceWorkload(
        prompt_length=512, output_length=256, concurrency=32, max_ttft_ms=500.0, max_tpot_ms=30.0, allow=("fp8-kv",)
    )
    asked = read_workload(False, True, generation, sequences, (None, None), ())
    assert asked == InferenceWorkload(task="encode", prompt_length=128, concurrency=64)
    with pytest.raises(RequestError, match="two tasks"):
        read_workload(True, True, generation, sequences, (None, None), ())


def test_a_limit_is_named_by_its_option() -> None:
    ranking = rank_plans(describe("2xl40s"), LLAMA_8B, ASK.changed(task="encode", output_length=0, max_ttft_ms=0.001), fixed={})
    assert any("latency " in entry.reason and "over --max-latency-ms 0.001" in entry.reason for entry in ranking.rejected)
