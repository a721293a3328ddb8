"""Read how outputs become the answer from a model's directory: the prompt before a text, its longest length, the
outputs, pooling, normalization.

sentence-transformers directories say it in modules.json and the folders it names. Classifiers of texts and of tokens
say it by their architecture. A plain encoder says nothing: then the mean over its tokens is taken, unless the user
asks otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from upshift.errors import RequestError
from upshift.models.config import read_json
from upshift.models.source import ModelSource
from upshift.value import Value

Output = Literal["embeddings", "class scores", "token scores"]
Pooling = Literal["mean", "cls", "last", "max"]
CLASSIFIERS: dict[str, Output] = {"sequence-classification": "class scores", "token-classification": "token scores"}
GENERATES = ("causal-lm", "seq2seq-lm")
MODES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}  # by sentence-transformers' names
FLAGS = {  # of its files before they named the mode
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
TRANSFORMER = tuple(  # the first that is there; the others are of its first years
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
PROMPTS = "config_sentence_transformers.json"


class Recipe(Value):
    output: Output
    pooling: Pooling = "mean"
    normalize: bool = False
    special: tuple[int, int] = (0, 0)  # tokens that the tokenizer puts before and behind a text: they are given no scores
    max_length: int | None = None  # tokens of a text; None: as the tokenizer and the model's positions say
    prompt: str = ""  # put before every text
    lower_case: bool = False  # of every text
    said_by: str  # where it was read


def read_recipe(source: ModelSource) -> Recipe:
    """Return the recipe of a model. Raise RequestError that names a pooling or a module that is not known."""
    from upshift.models.build import find_architecture

    objective = find_architecture(source.hf_config, source.reference).objective
    if objective in CLASSIFIERS:
        return Recipe(output=CLASSIFIERS[objective], said_by="the model's architecture")
    if source.directory is None or not (source.directory / "modules.json").is_file():
        return Recipe(output="embeddings", said_by="default: the model's files say nothing")
    pooling: Pooling = "mean"
    normalize, prompt = False, _prompt(source.directory)
    for module in read_json(source.directory / "modules.json"):
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling(source.directory / module["path"] / "config.json", prompt)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise RequestError(
                f"{source.reference!r} has a {kind} module, which is not supported; supported are Transformer, Pooling, Normalize"
            )
    settings = next((file for name in TRANSFORMER if (file := source.directory / name).is_file()), None)
    said = read_json(settings) if settings is not None else {}
    return Recipe(
        output="embeddings", pooling=pooling, normalize=normalize, max_length=said.get("max_seq_length"), prompt=prompt,
        lower_case=bool(said.get("do_lower_case")), said_by="modules.json",
    )  # fmt: skip


def is_encoder(source: ModelSource) -> bool:
    """Return whether texts become vectors or scores, and not other texts: sentence-transformers' files say so of language models,
    too; else the class that the config names does."""
    from upshift.models.build import find_architecture

    if source.directory is not None and (source.directory / "modules.json").is_file():
        return True
    found = find_architecture(source.hf_config, source.reference)
    return found.objective not in GENERATES and not (found.objective is None and found.model_class.can_generate())


def _pooling(path: Path, prompt: str) -> Pooling:
    config = read_json(path)
    named = config.get("pooling_mode") or [
        FLAGS.get(flag, flag) for flag, value in config.items() if flag.startswith("pooling_mode_") and value
    ]
    chosen = [named] if isinstance(named, str) else named or ["mean"]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise RequestError(f"{path} asks for pooling {', '.join(map(str, chosen))}; supported is one of {', '.join(MODES)}")
    if prompt and not config.get("include_prompt", True):
        raise RequestError(f"{path} leaves the tokens of the prompt {prompt!r} out of the pooling, which is not supported")
    return MODES[chosen[0]]


def _prompt(folder: Path) -> str:
    """Return the prompt that texts get if no other is asked for."""
    said = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    name, known = said.get("default_prompt_name"), said.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(known.get(name), str):
        raise RequestError(f"{folder / PROMPTS} has no prompt {name!r}, its default; it has {', '.join(known) or 'none'}")
    return str(known[name])
