"""Predict the rates of one device, the seconds of a step of one replica, and the latency and throughput under load.

Rates are those of matrix products by size, memory and launches. They are measured where the host was probed. Elsewhere they are
the datasheet's, times the share that such parts reach.

A step computes a number of prompt tokens and of decoding sequences. Each matrix product has a roofline: t = max(FLOPs / (rate x
efficiency of its size), weights / bandwidth). The time of the products is increased by cache reads, attention of prompts, memory
traffic of activations, exchanges between devices, and launches.

Batching is continuous: when a request ends, the next one takes its place, and its prompt is computed in chunks while the others
decode. In the steady state each decoding step is followed by P = D I / (O - 1) prompt tokens in the mean (D sequences decode,
prompts have I tokens, answers O). Little's law relates concurrency, throughput and latency: concurrency = requests/s x (time to
first token + (O - 1) x time per token).
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from math import ceil, log
from typing import Literal, NamedTuple

from upshift.hardware import memory_efficiency
from upshift.hardware.catalog.efficiency import GEMM_CLASSES, LARGE_GEMM_EFFICIENCY, efficiency_row, gemm_shares
from upshift.hardware.spec import Gpu, Host, Rates
from upshift.hardware.spec import Precision as MatrixPrecision
from upshift.models.profile import ModelProfile
from upshift.planning.cost.network import Group, collective_seconds, hop_seconds
from upshift.planning.cost.rates import (
    CPU_ATTENTION_SHARE,
    CPU_DISPATCH_SECONDS,
    DEFAULT_GEMM_EFFICIENCY,
    DEFAULT_MEMORY_EFFICIENCY,
)
from upshift.planning.cost.time import COMPILED_MOVED_SHARE
from upshift.planning.inference.memory import (
    Product,
    decode_attention_flops,
    mean_read_bytes,
    products_of,
    prompt_attention_flops,
)
from upshift.planning.inference.plan import (
    WEIGHTS,
    Execution,
    InferenceWorkload,
    ReplicaShape,
    WeightFormat,
    WeightPrecision,
    plain_bytes,
)

GPU_ATTENTION_SHARE = 0.6  # of the matrix rate: forward FlashAttention 2 against GEMM on A100, Dao 2023, figure 4
# Share of the bandwidth that reading the cache reaches. Split over the sequence, as in FlashDecoding and paged attention, it is a
# plain stream.
CACHE_READ_SHARE = 0.8
# The same for reading weights for few tokens: gpt-fast's Llama-2-7B on an A100 (batch 1, bf16) and TensorRT-LLM's Llama 3.1 8B on
# an H100 (2 requests/s, bf16) leave 7.8 and 5.3 ms for 13.2 and 15.0 GB, launches taken off: 0.83 and 0.85.
WEIGHT_READ_SHARE = 0.84
# Seconds a layer. Replayed, gaps between some ten kernels that the device cannot fill; eagerly, what Python takes to queue them
# (LitGPT's Llama 2 7B at batch 1 on an A100: 32 ms for 32 layers).
LAYER_SECONDS: dict[Execution, float] = {"graphs": 2.2e-5, "eager": 1.0e-3}
CPU_DISPATCHES_PER_LAYER = 180.0  # eager modules and operators of a layer, over one bare operator
CPU_GRAPH_SHARE = 0.3  # of these dispatches, those that compiling leaves: COMPILED_KERNEL_SHARE of planning.cost.time
LOG_CENTRES = tuple(log(bound * 10**0.5) for bound in GEMM_CLASSES)  # of the classes, each a decade


@dataclass(frozen=True)
class DeviceRates:
    """The rates of one device.

    ``efficiencies``: shares of ``matrix`` at the centres of GEMM_CLASSES; empty: the same rate for every size.
    """

    matrix: float
    outside: float  # the rate of products with embedding and head, which are not quantized
    attention: float
    memory: float
    weights: float  # bytes of weights a second, where few tokens use them
    cache: float
    layer_seconds: float
    efficiencies: tuple[float, ...] = ()

    def efficiency(self, flops: float) -> float:
        """Return the efficiency of one product.

        It lies between the classes' centres on a logarithmic scale, so that more work never takes less time.
        """
        shares = self.efficiencies
        if not shares:
            return 1.0
        log_flops = log(flops) if flops > 1.0 else 0.0
        if log_flops <= LOG_CENTRES[0]:
            return shares[0]
        if log_flops >= LOG_CENTRES[-1]:
            return shares[-1]
        above = bisect(LOG_CENTRES, log_flops)
        low = LOG_CENTRES[above - 1]
        high = LOG_CENTRES[above]
        return shares[above - 1] + (shares[above] - shares[above - 1]) * (log_flops - low) / (high - low)


def device_rates(host: Host, weights: WeightPrecision, computes: MatrixPrecision, execution: Execution) -> DeviceRates | None:
    """Return the device's rates; None where the rate in this precision is unknown. Such a plan cannot be ranked."""
    outside_precision: MatrixPrecision = weights if weights in ("fp32", "fp16") else activation_precision(host)
    if computes == "bf16":
        computes = outside_precision
    if host.device == "cpu":
        return _cpu_rates(host, computes, outside_precision, execution)
    return _gpu_rates(host, computes, outside_precision, execution)


