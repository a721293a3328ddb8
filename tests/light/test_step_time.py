"""The seconds of a step, term by term, by hand: what a rank computes, moves, queues and waits for, and the rates that it has."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from made_profile import LAYER, LAYERS, VOCABULARY, make_profile
from made_requests import measured_cpus, model_of

from upshift.hardware import AttentionKernel, describe, memory_efficiency
from upshift.hardware.spec import Host, Measured, Rates
from upshift.models.profile import ParameterShape, PassCost, Polynomial, Segment, StackTrace, StepTrace
from upshift.planning.cost import rates as cost_rates
from upshift.planning.cost import time as cost_time
from upshift.planning.cost.communication import ComputeSeconds, ExchangeCost
from upshift.planning.cost.partition import stage_of
from upshift.planning.cost.rates import Rates as RankRates
from upshift.planning.cost.rates import offload_wait_seconds, predict_rates
from upshift.planning.cost.time import StepTime, micro_batch_terms, num_full_micro_batches, predict_time, tokens_per_step
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.workload import LengthHistogram, Workload, forward_share

ROWS = 2
TOKENS = 8
PROFILE = make_profile()
RATES = RankRates(matrix=2.0, outside=4.0, attention=8.0, memory=16.0, stream=32.0, dispatch=64.0, first_touch=128.0)


def pass_of(scale: float) -> PassCost:
    """Return a pass of 3 FLOPs of products, 5 of attention, 7 bytes moved and 11 by products a token, 13 kernels, each scaled."""
    return PassCost(
        left=Polynomial(bs=17.0 * scale), released=Polynomial(), rise=(), matmul_flops=Polynomial(bs=3.0 * scale),
        attention_flops=Polynomial(bss=5.0 * scale), moved_bytes=Polynomial(bs=7.0 * scale),
        matmul_bytes=Polynomial(bs=11.0 * scale), num_kernels=round(13 * scale),
    )  # fmt: skip


def segment_of(scale: float) -> Segment:
    """Return a segment whose backward pass, where gradients exist, costs twice as much as its forward pass."""
    return Segment(forward=pass_of(scale), backward=pass_of(1000 * scale), backward_accumulating=pass_of(2 * scale))


def trace_of() -> StepTrace:
    gaps = (segment_of(100.0), segment_of(1000.0))
    stacks = (StackTrace(plain=(segment_of(1.0),), recomputed={}),)
    return StepTrace(
        precision="bf16", attention="sdpa", masked=False, tensor_parallel=1, gaps=gaps, gaps_recomputed={"full": gaps},
        chunked_gap=gaps[1], stacks=stacks,
    )  # fmt: skip


IN_LAYERS = 3.0 * LAYERS  # passes of scale 1: one forward, and two of them backward
OUTSIDE = 3.0 * 1100.0
EVERYWHERE = IN_LAYERS + OUTSIDE
SAVED = LAYERS + 1100.0  # forward passes only
BATCH = ROWS * TOKENS


def plan_of(**fields: object) -> Plan:
    plain = {"device": "cpu", "host": "h", "model": "m", "sequence_length": TOKENS, "per_device_train_batch_size": ROWS}
    return Plan(**{**plain, "precision": "bf16", **fields})  # type: ignore[arg-type]


def terms_of(plan: Plan, **more: object) -> dict[str, float]:
    return micro_batch_terms(PROFILE, trace_of(), plan, RATES, **more)  # type: ignore[arg-type]


def test_terms_of_a_micro_batch() -> None:
    assert terms_of(plan_of()) == pytest.approx(
        {
            "matrix products": BATCH * 3.0 * (IN_LAYERS / 2.0 + OUTSIDE / 4.0),
            "attention": BATCH * TOKENS * 5.0 * EVERYWHERE / 8.0,
            "memory traffic": BATCH * 7.0 * EVERYWHERE / 16.0,
            "page faults": BATCH * 17.0 * SAVED * 128.0,
            "dispatch": 13.0 * EVERYWHERE * 64.0,
        }
    )
    assert terms_of(plan_of(host_memory="keep"))["page faults"] == 0.0


def test_a_gpu_queues_kernels_while_it_computes() -> None:
    terms = terms_of(plan_of(device="cuda"))
    computing = terms["matrix products"] + terms["attention"] + terms["memory traffic"] + terms["page faults"]
    assert terms["dispatch"] == max(13.0 * EVERYWHERE * 64.0 - computing, 0.0) == 0.0
    fast = RATES._replace(dispatch=1e6)
    queueing = micro_batch_terms(PROFILE, trace_of(), plan_of(device="cuda"), fast)["dispatch"]
    assert queueing == pytest.approx(13.0 * EVERYWHERE * 1e6 - computing)


def test_what_fusion_leaves_of_traffic_and_kernels() -> None:
    """Compiled layers move half and queue three tenths. What written kernels move is in their trace."""
    plain = terms_of(plan_of())
    compiled = terms_of(plan_of(torch_compile="layer"))
    fused = terms_of(plan_of(fused_kernels=True))
    assert compiled["memory traffic"] == pytest.approx(0.5 * plain["memory traffic"])
    assert compiled["dispatch"] == fused["dispatch"] == pytest.approx(0.3 * plain["dispatch"])
    assert fused["memory traffic"] == pytest.approx(plain["memory traffic"])


@pytest.mark.parametrize(("fused", "words"), [(False, 2.5 * 5 / 9), (True, 2.0 * 1.6 / 9)])
def test_products_in_fp8_cast_their_operands(fused: bool, words: float) -> None:
    """In the layers alone, with three times the kernels."""
    terms = terms_of(plan_of(precision="fp8", fused_kernels=fused))
    moved = 7.0 * EVERYWHERE + 11.0 * IN_LAYERS * words
    assert terms["memory traffic"] == pytest.approx(BATCH * moved / 16.0)
    kernels = 13.0 * (3.0 * IN_LAYERS + OUTSIDE) * (0.3 if fused else 1.0)
    assert terms["dispatch"] == pytest.approx(kernels * 64.0)


def test_a_loss_in_chunks_computes_the_tokens_with_a_label() -> None:
    masked = PROFILE.changed(objective="masked-lm")
    terms = micro_batch_terms(masked, trace_of(), plan_of(loss_chunk_tokens=512), RATES)
    computed = EVERYWHERE - 0.85 * 3000.0
    assert terms["memory traffic"] == pytest.approx(BATCH * 7.0 * computed / 16.0)
    assert terms["attention"] == pytest.approx(BATCH * TOKENS * 5.0 * computed / 8.0)
    assert terms["matrix products"] == pytest.approx(BATCH * 3.0 * (IN_LAYERS / 2.0 + (300.0 + 0.15 * 3000.0) / 4.0))
    assert terms["dispatch"] == pytest.approx(13.0 * EVERYWHERE * 64.0)


def test_the_head_alone() -> None:
    assert terms_of(plan_of(), head_alone=True)["memory traffic"] == pytest.approx(BATCH * 7.0 * 3000.0 / 16.0)


def test_ranks_that_share_a_sequence_see_all_keys() -> None:
    plan = plan_of(device="cuda", num_processes=2, layout=Layout(context_parallel=2))
    terms = terms_of(plan, stage=stage_of(PROFILE, plan, 0))
    assert terms["memory traffic"] == pytest.approx(BATCH / 2 * 7.0 * EVERYWHERE / 16.0)
    assert terms["attention"] == pytest.approx(ROWS * TOKENS * TOKENS / 2 * 5.0 * EVERYWHERE / 8.0)


def test_activations_go_to_the_host_and_back() -> None:
    """Those of the layers alone."""
    plan = plan_of(device="cuda", activation_offload=True)
    assert "activations to the host and back" not in terms_of(plan)
    assert terms_of(plan, link=4.0)["activations to the host and back"] == pytest.approx(2 * BATCH * 17.0 * LAYERS / 4.0)
    assert "activations to the host and back" not in terms_of(plan_of(device="cuda"), link=4.0)


def test_a_step_is_all_its_terms() -> None:
    step = StepTime(terms={"attention": 1.0, "update": 3.0, "dispatch": 2.0}, one_time=10.0)
    assert (step.total, step.binding_term) == (6.0, "update")


# --- the update ------------------------------------------------------------------------------------------------------


def update_of(plan: Plan, host: Host, *, clips: bool = True) -> float | None:
    return cost_time._update_seconds(PROFILE, plan, RATES, host, clips=clips)


def test_an_update_moves_words_of_each_parameter() -> None:
    """7 words of fused AdamW, and 2 to clip."""
    size = 4.0 * PROFILE.parameters.trainable
    host = describe("h100")
    fused = plan_of(device="cuda")
    assert update_of(fused, host) == pytest.approx((7.0 + 2.0) * size / 32.0)
    assert update_of(fused, host, clips=False) == pytest.approx(7.0 * size / 32.0)


def test_an_update_on_the_host_sends_gradients_there_and_weights_back() -> None:
    size = 4.0 * PROFILE.parameters.trainable
    probed = Measured(
        torch_version="2", transformers_version=None, num_threads=1, cpu=Rates(fp32=1.0, memory_bytes_per_second=5.0),
        dispatch_seconds=0.0, first_touch_seconds_per_byte=None, base_resident_bytes=None, compiler=None, probe_seconds=1.0,
        host_to_device_bytes_per_second=3.0,
    )  # fmt: skip
    host = describe("h100").changed(measured=probed)
    plan = plan_of(device="cuda", optim_offload=True)
    assert update_of(plan, host) == pytest.approx(2.0 * size / 32.0 + 2.0 * size / 3.0 + 7.0 * size / 5.0)
    assert update_of(plan, describe("h100").changed(host_to_device=None)) is None
    assert update_of(plan, describe("h100")) is None
    unknown = probed.changed(cpu=Rates(fp32=1.0), host_to_device_bytes_per_second=None)
    assert update_of(plan, describe("h100").changed(measured=unknown)) is None


def test_muon_multiplies_matrices_and_low_bits_take_cores() -> None:
    """Newton-Schulz: 4 m m n + 2 m^3 for each of five steps, m the smaller side; 28 ns a parameter on one of two threads."""
    hidden = 2048
    wide = 8192
    flops = 4 * LAYERS * (4.0 * hidden**3 + 2.0 * hidden**3) + 3 * LAYERS * (4.0 * hidden**2 * wide + 2.0 * hidden**3)
    size = 4.0 * PROFILE.parameters.trainable
    muon = plan_of(device="cuda", optim="muon")
    assert update_of(muon, describe("h100"), clips=False) == pytest.approx(9.0 * size / 32.0 + 5 * flops / 2.0)
    low = plan_of(optim="adamw_torch_8bit", threads_per_process=2)
    stream = RATES._replace(stream=1e12)
    seconds = cost_time._update_seconds(PROFILE, low, stream, describe("epyc-9654-768gb"), clips=False)
    assert seconds == pytest.approx(5.0 * size / 1e12 + size / 4.0 * 28e-9 / 2)
    assert update_of(low.changed(device="cuda"), describe("h100"), clips=False) == pytest.approx(5.0 * size / 32.0)


def test_an_update_in_the_backward_pass_is_dispatched_for_each_tensor() -> None:
    """30 operators each, of which a kernel's time on a CPU is six."""
    host = describe("epyc-9654-768gb")
    plan = plan_of()
    tensors = 7 * LAYERS + 2
    later = update_of(plan, host, clips=False) or 0.0
    within = update_of(plan.changed(optimizer_in_backward=True), host, clips=False) or 0.0
    assert within - later == pytest.approx(tensors * 30.0 * 64.0 / 6.0)


