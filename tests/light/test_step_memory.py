"""The memory of a step against a walk through its segments, one after the other, and what each rank holds by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from made_profile import make_profile

from upshift.models.profile import (
    ModelProfile,
    ParameterShape,
    PassCost,
    Polynomial,
    ReleasedGradients,
    Segment,
    Stack,
    StackTrace,
    StepTrace,
)
from upshift.planning.cost.activation_checkpointing import RANDOM_STATE
from upshift.planning.cost.memory import (
    MEMORY_PARTS,
    Backward,
    MicroBatchMemory,
    Peaks,
    micro_batch_memory,
    predict_memory,
    scale_to_peak,
    step_memory,
)
from upshift.planning.cost.partition import FsdpTransients, InFlight, Share, Stage, share_of, stage_of
from upshift.planning.layout import Layout
from upshift.planning.plan import Plan

ROWS = 2
TOKENS = 3
HIDDEN = 10
WORDS = 100
SMALL = 100  # parameters of a small layer: one matrix of 10 x 10
LARGE = 160  # of a large one: one matrix of 16 x 10
SIZES = (SMALL, LARGE)
IN_LAYERS = 3 * SMALL + LARGE
TABLE = HIDDEN * WORDS
TOTAL = IN_LAYERS + 2 * TABLE


def pass_of(left: float, rises: tuple[float, ...], *, constant: float = 0.0, released: float = 0.0) -> PassCost:
    """Return a pass that leaves ``left`` bytes a token and ``constant`` bytes in all, and rises to each of ``rises``."""
    nothing = Polynomial()
    return PassCost(
        left=Polynomial(bs=left, one=constant), released=Polynomial(bs=released),
        rise=tuple(Polynomial(bs=rise, one=max(constant, 0.0)) for rise in rises), matmul_flops=nothing, attention_flops=nothing,
        moved_bytes=nothing, matmul_bytes=nothing, num_kernels=1,
    )  # fmt: skip


def segment_of(parameters: int, *, left: float, forward: float, backward: float, released: float = 0.0) -> Segment:
    """Return a segment whose first backward pass allocates fp32 gradients; where they go at once, as in its middle."""
    gradients = 4.0 * parameters
    freed = released - left
    moments = ((parameters, Polynomial(bs=backward / 2, one=gradients)),) if parameters else ()
    return Segment(
        forward=pass_of(left, (forward / 2, forward, forward / 4), released=released),
        backward=pass_of(freed, (backward, backward / 3), constant=gradients),
        backward_accumulating=pass_of(freed, (backward / 2, 1.5 * backward)),
        gradients_go=ReleasedGradients(
            rise=(Polynomial(bs=backward),), moments=moments, born=Polynomial(one=gradients),
        ),
    )  # fmt: skip


EMBEDDING = segment_of(TABLE, left=40.0, forward=44.0, backward=8.0)
HEAD = segment_of(TABLE, left=900.0, forward=1900.0, backward=800.0)
PLAIN = (
    segment_of(SMALL, left=300.0, forward=350.0, backward=200.0, released=20.0),
    segment_of(LARGE, left=500.0, forward=520.0, backward=700.0, released=30.0),
)
REMADE = (
    segment_of(SMALL, left=40.0, forward=350.0, backward=480.0),
    segment_of(LARGE, left=40.0, forward=520.0, backward=1100.0),
)
THIRD_IS_LARGE = (0, 0, 1, 0)


def profile_of(
    embedding: Segment = EMBEDDING, head: Segment = HEAD, assignment: tuple[int, ...] = THIRD_IS_LARGE
) -> ModelProfile:
    """Return a decoder of four layers, of which one is larger than the others."""
    gaps = (embedding, head)
    trace = StepTrace(
        precision="fp32", attention="sdpa", masked=False, tensor_parallel=1, gaps=gaps, gaps_recomputed={"full": gaps},
        chunked_gap=None, stacks=(StackTrace(plain=PLAIN, recomputed={"full": REMADE}),),
    )  # fmt: skip
    profile = make_profile()
    shapes = (
        ParameterShape(shape=(HIDDEN, HIDDEN), count=3), ParameterShape(shape=(16, HIDDEN), count=1),
        ParameterShape(shape=(WORDS, HIDDEN), count=2),
    )  # fmt: skip
    parameters = profile.parameters.changed(
        total=TOTAL, embedding=TABLE, layers=IN_LAYERS, head=TABLE, trainable=TOTAL, trainable_layers=IN_LAYERS,
        trainable_head=TABLE, buffers_bytes=48, trainable_shapes=shapes,
    )  # fmt: skip
    stack = Stack(path="model.layers", traced_layers=(0, 2), assignment=assignment, layer_trainable=SIZES)
    return profile.changed(
        parameters=parameters, steps=(trace,), stacks=(stack,), vocab_size=WORDS, hidden_size=HIDDEN, tensor_parallel=None
    )


PROFILE = profile_of()


def plan_of(**fields: object) -> Plan:
    plain = {"device": "cpu", "host": "h", "model": "m", "sequence_length": TOKENS, "per_device_train_batch_size": ROWS}
    return Plan(**{**plain, **fields})  # type: ignore[arg-type]


@dataclass
class Walk:
    """A step that runs every segment by itself, and notes the highest moment of each phase."""

    plan: Plan
    profile: ModelProfile
    peaks: dict[str, dict[str, float]] = field(default_factory=dict)

    def note(self, phase: str, **parts: float) -> None:
        resident = {
            "weights": 4.0 * TOTAL + 48.0,
            "optimizer": 8.0 * TOTAL + 4.0 * 6,  # two moments, and a count for each of six tensors
            "batch": 8.0 * ROWS * TOKENS * 2,  # token ids and labels
        }
        moment = {**resident, **parts}
        if phase not in self.peaks or sum(moment.values()) > sum(self.peaks[phase].values()):
            self.peaks[phase] = moment

    def segments(self) -> list[tuple[Segment, int, str]]:
        """Return (segment, parameters, embedding, layer, remade or loss) in forward order."""
        trace = self.profile.steps[0]
        placed = [(trace.gaps[0], TABLE, "embedding")]
        for number, index in enumerate(self.profile.stacks[0].assignment):
            is_remade = number < self.plan.activation_checkpointing
            layers = REMADE if is_remade else PLAIN
            placed.append((layers[index], SIZES[index], "remade" if is_remade else "layer"))
        return [*placed, (trace.gaps[1], TABLE, "loss")]

    def run(self) -> dict[str, dict[str, float]]:
        has_gradients = self.plan.gradient_accumulation_steps > 1
        all_gradients = 4.0 * TOTAL if has_gradients else 0.0
        activations = 0.0
        loss = 0.0
        released = 0.0
        for segment, _, kind in self.segments():
            rise = max(at(term) for term in segment.forward.rise)
            is_loss = kind == "loss"
            self.note(
                "forward", gradients=all_gradients, activations=activations, loss=loss + rise * is_loss,
                workspace=rise * (not is_loss),
            )  # fmt: skip
            offloads = self.plan.activation_offload and kind in ("layer", "remade")
            if not offloads:
                released += at(segment.forward.released)
                activations += at(segment.forward.left) * (not is_loss) + random_state(kind, self.plan)
                loss += at(segment.forward.left) * is_loss
        live = activations + loss - released
        gradients = all_gradients
        for segment, parameters, kind in reversed(self.segments()):
            cost = segment.backward_accumulating if has_gradients else segment.backward
            rises = [at(term) for term in cost.rise]
            left = at(cost.left)
            born = 0.0 if has_gradients else 4.0 * parameters
            if self.plan.optimizer_in_backward and segment.gradients_go is not None:
                rises = [at(term) for term in segment.gradients_go.rise]
                rises += [at(size) for _, size in segment.gradients_go.moments]
                left -= at(segment.gradients_go.born)
                born = 0.0
            copied_back = 0.0
            if self.plan.activation_offload and kind in ("layer", "remade"):
                copied_back = at(segment.forward.left) - at(segment.forward.released)
            rise = max(rises) + copied_back
            beside = live if has_gradients else live - gradients
            self.note(
                "backward", gradients=gradients, activations=max(beside, 0.0), loss=rise * (kind == "loss"),
                workspace=rise * (kind != "loss"),
            )  # fmt: skip
            live += left + copied_back - random_state(kind, self.plan)
            gradients += born
        if not self.plan.optimizer_in_backward:
            self.note("optimizer", gradients=4.0 * TOTAL, workspace=0.0)
        return self.peaks


def at(size: Polynomial) -> float:
    return size.one + size.bs * ROWS * TOKENS


def random_state(kind: str, plan: Plan) -> float:
    return RANDOM_STATE.one if kind == "remade" and plan.device == "cpu" else 0.0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"activation_checkpointing": 2},
        {"activation_checkpointing": 3, "gradient_accumulation_steps": 2},
        {"activation_checkpointing": 4},
        {"optimizer_in_backward": True},
        {"optimizer_in_backward": True, "activation_checkpointing": 1},
        {"device": "cuda", "activation_offload": True},
        {"device": "cuda", "activation_offload": True, "activation_checkpointing": 2, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "profile",
    [
        PROFILE,
        profile_of(segment_of(TABLE, left=4000.0, forward=9000.0, backward=9000.0)),
        profile_of(head=EMBEDDING),
        profile_of(head=EMBEDDING, assignment=(1, 0, 0, 0)),
        profile_of(head=EMBEDDING, assignment=(0, 0, 0, 1)),
    ],
    ids=["large head", "large embedding", "large layers", "a large layer first", "a large layer last"],
)
def test_a_step_needs_what_a_walk_through_it_needs(profile: ModelProfile, fields: dict[str, object]) -> None:
    """Each phase at its highest moment, by part: that of a run of equal layers is found without a walk."""
    plan = plan_of(**fields)
    memory = predict_memory(profile, profile.steps[0], plan)
    walk = Walk(plan, profile).run()
    for phase, parts in walk.items():
        found = memory.phases[phase]
        assert found.total == pytest.approx(sum(parts.values())), phase
        assert sum(found.parts.values()) == pytest.approx(found.total)
        assert {part: size for part, size in found.parts.items() if size} == pytest.approx(
            {part: size for part, size in parts.items() if size}
        ), phase
    assert memory.peak == pytest.approx(max(sum(parts.values()) for parts in walk.values()))
    remade = [REMADE[index] for index in profile.stacks[0].assignment[: plan.activation_checkpointing]]
    rises = [max(at(term) for term in segment.backward_accumulating.rise) for segment in remade]
    assert memory.recomputed == pytest.approx(max(rises, default=0.0))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_first_micro_batch_of_a_pipeline_allocates_gradients_and_later_ones_add_to_them(schedule: str) -> None:
    """On a stage that has the whole model, as a process alone does."""
    plan = plan_of(num_processes=2, layout=Layout(pipeline_parallel=2, pipeline_schedule=schedule))  # type: ignore[arg-type]
    whole = Stage(0, 4, 4)
    micro_batch = micro_batch_memory(PROFILE, PROFILE.steps[0], plan, whole, shape=(ROWS, TOKENS))
    assert micro_batch.first is not None
    for found, count in ((micro_batch.first, 1), (micro_batch.later, 2)):
        walk = Walk(plan_of(gradient_accumulation_steps=count), PROFILE).run()
        lasting = 4.0 * TOTAL * (count - 1)  # gradients, which the pipeline's rank counts with its other tensors
        for phase in ("forward", "backward"):
            resident = sum(walk[phase][part] for part in ("weights", "optimizer", "batch"))
            assert found.peaks[phase].total == pytest.approx(sum(walk[phase].values()) - resident - lasting), phase


def test_a_stage_between_others_has_a_buffer_for_what_it_receives() -> None:
    """While the layers before the last run their backward passes, the gradient that came from the next stage is still there.

    A stage without the embedding makes what the embedding makes for all layers, but for its output.
    """
    profile = profile_of(assignment=(1, 0, 0, 0))
    plan = plan_of(num_processes=2, layout=Layout(pipeline_parallel=2), gradient_accumulation_steps=4)
    tokens = ROWS * TOKENS
    first = micro_batch_memory(profile, profile.steps[0], plan, stage_of(profile, plan, 0), shape=(ROWS, TOKENS))
    last = micro_batch_memory(profile, profile.steps[0], plan, stage_of(profile, plan, 1), shape=(ROWS, TOKENS))
    states = 4.0 * HIDDEN * tokens
    assert first.hidden == last.hidden == states
    assert first.left == (40.0 + 500.0 + 300.0) * tokens
    assert last.left == (40.0 + 300.0 + 300.0) * tokens - states
    assert (first.left_of_loss, last.left_of_loss) == (0.0, 900.0 * tokens)
    # The small layer has freed 280 bytes a token when the large one rises by 1,050; 50 were released after the forward pass.
    highest = first.left - (50.0 + 280.0) * tokens + states + 1050.0 * tokens
    assert first.later.peaks["backward"].total == pytest.approx(highest)
    # The head's backward pass rises by 1,200 and frees 900; nothing is received behind it.
    assert last.later.peaks["backward"].total == pytest.approx(last.left + (900.0 - 40.0 + 1200.0) * tokens)


def micro_batch_of(first: Peaks | None, later: Peaks) -> MicroBatchMemory:
    """Return a micro-batch whose layers leave 100 bytes and whose loss leaves 10, with hidden states of 7."""
    return MicroBatchMemory(
        first=first, later=later, left=100.0, left_of_loss=10.0, recomputed=0.0, batch=1.0, hidden=7.0, outputs=3.0,
        half_logits=0.0,
    )  # fmt: skip


def peaks_of(gradients: float) -> Peaks:
    peaks = Peaks(by_moment=False)
    peaks.offer("forward", {"gradients": 0.0, "activations": 50.0, "loss": 5.0, "workspace": 2.0})
    peaks.offer("head", {"gradients": gradients, "activations": 60.0, "loss": 6.0, "workspace": 3.0})
    return peaks


@pytest.mark.parametrize("losses", [False, True])
def test_micro_batches_in_flight_add_up(losses: bool) -> None:
    """Two beside the one that allocates gradients, of 40 bytes, and three beside those that add to 400; eight inputs."""
    resident = {"weights": 1000.0 + 48.0, "optimizer": 800.0, "batch": 8.0}
    share = Share(weights=1000.0, gradients=400.0, optimizer=800.0, workspace=20.0)
    each = 110.0 if losses else 100.0
    in_flight = InFlight(first=3.0, later=4.0, hidden=1.0, sent=2.0, losses=losses, batches=8.0)
    stage = Stage(0, 2, 4, in_flight)
    plan = plan_of(num_processes=2, layout=Layout(pipeline_parallel=2), gradient_accumulation_steps=8)

    def phases_of(first: Peaks | None, stage: Stage = stage) -> dict[str, dict[str, float]]:
        memory = step_memory(micro_batch_of(first, peaks_of(0.0)), PROFILE, plan, stage, share)
        for peak in memory.phases.values():
            assert peak.total == sum(peak.parts.values())
        return {name: peak.parts for name, peak in memory.phases.items()}

    optimizer = {**resident, "gradients": 400.0, "workspace": 20.0}
    later = {
        "forward": {**resident, "gradients": 400.0, "activations": 50.0 + 3 * each, "loss": 5.0, "workspace": 2.0,
                    "communication": 21.0},
        "backward": {**resident, "gradients": 400.0, "activations": 60.0 + 3 * each, "loss": 6.0, "workspace": 3.0,
                     "communication": 21.0},
        "optimizer": optimizer,
    }  # fmt: skip
    assert phases_of(None) == later
    assert phases_of(peaks_of(40.0)) == later  # which hold more
    only_first = stage._replace(in_flight=in_flight._replace(later=0.0))
    assert phases_of(peaks_of(40.0), only_first) == {
        "forward": {**resident, "gradients": 0.0, "activations": 50.0 + 2 * each, "loss": 5.0, "workspace": 2.0,
                    "communication": 7.0},
        "backward": {**resident, "gradients": 40.0, "activations": 60.0 + 2 * each, "loss": 6.0, "workspace": 3.0,
                     "communication": 7.0},
        "optimizer": optimizer,
    }  # fmt: skip


@pytest.mark.parametrize(("count", "gradients"), [(3, 0.0), (4, 4.0)])
def test_weights_gradients_that_wait_hold_all_that_the_forward_pass_left(count: int, gradients: float) -> None:
    """ZB-H1: four micro-batches in flight and two that wait, each of three with the outputs' gradients and its loss."""
    share = Share(weights=1000.0, gradients=4.0, optimizer=800.0)
    stage = Stage(2, 4, 4, InFlight(first=0.0, later=4.0, pending=2, splits=True))
    plan = plan_of(num_processes=2, layout=Layout(pipeline_parallel=2), gradient_accumulation_steps=count)
    backward = step_memory(micro_batch_of(None, peaks_of(0.0)), PROFILE, plan, stage, share).phases["backward"]
    assert backward.parts["activations"] == 6 * 100.0 + 3 * (3.0 + 10.0)
    assert (backward.parts["gradients"], backward.parts["communication"]) == (gradients, 0.0)


