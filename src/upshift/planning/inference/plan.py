"""Define the inference workload, the formats of weights and of cached keys and values, and the InferencePlan.

The workload is the requests to the model, and how fast its answers must be. A format has the bytes with their scales, the compute
precision and the read speed. The plan has every choice that changes how a model is served, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from upshift.hardware.spec import Device
from upshift.hardware.spec import Precision as MatrixPrecision
from upshift.value import Value

ProgramName = Literal["upshift", "vllm", "tensorrt-llm", "llama.cpp", "mlc"]
OWN: ProgramName = "upshift"
PROGRAM_NAMES: tuple[ProgramName, ...] = get_args(ProgramName)
DEFAULT_GROUP = 128
# Requests at once in a replica, unless requested: TensorRT-LLM's default, and schedulers are built for no more.
MAX_SEQUENCES = 2048


class ServingProgram(NamedTuple):
    """A program that serves models. ``values``: those that it has words for, by field of a plan; other fields have any value.

    ``interval``: 5 and 95 % of measured over predicted tokens/s of published rows, each source predicted by factors that did not
    see it and counted once, those of the program twice (benchmarks/cases/leave_one_out_inference.py).
    """

    interval: tuple[float, float]
    values: Mapping[str, Sequence[Any]] = {}
    max_sequences: int = MAX_SEQUENCES
    group_size: int = DEFAULT_GROUP


# A program without published rows: the interval of all sources, and how much the medians of engines differ.
NEW_PROGRAM_INTERVAL = (0.44, 1.54)
PLAIN_CACHE = ("fp32", "bf16", "fp16")
# llama.cpp: at most LLAMA_MAX_SEQ sequences (llama-cparams.h), blocks of 32 weights (Q4_0, Q8_0), GPUs share layers by depth.
# MLC: the formats of its documentation (q0f16, q4f16_1 with groups of 32, e4m3). vLLM has fp8 caches, and no int8 ones.
PROGRAMS: Mapping[ProgramName, ServingProgram] = {
    "upshift": ServingProgram(NEW_PROGRAM_INTERVAL),
    "vllm": ServingProgram((0.46, 1.31), {"kv_cache": (*PLAIN_CACHE, "fp8")}),
    "tensorrt-llm": ServingProgram((0.47, 1.42), {"execution": ("graphs",)}),
    "llama.cpp": ServingProgram(
        NEW_PROGRAM_INTERVAL,
        {
            "weights": ("fp32", "bf16", "fp16", "int8", "int4"),
            "kv_cache": (*PLAIN_CACHE, "int8"),
            "tensor_parallel": (1,),
        },
        max_sequences=256,
        group_size=32,
    ),
    "mlc": ServingProgram(
        NEW_PROGRAM_INTERVAL,
        {"weights": ("fp32", "bf16", "fp16", "fp8", "int4"), "kv_cache": PLAIN_CACHE, "execution": ("graphs",)},
        group_size=32,
    ),
}


class InferenceWorkload(Value):
    """The requests to a model, the limits of its latency, and the changes of the mathematics that the user allows."""

    task: Literal["generate", "encode"] = "generate"
    prompt_length: int = Field(gt=0, description="tokens of a prompt; of a sequence to encode")
    output_length: int = Field(0, ge=0, description="tokens generated for a prompt; none to encode")
    concurrency: int | None = Field(None, gt=0, description="requests at once; None: as many as give the highest throughput")
    max_ttft_ms: float | None = Field(None, gt=0, description="time to first token; of a whole batch to encode")
    max_tpot_ms: float | None = Field(None, gt=0, description="time per output token after the first, mean")
    allow: tuple[str, ...] = Field((), description="choices that change the mathematics, allowed by the user")
    program: ProgramName = Field(OWN, description="the program that serves")

    @property
    def runs_in(self) -> ServingProgram:
        """Return what is known about the program that serves."""
        return PROGRAMS[self.program]

    @property
    def longest(self) -> int:
        """Return the number of tokens of a complete sequence."""
        return self.prompt_length + self.output_length

    @property
    def decode_steps(self) -> int:
        """Return the number of decode steps of a sequence. Its first token comes from the prompt's pass."""
        return max(self.output_length - 1, 0)


WeightPrecision = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
CachePrecision = Literal["fp32", "bf16", "fp16", "fp8", "int8"]

# Choices that change the mathematics, by the name the user allows them with.
CHANGES_MATHEMATICS: dict[str, str] = {
    "fp8-weights": "matrix products of the layers in fp8, weights scaled by output, activations by token",
    "int8-weights": "weights of the layers' matrices rounded to 8 bits, scaled by output",
    "int4-weights": "weights of the layers' matrices rounded to 4 bits, scaled by group",
    "fp8-kv": "cached keys and values in fp8",
    "int8-kv": "cached keys and values in 8 bits, scaled by token and head",
}


class WeightFormat(NamedTuple):
    """The bytes of stored weights, and the rates of products with them."""

    weight_bytes: float  # of one weight of a layer's matrix, without its scale
    scale_bytes: float  # of one scale, zero point included
    grouped: bool  # one scale for a group of inputs of an output; else one for an output
    computes: MatrixPrecision
    read_share: float  # of the bandwidth that plain weights reach
    product_share: float  # of the matrix products' efficiency in ``computes``
    allow: str | None