# --- rates -----------------------------------------------------------------------------------------------------------


def test_rates_of_a_probed_cpu_are_shared_by_its_processes() -> None:
    """16 cores: 2e12 in bf16, 1e12 in fp32, 1e11 bytes a second; four processes of four threads on each of two nodes."""
    rates = predict_rates(measured_cpus(), PROFILE, plan_of(num_processes=8, threads_per_process=4))
    assert rates is not None
    assert rates == pytest.approx(
        RankRates(
            matrix=2e12 / 4, outside=2e12 / 4, attention=0.4 * 1e12 / 4, memory=1e11 / 4, stream=1e11 / 4, dispatch=6e-6,
            first_touch=1e-10,
        )
    )  # fmt: skip
    block = predict_rates(measured_cpus(), PROFILE, plan_of(num_processes=8, threads_per_process=4, attention="block"))
    assert block is not None and block.attention == pytest.approx(0.9 * 1e12 / 4)
    turns = predict_rates(measured_cpus(), PROFILE, plan_of(num_processes=64, threads_per_process=1))
    assert turns is not None
    assert (turns.matrix, turns.memory, turns.dispatch) == pytest.approx((2e12 / 16 / 2, 1e11 / 32, 12e-6))
    more = predict_rates(measured_cpus(), PROFILE, plan_of(threads_per_process=99))
    assert more is not None and more.matrix == 2e12