def activation_precision(host: Host) -> Literal["bf16", "fp16", "fp32"]:
    """Return the precision of activations with weights of fewer bits. CPUs without bf16 compute in fp32."""
    if host.supports("bf16") is not False:
        return "bf16"
    return "fp32" if host.device == "cpu" else "fp16"


def _gpu_rates(
    host: Host, computes: MatrixPrecision, outside_precision: MatrixPrecision, execution: Execution
) -> DeviceRates | None:
    gpu = host.gpu
    measured = host.measured_gpu
    if gpu is None or (gpu.peak is None and measured is None):
        return None
    key = gpu.table_key or ""
    shares = _efficiencies_by_class(efficiency_row(gpu, outside_precision))
    rates = gpu.peak
    memory_share = memory_efficiency(key) or DEFAULT_MEMORY_EFFICIENCY
    large_share = _largest_share(gpu, outside_precision)
    if measured is None:
        shares = shares or (large_share,) * len(GEMM_CLASSES)
    else:
        rates, memory_share = _measured_or_listed(measured, gpu.peak, large_share, memory_share)
        # Large products were measured, so only the loss of smaller ones counts.
        shares = tuple(min(share / max(shares), 1.0) for share in shares)
    assert rates is not None
    matrix = rates.matrix(computes)
    outside = rates.matrix(outside_precision)
    bandwidth = rates.memory_bytes_per_second
    if matrix is None or outside is None or bandwidth is None:
        return None
    if host.measured is None or host.measured.gpu is None or host.measured.gpu.matrix(computes) is None:
        matrix *= _largest_share(gpu, computes) / large_share
    memory = bandwidth * memory_share
    return DeviceRates(
        matrix=matrix,
        outside=outside,
        attention=outside * GPU_ATTENTION_SHARE * (max(shares) if shares else 1.0),
        memory=memory,
        weights=max(bandwidth * WEIGHT_READ_SHARE, memory),
        cache=max(bandwidth * CACHE_READ_SHARE, memory),
        layer_seconds=LAYER_SECONDS[execution],
        efficiencies=shares,
    )


def _measured_or_listed(measured: Rates, listed: Rates | None, matrix_share: float, memory_share: float) -> tuple[Rates, float]:
    """Return the measured rates, and the datasheet's with the share that products reach where no rate was measured.

    Return also the share of their bandwidth that a program reaches: all of it if it was measured."""
    probed = {name: rate for name, rate in measured.model_dump().items() if rate is not None}
    estimated: dict[str, float] = {}
    if listed is not None:
        estimated = {name: rate * matrix_share for name, rate in listed.model_dump().items() if rate is not None}
        estimated |= {"memory_bytes_per_second": listed.memory_bytes_per_second} if listed.memory_bytes_per_second else {}
    is_measured = measured.memory_bytes_per_second is not None
    return Rates(**estimated | probed), 1.0 if is_measured else memory_share


def _largest_share(gpu: Gpu, precision: MatrixPrecision) -> float:
    """Return the share of the peak in this precision that the largest products reach."""
    row = efficiency_row(gpu, precision)
    return max(_efficiencies_by_class(row), default=LARGE_GEMM_EFFICIENCY.get(row, DEFAULT_GEMM_EFFICIENCY))