# The shares are those of the rates that plain weights reach.
# fp8: vLLM 0.13's prefill of Llama-3.1-8B on an H100 is 1.46 times as fast in fp8 (rowwise) as in bf16, with twice the peak
# (torchao README, commit 36027d8): 0.73, the scaling of activations included.
# int8, int4, read: gpt-fast's Llama-2-7B at batch 1 on an A100 takes 0.674 of bf16's time with 8 bits and 0.533 with 4 bits
# (groups of 32, 5 bits a weight with scale and zero point): 0.75 and 0.59 of the bytes a second.
# int8, int4, products: weights are dequantized to bf16 inside the kernel. 0.9 is assumed, for kernels that fuse this; the only
# known measurement, vLLM's int8 without fusing at 128 sequences, is less than half as fast as predicted with it.
WEIGHTS: dict[WeightPrecision, WeightFormat] = {
    "fp32": WeightFormat(4.0, 0.0, False, "fp32", 1.0, 1.0, None),
    "bf16": WeightFormat(2.0, 0.0, False, "bf16", 1.0, 1.0, None),
    "fp16": WeightFormat(2.0, 0.0, False, "fp16", 1.0, 1.0, None),
    "fp8": WeightFormat(1.0, 4.0, False, "fp8", 1.0, 0.73, "fp8-weights"),
    "int8": WeightFormat(1.0, 2.0, False, "bf16", 0.75, 0.9, "int8-weights"),
    "int4": WeightFormat(0.5, 4.0, True, "bf16", 0.59, 0.9, "int4-weights"),
}

CACHE_BYTES: dict[CachePrecision, float] = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
CACHE_SCALE_BYTES: dict[CachePrecision, float] = {"int8": 4.0}  # of one vector: a head's keys, or values, of one token
CACHE_ALLOW: dict[CachePrecision, str] = {"fp8": "fp8-kv", "int8": "int8-kv"}


def plain_bytes(weights: WeightPrecision) -> int:
    """Return the bytes of one activation, and of one weight that is not quantized: embedding, head, norms and biases."""
    return 4 if weights == "fp32" else 2


Execution = Literal["eager", "graphs"]
CHOICE_KINDS = ("weights", "kv", "replicas", "tp", "pp", "at once", "prefill", "execution")


class ReplicaShape(NamedTuple):
    """The fields of a plan that determine a replica's weights, cache and time of a step."""

    weights: WeightPrecision
    kv_cache: CachePrecision
    tensor_parallel: int
    pipeline_parallel: int
    execution: Execution
    group_size: int = DEFAULT_GROUP


class InferencePlan(Value):
    """A plan for inference. Degrees multiply: devices = replicas x tensor_parallel x pipeline_parallel."""

    device: Device
    host: str = Field(description="fingerprint of the host that it was made for")
    model: str = Field(description="hash of the model config that it was made for")
    weights: WeightPrecision = Field(description="of the layers' matrices; embedding, head and norms stay in 16 or 32 bits")
    group_size: int = Field(DEFAULT_GROUP, gt=0, description="weights that share a scale (int4)")
    kv_cache: CachePrecision = Field(description="of cached keys and values")
    tensor_parallel: int = Field(1, gt=0, description="devices that share every layer's matrices")
    pipeline_parallel: int = Field(1, gt=0, description="devices that share the layers by depth")
    replicas: int = Field(1, gt=0, description="copies of the model, each with its part of the requests")
    max_concurrency: int = Field(gt=0, description="sequences that one replica holds at once")
    prefill_chunk_tokens: int = Field(gt=0, description="most prompt tokens of one step; longer prompts take several")
    execution: Execution = Field(description="graphs: a step is replayed (CUDA graphs, or compiled); eager: kernel by kernel")

    @property
    def num_devices(self) -> int:
        return self.replicas * self.tensor_parallel * self.pipeline_parallel

    @property
    def mechanisms(self) -> tuple[bool, ...]:
        """Return which kinds of parallelism the plan uses beside copies of the model."""
        return self.tensor_parallel > 1, self.pipeline_parallel > 1

    @property
    def changes_mathematics(self) -> tuple[str, ...]:
        """Return the names, for ``--allow``, of the plan's choices that change the mathematics."""
        names = (WEIGHTS[self.weights].allow, CACHE_ALLOW.get(self.kv_cache))
        return tuple(name for name in names if name is not None)

    def choices(self) -> tuple[tuple[str, str], ...]:
        """Return (kind, text) for each choice that is not the plain one. Kinds are those of CHOICE_KINDS."""
        choices = (
            (True, "weights", self.weights if self.weights != "int4" else f"int4 g{self.group_size}"),
            (self.kv_cache != self.weights, "kv", f"kv {self.kv_cache}"),
            (self.replicas > 1, "replicas", f"{self.replicas} replicas"),
            (self.tensor_parallel > 1, "tp", f"tp {self.tensor_parallel}"),
            (self.pipeline_parallel > 1, "pp", f"pp {self.pipeline_parallel}"),
            (True, "at once", f"{self.max_concurrency} at once"),
            (True, "prefill", f"prefill {self.prefill_chunk_tokens}"),
            (True, "execution", self.execution),
        )
        return tuple((kind, text) for is_chosen, kind, text in choices if is_chosen)

    def label(self) -> str:
        """Return one short line: ``fp8 · kv fp8 · 4 x tp 2 · 256 at once · prefill 2048 · graphs``."""
        return " · ".join(text for _, text in self.choices())
