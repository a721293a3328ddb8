"""Figures of the cost model, computed by hand for small cases: each says where it comes from."""

from __future__ import annotations

import pytest
from made_profile import FEED_FORWARD, HIDDEN, LAYER, LAYERS, VOCABULARY, make_profile
from made_requests import ADAPTER, RANK, model_of

from upshift.errors import RequestError
from upshift.hardware import describe, gemm_efficiency
from upshift.hardware.spec import Gpu, Host, Link, Measured, Rates
from upshift.models.profile import ParameterShape
from upshift.planning.analysis.bottleneck import sum_by_kind
from upshift.planning.analysis.compare_hosts import DURATIONS
from upshift.planning.analysis.lock_file import _moved_numbers
from upshift.planning.cost import memory, optimizer, process_memory, rates
from upshift.planning.cost.network import HOP_SECONDS, NETWORK_EFFICIENCY, Group, collective_seconds, point_to_point_seconds
from upshift.planning.cost.partition import share_of, stage_of
from upshift.planning.cost.pipeline_schedule import idle_micro_batches
from upshift.planning.layout import Layout, divisors
from upshift.planning.optimizers import read_optim_args
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import PACKED_KERNELS, why_kernel_unusable
from upshift.planning.search.space import can_compile
from upshift.planning.trials.runner import LABELS_OF_A_LOSS, loosen_tolerance
from upshift.planning.workload import LengthHistogram, pack_rows

PROFILE = make_profile()
GIB = 2**30


def plan_of(**fields: object) -> Plan:
    plain = {"device": "cuda", "host": "h", "model": "m", "sequence_length": 1024, "per_device_train_batch_size": 2}
    return Plan(**{**plain, "precision": "bf16", **fields})  # type: ignore[arg-type]


# --- matrix products -------------------------------------------------------------------------------------------------


def test_a_product_has_the_efficiency_of_the_nearest_size_that_was_measured() -> None:
    """AIConfigurator's classes begin at 1e9 FLOP; the A100's end below 1e13."""
    assert [gemm_efficiency("a100-80gb", flops) for flops in (1.0, 1e9, 9.9e9, 1e10, 1e12, 1e13, 1e20)] == [
        0.46, 0.46, 0.46, 0.67, 0.93, 0.93, 0.93,
    ]  # fmt: skip
    assert [gemm_efficiency("h100-sxm", flops) for flops in (1e8, 1e13)] == [0.49, 0.84]
    assert gemm_efficiency("t4", 1e12) is None
    assert gemm_efficiency("mi300x", 1e12) == pytest.approx(620 / 1307, abs=0.005)


def test_efficiency_is_the_time_of_all_products_together() -> None:
    """1,000 tokens: one matrix of 1,000 x 1,000 (2e9 FLOP, 0.49 of an H100's peak), and three of 10,000 x 1,000 (2e10, 0.72)."""
    shapes = (ParameterShape(shape=(1000, 1000), count=1), ParameterShape(shape=(10_000, 1000), count=3))
    parameters = PROFILE.parameters.changed(trainable_shapes=(*shapes, ParameterShape(shape=(7,), count=9)))
    profile = PROFILE.changed(parameters=parameters)
    plan = plan_of(sequence_length=500)
    together = (2e9 + 6e10) / (2e9 / 0.49 + 6e10 / 0.72)
    assert rates.product_efficiency("h100-sxm", profile, plan) == pytest.approx(together)
    halved = plan.changed(sequence_length=1000, layout=Layout(context_parallel=2))
    assert rates.product_efficiency("h100-sxm", profile, halved) == pytest.approx(together)
    divided = plan.changed(sequence_length=1000, layout=Layout(tensor_parallel=2))
    assert rates.product_efficiency("h100-sxm", profile, divided) == pytest.approx(together)