def _efficiencies_by_class(row: str) -> tuple[float, ...]:
    """Return the efficiencies by class. For classes that were not measured, it is that of the class below."""
    shares: list[float] = []
    for share in gemm_shares(row):
        shares.append(share if share is not None else shares[-1])
    return tuple(shares)


def _cpu_rates(
    host: Host, computes: MatrixPrecision, outside_precision: MatrixPrecision, execution: Execution
) -> DeviceRates | None:
    measured = host.measured
    cpu = host.cpu
    rates: Rates | None = cpu.peak if cpu else None
    if measured:
        rates = measured.cpu
    if rates is None:
        return None
    matrix = rates.matrix(computes)
    outside = rates.matrix(outside_precision)
    bandwidth = rates.memory_bytes_per_second
    fp32 = rates.matrix("fp32")
    if matrix is None or outside is None or bandwidth is None or fp32 is None:
        return None
    share = 1.0 if measured else DEFAULT_GEMM_EFFICIENCY
    memory = bandwidth * (1.0 if measured else DEFAULT_MEMORY_EFFICIENCY)
    dispatch = measured.dispatch_seconds if measured else CPU_DISPATCH_SECONDS
    dispatch_share = CPU_GRAPH_SHARE if execution == "graphs" else 1.0
    return DeviceRates(
        matrix=matrix * share,
        outside=outside * share,
        attention=CPU_ATTENTION_SHARE * fp32 * share,
        memory=memory,
        weights=memory,
        cache=memory,
        layer_seconds=dispatch * CPU_DISPATCHES_PER_LAYER * dispatch_share,
    )


# Seconds of the host for every step, and for each sequence that decodes in it, while the device waits: scheduler, sampling,
# tokens to text. Both are fitted on the rows of Llama-2-7B, Llama-3.1-8B and Mixtral-8x7B in benchmarks/published (8 points).
STEP_SECONDS = 1.0e-3
SEQUENCE_SECONDS = 4.0e-6
MIXTURE_SHARE = 0.8  # of a product's efficiency, because experts get unequal parts of the tokens
REDUCED_PER_LAYER = 2  # all-reduces of a tensor-parallel layer: behind attention and behind the feed-forward part
EAGER_TRAFFIC = 1.0 / COMPILED_MOVED_SHARE  # of activations, over what fused kernels leave


class StepTime(NamedTuple):
    """Seconds by term, of all stages of a pipeline one after the other."""

    weights: float = 0.0  # products that wait for their weights
    products: float = 0.0  # products that wait for their arithmetic
    cache: float = 0.0
    attention: float = 0.0  # the attention of prompts
    activations: float = 0.0
    communication: float = 0.0
    launches: float = 0.0  # launches of kernels, and the host's work between steps

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def binding_term(self) -> str:
        return max(zip(self, TERM_NAMES, strict=True))[1]


TERM_NAMES = (
    "reading weights",
    "matrix products",
    "reading the cache",
    "attention of prompts",
    "activation traffic",
    "communication",
    "launches",
)


class _ProductCost(NamedTuple):
    """The cost of one shape of matrices, on one of the tensor-parallel devices."""

    product: Product
    flops: float  # FLOPs of one matrix for one token
    matrices: float  # matrices that a token meets
    weight_seconds: float  # to read one expert's matrix, or the only one, in every layer
    met: float  # share of the tokens that meet one matrix
    moved_bytes: float  # bytes of activations for one token


