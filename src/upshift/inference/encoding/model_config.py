"""Read from a model's directory how texts are encoded: prompt, maximum length, kind of results, pooling, normalization.

sentence-transformers directories define it in modules.json and the folders that it names. For classifiers of texts or tokens it
follows from the architecture. For other encoders the result is the mean over the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from upshift.errors import RequestError
from upshift.models.config import read_json
from upshift.models.source import ModelSource
from upshift.value import Value

Output = Literal["embeddings", "class scores", "token scores"]
Pooling = Literal["mean", "cls", "last", "max"]
CLASSIFIERS: dict[str, Output] = {"sequence-classification": "class scores", "token-classification": "token scores"}
GENERATES = ("causal-lm", "seq2seq-lm")
MODES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}  # by sentence-transformers' name
MODE_FLAGS = {  # of older files of sentence-transformers: mode by flag
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}
CONFIG_FILES = tuple(  # the first existing one counts; all but the first name are of early versions
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
PROMPTS = "config_sentence_transformers.json"
ACTIVATION = "activation_fn"  # of a cross-encoder, in PROMPTS or in the field "sentence_transformers" of config.json
OLD_ACTIVATION = "sbert_ce_default_activation_function"  # in config.json, before sentence-transformers 4
ACTIVATION_MODULES = "torch.nn."


class EncodingConfig(Value):
    """The way in which one model encodes texts. ``said_by`` names the source of these settings."""

    output: Output
    pooling: Pooling = "mean"
    normalize: bool = False
    special: tuple[int, int] = (0, 0)  # special tokens before and after a text, which get no scores
    max_length: int | None = None  # tokens of a text; None: the tokenizer and the model's positions limit it
    prompt: str = ""  # put before every text
    lower_case: bool = False  # of every text
    pairs: bool = False  # a row is the score of two texts that the model reads together
    segments: bool = False  # the model is told which of the two texts each token is of (token_type_ids)
    activation: str = "Identity"  # of the scores of pairs: a class of torch.nn
    said_by: str


def read_encoding_config(source: ModelSource) -> EncodingConfig:
    """Return the encoding config of a model. Raise RequestError for an unknown pooling or module."""
    from upshift.models.build import find_architecture

    objective = find_architecture(source.hf_config, source.reference).objective
    if objective in CLASSIFIERS:
        return EncodingConfig(output=CLASSIFIERS[objective], said_by="the model's architecture")
    if source.directory is None or not (source.directory / "modules.json").is_file():
        return EncodingConfig(output="embeddings", said_by="default: the model's files say nothing")
    pooling: Pooling = "mean"
    normalize = False
    prompt = _default_prompt(source.directory)
    for module in read_json(source.directory / "modules.json"):
        module_name = module["type"].rsplit(".", 1)[-1]
        if module_name == "Pooling":
            pooling = _read_pooling(source.directory / module["path"] / "config.json", prompt)
        elif module_name == "Normalize":
            normalize = True
        elif module_name != "Transformer":
            raise RequestError(
                f"{source.reference!r} has a {module_name} module, which is not supported; supported are Transformer, Pooling, "
                "Normalize"
            )
    return EncodingConfig(
        output="embeddings",
        pooling=pooling,
        normalize=normalize,
        prompt=prompt,
        said_by="modules.json",
        **_read_text_options(source.directory),
    )


def read_pair_config(source: ModelSource) -> EncodingConfig:
    """Return how a cross-encoder scores pairs of texts, by the rules of sentence-transformers' CrossEncoder.

    Raise RequestError for a model that does not classify texts, an unknown module, and an activation that is not torch's."""
    from upshift.models.build import find_architecture

    architecture = find_architecture(source.hf_config, source.reference)
    if architecture.objective != "sequence-classification":
        raise RequestError(
            f"{source.reference!r} is a {architecture.model_class.__name__}; pairs of texts are scored by a cross-encoder, a "
            "...ForSequenceClassification. Give one, or single texts"
        )
    folder = source.directory
    if folder is None:
        raise RequestError(f"{source.reference!r} has no directory, and a tokenizer is needed; save one beside the model")
    modules = read_json(folder / "modules.json") if (folder / "modules.json").is_file() else []
    unknown = [name for module in modules if (name := module["type"].rsplit(".", 1)[-1]) != "Transformer"]
    if unknown:
        raise RequestError(
            f"{source.reference!r} has a {unknown[0]} module, which is not supported in a cross-encoder; supported is Transformer"
        )
    return EncodingConfig(
        output="class scores",
        pairs=True,
        prompt=_default_prompt(folder),
        activation=_read_activation(source, folder),
        said_by="the model's architecture",
        **_read_text_options(folder),
    )


