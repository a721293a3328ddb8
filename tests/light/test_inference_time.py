"""The seconds, the latency and the memory of a replica, by hand, for a model of two small layers; and the space of its plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from made_generators import LLAMA_8B, MIXTURE, SLIDING, attention_shapes, cached, made_generator

from upshift.errors import RequestError
from upshift.hardware import describe, memory_efficiency
from upshift.hardware.catalog.efficiency import GEMM_CLASSES
from upshift.hardware.spec import Host, Link, Measured, Rates
from upshift.models.profile import CachedLayers, TensorParallel
from upshift.planning.inference.memory import (
    activation_bytes,
    cached_bytes,
    decode_attention_flops,
    mean_read_bytes,
    mean_visible,
    products_of,
    prompt_attention_flops,
    replica_memory,
    weight_bytes,
)
from upshift.planning.inference.plan import WEIGHTS, InferencePlan, InferenceWorkload, ReplicaShape, WeightFormat
from upshift.planning.inference.space import (
    chunk_sizes,
    concurrencies,
    device_layouts,
    legal_values,
    occupied_share,
    parse_fixed,
)
from upshift.planning.inference.time import (
    DeviceRates,
    Engine,
    Service,
    StepTime,
    build_engine,
    device_rates,
    predict_service,
)
from upshift.units import GIB, MIB

# Two layers of hidden size 8: two matrices of 8 x 8 and two of 4 x 8, one of 16 x 8, one of 8 x 16, and two norms. Ten words.
SMALL = made_generator(
    {**attention_shapes(8, 4, 2), (16, 8): 2, (8, 16): 2}, layers=2, vocabulary=10, hidden=8, heads=(2, 1),
    cache=(cached(2, 8, 1),),
)  # fmt: skip
MATRICES = 4 * 64 + 4 * 32 + 2 * 128 + 2 * 128  # elements
WIDTHS = 4 * 16 + 4 * 12 + 2 * 24 + 2 * 24  # of all products: inputs and outputs
HEAD = 80
WORKLOAD = InferenceWorkload(prompt_length=4, output_length=3)
SHAPE = ReplicaShape("bf16", "bf16", tensor_parallel=1, pipeline_parallel=1, execution="graphs")


def probed(*, bf16: float, memory: float, gpus: int = 1) -> Host:
    """Return GPUs that no table lists, with measured rates: products of every size then run at the same rate."""
    host = describe(f"{gpus}xh100")
    assert host.gpu is not None
    measured = Measured(
        torch_version="2", transformers_version=None, num_threads=1, cpu=Rates(fp32=1.0), dispatch_seconds=0.0,
        gpu=Rates(bf16=bf16, memory_bytes_per_second=memory), first_touch_seconds_per_byte=None, base_resident_bytes=None,
        compiler=None, probe_seconds=1.0,
    )  # fmt: skip
    return host.changed(gpu=host.gpu.changed(table_key=None, peak=None), measured=measured)


def engine_of(host: Host, shape: ReplicaShape = SHAPE, **changes: Any) -> Engine:
    engine = build_engine(host, SMALL, WORKLOAD.changed(**changes), shape)
    assert engine is not None
    return engine


def step_of(engine: Engine, prompt: float, decoding: float, **more: float) -> StepTime:
    step = engine.step(prompt, decoding, **more)
    assert step is not None
    return step


# --- a step ----------------------------------------------------------------------------------------------------------


def test_a_step_that_waits_for_weights_reads_each_once() -> None:
    """Two bytes of each weight, whatever the tokens; and the head where there are rows of logits."""
    engine = engine_of(probed(bf16=1e15, memory=1e3))
    step = step_of(engine, 3.0, 2.0)
    assert step.weights == pytest.approx(2 * (MATRICES + HEAD) / 1e3)
    assert step.products == 0.0
    assert step_of(engine, 3.0, 0.0).weights == pytest.approx(2 * MATRICES / 1e3)
    assert step_of(engine, 3.0, 2.0, logits=0.0).weights == pytest.approx(2 * MATRICES / 1e3)
    # Three prompt tokens and two that decode; a decoding one sees 4 and then 5 tokens behind it, 5 in the mean with itself.
    assert step.cache == pytest.approx(2 * 2 * (8 * 5 * 2) / 1e3)
    assert step.activations == pytest.approx(2 * WIDTHS * 5 / 1e3)
    assert step.launches == pytest.approx(1e-3 + 4e-6 * 2 + 2 * 2.2e-5)
    assert step.communication == 0.0
    assert step.total == pytest.approx(sum(step))


def test_a_step_that_waits_for_arithmetic_computes_every_token() -> None:
    """Attention runs at six tenths of the rate. A prompt of 4 tokens has 2 x 2 x 8 x 4 x 4 FLOPs of it, 128 for each token."""
    engine = engine_of(probed(bf16=1e3, memory=1e15))
    step = step_of(engine, 3.0, 2.0)
    assert step.products == pytest.approx((2 * MATRICES * 5 + 2 * HEAD * 2) / 1e3)
    assert step.weights == 0.0
    assert step.attention == pytest.approx(3 * 128 / 600)
    assert step.cache == pytest.approx(2 * (2 * 32 * 5) / 600)


def test_eager_kernels_hide_what_queues_them() -> None:
    """They move twice as much. A layer takes a millisecond to queue, less than the device computes here."""
    eager = SHAPE._replace(execution="eager")
    slow = step_of(engine_of(probed(bf16=1e15, memory=1e3), eager), 3.0, 2.0)
    assert slow.activations == pytest.approx(2 * 2 * WIDTHS * 5 / 1e3)
    assert slow.launches == pytest.approx(1e-3 + 4e-6 * 2)
    fast = step_of(engine_of(probed(bf16=1e15, memory=1e15), eager), 3.0, 2.0)
    assert fast.launches == pytest.approx(1e-3 + 4e-6 * 2 + 2e-3, rel=1e-3)


def test_tensor_parallel_devices_divide_products_and_sum_twice_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[float] = []

    def seconds_of(host: Host, operation: str, num_bytes: float, group: object) -> float:
        sums.append(num_bytes)
        return 1.0

    monkeypatch.setattr("upshift.planning.inference.time.collective_seconds", seconds_of)
    one = step_of(engine_of(probed(bf16=1e15, memory=1e3)), 3.0, 2.0)
    both = SHAPE._replace(tensor_parallel=2)
    two = step_of(engine_of(probed(bf16=1e15, memory=1e3, gpus=2), both), 3.0, 2.0)
    assert two.communication == 2 * 2 * 1.0 and sums == [2 * 8 * 5]
    assert (two.weights, two.activations) == pytest.approx((one.weights / 2, one.activations / 2))
    assert two.cache == pytest.approx(one.cache)  # its one head of keys is on both
    computing = step_of(engine_of(probed(bf16=1e3, memory=1e15, gpus=2), both), 3.0, 2.0)
    alone = step_of(engine_of(probed(bf16=1e3, memory=1e15)), 3.0, 2.0)
    assert (computing.products, computing.attention) == pytest.approx((alone.products / 2, alone.attention / 2))


def test_stages_of_a_pipeline_each_have_a_part_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step goes through both stages: each reads its weights, for half of the tokens; a sequence alone leaves one idle."""
    monkeypatch.setattr(
        "upshift.planning.inference.time.hop_seconds", lambda host, num_bytes, group: (num_bytes,) * (group.size - 1)
    )
    engine = engine_of(probed(bf16=1e15, memory=1e3, gpus=2), SHAPE._replace(pipeline_parallel=2))
    step = step_of(engine, 4.0, 2.0)
    assert step.weights == pytest.approx(2 * (MATRICES + 2 * HEAD) / 1e3)
    assert step.activations == pytest.approx(2 * WIDTHS * 3 / 1e3)
    assert step.communication == 2 * (2 * 8 * 3)
    assert step_of(engine, 0.0, 1.0).communication == 2 * (2 * 8 * 1)
    assert step_of(engine, 0.0, 0.5).communication == 2 * (2 * 8 * 0.5)


