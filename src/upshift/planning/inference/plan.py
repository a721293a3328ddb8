"""Define the InferencePlan: every choice that changes how a model is served, and nothing else."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from upshift.hardware.spec import Device
from upshift.planning.inference.formats import CACHE_ALLOW, WEIGHTS, CachePrecision, WeightPrecision
from upshift.value import Value

Execution = Literal["eager", "graphs"]
DEFAULT_GROUP = 128


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
    def changes_mathematics(self) -> tuple[str, ...]:
        """Return the names, for ``--allow``, of the plan's choices that change the mathematics."""
        names = (WEIGHTS[self.weights].allow, CACHE_ALLOW.get(self.kv_cache))
        return tuple(name for name in names if name is not None)

    def label(self) -> str:
        """Return one short line: ``fp8 · kv fp8 · 4 x tp 2 · 256 at once · prefill 2048 · graphs``."""
        parts = [self.weights if self.weights != "int4" else f"int4 g{self.group_size}"]
        if self.kv_cache != self.weights:
            parts.append(f"kv {self.kv_cache}")
        degrees = [f"tp {self.tensor_parallel}"] if self.tensor_parallel > 1 else []
        degrees += [f"pp {self.pipeline_parallel}"] if self.pipeline_parallel > 1 else []
        copies = [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += copies + degrees
        parts += [f"{self.max_concurrency} at once", f"prefill {self.prefill_chunk_tokens}", self.execution]
        return " · ".join(parts)
