"""Define the layout: how the ranks of a job share the model, its states and its batch."""

from __future__ import annotations

from math import isqrt
from typing import Literal

from pydantic import Field

from upshift.value import Value

FullyShard = Literal["no", "optimizer", "gradients", "weights"]  # ZeRO stages 0 to 3; weights: torch's fully_shard
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
ContextKind = Literal["ring", "ulysses"]


class Layout(Value):
    """The degrees of parallelism of a job: ranks = data parallel x tensor x context x pipeline.

    Ranks of a tensor-parallel group are neighbours, then those of context, of data and of pipeline parallelism.
    """

    fully_shard: FullyShard = Field("no", description="what the data-parallel ranks divide among them (ZeRO 0, 1, 2, 3)")
    shard_size: int = Field(1, gt=0, description="ranks that divide it; fewer than all data-parallel ones: hybrid")
    master_weights: bool = Field(
        False, description="weights in bf16, gradients summed in fp32; the fp32 weights are divided with the optimizer's state"
    )
    bf16_gradients: bool = Field(False, description="beside master_weights: gradients are summed in bf16, too")
    overlap: bool = Field(True, description="gradients and weights are exchanged while others are computed")
    tensor_parallel: int = Field(1, gt=0, description="ranks that share every layer's matrices")
    sequence_parallel: bool = Field(False, description="these ranks also share the tokens between the matrices")
    gather_again: bool = Field(False, description="they keep their own tokens of a matrix's input, gathered again backward")
    vocabulary_parallel: bool = Field(False, description="each of them has the logits, loss and embedding of its own words alone")
    context_parallel: int = Field(1, gt=0, description="ranks that share every sequence")
    context_kind: ContextKind = Field("ring", description="keys go round, or heads are exchanged (ulysses)")
    pipeline_parallel: int = Field(1, gt=0, description="ranks that share the layers by depth")
    pipeline_schedule: Schedule = "1f1b"
    virtual_stages: int = Field(1, gt=0, description="stages of each pipeline rank (interleaved_1f1b)")
    expert_parallel: int = Field(1, gt=0, description="ranks that share the experts")

    @property
    def ranks_per_replica(self) -> int:
        """Return the number of ranks that compute the same sequences together."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def gathers(self) -> bool:
        """Return whether weights are whole only where they are needed, and gradients are divided layer by layer (fully_shard)."""
        return self.fully_shard in ("gradients", "weights")

    @property
    def splits_backward(self) -> bool:
        """Return whether a layer's backward pass runs first for its input, and later for its weights."""
        return self.pipeline_parallel > 1 and self.pipeline_schedule == "zero_bubble"

    @property
    def exchanges(self) -> bool:
        """Return whether ranks wait for each other within a micro-batch, so that all must run it."""
        return self.gathers or self.ranks_per_replica > 1 or self.expert_parallel > 1

    def label(self) -> str:
        """Return a short text such as ``zero3 8 · tp 4 sp · pp 2 1f1b``; empty on one rank."""
        stages = {"no": "", "optimizer": "zero1", "gradients": "zero2", "weights": "zero3"}
        master = " master weights" * self.master_weights + " bf16 gradients" * self.bf16_gradients
        parts = [f"{stages[self.fully_shard]} {self.shard_size}{master}"] if self.fully_shard != "no" else []
        if self.tensor_parallel > 1:
            gathered = " gathered again" * self.gather_again
            vocabulary = " vocabulary" * self.vocabulary_parallel
            parts.append(f"tp {self.tensor_parallel}" + (" sp" if self.sequence_parallel else "") + gathered + vocabulary)
        if self.context_parallel > 1:
            parts.append(f"cp {self.context_parallel} {self.context_kind}")
        if self.pipeline_parallel > 1:
            stages_each = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
            parts.append(f"pp {self.pipeline_parallel}{stages_each} {self.pipeline_schedule}")
        if self.expert_parallel > 1:
            parts.append(f"ep {self.expert_parallel}")
        if not self.overlap:
            parts.append("no overlap")
        return " · ".join(parts)


def divisors(number: int) -> list[int]:
    """Return the degrees in which ``number`` ranks, layers or experts can be shared."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def why_not_split(layout: Layout) -> str | None:
    """Return why the layout cannot run zero_bubble; None where it can, or where it has another schedule."""
    if not layout.splits_backward:
        return None
    request = "pipeline_schedule=zero_bubble"
    advice = "use pipeline_schedule=1f1b"
    if layout.fully_shard == "weights":
        return f"{request} needs a layer's weights when fully_shard=weights has let go of them; {advice}"
    if layout.master_weights:
        return f"{request} makes gradients where master_weights does not see them to sum them; {advice}"
    return None
