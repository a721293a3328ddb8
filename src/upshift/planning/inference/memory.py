"""Predict the bytes of the fullest device of a replica, by part, and the largest number of sequences that fit.

They follow from a sequence's cached keys and values, and from the model's matrix products, which are read from the shapes of its
parameters. Layers with a sliding window cache and read no more than the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from upshift.hardware.spec import Host, stated_memory
from upshift.models.profile import CachedLayers, ModelProfile
from upshift.planning.cost.process_memory import CUDA_CONTEXT_BYTES, DEFAULT_BASE_BYTES, USABLE_SHARE
from upshift.planning.inference.plan import (
    CACHE_BYTES,
    CACHE_SCALE_BYTES,
    WEIGHTS,
    CachePrecision,
    InferenceWorkload,
    ReplicaShape,
    WeightFormat,
    WeightPrecision,
    plain_bytes,
)
from upshift.units import GIB, MIB


def cached_bytes(profile: ModelProfile, precision: CachePrecision, tokens: int, *, ranks: int = 1) -> float:
    """Return the bytes of a sequence of ``tokens`` in all layers, on one of ``ranks`` tensor-parallel devices."""
    return sum(
        layers.count * _layer_cache_bytes(layers, precision, min(tokens, layers.window or tokens), ranks)
        for layers in profile.cache
    )


def mean_read_bytes(profile: ModelProfile, precision: CachePrecision, start: int, steps: int, *, ranks: int = 1) -> float:
    """Return the cached bytes that a decode step reads, as the mean over ``steps`` steps that begin with ``start`` tokens."""
    return sum(
        layers.count * _layer_cache_bytes(layers, precision, mean_visible(layers.window, start, steps), ranks)
        for layers in profile.cache
    )


def mean_visible(window: int | None, start: int, steps: int) -> float:
    """Return the number of tokens that a new token sees, as the mean over steps that each add a token to ``start`` tokens."""
    end = start + max(steps, 1)
    if window is None or end <= window:
        return (start + end) / 2
    if start >= window:
        return float(window)
    growing = window - start
    return (growing * (start + window) / 2 + (end - window) * window) / (end - start)


def prompt_attention_flops(profile: ModelProfile, tokens: int) -> float:
    """Return the FLOPs of attention over a prompt; one multiply-add = 2 FLOPs.

    They are those of the trace, which counts half of the scores of causal attention. For models with windows they are computed
    from the cached elements: kernels skip tokens outside a window, and the traced sequence is shorter than a window.
    """
    if not _has_windows(profile):
        return profile.forward_flops.bss * tokens * tokens
    return sum(
        layers.count * _pair_flops(profile, layers) * tokens * mean_visible(layers.window, 0, tokens) for layers in profile.cache
    )


def decode_attention_flops(profile: ModelProfile, start: int, steps: int) -> float:
    """Return the FLOPs of attention for one token, as the mean over ``steps``."""
    if not _has_windows(profile):
        return 2.0 * profile.forward_flops.bss * mean_visible(None, start, steps)
    return sum(
        layers.count * _pair_flops(profile, layers) * mean_visible(layers.window, start, steps) for layers in profile.cache
    )


def _has_windows(profile: ModelProfile) -> bool:
    return any(layers.window is not None for layers in profile.cache)


def _pair_flops(profile: ModelProfile, layers: CachedLayers) -> float:
    """Return the FLOPs for one query token and one cached token.

    Every query head is multiplied with one head of keys and one of values.
    """
    queries = profile.heads[0] if profile.heads else layers.heads
    return 2.0 * layers.per_token * queries / layers.heads


def _layer_cache_bytes(layers: CachedLayers, precision: CachePrecision, tokens: float, ranks: int) -> float:
    """Return the bytes of one layer's cache on a rank.

    Ranks share heads. A single head, such as the compressed keys and values of latent attention, is on each of them.
    """
    vectors = 2 * layers.heads * tokens * (CACHE_SCALE_BYTES.get(precision, 0.0) if layers.per_token else 0.0)
    # States of recurrences are accumulated at every step, so they stay in 16 bits if the cache is quantized.
    state = layers.per_sequence * max(CACHE_BYTES[precision], 2.0)
    return (layers.per_token * tokens * CACHE_BYTES[precision] + vectors) / min(ranks, layers.heads) + state / ranks


class Product(NamedTuple):
    """Matrices of one shape, in the layers of the whole model.

    ``matrices``: the number of layers that have one such matrix, or a mixture of ``experts`` matrices, of which each token uses
    ``per_token``. Without a mixture both are 1.
    """

    outputs: int
    inputs: int
    matrices: int
    experts: int = 1
    per_token: int = 1

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs * self.matrices * self.experts

    def stored_bytes(self, weights: WeightFormat, group_size: int) -> float:
        """Return the bytes of all matrices with their scales."""
        groups = ceil(self.inputs / group_size) if weights.grouped else 1
        scales = self.outputs * groups * self.matrices * self.experts * weights.scale_bytes
        return self.elements * weights.weight_bytes + scales

    def touched(self, tokens: float) -> float:
        """Return the expected number of a mixture's matrices that ``tokens`` use, if all experts are equally likely."""
        if self.experts == 1:
            return 1.0
        missed: float = (1.0 - self.per_token / self.experts) ** tokens
        return self.experts * (1.0 - missed)


