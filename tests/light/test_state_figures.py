"""What optimizers keep, what a rank has of the model, and what a process holds beside its tensors, by hand."""

from __future__ import annotations

import math

import pytest
from made_profile import FEED_FORWARD, HIDDEN, LAYER, LAYERS, OUTSIDE, make_profile
from made_requests import model_of

from upshift.hardware import describe
from upshift.hardware.spec import Link, Measured, Rates
from upshift.models.profile import ModelProfile, ParameterShape
from upshift.planning.cost import network, optimizer, partition, process_memory, uncertainty
from upshift.planning.cost.memory import Peak, StepMemory, batch_bytes, phase_memory, scale_to_peak, with_libraries
from upshift.planning.cost.network import Group, collective_seconds
from upshift.planning.cost.partition import share_of, stage_of
from upshift.planning.cost.time import num_widths
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan
from upshift.planning.workload import LengthHistogram, Workload
from upshift.units import MIB

PROFILE = make_profile()
TOTAL = PROFILE.parameters.total
VECTORS = ParameterShape(shape=(HIDDEN,), count=2 * LAYERS)


def plan_of(**fields: object) -> Plan:
    plain = {"device": "cuda", "host": "h", "model": "m", "sequence_length": 1024, "per_device_train_batch_size": 2}
    return Plan(**{**plain, **fields})  # type: ignore[arg-type]


def with_vectors() -> ModelProfile:
    """Return the profile with two norms in each layer."""
    parameters = PROFILE.parameters
    more = VECTORS.count * HIDDEN
    return PROFILE.changed(
        parameters=parameters.changed(
            total=parameters.total + more, layers=parameters.layers + more, trainable=parameters.trainable + more,
            trainable_layers=parameters.trainable_layers + more, trainable_shapes=(*parameters.trainable_shapes, VECTORS),
        )
    )  # fmt: skip


# --- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16-weights", 2)])
def test_muon_keeps_one_moment_of_matrices_in_layers_and_two_of_all_else(precision: str, size: int) -> None:
    profile = with_vectors()
    matrices = LAYERS * LAYER
    others = profile.parameters.trainable - matrices
    plan = plan_of(optim="muon", precision=precision)
    counts = 4 * (2 + VECTORS.count)  # of embedding, head and vectors
    assert optimizer.state_bytes(profile, plan) == pytest.approx(size * (matrices + 2 * others) + counts)
    workspace = 4 * HIDDEN * FEED_FORWARD + 2 * 2 * HIDDEN * FEED_FORWARD + 2 * 2 * HIDDEN**2
    assert optimizer.update_workspace_bytes(profile, plan, HIDDEN * FEED_FORWARD) == (workspace if size == 4 else 24 * 2**24)
    if size == 4:
        assert optimizer.workspace_bytes(profile, plan) == workspace


@pytest.mark.parametrize(("optim", "bits"), [("adamw_torch_8bit", 8), ("adamw_torch_4bit", 4)])
def test_low_bit_moments_are_codes_scales_and_a_table(optim: str, bits: int) -> None:
    """Of each of two moments: a code for each element, an fp32 scale for 256, and a value for each code."""

    def state(shape: ParameterShape, options: str = "") -> float:
        return optimizer._state_bytes_function(optim, plan_of(optim=optim, optim_args=options), 4.0)(shape)

    matrix = ParameterShape(shape=(64, 64), count=1)
    assert state(matrix) == 4 + 2 * (4096 * bits / 8 + 4 * 16 + 4 * 2**bits)
    assert state(matrix, "block_size=128") == 4 + 2 * (4096 * bits / 8 + 4 * 32 + 4 * 2**bits)
    assert state(ParameterShape(shape=(63, 64), count=1)) == 4 + 2 * 4 * 63 * 64  # too small
    assert state(ParameterShape(shape=(65, 64), count=1)) == 4 + 2 * 4 * 65 * 64  # in no whole blocks