def test_rounded_weights_are_read_and_multiplied_at_their_share() -> None:
    """int8: a byte, and two for the scale of an output; read at three quarters, multiplied at nine tenths of the rate."""
    outputs = 4 * 8 + 4 * 4 + 2 * 16 + 2 * 8
    int8 = SHAPE._replace(weights="int8")
    step = step_of(engine_of(probed(bf16=1e15, memory=1e3), int8), 3.0, 2.0)
    assert step.weights == pytest.approx((MATRICES + 2 * outputs) / 750 + 2 * HEAD / 1e3)
    computing = step_of(engine_of(probed(bf16=1e3, memory=1e15), int8), 3.0, 2.0)
    assert computing.products == pytest.approx(2 * MATRICES * 5 / 900 + 2 * HEAD * 2 / 1e3)
    tied = SMALL.changed(parameters=SMALL.parameters.changed(head=0, tied=True))
    engine = build_engine(probed(bf16=1e15, memory=1e3), tied, WORKLOAD, SHAPE)
    assert engine is not None and engine.head_flops == 2 * HEAD
    encoding = engine_of(probed(bf16=1e15, memory=1e3), task="encode", output_length=0)
    assert (encoding.head_flops, encoding.head_seconds) == (0.0, 0.0)


def test_experts_get_few_tokens_each() -> None:
    """Two of eight experts for a token: a step of one token reads two, and computes at eight tenths of the rate."""
    workload = WORKLOAD.changed(prompt_length=4)
    elements = {2: 32 * (28672 * 4096 + 4096 * 14336), 1: LLAMA_8B.parameters.layers}
    dense = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 8 * 4096)
    reading = build_engine(probed(bf16=1e30, memory=1e12), MIXTURE, workload, SHAPE)
    computing = build_engine(probed(bf16=1e12, memory=1e30), MIXTURE, workload, SHAPE)
    assert reading is not None and computing is not None
    head = 32000 * 4096
    widths = 32 * (2 * 2 * 4096 + 2 * (1024 + 4096) + (8 + 4096) + 2 * (28672 + 4096) + 2 * (4096 + 14336))
    assert step_of(reading, 0.0, 1.0).activations == pytest.approx(2 * widths / 1e12)
    assert step_of(reading, 0.0, 1.0).weights == pytest.approx(2 * (dense + 2 * elements[2] + head) / 1e12)
    products = step_of(computing, 0.0, 1.0).products
    assert products == pytest.approx(2 * (dense + 2 * elements[2] / 0.8 + head) / 1e12)