def test_rates_of_a_described_cpu_are_shares_of_its_peak() -> None:
    host = describe("epyc-9654-768gb")
    assert host.cpu is not None and host.cpu.peak is not None
    rates = predict_rates(host, PROFILE, plan_of(threads_per_process=host.cpu.usable_cores, precision="fp32"))
    assert rates is not None and host.cpu.peak.fp32 is not None and host.cpu.peak.memory_bytes_per_second is not None
    assert rates.matrix == pytest.approx(0.7 * host.cpu.peak.fp32)
    assert rates.memory == pytest.approx(0.75 * host.cpu.peak.memory_bytes_per_second)
    assert (rates.dispatch, rates.first_touch) == (pytest.approx(6 * 1.2e-6), 0.0)
    assert predict_rates(host.changed(cpu=host.cpu.changed(peak=None)), PROFILE, plan_of()) is None


@pytest.mark.parametrize(
    ("name", "matrix", "attention", "memory"),
    [("a100-80gb", 0.82, 0.55, 1.0), ("h100", 0.7, 0.52, 0.95), ("l40s", 0.78, 0.55, 0.85)],
)
def test_rates_of_a_described_gpu_are_what_training_keeps_of_them(
    name: str, matrix: float, attention: float, memory: float
) -> None:
    host = describe(name)
    plan = plan_of(device="cuda")
    assert host.gpu is not None and host.gpu.peak is not None
    peak = host.gpu.peak
    assert peak.bf16 is not None and peak.memory_bytes_per_second is not None
    reached = peak.bf16 * cost_rates.product_efficiency(host.gpu.table_key or "", PROFILE, plan)
    bandwidth = peak.memory_bytes_per_second * (memory_efficiency(host.gpu.table_key or "") or 0.75)
    long = plan.sequence_length / (plan.sequence_length + 300)
    rates = predict_rates(host, PROFILE, plan)
    assert rates is not None
    assert rates == pytest.approx(
        RankRates(matrix * reached, matrix * reached, attention * long * peak.bf16, memory * bandwidth, bandwidth, 5 * 6e-6, 0.0)
    )
    assert predict_rates(host.changed(gpu=host.gpu.changed(peak=None)), PROFILE, plan) is None