def test_what_lasts_is_not_scaled_to_a_measured_peak() -> None:
    memory = predict_memory(PROFILE, PROFILE.steps[0], plan_of(gradient_accumulation_steps=2, activation_checkpointing=2))
    highest = memory.phases[memory.peak_phase]
    lasting = sum(highest.parts[part] for part in ("weights", "gradients", "optimizer", "batch"))
    scaled = scale_to_peak(memory, lasting + (memory.peak - lasting) / 2)
    for name, peak in memory.phases.items():
        for part, size in peak.parts.items():
            factor = 0.5 if part in ("activations", "loss", "workspace") else 1.0
            assert scaled.phases[name].parts[part] == pytest.approx(factor * size)
        assert scaled.phases[name].total == pytest.approx(sum(scaled.phases[name].parts.values()))
        assert set(peak.parts) <= set(MEMORY_PARTS)
    assert scaled.recomputed == memory.recomputed / 2


# --- ranks that divide weights ---------------------------------------------------------------------------------------

# One layer in bf16 has 230 bytes and 460 bytes of fp32 gradients: 115 parameters in the mean. Embedding and head have 4,000.
LAYER = 230.0
REDUCED = 460.0
OUTSIDE = 4000.0


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        # Two layers while layers compute; the gradients of the layer behind are reduced meanwhile.
        ("weights", {
            "start": OUTSIDE + 2 * LAYER, "forward": OUTSIDE + 2 * LAYER, "loss": OUTSIDE + LAYER, "head": OUTSIDE + LAYER,
            "last_layer": OUTSIDE + 2 * LAYER, "layers": OUTSIDE + 2 * LAYER + REDUCED, "end": OUTSIDE + 2 * LAYER + REDUCED,
            "outside": OUTSIDE + REDUCED,
        }),
        # All layers stay, with a buffer forward; backward a layer goes when its gradients are reduced.
        ("gradients", {
            "start": OUTSIDE + 5 * LAYER, "forward": OUTSIDE + 5 * LAYER, "loss": OUTSIDE + 5 * LAYER,
            "head": OUTSIDE + 4 * LAYER, "last_layer": OUTSIDE + 4 * LAYER, "layers": OUTSIDE + 3 * LAYER + REDUCED,
            "end": OUTSIDE + 3 * LAYER + REDUCED, "outside": OUTSIDE + REDUCED,
        }),
    ],
)  # fmt: skip
def test_whole_weights_of_ranks_that_divide_them(stage: str, expected: dict[str, float]) -> None:
    layout = Layout(fully_shard=stage, shard_size=4)  # type: ignore[arg-type]
    plan = plan_of(device="cuda", precision="bf16", num_processes=4, layout=layout)
    share = share_of(PROFILE, plan, stage_of(PROFILE, plan, 0))
    assert share.transients == FsdpTransients(**expected)
    assert (share.weights, share.gradients, share.updated) == (TOTAL, TOTAL, 1 / 4)  # 4 bytes each, of a quarter


