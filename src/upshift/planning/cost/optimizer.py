"""Compute what each optimizer holds, allocates and computes, from the shapes of the parameters that it trains."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from upshift.models.profile import ModelProfile, ParameterShape
from upshift.planning.optimizers import ALIASES, optimizers, read_optim_args
from upshift.planning.plan import Plan

STEP_BYTES = 4.0  # a step count is an fp32 tensor of its own
SMALL_ELEMENTS = 4096  # torchao and bitsandbytes keep smaller tensors in full precision
LOW_BIT_BLOCK = 256  # elements that share one fp32 scale: transformers' value for both torchao optimizers
STOCHASTIC_CHUNK = {"cpu": 2**16, "cuda": 2**24}  # elements updated at once (training/optimizers/stochastic_adamw.py)
STOCHASTIC_CHUNK_BYTES = 4 * 4 + 4 + 4  # fp32 weight, gradient and moments, random bits, their half in use
LOW_BIT_WORKSPACE = {"adamw_torch_8bit": 8.0, "adamw_torch_4bit": 26.0}  # bytes an element, compiled for a CPU
NEWTON_SCHULZ_STEPS = 5  # torch.optim.Muon

# Memory traffic of an update, in words of a parameter's size: counted from what fused kernels read and write, measured
# against fused AdamW for those that run operator by operator (docs/log.md).
UPDATE_WORDS = {
    "adamw_torch_fused": 7.0, "adamw_torch": 16.0, "adafactor": 30.0, "adamw_torch_8bit": 5.0, "adamw_torch_4bit": 4.5,
    "adamw_bnb_8bit": 5.0, "muon": 9.0, "sgd": 3.0, "adagrad": 5.0, "rmsprop": 16.0,
}  # fmt: skip
MOMENTUM_WORDS = 2.0
# What an update computes beyond moving memory, in seconds of one core a parameter, on CPUs alone; 2-core Zen 4 (docs/log.md).
CORE_SECONDS = {"adamw_torch_8bit": 28e-9, "adamw_torch_4bit": 45e-9}
STOCHASTIC_CORE_SECONDS = 6e-9
# torchao compiles its update once for every shape (docs/log.md). Small tensors have no low-bit state.
LOW_BIT_COMPILE_SECONDS = 5.0
SMALL_COMPILE_SECONDS = 0.5


def trained_shapes(profile: ModelProfile) -> tuple[ParameterShape, ...]:
    """Return the shapes of the trained parameters, on which the optimizer state depends."""
    return profile.parameters.trainable_shapes


def trained_elements(profile: ModelProfile) -> int:
    """Return the number of elements of all trained parameters."""
    return profile.parameters.trainable


def element_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the mean bytes of an element of a trained parameter: adapters stay fp32 beside bf16 weights."""
    parameters = profile.parameters
    return parameters.gradient_bytes(plan.parameter_bytes) / max(parameters.trainable, 1)


def state_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes of the state that the optimizer allocates in one process; 0 where the state is kept on the host."""
    if plan.optim_offload:
        return 0.0
    optim = ALIASES.get(plan.optim, plan.optim)
    if optim == "muon":
        return _muon_state_bytes(profile, plan)
    state_bytes_of = _state_bytes_function(optim, plan, element_bytes(profile, plan))
    return sum(float(shape.count * state_bytes_of(shape)) for shape in trained_shapes(profile))


def _state_bytes_function(optim: str, plan: Plan, element_size: float) -> Callable[[ParameterShape], float]:
    """Return a function from a parameter's shape to the bytes of its state.

    ``element_size``: bytes of one element of a parameter.
    """
    options = read_optim_args(plan.optim, plan.optim_args)
    added = optimizers()[plan.optim].added
    if added is not None:
        return lambda shape: added.state_words * element_size * shape.elements
    if optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        bits = 8 if optim == "adamw_torch_8bit" else 4
        block = int(options.get("block_size", LOW_BIT_BLOCK))
        return lambda shape: STEP_BYTES + _low_bit_state(shape.elements, bits, block, element_size)
    if optim == "adamw_bnb_8bit":
        return lambda shape: _bitsandbytes_state(shape.elements)
    if optim == "adafactor":
        return lambda shape: 4.0 + _adafactor_state(shape.shape) * element_size
    if optim == "sgd":
        return lambda shape: element_size * float(shape.elements) if options.get("momentum") else 0.0
    if optim == "adagrad":
        return lambda shape: STEP_BYTES + element_size * shape.elements
    if optim == "rmsprop":
        moments = 1 + bool(options.get("momentum")) + bool(options.get("centered"))
        return lambda shape: STEP_BYTES + moments * element_size * shape.elements
    step_bytes = 0.0 if rounds_stochastically(plan) else STEP_BYTES
    return lambda shape: step_bytes + 2.0 * element_size * shape.elements


def rounds_stochastically(plan: Plan) -> bool:
    """Return whether the update is the one of training/optimizers/stochastic_adamw.py."""
    is_ours = plan.precision == "bf16-weights" and not plan.rounds_to_nearest
    return is_ours and optimizers()[plan.optim].library is None


def _low_bit_state(elements: int, bits: int, block: int, parameter_bytes: float) -> float:
    """Return the bytes of codes, fp32 scales and a table of fp32 values for each of two moments (torchao.optim)."""
    if elements < SMALL_ELEMENTS or elements % block:
        return 2.0 * elements * parameter_bytes
    return 2.0 * (elements * bits / 8 + 4 * elements / block + 4 * (1 << bits))


def _bitsandbytes_state(elements: int) -> float:
    """Return the bytes of codes and fp32 scales. All parameters share the tables of values."""
    if elements < SMALL_ELEMENTS:
        return 2.0 * 4 * elements
    return 2.0 * (elements + 4 * -(-elements // LOW_BIT_BLOCK))


def _adafactor_state(shape: tuple[int, ...]) -> float:
    """Return the number of elements of the second moments: rows and columns of a matrix, all elements of a vector.

    The scale of transformers.Adafactor is not counted here. It is one element more.
    """
    if len(shape) < 2:
        return float(prod(shape))
    outer = prod(shape[:-2])
    return float(outer * (shape[-2] + shape[-1]))


def hidden_matrices(profile: ModelProfile) -> tuple[ParameterShape, ...]:
    """Return the two-dimensional parameters of the layers, which Muon updates."""
    parameters = profile.parameters
    outside = {parameters.embedding, parameters.head}
    return tuple(shape for shape in trained_shapes(profile) if len(shape.shape) == 2 and shape.elements not in outside)


def _hidden_elements(profile: ModelProfile) -> float:
    """Return the elements of the layers' matrices: the layers without their vectors and stacks of matrices.

    The profile does not say which vectors belong to the layers. Those outside are one or two of the hidden size.
    """
    other_elements = sum(shape.count * shape.elements for shape in trained_shapes(profile) if len(shape.shape) != 2)
    return max(float(profile.parameters.trainable_layers - other_elements), 0.0)


def _muon_state_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes of one moment for the layers' matrices, and of two moments and a step count for everything else."""
    shapes = trained_shapes(profile)
    num_elements = trained_elements(profile)
    step_bytes = STEP_BYTES * (sum(shape.count for shape in shapes) - sum(shape.count for shape in hidden_matrices(profile)))
    return step_bytes + element_bytes(profile, plan) * (2.0 * num_elements - _hidden_elements(profile))