def test_fp32_products_keep_the_rate_of_single_kernels() -> None:
    """They use no tensor cores, whose power lowers the clocks. A product that takes longer waits less for memory and launches."""
    host = describe("h100")
    assert host.gpu is not None and host.gpu.peak is not None and host.gpu.peak.fp32 is not None
    fp32 = predict_rates(host, PROFILE, plan_of(device="cuda", precision="fp32"))
    bf16 = predict_rates(host, PROFILE, plan_of(device="cuda"))
    assert fp32 is not None and bf16 is not None
    peak = host.gpu.peak
    assert peak.bf16 is not None
    assert fp32.matrix / peak.fp32 > bf16.matrix / peak.bf16 / 0.7
    assert fp32.memory == bf16.memory
    short, long = (plan_of(sequence_length=length) for length in (512, 2048))  # four times the work of a product
    assert cost_rates.product_efficiency("h100-sxm", PROFILE, short, slower=4.0) == pytest.approx(
        cost_rates.product_efficiency("h100-sxm", PROFILE, long)
    )


def test_attention_runs_at_the_rate_of_its_kernel() -> None:
    """Faster for longer texts, and never as fast as the peak. Whole precision has no such kernel."""

    def attention(host: str, kernel: AttentionKernel | None = None, **changes: Any) -> float:
        rates = predict_rates(describe(host), PROFILE, plan_of(device="cuda", **changes), kernel=kernel)
        assert rates is not None
        return rates.attention

    for host in ("h100", "a100-80gb", "b200", "rtx-4090"):
        gpu = describe(host).gpu
        assert gpu is not None and gpu.peak is not None and gpu.peak.bf16 is not None
        assert attention(host, sequence_length=512) < attention(host, sequence_length=8192) < gpu.peak.bf16
    on_h100 = [attention("h100", kernel) for kernel in get_args(AttentionKernel)]
    assert attention("h100") == on_h100[3] and on_h100[0] < on_h100[1] < on_h100[3] < on_h100[2]
    assert attention("h100", attention="flash_attention_2") == on_h100[1]
    assert attention("a100-80gb") == attention("a100-80gb", "flash_2")  # cuDNN is preferred on newer ones alone
    assert attention("v100-32gb", precision="fp16") == attention("v100-32gb", "flash_2", precision="fp16")  # none runs there
    assert attention("h100", precision="fp32") == attention("h100", "flash_3", precision="fp32")