def test_what_an_update_allocates_and_drops() -> None:
    """A matrix of the layers, and the largest tensor, which is the embedding."""
    matrix = HIDDEN * HIDDEN

    def workspace(optim: str, elements: int = matrix, **fields: object) -> float:
        return optimizer.update_workspace_bytes(PROFILE, plan_of(optim=optim, **fields), elements)

    assert workspace("adamw_torch_fused") == workspace("sgd") == workspace("adagrad") == 0.0
    assert workspace("adamw_torch") == 4 * matrix
    assert workspace("adafactor") == workspace("rmsprop") == 2 * 4 * matrix
    assert (workspace("adamw_torch_8bit"), workspace("adamw_torch_4bit")) == (8 * matrix, 26 * matrix)
    in_bf16 = {"precision": "bf16-weights"}
    for device, chunk in (("cuda", 2**24), ("cpu", 2**16)):
        assert workspace("adamw_torch_fused", device=device, **in_bf16) == 24 * min(matrix, chunk)
        assert optimizer.workspace_bytes(PROFILE, plan_of(device=device, **in_bf16)) == 24 * min(OUTSIDE, chunk)
    assert workspace("adamw_torch_fused", 100, device="cpu", **in_bf16) == 24 * 100

    def at_once(optim: str, **fields: object) -> float:
        return optimizer.workspace_bytes(PROFILE, plan_of(optim=optim, **fields))

    assert at_once("adamw_torch") == 4 * TOTAL
    assert at_once("adafactor") == 2 * 4 * OUTSIDE
    assert at_once("adamw_torch", optim_offload=True) == 0.0


def test_words_and_core_seconds_of_updates() -> None:
    assert optimizer.update_words(plan_of(optim="sgd")) == 3.0
    assert optimizer.update_words(plan_of(optim="sgd", optim_args="momentum=0.9")) == 5.0
    assert optimizer.update_words(plan_of(optim="rmsprop", optim_args="momentum=0.9")) == 18.0
    assert optimizer.update_words(plan_of(optim="adamw_8bit")) == 5.0
    in_bf16 = plan_of(device="cpu", precision="bf16-weights")
    assert optimizer.update_core_seconds(in_bf16) == 6e-9
    assert optimizer.update_core_seconds(in_bf16.changed(optim="adamw_torch_4bit")) == 45e-9
    assert optimizer.update_core_seconds(plan_of(device="cpu")) == 0.0
    assert optimizer.update_core_seconds(in_bf16.changed(device="cuda")) == 0.0
    assert optimizer.state_bytes(PROFILE, in_bf16) == 2 * 2 * TOTAL  # its count is no tensor
    assert optimizer._adafactor_state((5, 7)) == 12
    assert optimizer._adafactor_state((3, 5, 7)) == 3 * 12


# --- what a rank has -------------------------------------------------------------------------------------------------