# --- rates -----------------------------------------------------------------------------------------------------------


def test_rates_of_devices_that_were_not_probed() -> None:
    host = describe("h100")
    assert host.gpu is not None and host.gpu.peak is not None
    peak = host.gpu.peak
    rates = device_rates(host, "bf16", "bf16", "graphs")
    assert rates is not None and peak.memory_bytes_per_second is not None and peak.bf16 is not None
    bandwidth = peak.memory_bytes_per_second
    share = memory_efficiency(host.gpu.table_key or "") or 0.75
    assert (rates.matrix, rates.outside, rates.memory) == (peak.bf16, peak.bf16, pytest.approx(bandwidth * share))
    assert rates.attention == pytest.approx(0.6 * max(rates.efficiencies) * peak.bf16)
    assert rates.weights == pytest.approx(bandwidth * max(0.84, share))
    assert rates.cache == pytest.approx(bandwidth * max(0.8, share))
    assert rates.layer_seconds == 2.2e-5
    unlisted = host.changed(gpu=host.gpu.changed(table_key=None))
    found = device_rates(unlisted, "bf16", "bf16", "eager")
    assert found is not None and set(found.efficiencies) == {0.7} and found.layer_seconds == 1e-3
    assert (found.memory, found.weights, found.cache) == pytest.approx((0.75 * bandwidth, 0.84 * bandwidth, 0.8 * bandwidth))
    assert device_rates(host.changed(gpu=host.gpu.changed(peak=None)), "bf16", "bf16", "eager") is None


def test_what_a_probe_measured_counts_as_it_is_and_the_rest_as_products_reach_it() -> None:
    """Measured large products leave only the loss of small ones. fp8 goes with bf16, fp32 reaches the best share of its own."""
    host = describe("h100")
    assert host.gpu is not None and host.gpu.peak is not None
    peak = host.gpu.peak
    assert peak.fp8 is not None and peak.bf16 is not None and peak.fp32 is not None
    measured = host.changed(measured=probed(bf16=5e14, memory=2e12).measured)
    listed = device_rates(host, "bf16", "bf16", "graphs")
    rates = device_rates(measured, "bf16", "bf16", "graphs")
    assert rates is not None and listed is not None
    best = max(listed.efficiencies)
    assert (rates.matrix, rates.memory, rates.weights, rates.cache) == (5e14, 2e12, 2e12, 2e12)
    assert rates.efficiencies == pytest.approx([share / best for share in listed.efficiencies])
    assert rates.attention == pytest.approx(0.6 * 5e14)
    in_fp8 = device_rates(measured, "fp8", "fp8", "graphs")
    in_fp32 = device_rates(measured, "fp32", "fp32", "graphs")
    assert in_fp8 is not None and in_fp32 is not None
    assert (in_fp8.matrix, in_fp8.outside) == (pytest.approx(5e14 * peak.fp8 / peak.bf16), 5e14)
    assert in_fp32.matrix == in_fp32.outside == pytest.approx(best * peak.fp32)