def test_whole_weights_of_ranks_of_a_pipeline_that_divide_them() -> None:
    """Two of four layers a stage: the first has the embedding, the last the head, and the third layer, which is larger."""
    outside = OUTSIDE / 2
    layout = Layout(fully_shard="weights", shard_size=2, pipeline_parallel=2)
    plan = plan_of(device="cuda", precision="bf16", num_processes=4, layout=layout, gradient_accumulation_steps=4)
    first = share_of(PROFILE, plan, stage_of(PROFILE, plan, 0))
    assert first.transients == FsdpTransients(
        start=outside + 2 * LAYER, forward=outside + 2 * LAYER, loss=outside + LAYER, head=outside + LAYER,
        last_layer=outside + 2 * LAYER, layers=outside + 2 * LAYER, end=outside + 2 * LAYER, outside=outside + 2 * LAYER,
    )  # fmt: skip
    last = share_of(PROFILE, plan, stage_of(PROFILE, plan, 1))
    assert first.weights == pytest.approx(4 * (2 * SMALL + TABLE) / 2)
    assert last.weights == pytest.approx(4 * (SMALL + LARGE + TABLE) / 2)
    assert last.undivided_gradients == pytest.approx(4 * (SMALL + LARGE + TABLE))
    kept = share_of(PROFILE, plan.changed(layout=layout.changed(fully_shard="gradients")), stage_of(PROFILE, plan, 1))
    assert kept.transients == FsdpTransients(*[outside + 2 * LAYER] * 8)