def test_tensor_parallel_ranks_have_parts_of_what_the_model_divides() -> None:
    """All of layers, embedding and head here; then layers alone, of which a fourth stays whole."""
    plan = plan_of(precision="bf16", num_processes=4, layout=Layout(tensor_parallel=4))
    whole = stage_of(PROFILE, plan, 0)
    assert share_of(PROFILE, plan, whole)[:3] == pytest.approx((TOTAL, TOTAL, 2 * TOTAL + 4 * (7 * LAYERS + 2) / 4))
    assert PROFILE.tensor_parallel is not None
    declared = PROFILE.tensor_parallel.changed(layers=LAYERS * LAYER * 3 // 4, outside=0)
    partly = PROFILE.changed(tensor_parallel=declared)
    layers = LAYERS * LAYER * (1 / 4 + 3 / 4 / 4)
    assert partition.layer_elements(partly, plan) == pytest.approx(layers / LAYERS)
    assert partition.elements(partly, plan, whole) == pytest.approx(layers + 2 * OUTSIDE)
    assert partition.outside_part(partly, plan) == 1.0
    words = plan.changed(layout=Layout(tensor_parallel=4, vocabulary_parallel=True))
    assert partition.outside_part(partly, words) == 1 / 4
    assert partition.outside_part(PROFILE.changed(tensor_parallel=None), plan) == 1.0
    half = PROFILE.changed(tensor_parallel=declared.changed(outside=OUTSIDE))
    assert partition.outside_part(half, plan) == pytest.approx(1 - 1 / 2 * 3 / 4)


def test_weights_trained_outside_the_layers_may_be_at_each_end_of_a_pipeline() -> None:
    """A LoRA in the layers, and 500 parameters of a module that is before or behind them."""
    adapted = model_of("lora", "causal-lm", longest=4096)
    counts = adapted.parameters
    profile = adapted.changed(parameters=counts.changed(total=counts.total + 500, trainable=counts.trainable + 500))
    plan = plan_of(num_processes=4, layout=Layout(pipeline_parallel=4), gradient_accumulation_steps=4)
    parts = [partition.trained_part(profile, plan, stage_of(profile, plan, rank)) for rank in range(4)]
    inner = counts.trainable / 4
    trained = counts.trainable + 500
    assert parts == pytest.approx([(inner + 500) / trained, inner / trained, inner / trained, (inner + 500) / trained])
    # A head that is tied to the embedding is at both ends, unless an adapter gives it weights of its own.
    tied = profile.parameters.changed(trainable_head=500, tied=True)
    for parameters, first in ((tied.changed(always_fp32=0), inner + 500), (tied, inner), (tied.changed(tied=False), inner)):
        head = profile.changed(parameters=parameters)
        assert partition.trained_part(head, plan, stage_of(head, plan, 0)) == pytest.approx(first / trained)
        assert partition.trained_part(head, plan, stage_of(head, plan, 3)) == pytest.approx((inner + 500) / trained)


def test_a_tied_embedding_is_at_both_ends_of_a_pipeline() -> None:
    tied = model_of("tied", "causal-lm", longest=4096)
    plan = plan_of(num_processes=4, layout=Layout(pipeline_parallel=4), gradient_accumulation_steps=4)
    outside = [partition.outside_elements(tied, plan, stage_of(tied, plan, rank)) for rank in range(4)]
    assert outside == [OUTSIDE, 0, 0, OUTSIDE]
    alone = plan_of()
    assert partition.outside_elements(tied, alone, stage_of(tied, alone, 0)) == OUTSIDE
    assert partition.outside_elements(PROFILE, alone, stage_of(PROFILE, alone, 0)) == 2 * OUTSIDE


def test_rows_of_other_ranks_words_are_filled_in_an_embeddings_gradient() -> None:
    """Four ranks: three quarters more, where the model divides words; none where Upshift's own loss does."""
    rowwise = PROFILE.changed(declares=PROFILE.declares.changed(tensor_parallel_plan={"embed": "embedding_rowwise"}))
    plan = plan_of(precision="bf16", num_processes=4, layout=Layout(tensor_parallel=4))
    stage = stage_of(rowwise, plan, 0)
    assert share_of(rowwise, plan, stage).gradients == pytest.approx(TOTAL + 4 * OUTSIDE * 3 / 4)
    words = plan.changed(layout=Layout(tensor_parallel=4, vocabulary_parallel=True))
    assert share_of(rowwise, words, stage).gradients == pytest.approx(TOTAL)


def test_zero_1_divides_the_state_and_masters_are_part_of_it() -> None:
    plan = plan_of(precision="bf16", num_processes=4, layout=Layout(fully_shard="optimizer", shard_size=4))
    share = share_of(PROFILE, plan, stage_of(PROFILE, plan, 0))
    state = 8 * TOTAL + 4 * (7 * LAYERS + 2)
    assert share[:3] == pytest.approx((4 * TOTAL, 4 * TOTAL, state / 4))
    assert (share.updated, share.transients) == (1 / 4, None)
    masters = plan.changed(layout=plan.layout.changed(master_weights=True))
    assert share_of(PROFILE, masters, stage_of(PROFILE, masters, 0))[:3] == pytest.approx(
        (2 * TOTAL, 4 * TOTAL, (state + 4 * TOTAL) / 4)
    )


# --- a process -------------------------------------------------------------------------------------------------------


def memory_of(*, loss: float = 0.0, recomputed: float = 0.0) -> StepMemory:
    """Return the memory of a step with 1,000 MiB of weights and, forward, 400 of activations; backward it has 500."""
    forward = {"weights": 1000.0 * MIB, "activations": 400.0 * MIB, "loss": loss}
    backward = {"weights": 1000.0 * MIB, "activations": 500.0 * MIB}
    phases = {"forward": Peak(sum(forward.values()), forward), "backward": Peak(sum(backward.values()), backward)}
    return StepMemory(phases, recomputed)


def resident_of(memory: StepMemory, *, adapter: bool = False, **fields: object) -> float:
    plan = plan_of(device="cpu", **fields)
    return process_memory.predict_resident(memory, plan, describe("epyc-9654-768gb"), adapter=adapter) / MIB


def test_a_process_on_a_cpu_holds_libraries_tensors_and_holes() -> None:
    """300 MiB of libraries, 75 of the first step, the peak, and shares of weights, activations, loss and what is recomputed."""
    tensors = 1500 + 300 + 75 + 0.15 * 1000 + 0.17 * 500
    assert resident_of(memory_of()) == pytest.approx(tensors)
    assert resident_of(memory_of(recomputed=100.0 * MIB)) == pytest.approx(tensors + 140)
    assert resident_of(memory_of(), adapter=True) == pytest.approx(tensors + 48)
    assert resident_of(memory_of(), torch_compile="layer") == pytest.approx(tensors + 65)
    assert resident_of(memory_of(), optim="adamw_torch_8bit") == pytest.approx(tensors + 65)
    probed = Measured(
        torch_version="2", transformers_version=None, num_threads=1, cpu=Rates(fp32=1.0), dispatch_seconds=0.0,
        first_touch_seconds_per_byte=None, base_resident_bytes=700 * MIB, compiler=None, probe_seconds=1.0,
    )  # fmt: skip
    assert process_memory.base_bytes(describe("epyc-9654").changed(measured=probed)) == 775 * MIB


@pytest.mark.parametrize(
    ("precision", "memory", "loss", "share"),
    [
        ("fp32", "system", 60, 1.0), ("fp32", "system", 70, 0.0), ("fp32", "keep", 70, 1.0), ("bf16", "system", 80, 1.0),
        ("bf16", "system", 100, 1 / 3), ("bf16", "system", 180, 0.0), ("bf16", "keep", 180, 1.0),
    ],
)  # fmt: skip
def test_large_blocks_of_the_loss_leave_no_holes(precision: str, memory: str, loss: float, share: float) -> None:
    """glibc maps blocks above 32 MiB one by one. The loss is 2.05 blocks of fp32 logits; beside bf16 logits, 2.8."""
    found = resident_of(memory_of(loss=loss * MIB), precision=precision, host_memory=memory)
    tensors = max(1500, 1400 + loss) + 375 + 0.15 * 1000 + 0.17 * 500
    assert found == pytest.approx(tensors + 1.1 * loss * share)


@pytest.mark.parametrize(("precision", "added"), [("fp32", 0.0), ("bf16", 12 * 9 * 0.56)])
def test_each_further_width_holds_code_in_16_bits(precision: str, added: float) -> None:
    """0.27 MiB of code for each of 12 products, and 0.29 of what the newest 1,024 keep."""
    plan = plan_of(device="cpu", precision=precision)
    host = describe("epyc-9654-768gb")

    def held(num_widths: int) -> float:
        return process_memory.predict_resident(memory_of(), plan, host, adapter=False, num_widths=num_widths) / MIB

    assert held(10) - held(1) == pytest.approx(added)
    assert held(1001) - held(501) == pytest.approx(12 * 500 * 0.27 if added else 0.0)


@pytest.mark.parametrize(
    ("packing", "attention", "widths"), [(False, "sdpa", 3), (False, "block", 3), (True, "block", 5), (True, "sdpa", 1)]
)
def test_widths_of_a_run(packing: bool, attention: str, widths: int) -> None:
    """Texts of 10, 20 and 30 tokens, two in a micro-batch: padded to 16, 24 or 32; flattened, two have 20 to 60 in all."""
    lengths = LengthHistogram.of_documents([10, 20, 30], 64)
    plan = plan_of(device="cpu", packing=packing, attention=attention, per_device_train_batch_size=2, sequence_length=64)
    assert num_widths(plan, Workload(sequence_length=64, global_batch=2, lengths=lengths)) == widths


@pytest.mark.parametrize(
    ("device", "host_memory", "varies", "high"),
    [("cpu", "keep", True, 1.6), ("cpu", "keep", False, math.exp(0.1)), ("cpu", "system", True, math.exp(0.1)),
     ("cuda", "keep", True, math.exp(0.16))],
)  # fmt: skip
def test_widths_that_vary_leave_holes_in_kept_memory(device: str, host_memory: str, varies: bool, high: float) -> None:
    """A bf16 run on packed chats held 1.25 times the formula's figure, and at most 1.6 times: then it gives holes back."""
    interval = uncertainty.formula_interval("held", plan_of(device=device, host_memory=host_memory), varies=varies)
    assert interval[1] == pytest.approx(high)


def test_a_process_on_a_gpu_holds_context_buffers_and_segments() -> None:
    """0.5 GiB of context, 4 % of slack; and 16-bit logits that nothing else fits into."""
    plan = plan_of(precision="bf16")
    step = memory_of()
    found = process_memory.predict_resident(step, plan, describe("h100"), adapter=True)
    assert found == pytest.approx((512 + 1.04 * 1500) * MIB)
    at_loss = StepMemory({"backward": Peak(300.0, {"loss": 100.0, "weights": 200.0})}, half_logits=50.0)
    assert process_memory.predict_reserved(at_loss) == pytest.approx(1.04 * 300.0 + 50.0)
    elsewhere = StepMemory({"backward": Peak(300.0, {"loss": 0.0, "weights": 300.0})}, half_logits=50.0)
    assert process_memory.predict_reserved(elsewhere) == pytest.approx(1.04 * 300.0)
    shared = plan.changed(num_processes=4, layout=Layout(tensor_parallel=2))
    assert process_memory.outside_allocator(shared) == pytest.approx((0.5 + 2 * 0.37) * 1024 * MIB)


def test_cublas_takes_more_on_hopper_and_blackwell_servers() -> None:
    host = describe("h100")
    assert host.gpu is not None
    capabilities = ((8, 9), (9, 0), (10, 0), (11, 9), (12, 0), (12, 1), None)
    hosts = [host.changed(gpu=host.gpu.changed(compute_capability=capability)) for capability in capabilities]
    plain = 2 * 8_519_680  # the thread of the forward pass and that of the backward pass
    plan = plan_of(device="cuda")
    assert [process_memory.library_bytes(plan, each) for each in hosts] == [plain, *[64 * MIB] * 3, *[plain] * 3]
    assert process_memory.library_bytes(plan_of(device="cpu"), host) == 0


def test_cublas_is_in_every_phase_of_the_step_and_a_measured_peak_does_not_scale_it() -> None:
    forward = Peak(300.0, {"weights": 100.0, "activations": 200.0})
    step = StepMemory({"forward": forward, "backward": Peak(150.0, {"weights": 150.0})})
    whole = with_libraries(step, 64.0)
    assert {name: peak.total for name, peak in whole.phases.items()} == {"forward": 364.0, "backward": 214.0}
    measured = scale_to_peak(whole, 464.0)
    assert measured.phases["forward"].parts == {"weights": 100.0, "activations": 300.0, "libraries": 64.0}
    assert with_libraries(step, 0.0) == step


def test_a_batch_is_token_ids_labels_and_positions_or_a_mask() -> None:
    plan = plan_of()
    assert batch_bytes(PROFILE, plan, 2, 10) == 8 * 20 * 2
    assert batch_bytes(PROFILE, plan.changed(packing=True), 2, 10) == 8 * 20 * 3
    assert batch_bytes(PROFILE.changed(objective="masked-lm"), plan, 2, 10) == 8 * 20 * 3
    assert batch_bytes(PROFILE.changed(objective="image-classification"), plan, 2, 10) == 0.0


def test_phases_around_the_steps_by_hand() -> None:
    """A layer of the made profile needs 2 x 8,192 bytes a token beside 17 of its hidden states; a head 14 of each word."""
    plan = plan_of(device="cpu")
    trace = PROFILE.steps[0]
    steps = {name: Peak(10.0, {"weights": 4.0, "optimizer": 6.0}) for name in ("forward", "optimizer")}
    steps["backward"] = Peak(12.0, {"weights": 4.0, "optimizer": 6.0, "gradients": 2.0})
    phases = phase_memory(PROFILE, trace, plan, StepMemory(steps), shape=(2, 100))
    weights = 4.0 * TOTAL
    state = 8.0 * TOTAL + 4 * (7 * LAYERS + 2)
    table = 4.0 * OUTSIDE
    assert phases["load"].parts == {"weights": weights, "workspace": table}
    assert phases["resume"].parts == {"weights": weights, "optimizer": state, "workspace": table}
    assert phases["save"].parts == {"weights": weights, "optimizer": state, "communication": weights + state}
    assert phases["first step"].parts == {"weights": 4.0, "optimizer": 6.0}  # before the update: 4 forward, 6 backward
    head = trace.gaps[-1].forward.rise[0].at(2, 100)
    layer = trace.stacks[0].plain[0].forward.rise[0].at(2, 100)
    states = 2 * 100 * HIDDEN * 4.0
    higher = {"loss": head, "activations": states} if head >= layer else {"activations": states + layer}
    assert phases["evaluation"].parts == {"weights": weights, "optimizer": state, **higher}
    assert "save" not in phase_memory(PROFILE, trace, plan.changed(device="cuda"), StepMemory(steps), shape=(2, 100))


# --- links -----------------------------------------------------------------------------------------------------------


def test_a_link_without_a_latency_has_none() -> None:
    gpus = describe("4x4090")
    link = Link(name="measured", bytes_per_second=1e9, latency_seconds=None, measured=True)
    probed = Measured(
        torch_version="2", transformers_version=None, num_threads=1, cpu=Rates(fp32=1.0), dispatch_seconds=0.0,
        first_touch_seconds_per_byte=None, base_resident_bytes=None, compiler=None, probe_seconds=1.0,
        gpu_exchanges={"all_reduce": link, "send": link}, gpu_exchange_ranks=4,
    )  # fmt: skip
    host = gpus.changed(measured=probed)
    assert collective_seconds(host, "all_reduce", 2e9, Group(4, 1, 4)) == pytest.approx(2.0)
    assert network.point_to_point_seconds(host, 2e9, between_nodes=False, node_ranks=4, num_senders=1) == pytest.approx(2.0)


def test_one_process_on_each_node_exchanges_through_the_network_alone() -> None:
    """However slow the exchange of two processes of one node is."""
    host = describe("2xepyc-9654-768gb@ethernet-25").changed(
        inter_node=Link(name="fast", bytes_per_second=1e12, latency_seconds=0.0, measured=True)
    )
    assert collective_seconds(host, "all_gather", 2e9, Group(2, 1, 1)) == pytest.approx(1e-3)
    assert collective_seconds(host, "all_to_all", 2e9, Group(2, 1, 1)) == pytest.approx(1e-3)
    # Two ranks on each of two nodes: each sends half of its tensor out, and both share the port.
    slow = host.changed(inter_node=Link(name="slow", bytes_per_second=1e6, latency_seconds=0.0, measured=True))
    assert collective_seconds(slow, "all_to_all", 2e6, Group(4, 1, 2)) == pytest.approx(2.0)
    assert collective_seconds(slow, "all_to_all", 2e6, Group(2, 2, 2)) == pytest.approx(2.0)


# --- how sure a number is --------------------------------------------------------------------------------------------


def test_an_interval_narrows_from_the_formulas_to_the_spread_of_what_ran() -> None:
    """The formula counts as three records. Two standard deviations: 1.4826 times the median deviation, twice."""
    prior = (0.6, 1.6)
    deviations = [0.1, -0.1, 0.1]
    spread = 2 * 1.4826 * 0.1
    low = math.exp(-math.sqrt((3 * math.log(0.6) ** 2 + 3 * spread**2) / 6))
    high = math.exp(math.sqrt((3 * math.log(1.6) ** 2 + 3 * spread**2) / 6))
    assert uncertainty._interval(prior, deviations, num_fitted=0) == pytest.approx((low, high))
    again = uncertainty.remeasured("step", [1.2, 1.2])
    assert again.factor == pytest.approx(1.2)
    assert again.basis.interval == pytest.approx((0.8 ** (3 / 4) ** 0.5, 1.25 ** (3 / 4) ** 0.5))
    other = uncertainty.transfer(prior, [2.0])
    assert other.factor == pytest.approx(2.0 ** (1 / 3))
    assert uncertainty.held_memory_spread(other.basis) == pytest.approx(
        max(-math.log(other.basis.interval[0]), math.log(other.basis.interval[1])) / 2  # type: ignore[index]
    )
    assert uncertainty.held_memory_spread(uncertainty.formula_basis("held", plan_of())) == pytest.approx(0.08)