def test_a_probed_gpu_needs_no_datasheet_for_what_was_measured() -> None:
    probed = Measured(
        torch_version="2", transformers_version=None, num_threads=1, cpu=Rates(fp32=1.0), dispatch_seconds=0.0,
        gpu=Rates(bf16=1e14, memory_bytes_per_second=1e12), gpu_dispatch_seconds=2e-6, first_touch_seconds_per_byte=None,
        base_resident_bytes=None, compiler=None, probe_seconds=1.0,
    )  # fmt: skip
    host = describe("h100").changed(measured=probed)
    rates = predict_rates(host, PROFILE, plan_of(device="cuda"))
    assert rates is not None
    assert rates[:2] == pytest.approx((0.7e14, 0.7e14))
    assert rates[3:6] == pytest.approx((0.95e12, 1e12, 5 * 2e-6))
    in_fp32 = predict_rates(host, PROFILE, plan_of(device="cuda", precision="fp32"))
    assert in_fp32 is not None and host.gpu is not None and host.gpu.peak is not None
    plain = predict_rates(describe("h100"), PROFILE, plan_of(device="cuda", precision="fp32"))
    assert plain is not None and in_fp32.matrix == plain.matrix
    assert in_fp32.stream == 1e12


def test_offloaded_weights_are_read_twice_a_micro_batch_while_others_compute() -> None:
    """But for those that the buffers hold: two of 24 layers."""
    adapted = model_of("lora", "causal-lm", longest=4096)
    host = measured_cpus()
    plan = plan_of(weight_offload="disk", gradient_accumulation_steps=3)
    frozen = 4.0 * LAYERS * LAYER
    assert adapted.parameters.layers - adapted.parameters.trainable_layers == LAYERS * LAYER
    read = 3 * (2 * frozen - frozen * 2 / LAYERS) / 1e9
    assert offload_wait_seconds(adapted, plan, host, 0.0) == {"weights from the disk": pytest.approx(read)}
    assert offload_wait_seconds(adapted, plan, host, read / 4) == {"weights from the disk": pytest.approx(read * 3 / 4)}
    assert offload_wait_seconds(adapted, plan, host, 1e9) == {"weights from the disk": 0.0}
    assert offload_wait_seconds(adapted, plan_of(), host, 0.0) == {}
    weights = cost_rates.offloaded_weights(adapted, plan)
    embedding = 4.0 * VOCABULARY * 2048
    assert weights == pytest.approx((frozen, embedding, frozen * 2 / LAYERS))
    assert weights.saved == pytest.approx(frozen + embedding - frozen * 2 / LAYERS)