def test_ranks_of_a_pipeline_divide_gradients_after_the_last_micro_batch() -> None:
    layout = Layout(fully_shard="weights", shard_size=2)
    stages = layout.changed(pipeline_parallel=2)
    divides = {
        shape: Backward(plan_of(num_processes=4, layout=shape), PROFILE, ROWS, TOKENS, accumulating=True).divides
        for shape in (layout, stages, Layout(), Layout(fully_shard="optimizer", shard_size=2))
    }
    assert [*divides.values()] == [True, False, False, False]


# --- micro-batches of a pipeline ------------------------------------------------------------------------------------


def in_flight_of(schedule: str, rank: int, *, count: int = 8, stages: int = 1, device: str = "cpu") -> InFlight:
    layout = Layout(pipeline_parallel=4, pipeline_schedule=schedule, virtual_stages=stages)  # type: ignore[arg-type]
    plan = plan_of(device=device, num_processes=4, layout=layout, gradient_accumulation_steps=count)
    return stage_of(PROFILE, plan, rank).in_flight


def test_stages_of_a_pipeline_have_as_many_layers() -> None:
    plan = plan_of(num_processes=4, layout=Layout(pipeline_parallel=4), gradient_accumulation_steps=8)
    stages = [stage_of(PROFILE, plan, rank) for rank in range(4)]
    assert [(stage.first, stage.last) for stage in stages] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [stage.has_embedding for stage in stages] == [True, False, False, False]
    assert [stage.has_head for stage in stages] == [False, False, False, True]