def test_an_adapter_computes_with_the_weights_below_it() -> None:
    """Two of a step's three products are with frozen weights, which are large; the adapter's own are a thousandth of the work."""
    whole, adapted = (model_of(kind, "causal-lm", longest=4096) for kind in ("full", "lora"))
    plan = plan_of()
    full, lora = (rates.product_efficiency("h100-sxm", profile, plan) for profile in (whole, adapted))
    assert lora == pytest.approx(full, rel=0.02)
    alone = adapted.changed(parameters=adapted.parameters.changed(frozen_shapes=()))
    assert rates.product_efficiency("h100-sxm", alone, plan) == pytest.approx(0.49)
    assert full > 0.7
    assert adapted.parameters.trainable == LAYERS * ADAPTER
    assert sum(shape.count * shape.elements for shape in adapted.parameters.trainable_shapes) == LAYERS * (
        RANK * (12 * HIDDEN + 2 * FEED_FORWARD)
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def test_gradients_exist_before_the_last_backward_pass() -> None:
    """Where micro-batches add up, where GPUs exchange buckets, and where ranks share the job; else they are born in it."""
    assert not memory.has_earlier_gradients(plan_of())
    assert not memory.has_earlier_gradients(plan_of(device="cpu", num_processes=2))
    assert memory.has_earlier_gradients(plan_of(gradient_accumulation_steps=2))
    assert memory.has_earlier_gradients(plan_of(num_processes=2))
    assert memory.has_earlier_gradients(plan_of(device="cpu", num_processes=2, layout=Layout(tensor_parallel=2)))


def test_logits_are_tokens_by_words() -> None:
    """Two bytes each under bf16, four under fp32; none where the loss comes in chunks or by a kernel of its own."""
    assert memory._logits_bytes(PROFILE, plan_of(), 100) == 100 * VOCABULARY * 2
    assert memory._logits_bytes(PROFILE, plan_of(precision="fp32"), 100) == 100 * VOCABULARY * 4
    shared = Layout(tensor_parallel=2, vocabulary_parallel=True)
    assert memory._logits_bytes(PROFILE, plan_of(num_processes=2, layout=shared), 100) == 100 * VOCABULARY
    assert memory._logits_bytes(PROFILE, plan_of(num_processes=2, layout=Layout(tensor_parallel=2)), 100) == 200 * VOCABULARY
    assert memory._logits_bytes(PROFILE, plan_of(loss_chunk_tokens=512), 100) == 0.0
    assert memory._logits_bytes(PROFILE, plan_of(loss_kernel="fused"), 100) == 0.0
    assert memory._logits_bytes(PROFILE.changed(vocab_size=None), plan_of(), 100) == 0.0


def test_outputs_of_weights_are_a_row_for_each_token() -> None:
    """Four matrices of 2,048 and three of 8,192 outputs a layer; half the layers and no head on a stage of two, all words on the
    last. A mixture's outputs are those of the experts that a token is sent to."""
    inner = LAYERS * (4 * HIDDEN + 3 * FEED_FORWARD)
    plan = plan_of(num_processes=2, layout=Layout(pipeline_parallel=2))
    first, last = (stage_of(PROFILE, plan, rank) for rank in (0, 1))
    assert memory._weight_output_bytes(PROFILE, plan, first, 10) == 10 * 2 * inner / 2
    assert memory._weight_output_bytes(PROFILE, plan, last, 10) == 10 * 2 * (inner / 2 + VOCABULARY)
    mixture = model_of("mixture", "causal-lm", longest=4096)
    each = LAYERS * (4 * HIDDEN + 2 * 3 * FEED_FORWARD // 8)
    assert memory._weight_output_bytes(mixture, plan, first, 10) == 10 * 2 * each / 2


def test_the_stage_with_the_head_has_all_that_a_head_trained_whole_needs() -> None:
    """LoRA in every layer, in two stages of half the layers each. Only the last stage has the moments of the head's copy."""
    adapted = model_of("lora", "causal-lm", longest=4096)
    head = HIDDEN * VOCABULARY
    counts = adapted.parameters
    parameters = counts.changed(
        total=counts.total + head, head=counts.head + head, trainable=counts.trainable + head, trainable_head=head,
        trainable_shapes=(*counts.trainable_shapes, ParameterShape(shape=(VOCABULARY, HIDDEN), count=1)),
    )  # fmt: skip
    profile = adapted.changed(parameters=parameters)
    plan = plan_of(num_processes=2, layout=Layout(pipeline_parallel=2))
    first, last = (share_of(profile, plan, stage_of(profile, plan, rank)) for rank in (0, 1))
    in_layers = counts.trainable / 2
    assert first.gradients == pytest.approx(4 * in_layers) and last.gradients == pytest.approx(4 * (in_layers + head))
    assert first.optimizer == pytest.approx(8 * in_layers, rel=1e-3)
    assert last.optimizer == pytest.approx(8 * (in_layers + head), rel=1e-3)
    assert first.updated + last.updated == pytest.approx(1.0)


def test_a_copy_of_bf16_weights_is_trained_in_bf16() -> None:
    """In every plan: the model below an adapter keeps its dtype, and so does the copy of its head. LoRA itself is fp32."""
    counts = model_of("lora", "causal-lm", longest=4096).parameters
    head = HIDDEN * VOCABULARY
    lora = counts.trainable
    frozen = counts.total - lora
    parameters = counts.changed(
        total=counts.total + head, trainable=lora + head, trainable_head=head, trainable_bf16=head, always_bf16=frozen
    )
    for parameter_bytes in (2, 4):
        assert parameters.gradient_bytes(parameter_bytes) == 4 * lora + 2 * head
        assert parameters.weight_bytes(parameter_bytes) == 4 * lora + 2 * (head + frozen)


def test_buffers_for_weights_from_the_disk_hold_the_largest_layers() -> None:
    """Wherever the adapter is: the frozen weights decide. Buffers hold two layers."""
    adapted = model_of("lora", "causal-lm", longest=4096)
    stack = adapted.stacks[0].changed(
        traced_layers=(0, 1), assignment=(0, *[1] * (LAYERS - 1)), layer_trainable=(100, 0), layer_frozen=(LAYER, LAYER)
    )
    plan = plan_of(weight_offload="disk")
    frozen = rates.frozen_bytes(adapted, plan)
    for layer_frozen, largest in (((LAYER, LAYER), 1 / LAYERS), ((2 * LAYER, LAYER), 2 / (LAYERS + 1))):
        profile = adapted.changed(stacks=(stack.changed(layer_frozen=layer_frozen),))
        assert rates.offloaded_weights(profile, plan).buffers == pytest.approx(2 * largest * frozen)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_adamw_keeps_two_moments_and_a_count(optim: str) -> None:
    tensors = 4 * LAYERS + 3 * LAYERS + 2
    expected = 8.0 * PROFILE.parameters.trainable + optimizer.STEP_BYTES * tensors
    assert optimizer.state_bytes(PROFILE, plan_of(optim=optim)) == expected
    assert optimizer.state_bytes(PROFILE, plan_of(optim=optim, optim_offload=True)) == 0.0


def test_states_of_one_tensor() -> None:
    """Of 3 x 4 x 5 elements and of a vector of 7, in fp32."""
    shape, vector = ParameterShape(shape=(3, 4, 5), count=1), ParameterShape(shape=(7,), count=1)

    def state(optim: str, one: ParameterShape, options: str = "") -> float:
        return optimizer._state_bytes_function(optim, plan_of(optim=optim, optim_args=options), 4.0)(one)

    assert state("adafactor", shape) == 4 + 4 * 3 * (4 + 5)
    assert state("adafactor", vector) == 4 + 4 * 7
    assert state("sgd", shape) == 0.0
    assert state("sgd", shape, "momentum=0.9") == 4 * 60
    assert state("adagrad", shape) == optimizer.STEP_BYTES + 4 * 60
    assert state("rmsprop", shape) == optimizer.STEP_BYTES + 4 * 60
    assert state("rmsprop", shape, "momentum=0.9,centered=true") == optimizer.STEP_BYTES + 3 * 4 * 60
    assert optimizer._bitsandbytes_state(4096) == 2 * (4096 + 4 * 4096 / optimizer.LOW_BIT_BLOCK)
    assert optimizer._bitsandbytes_state(4097) == 2 * (4097 + 4 * (4096 / optimizer.LOW_BIT_BLOCK + 1))
    assert optimizer._bitsandbytes_state(10) == 80.0
    assert optimizer._newton_schulz_bytes((3, 5)) == 4 * 15 + 2 * 2 * 15 + 2 * 2 * 9


def test_the_risk_decides_how_much_may_be_predicted() -> None:
    """A normal distribution's 99 % is 2.326 standard deviations above its mean, its 60 % is 0.253."""
    host, plan = describe("h100"), plan_of()
    assert host.gpu is not None
    total = host.gpu.memory_bytes
    assert process_memory.memory_limit(plan, host) == pytest.approx(0.95 * total)
    assert process_memory.memory_limit(plan, host, risk=0.01) == pytest.approx(total / (1 + 2.326 * 0.08), rel=1e-3)
    assert process_memory.memory_limit(plan, host, risk=0.4) == pytest.approx(total / (1 + 0.2533 * 0.08), rel=1e-3)
    assert process_memory.memory_limit(plan, host, risk=0.01, spread=0.01) == pytest.approx(total / 1.02326, rel=1e-3)
    limits = [process_memory.memory_limit(plan, host, risk=risk) or 0.0 for risk in (0.001, 0.01, 0.1, 0.3, 0.49)]
    assert limits == sorted(limits)
    for risk in (0.01, 0.2):
        held = process_memory.memory_limit(plan, host, risk=risk)
        assert held is not None
        assert process_memory.out_of_memory_probability(held, plan, host) == pytest.approx(risk)


def test_memory_of_a_host_is_shared_by_its_processes() -> None:
    plan, host = plan_of(device="cpu", num_processes=4), describe("2xepyc-9654-64gb@ethernet-25")
    assert process_memory.free_memory(plan, host) == 64 * GIB / 2


def test_communicators_are_counted_by_kind() -> None:
    """Two of tensor parallelism, four that share gradients: 2 kinds of groups; with ZeRO in halves the rest replicates."""
    assert process_memory._num_communicators(plan_of(num_processes=8, layout=Layout(tensor_parallel=2))) == 2
    assert process_memory._num_communicators(plan_of()) == 0
    halves = Layout(fully_shard="weights", shard_size=2)
    assert process_memory._num_communicators(plan_of(num_processes=4, layout=halves)) == 2
    assert process_memory._num_communicators(plan_of(num_processes=2, layout=halves)) == 1
    shared = Layout(context_parallel=2)
    assert process_memory._num_communicators(plan_of(num_processes=2, layout=shared)) == 2


# --- exchanges -------------------------------------------------------------------------------------------------------


def test_a_sum_over_nodes_sends_almost_twice_its_bytes() -> None:
    """Eight nodes of one GPU at 10 GB/s: 2 x 7/8 of 1e9 bytes, and twice the three hops of a tree of eight."""
    host = describe("8x1xh100").changed(inter_node=Link(name="port", bytes_per_second=1e10))
    group = Group(8, 1, 1)
    rate = 1e10 * NETWORK_EFFICIENCY
    expected = {"all_reduce": 6 * HOP_SECONDS + 1e9 * 2 * 7 / 8 / rate, "all_gather": 3 * HOP_SECONDS + 1e9 * 7 / 8 / rate}
    for operation, seconds in expected.items():
        assert collective_seconds(host, operation, 1e9, group) == pytest.approx(seconds)  # type: ignore[arg-type]
    every = 3 * HOP_SECONDS + 1e9 * 7 / 8 / rate
    assert collective_seconds(host, "all_to_all", 1e9, group) == pytest.approx(every)
    assert collective_seconds(host.changed(inter_node=None), "all_reduce", 1e9, group) is None


def test_more_bytes_slower_links_and_more_ranks_never_take_less() -> None:
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for on in ("8xa100-40gb", "8xl40s", "2x8xh100"):
            host = describe(on)
            ranks = host.num_devices
            seconds = [collective_seconds(host, operation, size, Group(ranks, 1, 8)) or 0.0 for size in (1e3, 1e6, 1e9)]  # type: ignore[arg-type]
            assert 0.0 < seconds[0] < seconds[1] < seconds[2]
            fewer = collective_seconds(host, operation, 1e9, Group(2, 1, 8))  # type: ignore[arg-type]
            assert fewer is not None
            assert fewer < seconds[2]


def test_idle_micro_batches_of_each_schedule() -> None:
    """Narayanan et al. 2021, section 2.2: p - 1; divided by the chunks when interleaved; a third of it for ZB-H1."""

    def idle(schedule: str, ranks: int, count: int, stages: int = 1) -> float:
        layout = Layout(pipeline_parallel=ranks, pipeline_schedule=schedule, virtual_stages=stages)  # type: ignore[arg-type]
        return idle_micro_batches(plan_of(num_processes=ranks, gradient_accumulation_steps=count, layout=layout))

    assert idle("1f1b", 4, 8) == idle("gpipe", 4, 8) == 3
    assert idle("zero_bubble", 4, 8) == 1
    assert idle("zero_bubble", 4, 1) == 2
    assert idle("interleaved_1f1b", 4, 8, 2) == 1.5
    assert idle("interleaved_1f1b", 4, 2, 2) == (3 + 2) / 2


# --- small pieces ----------------------------------------------------------------------------------------------------


def test_units_of_durations() -> None:
    assert DURATIONS == {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}


@pytest.mark.parametrize(
    ("on", "can"), [("v100-16gb", set()), ("t4", {"flex_attention"}), ("a100-40gb", {"flex_attention", "flash_attention_2"}),
                    ("h100", {*PACKED_KERNELS}), ("b200", {"flex_attention", "flash_attention_2"}), ("epyc-9654", set())]
)  # fmt: skip
def test_kernels_run_on_the_devices_that_they_are_written_for(on: str, can: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshift.planning.search.constraints.find_spec", lambda name: object())
    declares = PROFILE.declares.changed(attention_kernels=("sdpa", *PACKED_KERNELS))
    profile = PROFILE.changed(declares=declares)
    assert {name for name in PACKED_KERNELS if why_kernel_unusable(name, describe(on), profile) is None} == can
    undeclared = "TestForCausalLM does not declare it, or drops attention weights"
    assert why_kernel_unusable("flex_attention", describe("h100"), PROFILE) == undeclared


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 360])
def test_divisors_are_all_that_divide(number: int) -> None:
    assert divisors(number) == [degree for degree in range(1, number + 1) if number % degree == 0]


def test_truths_of_optimizers_options() -> None:
    for text, value in {"true": True, "1": True, "Yes": True, "false": False, "0": False, "no": False}.items():
        assert read_optim_args("sgd", f"nesterov={text},momentum=0.5") == {"nesterov": value, "momentum": 0.5}
    for text in ("nesterov=2", "momentum=fast", "beta=1"):
        with pytest.raises(RequestError, match=text):
            read_optim_args("sgd", text)


def test_rows_with_room_are_filled_before_new_ones() -> None:
    """10 takes 6 + 4 and 5 + 5; the two of 2 stand together."""
    rows = pack_rows([6, 5, 5, 4, 2, 2], capacity=10)
    assert sorted(sorted([6, 5, 5, 4, 2, 2][index] for index in row) for row in rows) == [[2, 2], [4, 6], [5, 5]]


def test_waste_of_padding_by_hand() -> None:
    """Lengths 10 and 30 in equal number, two at once, longest first, widths in multiples of 8: 32 for 30, 16 for 10."""
    lengths = LengthHistogram(sequence_length=64, lengths=(10, 30), counts=(50, 50), num_tokens=2000)
    alone = lengths.padded_tokens_ratio(1, global_batch=64)
    assert 1.0 < alone < 1.6
    assert lengths.visible_share(8) == pytest.approx((10 * (5 + 8) + 30 * (15 + 8)) / (64 * 40))
    short = LengthHistogram(sequence_length=16, lengths=(16,), counts=(1,), num_tokens=16)
    assert short.padded_tokens_ratio(2, global_batch=4) == 1.0
    assert short.visible_share(128) == 1.0


def test_lengths_are_rounded_up_to_a_bucket_and_tokens_are_exact() -> None:
    """At most 1,024 buckets: of 3 tokens for sequences of up to 2,050. Documents are cut; a last token alone is dropped."""
    lengths = LengthHistogram.of_documents([100, 2050 + 7, 2 * 2050 + 1, 8], 2050)
    assert (lengths.lengths, lengths.counts) == ((9, 102, 2050), (2, 1, 3))
    assert lengths.num_tokens == 100 + 7 + 8 + 3 * 2050
    short = LengthHistogram.of_documents([100, 7], 1024)
    assert (short.lengths, short.mean, short.longest) == ((7, 100), 53.5, 100)
    with pytest.raises(RequestError, match="no sequence of two or more tokens"):
        LengthHistogram.of_documents([1, 0], 1024)
    for counts in ((1,), (1, 2, 3)):
        with pytest.raises(ValueError, match="give the same number of both"):
            LengthHistogram(sequence_length=8, lengths=(1, 2), counts=counts, num_tokens=3)
    with pytest.raises(ValueError, match="at least one"):
        LengthHistogram(sequence_length=8, lengths=(), counts=(), num_tokens=0)


def test_what_moved_is_told_from_the_most() -> None:
    """Of a whole of 100: less than 0.2 is not worth saying, what is new or gone counts whole."""
    found = _moved_numbers({"a": 10.0, "b": 5.0, "gone": 1.0}, {"a": 10.1, "b": 8.0, "new": 2.0}, total=100.0)
    told = [(change.name, change.before, change.now) for change in found]
    assert told == [("b", 5.0, 8.0), ("new", None, 2.0), ("gone", 1.0, None)]
    assert [change.name for change in _moved_numbers({"a": 1.0}, {"a": 1.1}, total=None)] == ["a"]


def test_terms_of_a_step_by_kind() -> None:
    terms = {
        "matrix products": 1.0, "attention": 2.0, "memory traffic": 4.0, "page faults": 8.0, "dispatch": 16.0,
        "pipeline idle": 32.0, "update": 64.0, "gradient exchange": 128.0, "waiting for the slowest node": 256.0,
    }  # fmt: skip
    assert sorted(sum_by_kind(terms).values()) == [1.0, 2.0, 12.0, 48.0, 64.0, 384.0]


def test_a_loss_of_few_labels_may_differ_more() -> None:
    assert loosen_tolerance(0.1, LABELS_OF_A_LOSS) == loosen_tolerance(0.1, 4 * LABELS_OF_A_LOSS) == 0.1
    assert loosen_tolerance(0.1, LABELS_OF_A_LOSS // 4) == pytest.approx(0.2)
    assert loosen_tolerance(0.1, 0) == pytest.approx(0.1 * LABELS_OF_A_LOSS**0.5)


def measured_gpus(host: Host, ranks: int, **links: tuple[float, float]) -> Host:
    """The host, whose GPUs were measured to exchange tensors so: (seconds, bytes per second) by operation."""
    exchanges = {
        name: Link(name=name, latency_seconds=latency, bytes_per_second=rate, measured=True)
        for name, (latency, rate) in links.items()
    }
    rates = Rates(fp32=1e12)
    return host.changed(measured=Measured(
        torch_version="", transformers_version=None, num_threads=1, cpu=rates, gpu=rates, dispatch_seconds=0.0,
        first_touch_seconds_per_byte=None, base_resident_bytes=None, compiler=None, probe_seconds=1.0,
        gpu_exchanges=exchanges, gpu_exchange_ranks=ranks,
    ))  # fmt: skip


def test_exchanges_that_were_measured_between_the_gpus_count() -> None:
    """Two 4090 without peer access: the slot's specified rate says nothing about copies through the host."""
    host = measured_gpus(describe("4x4090"), 4, all_reduce=(5e-5, 3e9), send=(1e-5, 4e9))
    four = Group(4, 1, 4)
    assert collective_seconds(host, "all_reduce", 3e9, four) == pytest.approx(5e-5 + 1.0)
    # A ring of two moves 1 of the tensor's bytes where that of four moves 1.5.
    assert collective_seconds(host, "all_reduce", 3e9, Group(2, 1, 4)) == pytest.approx(5e-5 + 1 / 1.5)
    assert point_to_point_seconds(host, 4e9, between_nodes=False, node_ranks=4, num_senders=1) == pytest.approx(1e-5 + 1.0)
    plain = describe("4x4090")
    assert collective_seconds(host, "all_gather", 3e9, four) == collective_seconds(plain, "all_gather", 3e9, four)
    listed = measured_gpus(describe("8xh100"), 8, all_reduce=(1e-5, 1e9))  # and not the fit of other machines
    assert collective_seconds(listed, "all_reduce", 1e9, Group(8, 1, 8)) == pytest.approx(1.0, rel=1e-3)


def test_gpus_that_triton_cannot_compile_for_compile_nothing() -> None:
    assert can_compile(describe("h100")) and not can_compile(Host(name="x", gpus_per_node=1, gpu=Gpu(
        name="GTX 1080", memory_bytes=2**33, compute_capability=(6, 1),
    )))  # fmt: skip
    probed = measured_gpus(describe("h100"), 1)
    assert probed.measured is not None
    for works in (True, False):
        assert can_compile(probed.changed(measured=probed.measured.changed(gpu_compiler=works))) is works
