"""Predict the bytes that the fullest device of a replica holds, by part, and the most sequences that fit beside its weights."""

from __future__ import annotations

from dataclasses import dataclass

from upshift.hardware.spec import Host, stated_memory
from upshift.models.profile import ModelProfile
from upshift.planning.cost.resident import CUDA_CONTEXT_BYTES, DEFAULT_BASE_BYTES, USABLE_SHARE
from upshift.planning.inference.cache import cached_bytes
from upshift.planning.inference.formats import WEIGHTS, WeightPrecision, plain_bytes
from upshift.planning.inference.plan import ReplicaShape
from upshift.planning.inference.products import products_of
from upshift.planning.inference.workload import InferenceWorkload
from upshift.units import GIB, MIB

COMMUNICATOR_BYTES = 370 * MIB  # NCCL's buffers: 342 to 392 MB in AIConfigurator's table (COSTS.md D2)
GRAPH_BYTES = 0.5 * GIB  # assumed, for graphs captured for a few dozen batch sizes: not measured here
LIBRARY_BYTES = 64 * MIB  # of matrix-product libraries: two handles of cuBLAS, 32 MiB each on Hopper (cublasSetWorkspace)
LOGITS_BYTES = 6  # of one word: 16 bits from the head, 32 for sampling
PARTS = ("weights", "kv cache", "activations", "workspace", "communication", "context")


@dataclass(frozen=True)
class ReplicaMemory:
    """The bytes of one device.

    ``sequence``: what one more sequence takes. The other parts do not depend on how many sequences there are.
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
        found = (
            self.weights, self.sequence_cache * sequences, self.step_activations + self.sequence_activations * sequences,
            self.workspace, self.communication, self.context,
        )  # fmt: skip
        return dict(zip(PARTS, found, strict=True))

    def total(self, sequences: int) -> float:
        return self.fixed + self.sequence * sequences

    @property
    def largest_concurrency(self) -> int | None:
        """Return the sequences at their full length that fit at once; None: the host does not say how much memory it has."""
        if self.limit is None:
            return None
        left = self.limit - self.fixed
        return max(int(left // self.sequence), 0) if self.sequence > 0 else int(left >= 0) * 2**31


def replica_memory(
    host: Host, profile: ModelProfile, workload: InferenceWorkload, shape: ReplicaShape, *, chunk_tokens: int
) -> ReplicaMemory:
    degree, stages, size = shape.tensor_parallel, shape.pipeline_parallel, plain_bytes(shape.weights)
    generates = workload.task == "generate"
    cache = cached_bytes(profile, shape.kv_cache, workload.longest, ranks=degree) if generates else 0.0
    vocabulary = profile.vocab_size or 0
    gpu = host.device != "cpu"
    of_token = activation_bytes(profile, size=size, tensor_parallel=degree)
    return ReplicaMemory(
        weights=weight_bytes(profile, shape.weights, shape.group_size, tensor_parallel=degree, pipeline_parallel=stages),
        sequence_cache=cache / stages,
        sequence_activations=float(LOGITS_BYTES * vocabulary) / stages if generates else of_token * workload.prompt_length,
        step_activations=of_token * chunk_tokens if generates else 0.0,
        workspace=(LIBRARY_BYTES if gpu else 0.0) + (GRAPH_BYTES if gpu and shape.execution == "graphs" else 0.0),
        communication=float(COMMUNICATOR_BYTES * ((degree > 1) + (stages > 1))) if gpu else 0.0,
        context=CUDA_CONTEXT_BYTES if gpu else _base_bytes(host),
        limit=memory_limit(host),
    )


def weight_bytes(
    profile: ModelProfile, weights: WeightPrecision, group_size: int, *, tensor_parallel: int, pipeline_parallel: int
) -> float:
    """Return the bytes of weights on the fullest device.

    A tied embedding counts once on one stage, and at both ends of a pipeline.
    """
    parameters, size, stored = profile.parameters, plain_bytes(weights), WEIGHTS[weights]
    products = products_of(profile)
    matrices = sum(item.stored_bytes(stored, group_size) for item in products)
    in_layers = matrices + size * max(parameters.layers - sum(item.elements for item in products), 0)
    divided = outside_divided = 0.0
    if tensor_parallel > 1 and profile.tensor_parallel is not None:
        kept = 1.0 - 1.0 / tensor_parallel
        divided = kept * min(profile.tensor_parallel.layers / max(parameters.layers, 1), 1.0)
        outside_divided = kept * min(profile.tensor_parallel.outside / max(parameters.embedding + parameters.head, 1), 1.0)
    first, last = parameters.embedding, parameters.head or (parameters.embedding if parameters.tied else 0)
    ends = parameters.embedding + parameters.head if pipeline_parallel == 1 else max(first, last)
    outside = size * (ends * (1.0 - outside_divided) + parameters.other)
    return in_layers * (1.0 - divided) / pipeline_parallel + outside + parameters.buffers_bytes


def activation_bytes(profile: ModelProfile, *, size: int, tensor_parallel: int) -> float:
    """Return the bytes of a token at the widest moment of a layer.

    They are the residual and its norm, the operand and the result of the widest product, and what is made of these.
    """
    widest = max((item.outputs + item.inputs for item in products_of(profile)), default=0)
    return float(size * (2 * (profile.hidden_size or 0) + 2 * widest / tensor_parallel))


def memory_limit(host: Host) -> float | None:
    """Return the bytes that one process may hold on a device; None where the host does not say."""
    free = stated_memory(host.gpu if host.device != "cpu" else host.cpu)
    return None if free is None else free * USABLE_SHARE


def _base_bytes(host: Host) -> float:
    return float((host.measured.base_resident_bytes if host.measured else None) or DEFAULT_BASE_BYTES)