@pytest.mark.parametrize(
    ("schedule", "rank", "expected"),
    [
        # 1F1B, four ranks and eight micro-batches: 4, 3, 2 and 1 in flight. Of the transfers only the last ones are held: what
        # the rank sent on (unless it is the last), and the gradient that it sent back (unless it is the first).
        ("1f1b", 0, InFlight(later=4.0, hidden=1.0, sent=1.0, batches=8.0)),
        ("1f1b", 1, InFlight(later=3.0, hidden=4.0, sent=2.0, batches=8.0)),
        ("1f1b", 3, InFlight(later=1.0, hidden=8.0, sent=1.0, batches=8.0)),
        # GPipe: all eight in flight when the first backward pass begins, seven beside each later one.
        ("gpipe", 0, InFlight(first=8.0, later=7.0, hidden=1.0, sent=1.0, batches=8.0)),
        ("gpipe", 3, InFlight(first=8.0, later=7.0, hidden=8.0, sent=0.0, losses=True, batches=8.0)),
        # ZB-H1: a buffer more. Weights' gradients of as many micro-batches wait as there are ranks before this one. All that was
        # sent on is held: four of eight passes have ended when most are in flight, seven on the last rank but there is no next.
        ("zero_bubble", 0, InFlight(later=4.0, hidden=1.0, sent=4.0, batches=8.0)),
        ("zero_bubble", 1, InFlight(later=3.0, hidden=5.0, sent=5.0, pending=1, splits=True, batches=8.0)),
        ("zero_bubble", 3, InFlight(later=1.0, hidden=9.0, sent=0.0, pending=3, splits=True, batches=8.0)),
    ],
)
def test_micro_batches_in_flight_and_their_transfers(schedule: str, rank: int, expected: InFlight) -> None:
    assert in_flight_of(schedule, rank) == expected