@pytest.mark.parametrize(("link", "disk", "place"), [(2e9, 1e9, "disk"), (1e9, 2e9, "host")])
def test_the_slower_of_disk_and_link_decides(link: float, disk: float, place: str) -> None:
    adapted = model_of("lora", "causal-lm", longest=4096)
    host = describe("h100")
    assert host.host_to_device is not None
    host = host.changed(host_to_device=host.host_to_device.changed(bytes_per_second=link), disk_bytes_per_second=disk)
    from_disk = plan_of(device="cuda", weight_offload="disk")
    assert [*offload_wait_seconds(adapted, from_disk, host, 0.0)] == [f"weights from the {place}"]
    from_host = from_disk.changed(weight_offload="host")
    assert [*offload_wait_seconds(adapted, from_host, host, 0.0)] == ["weights from the host"]


# --- the whole step --------------------------------------------------------------------------------------------------


def test_a_step_on_a_cpu_is_its_micro_batches_and_its_update() -> None:
    host = measured_cpus().changed(num_nodes=1)
    workload = Workload(sequence_length=TOKENS, global_batch=12, clips_gradients=False)
    plan = plan_of(gradient_accumulation_steps=6, threads_per_process=16)
    rates = predict_rates(host, PROFILE, plan)
    step = predict_time(PROFILE, trace_of(), plan, workload, host)
    assert rates is not None and step is not None
    one = micro_batch_terms(PROFILE, trace_of(), plan, rates)
    assert step.terms == pytest.approx(
        {**{name: 6 * seconds for name, seconds in one.items()}, "update": 7 * 4.0 * PROFILE.parameters.trainable / 1e11}
    )
    assert step.one_time == 0.0
    compiled = predict_time(PROFILE, trace_of(), plan.changed(torch_compile="layer"), workload, host)
    whole = predict_time(PROFILE, trace_of(), plan.changed(torch_compile="model"), workload, host)
    assert compiled is not None and whole is not None
    assert (compiled.one_time, whole.one_time) == (15.0, 10.0 * LAYERS)


@pytest.mark.parametrize(("backward", "share"), [(2.0, (3 + 1) / (3 + 3)), (1.0, (2 + 1) / (2 + 2)), (3.0, (4 + 1) / (4 + 4))])
def test_a_mismatched_sequence_costs_a_forward_pass(backward: float, share: float) -> None:
    """A backward pass has two products for each one of the forward pass, one if the weights are frozen, and three if it computes
    the layer again."""
    trace = trace_of()
    segments = [
        segment.changed(backward_accumulating=pass_of(scale * backward))
        for segment, scale in ((trace.stacks[0].plain[0], 1.0), (trace.gaps[0], 100.0), (trace.gaps[1], 1000.0))
    ]
    layer, *gaps = segments
    trace = trace.changed(gaps=tuple(gaps), chunked_gap=gaps[1], stacks=(StackTrace(plain=(layer,), recomputed={}),))
    host = measured_cpus().changed(num_nodes=1)
    workload = Workload(sequence_length=TOKENS, global_batch=12, rows_together=2, clips_gradients=False)
    plan = plan_of(gradient_accumulation_steps=6, threads_per_process=16, host_memory="keep")
    kinds = {"pairs": {}, "kto": {"has_ratings": True}, "without kl": {"has_ratings": True, "has_kl_pass": False}}
    for layout in ({}, {"num_processes": 2, "gradient_accumulation_steps": 3}):
        seconds = {}
        for name, fields in kinds.items():
            step = predict_time(PROFILE, trace, plan.changed(**layout), workload.changed(**fields), host)
            assert step is not None
            seconds[name] = step.terms["matrix products"] + step.terms["memory traffic"]
        assert seconds["kto"] / seconds["pairs"] == pytest.approx(share)
        assert seconds["without kl"] / seconds["pairs"] == pytest.approx(0.5)