def test_rates_of_a_cpu() -> None:
    host = describe("xeon-8480-512gb")
    assert host.cpu is not None and host.cpu.peak is not None
    peak = host.cpu.peak
    assert peak.bf16 is not None and peak.fp32 is not None and peak.memory_bytes_per_second is not None
    rates = device_rates(host, "bf16", "bf16", "eager")
    memory = 0.75 * peak.memory_bytes_per_second
    expected = DeviceRates(
        0.7 * peak.bf16, 0.7 * peak.bf16, 0.4 * 0.7 * peak.fp32, memory, memory, memory, layer_seconds=180 * 1.2e-6
    )
    assert rates == expected
    measured = host.changed(measured=Measured(
        torch_version="2", transformers_version=None, num_threads=1, dispatch_seconds=2e-6, compiler=True, probe_seconds=1.0,
        cpu=Rates(fp32=1e12, bf16=2e12, memory_bytes_per_second=1e11), first_touch_seconds_per_byte=None,
        base_resident_bytes=None,
    ))  # fmt: skip
    found = device_rates(measured, "bf16", "bf16", "graphs")
    assert found is not None
    assert found == DeviceRates(2e12, 2e12, 4e11, 1e11, 1e11, 1e11, layer_seconds=pytest.approx(180 * 2e-6 * 0.3))
    assert device_rates(host.changed(cpu=host.cpu.changed(peak=None)), "bf16", "bf16", "eager") is None


def test_efficiency_lies_between_the_classes_on_a_logarithmic_scale() -> None:
    shares = tuple((number + 1) / 10 for number in range(len(GEMM_CLASSES)))
    rates = DeviceRates(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, shares)
    lowest = GEMM_CLASSES[0] * 10**0.5  # a class is a decade
    assert rates.efficiency(0.0) == rates.efficiency(lowest) == shares[0]
    assert rates.efficiency(lowest * 10) == pytest.approx(shares[1])
    assert rates.efficiency(lowest * 10**0.25) == pytest.approx(shares[0] + 0.025)
    assert rates.efficiency(lowest * 10**1.5) == pytest.approx(shares[1] + 0.05)
    assert rates.efficiency(1e30) == shares[-1]
    assert replace(rates, efficiencies=()).efficiency(1e9) == 1.0


# --- latency and throughput ------------------------------------------------------------------------------------------


def service_of(concurrency: int, chunk: int, *, prompt_seconds: float = 1.0, **workload: Any) -> Service:
    """Return the service of an engine whose steps take 1 s with prompt tokens, and half a second without."""

    def step(prompt_tokens: float, decoding: float, *, logits: float | None = None) -> StepTime:
        return StepTime(weights=prompt_seconds if prompt_tokens else 0.5)

    request = InferenceWorkload(**{"prompt_length": 100, "output_length": 11, **workload})
    service = predict_service(SimpleNamespace(step=step), request, concurrency, chunk)  # type: ignore[arg-type]
    assert service is not None
    return service


def test_decoding_and_prompts_share_the_steps() -> None:
    """Prompts of two chunks, ten steps to decode: 4 x 10 / 12 sequences decode, and two of three steps have prompt tokens."""
    service = service_of(4, 50)
    assert service.tpot == pytest.approx(5 / 6)
    assert service.requests_per_second == pytest.approx(0.4)
    assert service.tokens_per_second == pytest.approx(4.4)
    queue = (2 / 3) / (2 * (1 / 3)) * 2
    assert service.ttft == pytest.approx(7e-3 + 5 / 12 + 2 + queue)
    assert service.step == StepTime(weights=1.0)
    assert service_of(4, 50, prompt_seconds=0.1).step == StepTime(weights=0.5)
    one = service_of(1, 100)  # nobody else's prompt is waited for
    assert one.tpot == pytest.approx(10 / 11 / 10 * 10 * 0.1 * 1.0 + (1 - 1 / 11) * 0.5)
    assert one.ttft == pytest.approx(7e-3 + one.tpot / 2 + 1.0)


