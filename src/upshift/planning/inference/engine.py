"""Predict the seconds of a step of one replica of a model, for a number of prompt tokens and of decoding sequences.

Each matrix product has a roofline: t = max(FLOPs / (rate x efficiency of its size), weights / bandwidth). Beside the products
are the cache that is read, attention of prompts, activations that go through memory, exchanges between devices, and launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from upshift.hardware.spec import Host
from upshift.models.profile import ModelProfile
from upshift.planning.cost.network import Group, collective_seconds, point_to_point_seconds
from upshift.planning.cost.time import COMPILED_MOVED_SHARE
from upshift.planning.inference.cache import decode_attention_flops, mean_read_bytes, prompt_attention_flops
from upshift.planning.inference.formats import WEIGHTS, plain_bytes
from upshift.planning.inference.plan import ReplicaShape
from upshift.planning.inference.products import Product, products_of
from upshift.planning.inference.rates import DeviceRates, device_rates
from upshift.planning.inference.workload import InferenceWorkload

# Of every step, and of each sequence that decodes in it, on the host while the device waits: scheduler, sampling, tokens to
# text. Fitted, with the next one, on the rows of Llama-2-7B, Llama-3.1-8B and Mixtral-8x7B in benchmarks/published (8 points).
STEP_SECONDS, SEQUENCE_SECONDS = 1.0e-3, 4.0e-6
MIXTURE_SHARE = 0.8  # of a product's efficiency, where experts get unequal parts of the tokens
REDUCED_PER_LAYER = 2  # all-reduces of a tensor-parallel layer: behind attention and behind the feed-forward part
EAGER_TRAFFIC = 1.0 / COMPILED_MOVED_SHARE  # of activations, over what fused kernels leave


class StepTime(NamedTuple):
    """Seconds by term, of all stages of a pipeline one after the other."""

    weights: float = 0.0  # products that wait for their weights
    products: float = 0.0  # products that wait for their arithmetic
    cache: float = 0.0
    attention: float = 0.0  # of prompts
    activations: float = 0.0
    communication: float = 0.0
    launches: float = 0.0  # of kernels, and the host's work between steps

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def binding_term(self) -> str:
        return max(zip(self, TERM_NAMES, strict=True))[1]


TERM_NAMES = (
    "reading weights", "matrix products", "reading the cache", "attention of prompts", "activation traffic", "communication",
    "launches",
)  # fmt: skip


class _Cost(NamedTuple):
    """The cost of one shape of matrices, on one of the tensor-parallel devices."""

    product: Product
    flops: float  # of one matrix, for one token
    matrices: float  # matrices that a token meets
    weight_seconds: float  # to read one expert's matrix, or the only one, in every layer
    met: float  # share of the tokens that meet one matrix
    moved_bytes: float  # of activations, for one token


@dataclass(frozen=True)
class Engine:
    host: Host
    rates: DeviceRates
    costs: tuple[_Cost, ...]
    product_share: float
    head_flops: float  # for one row of logits
    head_seconds: float  # to read the head
    prompt_flops: float  # attention, for each token of a prompt
    decode_flops: float  # attention, for each decoding sequence
    cache_seconds: float  # to read one decoding sequence's cache
    reduced_bytes: float  # of one token, in each all-reduce
    num_reduced: int
    launch_seconds: float
    eager: bool
    tensor_parallel: int
    pipeline_parallel: int

    def step(self, prompt_tokens: float, decoding: float, *, logits: float | None = None) -> StepTime | None:
        """Return the time to pass all tokens of the replica once through all stages; None where a link is unknown.

        A pipeline is filled with one group of sequences for each stage, so that each works on its part of the tokens.
        """
        stages = self.pipeline_parallel
        prompt, decode = prompt_tokens / stages, max(decoding / stages, min(decoding, 1.0))  # fewer than stages: some idle
        tokens = prompt + decode
        rows = decode if logits is None else logits / stages
        weights, products, moved = self._products(tokens)
        head_compute = self.head_flops * rows / (self.rates.outside * self.rates.efficiency(self.head_flops * rows))
        if rows and head_compute >= self.head_seconds:
            products += stages * head_compute
        elif rows:
            weights += stages * self.head_seconds
        communication = self._communication(tokens)
        if communication is None:
            return None
        found = StepTime(
            weights=weights,
            products=products,
            cache=max(decode * self.cache_seconds, decode * self.decode_flops / self.rates.attention),
            attention=prompt * self.prompt_flops / self.rates.attention,
            activations=moved,
            communication=communication,
        )
        return found._replace(launches=self._launches(found.total, decoding))

    def _products(self, tokens: float) -> tuple[float, float, float]:
        weights = products = 0.0
        moved = 0.0
        for cost in self.costs:
            rate = self.rates.matrix * self.product_share * (MIXTURE_SHARE if cost.product.experts > 1 else 1.0)
            flops = cost.flops * max(tokens * cost.met, 1.0)
            touched = cost.product.touched(tokens)
            compute = cost.flops * tokens * cost.matrices * cost.product.matrices / (rate * self.rates.efficiency(flops))
            read = cost.weight_seconds * touched
            if compute > read:
                products += compute
            else:
                weights += read
            moved += cost.moved_bytes * tokens
        return weights, products, moved / self.rates.memory

    def _communication(self, tokens: float) -> float | None:
        degree, stages, node = self.tensor_parallel, self.pipeline_parallel, max(self.host.gpus_per_node, 1)
        size = tokens * self.reduced_bytes
        seconds = 0.0
        if degree > 1:
            one = collective_seconds(self.host, "all_reduce", size, Group(degree, 1, node))
            if one is None:
                return None
            seconds += one * self.num_reduced
        if stages > 1:
            hop = point_to_point_seconds(self.host, size, stride=degree, node_ranks=node)
            if hop is None:
                return None
            seconds += hop * stages
        return seconds

    def _launches(self, device: float, sequences: float) -> float:
        """Return the seconds of launches, and of the host's work between steps.

        Kernels run while the host queues the next ones: eagerly, only what the device does not hide counts.
        """
        between = STEP_SECONDS + SEQUENCE_SECONDS * sequences if self.host.device != "cpu" else 0.0
        hidden = device if self.eager and self.host.device != "cpu" else 0.0
        return between + max(self.launch_seconds - hidden, 0.0)


def build_engine(host: Host, profile: ModelProfile, workload: InferenceWorkload, shape: ReplicaShape) -> Engine | None:
    """Return an engine of the shape; None where the host's rate in this precision is unknown."""
    stored, degree, size = WEIGHTS[shape.weights], shape.tensor_parallel, plain_bytes(shape.weights)
    rates = device_rates(host, shape.weights, stored.computes, shape.execution)
    if rates is None:
        return None
    read_rate = rates.weights * stored.read_share * degree
    unfused = size * (EAGER_TRAFFIC if shape.execution == "eager" else 1.0)
    head = profile.parameters.head or (profile.parameters.embedding if profile.parameters.tied else 0)
    head = head if workload.task == "generate" else 0
    prompt, steps = workload.prompt_length, workload.decode_steps
    return Engine(
        host=host,
        rates=rates,
        costs=tuple(
            _cost(item, item.stored_bytes(stored, shape.group_size) / read_rate, unfused, degree) for item in products_of(profile)
        ),
        product_share=stored.product_share,
        head_flops=2.0 * head / degree,
        head_seconds=size * head / (rates.weights * degree),
        prompt_flops=prompt_attention_flops(profile, prompt) / prompt / degree,
        decode_flops=decode_attention_flops(profile, prompt, steps) / degree,
        cache_seconds=mean_read_bytes(profile, shape.kv_cache, prompt, steps, ranks=degree) / rates.cache,
        reduced_bytes=float(size * (profile.hidden_size or 0)),
        num_reduced=REDUCED_PER_LAYER * profile.num_layers,
        launch_seconds=profile.num_layers * rates.layer_seconds,
        eager=shape.execution == "eager",
        tensor_parallel=degree,
        pipeline_parallel=shape.pipeline_parallel,
    )


def _cost(item: Product, seconds: float, moved: float, degree: int) -> _Cost:
    """Return the cost of a product. ``seconds``: to read all its matrices.

    What stands between products (norms, rotation, activation, residuals) reads one product's result and writes the next one's
    operand, ``moved`` bytes an element.
    """
    return _Cost(
        product=item,
        flops=2.0 * item.outputs * item.inputs / degree,
        matrices=float(item.per_token),
        weight_seconds=seconds / item.experts,
        met=item.per_token / item.experts,
        moved_bytes=moved * (item.outputs + item.inputs) * item.matrices * item.per_token / degree,
    )
