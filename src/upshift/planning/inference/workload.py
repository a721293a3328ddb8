"""Define the inference workload: the requests to the model, and how fast its answers must be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from upshift.value import Value


class InferenceWorkload(Value):
    task: Literal["generate", "encode"] = "generate"
    prompt_length: int = Field(gt=0, description="tokens of a prompt; of a sequence to encode")
    output_length: int = Field(0, ge=0, description="tokens generated for a prompt; none to encode")
    concurrency: int | None = Field(None, gt=0, description="requests at once; None: as many as give the highest throughput")
    max_ttft_ms: float | None = Field(None, gt=0, description="time to first token; of a whole batch to encode")
    max_tpot_ms: float | None = Field(None, gt=0, description="time per output token after the first, mean")
    allow: tuple[str, ...] = Field((), description="choices that change the mathematics, allowed by the user")

    @property
    def longest(self) -> int:
        """Return the tokens of a sequence when its last token is there."""
        return self.prompt_length + self.output_length

    @property
    def decode_steps(self) -> int:
        """Return the decode steps of a sequence: its first token comes from the prompt's own pass."""
        return max(self.output_length - 1, 0)