def test_where_prompts_are_the_bottleneck_requests_wait_for_their_turn() -> None:
    """Forty requests: every step has a whole chunk of prompt tokens, five sequences decode; Little's law gives the rest."""
    service = service_of(40, 50)
    assert (service.tpot, service.requests_per_second) == (pytest.approx(1.0), pytest.approx(0.5))
    assert service.ttft == pytest.approx(40 / 0.5 - 10)


def test_one_token_is_a_prompts_pass_and_encoding_is_a_batch() -> None:
    """400 prompt tokens in chunks of 150 are three steps."""
    first = service_of(4, 150, output_length=1)
    assert (first.ttft, first.tpot) == (pytest.approx(3.007), None)
    assert first.requests_per_second == first.tokens_per_second == pytest.approx(4 / 3)
    encoded = service_of(4, 150, task="encode", output_length=0, prompt_seconds=2.0)
    assert (encoded.ttft, encoded.requests_per_second, encoded.tokens_per_second) == (2.0, 2.0, 200.0)


def test_an_unknown_link_is_no_service() -> None:
    def step(prompt_tokens: float, decoding: float, *, logits: float | None = None) -> StepTime | None:
        return None if prompt_tokens else StepTime(weights=1.0)

    engine: Any = SimpleNamespace(step=step)
    for changes in ({"output_length": 3}, {"output_length": 1}, {"task": "encode"}):
        assert predict_service(engine, InferenceWorkload(prompt_length=4, **changes), 2, 2) is None
    host = probed(bf16=1e15, memory=1e3, gpus=2).changed(intra_node=None)
    assert engine_of(host, SHAPE._replace(tensor_parallel=2)).step(1.0, 1.0) is None
    apart = describe("2x1xh100").changed(inter_node=None)
    staged = engine_of(apart, SHAPE._replace(pipeline_parallel=2))
    assert staged.step(1.0, 1.0) is None
    link = Link(name="port", bytes_per_second=1e9)
    assert engine_of(apart.changed(inter_node=link), SHAPE._replace(pipeline_parallel=2)).step(1.0, 1.0) is not None


def test_the_one_stage_that_sends_to_another_node_has_a_whole_port() -> None:
    """A second port is of no use to it, and a slower one costs time."""
    sixteen = SHAPE._replace(pipeline_parallel=16)
    seconds = {
        port: step.communication
        for port in ("ethernet-100", "8xethernet-100", "ethernet-10")
        if (step := engine_of(describe(f"2x8xh100@{port}"), sixteen).step(1e8, 0.0)) is not None
    }
    assert seconds["8xethernet-100"] == pytest.approx(seconds["ethernet-100"])
    assert seconds["ethernet-10"] > 2 * seconds["ethernet-100"]


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_a_replica_by_part() -> None:
    """One token of activations: the state twice, and the widest product's input and output twice."""
    memory = replica_memory(describe("8xh100"), SMALL, WORKLOAD, SHAPE, chunk_tokens=100)
    norms = 4 * 8
    assert memory.weights == 2 * (MATRICES + norms + 2 * HEAD)
    assert memory.sequence_cache == 2 * 8 * 7 * 2
    assert memory.sequence_activations == 6 * 10
    assert memory.step_activations == 100 * 2 * (2 * 8 + 2 * 24)
    assert memory.workspace == 64 * MIB + 0.5 * GIB
    assert (memory.communication, memory.context) == (0.0, 0.5 * GIB)
    shared = SHAPE._replace(tensor_parallel=2, pipeline_parallel=2, execution="eager")
    parts = replica_memory(describe("8xh100"), SMALL, WORKLOAD, shared, chunk_tokens=100)
    assert (parts.workspace, parts.communication) == (64 * MIB, 2 * 370 * MIB)
    assert (parts.sequence_cache, parts.sequence_activations) == (memory.sequence_cache / 2, memory.sequence_activations / 2)
    assert parts.step_activations == 100 * 2 * (2 * 8 + 2 * 24 / 2)
    encode = WORKLOAD.changed(task="encode", output_length=0)
    batch = replica_memory(describe("8xh100"), SMALL, encode, SHAPE, chunk_tokens=100)
    assert (batch.sequence_cache, batch.step_activations) == (0.0, 0.0)
    assert batch.sequence_activations == 4 * activation_bytes(SMALL, size=2, tensor_parallel=1)
    on_cpu = replica_memory(describe("epyc-9654-64gb"), SMALL, WORKLOAD, SHAPE, chunk_tokens=100)
    assert (on_cpu.workspace, on_cpu.communication, on_cpu.context) == (0.0, 0.0, 300 * MIB)
    assert on_cpu.limit == pytest.approx(0.95 * 64 * GIB)
    room = replace(memory, limit=memory.fixed + 2.5 * memory.sequence)
    assert room.largest_concurrency == 2
    assert replace(memory, limit=memory.fixed - 1.0).largest_concurrency == 0