@dataclass(frozen=True)
class Engine:
    """A replica, of which the time of a step can be predicted."""

    host: Host
    rates: DeviceRates
    costs: tuple[_ProductCost, ...]
    product_share: float
    head_flops: float  # for one row of logits
    head_seconds: float  # to read the head
    prompt_flops: float  # attention, for each token of a prompt
    decode_flops: float  # attention, for each decoding sequence
    cache_seconds: float  # to read one decoding sequence's cache
    reduced_bytes: float  # bytes of one token in each all-reduce
    num_reduced: int
    launch_seconds: float
    eager: bool
    tensor_parallel: int
    pipeline_parallel: int

    def step(self, prompt_tokens: float, decoding: float, *, logits: float | None = None) -> StepTime | None:
        """Return the time to pass all tokens of the replica once through all stages; None where a link is unknown.

        A pipeline has one group of sequences for each stage, so that each stage computes its part of the tokens.
        """
        stages = self.pipeline_parallel
        prompt = prompt_tokens / stages
        decode = max(decoding / stages, min(decoding, 1.0))  # with fewer sequences than stages some stages are idle
        tokens = prompt + decode
        rows = decode if logits is None else logits / stages
        weights, products, activation_seconds = self._products(tokens)
        head_compute = self.head_flops * rows / (self.rates.outside * self.rates.efficiency(self.head_flops * rows))
        if rows and head_compute >= self.head_seconds:
            products += stages * head_compute
        elif rows:
            weights += stages * self.head_seconds
        communication = self._communication(tokens)
        if communication is None:
            return None
        time = StepTime(
            weights=weights,
            products=products,
            cache=max(decode * self.cache_seconds, decode * self.decode_flops / self.rates.attention),
            attention=prompt * self.prompt_flops / self.rates.attention,
            activations=activation_seconds,
            communication=communication,
        )
        return time._replace(launches=self._launches(time.total, decoding))

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
        degree = self.tensor_parallel
        stages = self.pipeline_parallel
        node_devices = max(self.host.gpus_per_node, 1)
        num_bytes = tokens * self.reduced_bytes
        seconds = 0.0
        if degree > 1:
            all_reduce_seconds = collective_seconds(self.host, "all_reduce", num_bytes, Group(degree, 1, node_devices))
            if all_reduce_seconds is None:
                return None
            seconds += all_reduce_seconds * self.num_reduced
        if stages > 1:
            hops = hop_seconds(self.host, num_bytes, Group(stages, degree, node_devices))
            if None in hops:
                return None
            known_hops = [hop for hop in hops if hop is not None]
            seconds += sum(known_hops) + max(known_hops)  # the last stage sends each token back to the first
        return seconds

    def _launches(self, device: float, sequences: float) -> float:
        """Return the seconds of launches, and of the host's work between steps.

        Kernels run while the host queues the next ones. So in eager mode only launches that the device does not hide count.
        """
        host_seconds = STEP_SECONDS + SEQUENCE_SECONDS * sequences if self.host.device != "cpu" else 0.0
        hidden = device if self.eager and self.host.device != "cpu" else 0.0
        return host_seconds + max(self.launch_seconds - hidden, 0.0)


# Weights of fewer bits are unpacked by the general units while they are read. The shares of plain weights' rate were measured on
# an A100, which has 9.6 FLOPs of these units for a byte of its bandwidth. Another GPU has a share that is larger by its own
# ratio. Units that compute either integers or half of its peak in fp32, as in 8.6, 8.9 and 9.0, count half (NVIDIA's architecture
# papers).
MEASURED_FLOPS_PER_BYTE = 19.5 / 2.039
SHARED_INTEGER_UNITS = ((8, 6), (8, 9), (9, 0))
# No kernel unpacks for nothing: on RTX 3090, RTX 4090 and L40S 4-bit weights reached 0.71 to 0.95 of the rate of plain ones.
MOST_UNPACKED_SHARE = 0.85


def _read_share(stored: WeightFormat, host: Host) -> float:
    """Return the share of the rate of plain weights that reading these weights reaches."""
    peak = host.gpu.peak if host.gpu is not None else None
    if stored.read_share == 1.0 or host.gpu is None or peak is None or not peak.fp32 or not peak.memory_bytes_per_second:
        return stored.read_share
    units = 0.5 if host.gpu.compute_capability in SHARED_INTEGER_UNITS else 1.0
    ratio = units * peak.fp32 / peak.memory_bytes_per_second / MEASURED_FLOPS_PER_BYTE
    return min(stored.read_share * ratio, MOST_UNPACKED_SHARE)


