"""Define ``upshift.xla.generate``: the one call. Programs that were compiled before are found again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from upshift.errors import RequestError
from upshift.xla.build import XlaModel, build
from upshift.xla.generation.generator import XlaGenerator
from upshift.xla.kept import keep_programs


def generate(model: str | XlaModel, prompts: Sequence[str] | Sequence[Sequence[int]], **options: Any) -> list[Any]:
    """Return texts behind prompts that are texts, or token ids behind token ids. ``options`` have transformers'
    names, such as max_new_tokens, do_sample, temperature, top_k, top_p, num_beams, seed. For several calls keep an
    XlaGenerator."""
    if isinstance(prompts, str):
        raise RequestError("generate() takes a list of prompts and was given one text; use generate(model, [text])")
    keep_programs()
    generator = XlaGenerator(build(model) if isinstance(model, str) else model)
    if not any(isinstance(prompt, str) for prompt in prompts):
        return generator.generate(prompts, **options)  # type: ignore[arg-type]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(generator.model.source.directory)
    found = generator.generate([tokenizer(prompt).input_ids for prompt in prompts], **options)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]