def test_exchanges_hide_behind_what_a_micro_batch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of KTO: half of its rows forward and backward, and half forward alone, which is a third of that."""
    seen: list[ComputeSeconds] = []

    class Watched(ExchangeCost):
        def seconds(self) -> dict[str, float]:
            seen.append(self.compute)
            return {}

    monkeypatch.setattr(cost_time, "ExchangeCost", Watched)
    workload = Workload(sequence_length=TOKENS, global_batch=12, rows_together=2, clips_gradients=False)
    plan = plan_of(threads_per_process=16, host_memory="keep", num_processes=2, gradient_accumulation_steps=3)
    plan = plan.changed(layout=Layout(fully_shard="gradients", shard_size=2))
    kinds: tuple[dict[str, bool], ...] = ({}, {"has_ratings": True}, {"has_ratings": True, "has_kl_pass": False})
    for fields in kinds:
        assert predict_time(PROFILE, trace_of(), plan, workload.changed(**fields), measured_cpus().changed(num_nodes=1))
    pairs, kto, without_kl = seen
    assert without_kl.total == pytest.approx(pairs.total / 2) and (pairs.forward, without_kl.forward) == (0.0, 0.0)
    assert kto.total - kto.forward == pytest.approx(without_kl.total) and 0 < kto.forward < kto.total / 2
    assert kto.backward == pytest.approx(pairs.backward / 2)


@pytest.mark.parametrize(("has_adapter", "backward"), [(False, 2.0), (True, 1.0)])
def test_a_pass_of_the_reference_is_a_share_of_a_step(has_adapter: bool, backward: float) -> None:
    """It computes two sequences for each one that KTO trains, and one if nothing is compared with the other."""
    kinds = {(False, True): 1 / (1 + backward), (True, True): 2 / (2 + backward), (True, False): 1 / (1 + backward)}
    for (has_ratings, has_kl_pass), share in kinds.items():
        found = forward_share(has_ratings=has_ratings, has_kl_pass=has_kl_pass, has_adapter=has_adapter)
        assert found == pytest.approx(share)


def test_torchao_compiles_its_update_once_for_each_shape() -> None:
    """5 s for a matrix, 0.5 s for what is too small to be quantized."""
    vectors = (ParameterShape(shape=(2048,), count=9), ParameterShape(shape=(4096,), count=1))
    shapes = (*PROFILE.parameters.trainable_shapes, *vectors)
    profile = PROFILE.changed(parameters=PROFILE.parameters.changed(trainable_shapes=shapes))
    assert cost_time._compiling_seconds(profile, plan_of(optim="adamw_torch_8bit")) == 4 * 5.0 + 0.5
    assert cost_time._compiling_seconds(profile, plan_of(optim="adamw_torch_8bit", torch_compile="layer")) == 15.0 + 4 * 5.0 + 0.5


def test_micro_batches_of_sequences_that_are_short() -> None:
    """All of 4 tokens in rows of 8, 16 sequences for 2 ranks in micro-batches of 2: half as long, or half as many."""
    short = LengthHistogram(sequence_length=TOKENS, lengths=(4,), counts=(16,), num_tokens=64)
    full = Workload(sequence_length=TOKENS, global_batch=16)
    plan = plan_of(num_processes=2, gradient_accumulation_steps=4)
    assert num_full_micro_batches(plan, full) == 4.0
    padded = plan.changed(sequence_length=TOKENS)
    ragged = full.changed(lengths=short)
    assert num_full_micro_batches(padded, ragged) == 4.0  # widths are multiples of 8
    assert num_full_micro_batches(plan.changed(packing=True), ragged) == 2.0
    assert num_full_micro_batches(plan.changed(packing=True, attention="block"), ragged) == 2.0
    few = plan.changed(packing=True, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    assert num_full_micro_batches(few, ragged) == 1.0


def test_tokens_of_a_step() -> None:
    full = Workload(sequence_length=TOKENS, global_batch=16)
    assert tokens_per_step(PROFILE, full) == 128
    assert tokens_per_step(PROFILE.changed(objective="seq2seq-lm"), full) == 256
    assert tokens_per_step(PROFILE.changed(objective="image-classification"), full) == 16
    ragged = LengthHistogram(sequence_length=TOKENS, lengths=(2, 4), counts=(3, 1), num_tokens=10)
    assert tokens_per_step(PROFILE, full.changed(lengths=ragged)) == 40