def build_engine(host: Host, profile: ModelProfile, workload: InferenceWorkload, shape: ReplicaShape) -> Engine | None:
    """Return an engine of the shape; None where the host's rate in this precision is unknown."""
    stored = WEIGHTS[shape.weights]
    degree = shape.tensor_parallel
    size = plain_bytes(shape.weights)
    rates = device_rates(host, shape.weights, stored.computes, shape.execution)
    if rates is None:
        return None
    read_rate = rates.weights * _read_share(stored, host) * degree
    unfused = size * (EAGER_TRAFFIC if shape.execution == "eager" else 1.0)
    head = profile.parameters.whole_head if workload.task == "generate" else 0
    prompt = workload.prompt_length
    steps = workload.decode_steps
    return Engine(
        host=host,
        rates=rates,
        costs=tuple(
            _product_cost(item, item.stored_bytes(stored, shape.group_size) / read_rate, unfused, degree)
            for item in products_of(profile)
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


def _product_cost(item: Product, seconds: float, moved: float, degree: int) -> _ProductCost:
    """Return the cost of a product. ``seconds``: to read all its matrices.

    The operators between products (norms, rotation, activation, residuals) read one product's result and write the next one's
    operand, ``moved`` bytes an element.
    """
    return _ProductCost(
        product=item,
        flops=2.0 * item.outputs * item.inputs / degree,
        matrices=float(item.per_token),
        weight_seconds=seconds / item.experts,
        met=item.per_token / item.experts,
        moved_bytes=moved * (item.outputs + item.inputs) * item.matrices * item.per_token / degree,
    )


MAX_LOAD = 0.9  # share of steps with prompts up to which arrivals are taken as independent of each other
# From a request's arrival to its first step, and back: text to tokens, queues between processes. Fitted as STEP_SECONDS is.
REQUEST_SECONDS = 7e-3


@dataclass(frozen=True)
class Service:
    """The latency (in seconds) and throughput of one replica."""

    ttft: float
    tpot: float | None
    requests_per_second: float
    tokens_per_second: float  # generated tokens; when encoding, the tokens of the sequences
    step: StepTime  # the mean step's


def predict_service(engine: Engine, workload: InferenceWorkload, concurrency: int, chunk_tokens: int) -> Service | None:
    """Return the service with ``concurrency`` requests in the replica at any time; None where a link is unknown."""
    if workload.task == "encode":
        return _encode_service(engine, workload, concurrency)
    if workload.decode_steps == 0:
        return _prefill_service(engine, workload, concurrency, chunk_tokens)
    prompt = workload.prompt_length
    steps = workload.decode_steps
    block = min(chunk_tokens, prompt)  # prompt tokens that one step takes, as long as there is no more to do
    chunks = ceil(prompt / chunk_tokens)
    decoding = concurrency * steps / (steps + chunks)
    prompt_tokens = decoding * prompt / steps
    if prompt_tokens > chunk_tokens:  # prompts are the bottleneck: fewer sequences decode, the others wait for their turn
        decoding = chunk_tokens * steps / prompt
        prompt_tokens = float(chunk_tokens)
    prompt_step = engine.step(max(block, prompt_tokens), decoding)
    decode_step = engine.step(0.0, decoding)
    if prompt_step is None or decode_step is None:
        return None
    prompt_share = min(prompt_tokens / block, 1.0)  # share of the steps that have prompt tokens
    mean_step = prompt_share * prompt_step.total + (1.0 - prompt_share) * decode_step.total
    rate = decoding / steps / mean_step
    load = min(prompt_share, MAX_LOAD)
    queue_seconds = load / (2.0 * (1.0 - load)) * prompt_step.total * chunks  # M/D/1
    unloaded_ttft = REQUEST_SECONDS + mean_step / 2.0 + chunks * prompt_step.total
    ttft = max(min(unloaded_ttft + queue_seconds, unloaded_ttft * concurrency), concurrency / rate - steps * mean_step)
    step = prompt_step if prompt_share * prompt_step.total >= (1.0 - prompt_share) * decode_step.total else decode_step
    return Service(ttft, mean_step, rate, rate * workload.output_length, step)


def _prefill_service(engine: Engine, workload: InferenceWorkload, concurrency: int, chunk_tokens: int) -> Service | None:
    """Return the service of requests for one token: prompts fill steps, one after the other."""
    tokens = concurrency * workload.prompt_length
    steps = ceil(tokens / chunk_tokens)
    step = engine.step(tokens / steps, 0.0, logits=concurrency / steps)
    if step is None:
        return None
    seconds = steps * step.total
    return Service(REQUEST_SECONDS + seconds, None, concurrency / seconds, concurrency / seconds, step)


def _encode_service(engine: Engine, workload: InferenceWorkload, concurrency: int) -> Service | None:
    """Return the service of encoding, one batch at a time."""
    step = engine.step(float(concurrency * workload.prompt_length), 0.0, logits=0.0)
    if step is None:
        return None
    rate = concurrency / step.total
    return Service(step.total, None, rate, rate * workload.prompt_length, step)