def _read_activation(source: ModelSource, folder: Path) -> str:
    """Return the class of torch.nn that is applied to a cross-encoder's scores.

    The model's files name it. Without a name, one label has a sigmoid, and several have their logits."""
    settings = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    nested = source.config.get("sentence_transformers") or {}
    path = settings.get(ACTIVATION) or nested.get(ACTIVATION) or source.config.get(OLD_ACTIVATION)
    if path is None:
        return "Sigmoid" if source.hf_config.num_labels == 1 else "Identity"
    if not str(path).startswith(ACTIVATION_MODULES):
        raise RequestError(
            f"{source.reference!r} has the activation {path!r}, which is Python code that Upshift does not run; "
            f'write a class of torch.nn as "{ACTIVATION}" into its {PROMPTS}, such as torch.nn.modules.linear.Identity'
        )
    return str(path).rsplit(".", 1)[-1]


def _read_text_options(folder: Path) -> dict[str, Any]:
    """Return the maximum length and the lower case of texts, from the files of sentence-transformers."""
    config_file = next((file for name in CONFIG_FILES if (file := folder / name).is_file()), None)
    sentence_config = read_json(config_file) if config_file is not None else {}
    return {"max_length": sentence_config.get("max_seq_length"), "lower_case": bool(sentence_config.get("do_lower_case"))}


def is_encoder(source: ModelSource) -> bool:
    """Return whether the model turns texts into vectors or scores, and not into other texts.

    A directory of sentence-transformers does, even with a language model. Otherwise the architecture decides."""
    from upshift.models.build import find_architecture

    if source.directory is not None and (source.directory / "modules.json").is_file():
        return True
    architecture = find_architecture(source.hf_config, source.reference)
    if architecture.objective is None:
        return not architecture.model_class.can_generate()
    return architecture.objective not in GENERATES


def _read_pooling(path: Path, prompt: str) -> Pooling:
    """Return the pooling of a config file. Raise RequestError if it is not supported."""
    config = read_json(path)
    mode = config.get("pooling_mode") or [
        MODE_FLAGS.get(flag, flag) for flag, value in config.items() if flag.startswith("pooling_mode_") and value
    ]
    modes = [mode] if isinstance(mode, str) else mode or ["mean"]
    if len(modes) != 1 or modes[0] not in MODES:
        raise RequestError(f"{path} asks for pooling {', '.join(map(str, modes))}; supported is one of {', '.join(MODES)}")
    if prompt and not config.get("include_prompt", True):
        raise RequestError(f"{path} leaves the tokens of the prompt {prompt!r} out of the pooling, which is not supported")
    return MODES[modes[0]]


def _default_prompt(folder: Path) -> str:
    """Return the prompt that the directory defines as the default for all texts, or an empty text."""
    settings = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    name = settings.get("default_prompt_name")
    prompts = settings.get("prompts") or {}
    if name is None:
        return ""
    if not isinstance(prompts.get(name), str):
        raise RequestError(f"{folder / PROMPTS} has no prompt {name!r}, its default; it has {', '.join(prompts) or 'none'}")
    return str(prompts[name])
