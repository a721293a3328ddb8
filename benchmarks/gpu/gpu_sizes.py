"""Choose the sizes of the models and runs of the GPU check by the GPU's memory, and name the files of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_process import PartRequest
from trainer_data import QUICK, Size

from upshift.benchmarking.case import Case
from upshift.hardware import detect

GIB = 2**30
SEED = 42
VOCABULARY = 16384  # for which one tokenizer is trained, in seconds
SMALL = Size(VOCABULARY, 768, 2048, 14, 12, 512, 20)  # 124 M parameters
SMALLER = Size(VOCABULARY, 512, 1408, 8, 8, 256, 20)  # 42 M, for cards of 8 GB
HALF = Size(VOCABULARY, 1536, 4096, 16, 12, 512, 16)  # 0.5 B
LARGE = Size(VOCABULARY, 2048, 5632, 28, 16, 512, 16)  # 1.5 B
TINY = Size(QUICK.vocab_size, 128, 256, 2, 4, 64, 6)
# Bytes of weights, gradients and AdamW's states in fp32, 16 a parameter, and room for activations.
SMALL_BYTES = 10 * GIB  # Trainer's defaults hold 6 GiB of activations of 8 sequences of 512 tokens
HALF_BYTES = 12 * GIB
LARGE_BYTES = 30 * GIB
ROOMY_BYTES = 38 * GIB  # Trainer's defaults hold 20 GiB of activations of 32 sequences of 512 tokens
BERT_BYTES = 15 * GIB  # the guide's first setting holds 13 GiB
BERT_LARGE = {
    "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts.

    large: the model of train-large, None if the GPU is too small for one. max_files: of source, to tokenize.
    settings: fields of the BERT of the nine settings; settings_length: its tokens. texts: to encode.
    shape: a key of the generate case's SHAPES; tokens: to generate for each prompt.
    """

    small: Size
    large: Size | None
    global_batch: int
    trial_seconds: float
    max_files: int | None
    settings: dict[str, Any]
    settings_length: int
    settings_steps: int
    texts: int
    shape: str
    prompts: int
    tokens: int


def sizes_for(request: PartRequest) -> Sizes:
    """Return tiny sizes for --quick, else those for the free memory of the GPU that has least."""
    from nine_settings import FULL as BERT_SMALL
    from nine_settings import QUICK as BERT_TINY

    if request.quick:
        return Sizes(TINY, TINY, 8, 3.0, 40, BERT_TINY, 64, 3, 16, "quick", 2, 8)
    free = request.free_bytes
    large = LARGE if free >= LARGE_BYTES else HALF if free >= HALF_BYTES else None
    batch = 32 if free >= ROOMY_BYTES else 8
    bert = BERT_LARGE if free >= BERT_BYTES else BERT_SMALL
    small = SMALL if free >= SMALL_BYTES else SMALLER
    return Sizes(small, large, batch, 15.0, None, bert, 512, 6, 512, "125m", 8, 128)


def case_for(request: PartRequest, name: str, settings: dict[str, Any]) -> Case:
    """Return the collector of the rows of results/NAME.jsonl."""
    return Case(name, request.results, detect(), request.quick, {"seed": SEED, **settings})
