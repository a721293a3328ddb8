"""How a model's directory says that its outputs become the answer: which outputs, pooling, normalization, longest text.

sentence-transformers directories say it in modules.json and the folders it names; classifiers of texts and of tokens by their
architecture. A plain encoder says nothing: then the mean over its tokens is taken, unless the user asks otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.value import Value

Output = Literal["embeddings", "class scores", "token scores"]
Pooling = Literal["mean", "cls", "last", "max"]
CLASSIFIERS: dict[str, Output] = {"ForSequenceClassification": "class scores", "ForTokenClassification": "token scores"}
POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}


class Recipe(Value):
    output: Output
    pooling: Pooling = "mean"
    normalize: bool = False
    special: tuple[int, int] = (0, 0)  # tokens that the tokenizer puts before and behind a text: they are given no scores
    max_length: int | None = None  # tokens of a text; None: as the tokenizer and the model's positions say
    said_by: str  # where it was read


def read_recipe(source: ModelSource) -> Recipe:
    """Raises RequestError for a pooling or a module that is not known, naming it."""
    for name in source.config.get("architectures") or ():
        for ending, output in CLASSIFIERS.items():
            if name.endswith(ending):
                return Recipe(output=output, said_by="the model's architecture")
    if source.directory is None or not (source.directory / "modules.json").is_file():
        return Recipe(output="embeddings", said_by="default: the model's files say nothing")
    pooling: Pooling = "mean"
    normalize = False
    for module in _read(source.directory / "modules.json"):
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling(source.directory / module["path"] / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise RequestError(
                f"{source.reference!r} has a {kind} module, which is not supported; supported are Transformer, Pooling, Normalize"
            )
    settings = source.directory / "sentence_bert_config.json"
    longest = _read(settings).get("max_seq_length") if settings.is_file() else None
    return Recipe(output="embeddings", pooling=pooling, normalize=normalize, max_length=longest, said_by="modules.json")


def is_encoder(source: ModelSource) -> bool:
    """Whether its files say that texts become vectors or scores: sentence-transformers' do so of language models, too."""
    if source.directory is not None and (source.directory / "modules.json").is_file():
        return True
    names = source.config.get("architectures") or ()
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names)
    return not generates and not source.config.get("is_encoder_decoder")


def _pooling(path: Path) -> Pooling:
    config = _read(path)
    named = config.get("pooling_mode")
    chosen = [name for flag, name in POOLING_FLAGS.items() if config.get(flag) or named == name]
    unknown = [flag for flag, value in config.items() if flag.startswith("pooling_mode_") and value and flag not in POOLING_FLAGS]
    if len(chosen) != 1 or unknown:
        said = ", ".join(chosen + unknown) or "none"
        raise RequestError(f"{path} asks for pooling {said}; supported is one of {', '.join(POOLING_FLAGS.values())}")
    return chosen[0]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {path} ({error}); save the model again") from None