def products_of(profile: ModelProfile) -> tuple[Product, ...]:
    """Return the products of the layers, without the head and without embedding tables."""
    parameters = profile.parameters
    products = []
    outside = {parameters.embedding, parameters.head} - {0}
    for entry in parameters.product_shapes:
        shape = entry.shape
        if entry.elements in outside:
            continue
        if len(shape) == 3 and profile.experts is not None and shape[0] == profile.experts.count:
            products.append(Product(shape[1], shape[2], entry.count, shape[0], profile.experts.per_token))
        else:
            products.append(Product(shape[0], prod(shape[1:]), entry.count))
    return tuple(products)


COMMUNICATOR_BYTES = 370 * MIB  # NCCL's buffers: 342 to 392 MB in AIConfigurator's table (COSTS.md D2)
GRAPH_BYTES = 0.5 * GIB  # assumed, for graphs captured for a few dozen batch sizes: not measured here
LIBRARY_BYTES = 64 * MIB  # of matrix-product libraries: two handles of cuBLAS, 32 MiB each on Hopper (cublasSetWorkspace)
LOGITS_BYTES = 6  # of one word: 16 bits from the head, 32 for sampling
PARTS = ("weights", "kv cache", "activations", "workspace", "communication", "context")


@dataclass(frozen=True)
class ReplicaMemory:
    """The bytes of one device.

    ``sequence``: the bytes of one more sequence. The other parts do not depend on the number of sequences.
    """

    weights: float
    sequence_cache: float
    sequence_activations: float
    step_activations: float
    workspace: float
    communication: float
    context: float
    limit: float | None  # bytes that a process may use; None where the host does not say

    @property
    def fixed(self) -> float:
        return self.weights + self.step_activations + self.workspace + self.communication + self.context

    @property
    def sequence(self) -> float:
        return self.sequence_cache + self.sequence_activations

    def parts(self, sequences: int) -> dict[str, float]:
        """Return the bytes by part with a number of sequences."""
        sizes = (
            self.weights,
            self.sequence_cache * sequences,
            self.step_activations + self.sequence_activations * sequences,
            self.workspace,
            self.communication,
            self.context,
        )
        return dict(zip(PARTS, sizes, strict=True))

    def total(self, sequences: int) -> float:
        return self.fixed + self.sequence * sequences

    @property
    def largest_concurrency(self) -> int | None:
        """Return the number of sequences of full length that fit at once; None where the host's memory is unknown."""
        if self.limit is None:
            return None
        free_bytes = self.limit - self.fixed
        return max(int(free_bytes // self.sequence), 0) if self.sequence > 0 else int(free_bytes >= 0) * 2**31


def replica_memory(
    host: Host, profile: ModelProfile, workload: InferenceWorkload, shape: ReplicaShape, *, chunk_tokens: int
) -> ReplicaMemory:
    """Return the predicted memory of the fullest device of a replica."""
    degree = shape.tensor_parallel
    stages = shape.pipeline_parallel
    size = plain_bytes(shape.weights)
    generates = workload.task == "generate"
    cache = cached_bytes(profile, shape.kv_cache, workload.longest, ranks=degree) if generates else 0.0
    vocabulary = profile.vocab_size or 0
    is_gpu = host.device != "cpu"
    of_token = activation_bytes(profile, size=size, tensor_parallel=degree)
    return ReplicaMemory(
        weights=weight_bytes(profile, shape.weights, shape.group_size, tensor_parallel=degree, pipeline_parallel=stages),
        sequence_cache=cache / stages,
        sequence_activations=float(LOGITS_BYTES * vocabulary) / stages if generates else of_token * workload.prompt_length,
        step_activations=of_token * chunk_tokens if generates else 0.0,
        workspace=(LIBRARY_BYTES if is_gpu else 0.0) + (GRAPH_BYTES if is_gpu and shape.execution == "graphs" else 0.0),
        communication=float(COMMUNICATOR_BYTES * ((degree > 1) + (stages > 1))) if is_gpu else 0.0,
        context=CUDA_CONTEXT_BYTES if is_gpu else _base_bytes(host),
        limit=memory_limit(host),
    )


def weight_bytes(
    profile: ModelProfile, weights: WeightPrecision, group_size: int, *, tensor_parallel: int, pipeline_parallel: int
) -> float:
    """Return the bytes of weights on the fullest device.

    A tied embedding counts once on one stage, and at both ends of a pipeline.
    """
    parameters = profile.parameters
    size = plain_bytes(weights)
    stored = WEIGHTS[weights]
    products = products_of(profile)
    matrices = sum(item.stored_bytes(stored, group_size) for item in products)
    in_layers = matrices + size * max(parameters.layers - sum(item.elements for item in products), 0)
    divided = outside_divided = 0.0
    if tensor_parallel > 1 and profile.tensor_parallel is not None:
        saved_share = 1.0 - 1.0 / tensor_parallel
        divided = saved_share * min(profile.tensor_parallel.layers / max(parameters.layers, 1), 1.0)
        outside_divided = saved_share * min(profile.tensor_parallel.outside / max(parameters.embedding + parameters.head, 1), 1.0)
    first = parameters.embedding
    last = parameters.whole_head
    ends = parameters.embedding + parameters.head if pipeline_parallel == 1 else max(first, last)
    outside = size * (ends * (1.0 - outside_divided) + parameters.other)
    return in_layers * (1.0 - divided) / pipeline_parallel + outside + parameters.buffers_bytes


def activation_bytes(profile: ModelProfile, *, size: int, tensor_parallel: int) -> float:
    """Return the bytes of a token at the peak of a layer.

    They are the residual and its norm, the operand and the result of the widest product, and the tensors made from these.
    """
    widest = max((item.outputs + item.inputs for item in products_of(profile)), default=0)
    return float(size * (2 * (profile.hidden_size or 0) + 2 * widest / tensor_parallel))


def memory_limit(host: Host) -> float | None:
    """Return the bytes that one process may hold on a device; None where the host does not say."""
    free = stated_memory(host.gpu if host.device != "cpu" else host.cpu)
    return None if free is None else free * USABLE_SHARE


def _base_bytes(host: Host) -> float:
    measured = host.measured.base_resident_bytes if host.measured else None
    return float(measured or DEFAULT_BASE_BYTES)
