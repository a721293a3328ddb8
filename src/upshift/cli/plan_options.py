"""Reject options of ``upshift plan`` that its question does not use. Such an option is never ignored."""

from __future__ import annotations

from typing import Literal

import typer

from upshift.cli.given import given_options
from upshift.errors import RequestError

Instead = Literal["--largest", "--compare", "--check"]  # these answers come instead of a ranking
Question = Literal["--train", "--generate", "--encode", Instead]
OF_TRAINING = (
    "train", "data", "text_column", "risk", "max_grad_norm", "steps", "lora_rank", "load_in_4bit", "why", "shadow_prices",
    "largest", "compare", "price", "tokens", "deadline", "lock", "check", "html",
)  # fmt: skip
OF_SEQUENCES = ("sequence_length", "global_batch")
OF_PROMPTS = ("prompt_length", "output_length", "concurrency")
LIMITS = ("max_ttft_ms", "max_tpot_ms")
OF_A_RANKING = ("html", "rows")
UNUSED: dict[Question, tuple[str, ...]] = {
    "--train": (*OF_PROMPTS, *LIMITS),
    "--generate": (*OF_TRAINING, *OF_SEQUENCES),
    "--encode": (*OF_TRAINING, *OF_PROMPTS),
    "--largest": (*OF_PROMPTS, *LIMITS, *OF_A_RANKING),
    "--compare": (*OF_PROMPTS, *LIMITS, *OF_A_RANKING),
    "--check": (*OF_PROMPTS, *LIMITS, *OF_A_RANKING),
}


def refuse_unused(context: typer.Context, question: Question) -> None:
    """Raise RequestError that names every option on the command line that the question does not use."""
    written = given_options(context)
    given = [written[name] for name in UNUSED[question] if name in written]
    if given:
        asked = "a training plan" if question == "--train" else question
        instead = ", or ask with --generate or --encode" if question == "--train" else ""
        raise RequestError(f"{asked} does not use {', '.join(given)}; leave {'them' if given[1:] else 'it'} out{instead}")