def workspace_bytes(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes of temporaries at the height of the update, when all parameters are updated in one call."""
    shapes = trained_shapes(profile)
    largest = max(shape.elements for shape in shapes)
    if plan.optim_offload:
        return 0.0
    if rounds_stochastically(plan):
        return float(STOCHASTIC_CHUNK_BYTES * min(largest, STOCHASTIC_CHUNK[plan.device]))
    if plan.optim == "adamw_torch":
        return trained_elements(profile) * element_bytes(profile, plan)
    sizes = {shape.elements for shape in hidden_matrices(profile)} if plan.optim == "muon" else {largest}
    return max((update_workspace_bytes(profile, plan, size) for size in sizes), default=0.0)


def update_workspace_bytes(profile: ModelProfile, plan: Plan, elements: int) -> float:
    """Return the bytes of temporaries when one parameter of ``elements`` elements is updated."""
    element_size = element_bytes(profile, plan)
    if rounds_stochastically(plan):
        return float(STOCHASTIC_CHUNK_BYTES * min(elements, STOCHASTIC_CHUNK[plan.device]))
    if plan.optim == "muon":
        matrices = [shape.shape for shape in hidden_matrices(profile) if shape.elements == elements]
        return max((_newton_schulz_bytes(shape) for shape in matrices), default=0.0)
    if plan.optim in LOW_BIT_WORKSPACE:
        return LOW_BIT_WORKSPACE[plan.optim] * elements
    added = optimizers()[plan.optim].added
    default_copies = added.update_copies if added else 0.0
    copies = {"adamw_torch": 1.0, "adafactor": 2.0, "rmsprop": 2.0}.get(plan.optim, default_copies)
    return copies * elements * element_size


def _newton_schulz_bytes(shape: tuple[int, ...]) -> float:
    """Return the bytes of the fp32 update, of the update and its next iterate in bf16, and of two Gram matrices in bf16."""
    return 4.0 * prod(shape) + 2 * 2.0 * prod(shape) + 2 * 2.0 * min(shape) ** 2


def update_words(plan: Plan) -> float:
    """Return how much the update reads and writes for each parameter, in words of the parameter's size."""
    added = optimizers()[plan.optim].added
    if added is not None:
        return added.update_words
    momentum = plan.optim in ("sgd", "rmsprop") and bool(read_optim_args(plan.optim, plan.optim_args).get("momentum"))
    return UPDATE_WORDS[ALIASES.get(plan.optim, plan.optim)] + MOMENTUM_WORDS * momentum


def update_core_seconds(plan: Plan) -> float:
    """Return the seconds of one core for each parameter, where the update computes more than it moves."""
    if plan.device != "cpu":
        return 0.0
    if rounds_stochastically(plan):
        return STOCHASTIC_CORE_SECONDS
    return CORE_SECONDS.get(plan.optim, 0.0)


def update_flops(profile: ModelProfile, plan: Plan) -> float:
    """Return the FLOPs of Muon's Newton-Schulz iterations.

    Each iteration needs 4 m^2 n + 2 m^3 FLOPs for a matrix m x n, with m the smaller side.
    """
    if plan.optim != "muon":
        return 0.0
    flops = 0.0
    for shape in hidden_matrices(profile):
        m, n = sorted(shape.shape)
        flops += shape.count * NEWTON_SCHULZ_STEPS * (4.0 * m * m * n + 2.0 * m**3)
    return flops


def compile_seconds(profile: ModelProfile, plan: Plan) -> float:
    """Return the seconds for which an optimizer compiles its own update before the first step."""
    if optimizers()[plan.optim].library != "torchao":
        return 0.0
    sizes = [shape.elements for shape in trained_shapes(profile)]
    return sum(LOW_BIT_COMPILE_SECONDS if size >= SMALL_ELEMENTS else SMALL_COMPILE_SECONDS for size in sizes)
