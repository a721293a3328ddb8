"""The part of the GPU check that writes what the other parts train on."""

from __future__ import annotations

from pathlib import Path

from gpu_process import PartRequest
from gpu_rows import Answer
from gpu_sizes import sizes_for
from trainer_data import write_inputs, write_model


def write_data(request: PartRequest) -> Answer:
    """Write the two models' configs, one tokenizer, and the standard library's source as rows of token ids."""
    from transformers import AutoTokenizer

    sizes = sizes_for(request)
    request.work.mkdir(exist_ok=True)
    model, data = write_inputs(request.work, sizes.small, full_length=False, max_files=sizes.max_files)
    if sizes.large is not None:
        write_model(request.work / "large", AutoTokenizer.from_pretrained(model), sizes.large)
    with Path(data).open(encoding="utf-8") as file:
        rows = sum(1 for _ in file)
    return Answer(reason=f"{rows:,} rows of at most {sizes.small.sequence_length} tokens")