def test_buckets_of_data_parallel_ranks_exist_before_the_first_backward_pass() -> None:
    layout = Layout(pipeline_parallel=4)
    plan = plan_of(device="cuda", num_processes=8, layout=layout, gradient_accumulation_steps=8)
    assert stage_of(PROFILE, plan, 0).in_flight[:2] == (0.0, 4.0)
    assert stage_of(PROFILE, plan.changed(num_processes=4, gradient_accumulation_steps=2), 0).in_flight[:2] == (2.0, 1.0)


def test_passes_that_interleaved_ranks_have_behind_them() -> None:
    """Four ranks with two chunks each, and eight micro-batches: 11 of 16 chunks are in flight on the first rank, 5 on the last.

    So the first rank has 5 backward passes behind it: 4 of its second chunk and 1 of its first. It sent on what all of them left,
    and back the gradients of the second chunk. The last rank has 11 behind it, of which 7 are of the second chunk.
    """
    first = in_flight_of("interleaved_1f1b", 0, stages=2)
    last = in_flight_of("interleaved_1f1b", 3, stages=2)
    assert first == InFlight(first=0.0, later=5.5, hidden=1.0 + 5.5, sent=5.0 + 4.0, batches=8.0)
    assert last == InFlight(first=0.0, later=2.5, hidden=1.0 + 8.0 + 2.5, sent=(11.0 - 7.0) + 11.0, batches=8.0)