def test_devices_divide_what_the_model_declares() -> None:
    """All of the layers, and the embedding of embedding and head: a quarter of their bytes is saved by two devices."""
    declared = SMALL.changed(tensor_parallel=TensorParallel(divisor=2, layers=SMALL.parameters.layers, outside=HEAD))
    one = weight_bytes(declared, "bf16", 128, tensor_parallel=1, pipeline_parallel=1)
    two = weight_bytes(declared, "bf16", 128, tensor_parallel=2, pipeline_parallel=1)
    assert one == 2 * (SMALL.parameters.layers + 2 * HEAD)
    assert two == 2 * (SMALL.parameters.layers / 2 + 2 * HEAD * 3 / 4)
    half = declared.changed(tensor_parallel=TensorParallel(divisor=2, layers=SMALL.parameters.layers // 2, outside=0))
    assert weight_bytes(half, "bf16", 128, tensor_parallel=2, pipeline_parallel=1) == 2 * (
        SMALL.parameters.layers * 3 / 4 + 2 * HEAD
    )
    others = SMALL.parameters.changed(other=10, buffers_bytes=7)
    assert weight_bytes(SMALL.changed(parameters=others), "bf16", 128, tensor_parallel=1, pipeline_parallel=1) == one + 27
    staged = weight_bytes(SMALL, "bf16", 128, tensor_parallel=1, pipeline_parallel=2)
    assert staged == 2 * (SMALL.parameters.layers / 2 + HEAD)


def test_states_of_recurrences_stay_in_16_bits_and_ranks_divide_heads() -> None:
    layers = CachedLayers(count=3, per_token=8, per_sequence=100, heads=2, window=None)
    profile = SMALL.changed(cache=(layers,))
    assert cached_bytes(profile, "bf16", 10) == 3 * (8 * 10 * 2 + 100 * 2)
    assert cached_bytes(profile, "fp8", 10) == 3 * (8 * 10 + 100 * 2)
    assert cached_bytes(profile, "int8", 10) == 3 * (8 * 10 + 2 * 2 * 10 * 4 + 100 * 2)
    assert cached_bytes(profile, "fp32", 10) == 3 * (8 * 10 * 4 + 100 * 4)
    assert cached_bytes(profile, "bf16", 10, ranks=4) == 3 * (8 * 10 * 2 / 2 + 100 * 2 / 4)
    states = SMALL.changed(cache=(layers.changed(per_token=0),))
    assert cached_bytes(states, "int8", 10) == 3 * 100 * 2
    assert mean_read_bytes(profile, "bf16", 4, 2, ranks=2) == 3 * (8 * 5 * 2 / 2 + 100 * 2 / 2)


def test_tokens_that_a_new_one_sees() -> None:
    """From 4 to 8 tokens; a window of 6 grows for two of four steps; one of 3 is full."""
    assert mean_visible(None, 4, 4) == 6.0
    assert mean_visible(8, 4, 4) == 6.0
    assert mean_visible(6, 4, 4) == (2 * 5 + 2 * 6) / 4
    assert mean_visible(4, 4, 4) == mean_visible(4, 9, 0) == 4.0
    assert mean_visible(3, 4, 4) == 3.0
    assert mean_visible(None, 4, 0) == 4.5


def test_attention_with_windows_computes_what_is_cached() -> None:
    """4 FLOPs for each element of a query head and each visible token: 8 query heads of 256, over 4 heads of keys."""
    pair = 2 * 2048 * 8 / 4
    assert prompt_attention_flops(SLIDING, 512) == pytest.approx(24 * pair * 512 * 256)
    long = 20 * mean_visible(1024, 0, 4096) + 4 * 2048
    assert prompt_attention_flops(SLIDING, 4096) == pytest.approx(pair * 4096 * long)
    assert decode_attention_flops(SLIDING, 4096, 2) == pytest.approx(pair * (20 * 1024 + 4 * 4097))
    assert decode_attention_flops(SMALL, 4, 2) == 2 * 32 * 5
    unknown = SLIDING.changed(heads=None)
    assert prompt_attention_flops(unknown, 512) == pytest.approx(24 * 2 * 2048 * 512 * 256)


# --- the space -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "replicas", "largest", "expected"),
    [
        (None, 1, 10, [1, 2, 3, 4, 6, 8, 10, 12]), (None, 1, 6, [1, 2, 3, 4, 6, 8]), (None, 1, 0, [1]), (9, 2, 3, [5]),
        (8, 2, None, [4]),
    ],
)  # fmt: skip
def test_numbers_of_sequences_at_once(requests: int | None, replicas: int, largest: int | None, expected: list[int]) -> None:
    """Powers of two and sizes between them, up to the largest that fits, and the first that does not."""
    workload = WORKLOAD.changed(concurrency=requests)
    assert concurrencies(workload, replicas, largest, {}) == expected
    assert concurrencies(workload, replicas, largest, {"max_concurrency": 7}) == [7]


def test_batches_to_encode_are_no_larger_than_a_replicas_share() -> None:
    encode = WORKLOAD.changed(task="encode", output_length=0, concurrency=9)
    assert concurrencies(encode, 2, None, {}) == [1, 2, 3, 4, 5]
    assert concurrencies(encode, 2, 3, {}) == [1, 2, 3, 4]
    unbounded = concurrencies(WORKLOAD, 1, None, {})
    assert unbounded[-3:] == [1024, 1536, 2048]
    assert occupied_share(encode, 2, 5) == 9 / 10
    assert occupied_share(encode, 2, 1) == 9 / 10
    assert occupied_share(encode, 2, 8) == 9 / 16
    assert occupied_share(encode.changed(concurrency=None), 2, 8) == 1.0


def test_chunks_and_devices() -> None:
    assert chunk_sizes(WORKLOAD.changed(prompt_length=100, concurrency=21), {}) == [512, 2048, 8192]
    assert chunk_sizes(WORKLOAD.changed(prompt_length=512, concurrency=4), {}) == [512, 2048]
    assert chunk_sizes(WORKLOAD.changed(prompt_length=600, concurrency=1), {}) == [512, 2048]
    assert chunk_sizes(WORKLOAD.changed(prompt_length=9000), {}) == [512, 2048, 8192, 9000]
    assert chunk_sizes(WORKLOAD.changed(concurrency=1), {}) == [512]
    assert chunk_sizes(WORKLOAD, {"prefill_chunk_tokens": 77}) == [77]
    values = {"tensor_parallel": [1, 2, 4], "pipeline_parallel": [1, 3]}
    assert device_layouts(describe("4xh100"), values) == [(1, 1, 4), (2, 1, 2), (4, 1, 1)]
    assert device_layouts(describe("6xh100"), values) == [(1, 1, 6), (1, 3, 2), (2, 1, 3), (2, 3, 1)]


def test_degrees_and_executions_that_are_legal() -> None:
    """Tensor parallelism inside a node, by what divides the heads; stages by what divides the layers."""
    gpus = legal_values(describe("2x8xh100"), LLAMA_8B, WORKLOAD)
    assert (gpus["tensor_parallel"], gpus["pipeline_parallel"]) == ([1, 2, 4, 8], [1, 2, 4, 8, 16])
    assert gpus["execution"] == ["graphs", "eager"]
    few = legal_values(describe("4xh100"), SMALL, WORKLOAD)
    assert (few["tensor_parallel"], few["pipeline_parallel"]) == ([1], [1, 2])
    undeclared = SMALL.changed(tensor_parallel=None, declares=SMALL.declares.changed(pipeline_parallel_plan=()))
    assert legal_values(describe("4xh100"), undeclared, WORKLOAD)["pipeline_parallel"] == [1]
    cpu = describe("epyc-9654-64gb")
    values = legal_values(cpu, LLAMA_8B, WORKLOAD)
    assert (values["tensor_parallel"], values["pipeline_parallel"], values["execution"]) == ([1], [1], ["eager"])
    compiler = cpu.changed(measured=probed(bf16=1.0, memory=1.0).measured)
    assert compiler.measured is not None
    compiles = compiler.changed(measured=compiler.measured.changed(compiler=True))
    assert legal_values(compiles, LLAMA_8B, WORKLOAD)["execution"] == ["graphs", "eager"]


@pytest.mark.parametrize(
    ("task", "fixed", "words"),
    [
        ("encode", "kv_cache=fp8", "encoding keeps no cache"), ("generate", "kv_cache=fp8", "add --allow fp8-kv"),
        ("generate", "kv_cache=int8", "add --allow int8-kv"), ("encode", "weights=int8", "add --allow int8-weights"),
        ("generate", "weights=int4", "add --allow int4-weights"), ("generate", "execution=fast", "use one of"),
    ],
)  # fmt: skip
def test_choices_that_a_request_cannot_have_say_why(task: Any, fixed: str, words: str) -> None:
    workload = WORKLOAD.changed(task=task, output_length=3 if task == "generate" else 0)
    with pytest.raises(RequestError, match=words) as problem:
        parse_fixed((fixed,), describe("h100"), LLAMA_8B, workload)
    assert ("no cache" in str(problem.value)) == ("no cache" in words)
    old = describe("v100-16gb")
    with pytest.raises(RequestError, match="has no instructions for it"):
        parse_fixed(("weights=bf16",), old, LLAMA_8B, WORKLOAD)


def test_formats_of_weights() -> None:
    """Bytes of a weight and of a scale, the share of the bandwidth, and the share of the products' rate."""
    assert {name: stored[:2] + stored[4:6] for name, stored in WEIGHTS.items()} == {
        "fp32": (4.0, 0.0, 1.0, 1.0), "bf16": (2.0, 0.0, 1.0, 1.0), "fp16": (2.0, 0.0, 1.0, 1.0), "fp8": (1.0, 4.0, 1.0, 0.73),
        "int8": (1.0, 2.0, 0.75, 0.9), "int4": (0.5, 4.0, 0.59, 0.9),
    }  # fmt: skip
    assert [name for name, stored in WEIGHTS.items() if stored.grouped] == ["int4"]
    assert isinstance(WEIGHTS["int4"], WeightFormat)


def test_more_general_units_unpack_weights_faster() -> None:
    """Up to the rate of plain weights, less some. An A100 has the share that was measured on it."""

    def seconds(name: str, weights: Any) -> float:
        shape = ReplicaShape(weights, "bf16", 1, 1, "graphs")
        engine = build_engine(describe(name), LLAMA_8B, WORKLOAD.changed(prompt_length=16, output_length=16), shape)
        assert engine is not None
        return sum(cost.weight_seconds for cost in engine.costs)

    def bytes_per_second(name: str, weights: Any) -> float:
        stored = sum(item.stored_bytes(WEIGHTS[weights], 128) for item in products_of(LLAMA_8B))
        return stored / seconds(name, weights)

    shares = {
        name: [bytes_per_second(name, weights) / bytes_per_second(name, "bf16") for weights in ("int8", "int4")]
        for name in ("a100-80gb", "h100", "rtx-3090", "l40s")
    }
    assert shares["a100-80gb"] == pytest.approx([0.75, 0.59], rel=1e-3)
    assert shares["rtx-3090"] == pytest.approx([0.85, 0.85]) == shares["l40s"]
    assert 0.85 > shares["h100"][0] > shares["h100"][1] > 0.59  # its units and its bandwidth grew alike
    assert bytes_per_second("h100", "fp8") == pytest.approx(bytes_per_second("h100", "bf16"))  # which no unit unpacks


@pytest.mark.parametrize(
    "field", ["tensor_parallel", "pipeline_parallel", "replicas", "group_size", "max_concurrency", "prefill_chunk_tokens"]
)
def test_one_of_each_is_the_least(field: str) -> None:
    plain = {"device": "cuda", "host": "h", "model": "m", "weights": "bf16", "kv_cache": "bf16", "execution": "eager",
             "max_concurrency": 1, "prefill_chunk_tokens": 1}  # fmt: skip
    assert getattr(InferencePlan(**{**plain, field: 1}), field) == 1  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field):
        InferencePlan(**{**plain, field: 0})  # type: ignore[arg-type]
