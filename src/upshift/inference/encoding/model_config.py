"""Read from a model's directory how texts are encoded: prompt, maximum length, kind of results, pooling, normalization.

sentence-transformers directories define it in modules.json and the folders that it names. For classifiers of texts or tokens the
architecture says it. For other encoders the result is the mean over the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from upshift.errors import RequestError
from upshift.inference.weights import files_identity
from upshift.models.config import read_json
from upshift.models.source import ModelSource
from upshift.value import Value

Output = Literal["embeddings", "class scores", "token scores", "sparse vectors", "token vectors"]
Task = Literal["query", "document"]
Module = tuple[str, Path]  # the name of the class of a module of sentence-transformers, and its folder
BACKBONES = ("Transformer", "MLMTransformer")  # modules that are a model of transformers
TASK_PROMPTS: dict[Task, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}
Pooling = Literal["mean", "cls", "last", "max"]
CLASSIFIERS: dict[str, Output] = {"sequence-classification": "class scores", "token-classification": "token scores"}
GENERATES = ("causal-lm", "seq2seq-lm")
MODES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}  # by sentence-transformers' name
MODE_FLAGS = {  # the modes by the flags of older files of sentence-transformers
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
}
CONFIG_FILES = tuple(  # the first existing one counts; all but the first name are of early versions
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
PROMPTS = "config_sentence_transformers.json"
ACTIVATION = "activation_fn"  # a cross-encoder's, in PROMPTS or in the field "sentence_transformers" of config.json
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
    lower_case: bool = False  # lower-case every text
    pairs: bool = False  # a row is the score of two texts that the model reads together
    segments: bool = False  # the model is told which of the two texts each token is of (token_type_ids)
    activation: str = "Identity"  # the activation of the scores of pairs: a class of torch.nn
    sparse_pooling: Literal["max", "sum"] = "max"  # how the weights are joined that tokens give to a token of the vocabulary
    log1p_twice: bool = False  # the logarithm of those weights is taken twice
    dense: tuple[str, ...] = ()  # folders of Dense modules
    dense_files: str = ""  # a hash of the weights in these folders
    skipped_words: tuple[str, ...] = ()  # tokens that get no vector
    skipped: tuple[int, ...] = ()  # the ids of skipped_words
    expand_to: int = 0  # tokens of a query, with the tokens that fill it up
    expansion_token: str | None = None  # the token that fills a query up; None: the tokenizer's mask
    attend_expansion: bool = False  # the query's own tokens attend to the tokens that fill it up
    said_by: str


def read_encoding_config(source: ModelSource, task: Task | None = None) -> EncodingConfig:
    """Return the encoding config of a model. Raise RequestError for an unknown pooling or module.

    ``task`` says whether the texts are queries or documents, for models that encode the two in different ways."""
    from upshift.models.build import find_architecture

    architecture = find_architecture(source.hf_config, source.reference)
    if architecture.objective in CLASSIFIERS:
        return EncodingConfig(output=CLASSIFIERS[architecture.objective], said_by="the model's architecture")
    folder = source.directory
    if folder is None or not (folder / "modules.json").is_file():
        return EncodingConfig(output="embeddings", said_by="default: the model's files say nothing")
    modules = [(module["type"].rsplit(".", 1)[-1], folder / module["path"]) for module in read_json(folder / "modules.json")]
    settings = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    if settings.get("model_type") == "ColBERT":
        raise RequestError(
            f"{source.reference!r} was saved by PyLate; save it once in the form of sentence-transformers: "
            f"MultiVectorEncoder({source.reference!r}).save_pretrained(DIR), then give DIR"
        )
    options = {**_read_text_options(folder, task), "prompt": _read_prompt(folder, task), "said_by": "modules.json"}
    names = [name for name, _ in modules]
    if "SpladePooling" in names:
        if architecture.objective != "masked-lm":
            raise RequestError(
                f"{source.reference!r} is a {architecture.model_class.__name__}, and SpladePooling takes the logits of a "
                "...ForMaskedLM; name it in the architectures of its config.json"
            )
        return EncodingConfig(output="sparse vectors", **_read_sparse(source, modules), **options)
    if "MultiVectorMask" in names:
        return EncodingConfig(output="token vectors", **_read_token_vectors(source, modules, task), **options)
    return EncodingConfig(output="embeddings", **_read_pooled(source, modules, options["prompt"]), **options)


def _read_pooled(source: ModelSource, modules: list[Module], prompt: str) -> dict[str, Any]:
    """Return the fields of a model that gives one vector for each text."""
    fields: dict[str, Any] = {}
    dense: list[Path] = []
    for name, path in modules:
        if name == "Pooling":
            fields["pooling"] = _read_pooling(path / "config.json", prompt)
        elif name == "Normalize":
            fields["normalize"] = True
        elif name == "Dense" and not fields.get("normalize"):
            dense.append(path)
        elif name not in BACKBONES:
            raise _unsupported(source, name, "Transformer, Pooling, Dense, Normalize, in this order")
    return fields | _read_dense(source, dense)


def _read_sparse(source: ModelSource, modules: list[Module]) -> dict[str, Any]:
    """Return the fields of a model like SPLADE, which gives a weight for each token of the vocabulary."""
    config: dict[str, Any] = {}
    for name, path in modules:
        if name == "SpladePooling":
            config = read_json(path / "config.json")
        elif name not in BACKBONES:
            raise _unsupported(source, name, "Transformer, SpladePooling")
    pooling = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    if pooling not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise RequestError(
            f"SpladePooling of {source.reference!r} asks for {pooling} and {activation}; supported are max or sum, and relu or "
            "log1p_relu"
        )
    return {"sparse_pooling": pooling, "log1p_twice": activation == "log1p_relu"}


def _read_token_vectors(source: ModelSource, modules: list[Module], task: Task | None) -> dict[str, Any]:
    """Return the fields of a model like ColBERT, which gives a vector for each token."""
    fields: dict[str, Any] = {}
    dense: list[Path] = []
    for name, path in modules:
        config = read_json(path / "config.json") if name not in BACKBONES and (path / "config.json").is_file() else {}
        if name == "MultiVectorMask":
            if config.get("keep_only_token_ids"):
                raise RequestError(f"{path} keeps the vectors of some tokens alone (keep_only_token_ids), which is not supported")
            if (task or "document") in config.get("skiplist_tasks", ["document"]):
                fields["skipped_words"] = tuple(config.get("skiplist_words") or ())
        elif name == "Normalize":
            fields["normalize"] = True
        elif name == "Dense" and config.get("module_input_name") == "token_embeddings" and not fields.get("normalize"):
            dense.append(path)
        elif name not in BACKBONES:
            raise _unsupported(source, name, "Transformer, Dense (of tokens), MultiVectorMask, Normalize")
    return fields | _read_dense(source, dense) | _read_expansion(source, task)


def _read_expansion(source: ModelSource, task: Task | None) -> dict[str, Any]:
    """Return how queries are filled up with a token that also gets vectors."""
    assert source.directory is not None
    expansion = _sentence_config(source.directory).get("query_expansion")
    if task != "query" or not expansion:
        return {}
    return {
        "expand_to": expansion["length"],
        "attend_expansion": bool(expansion.get("attend")),
        "expansion_token": expansion.get("token"),
    }


def _read_dense(source: ModelSource, folders: list[Path]) -> dict[str, Any]:
    """Return the fields of the Dense modules in ``folders``, in their order."""
    assert source.directory is not None
    weights = [folder / "model.safetensors" for folder in folders]
    for file in weights:
        if not file.is_file():
            raise RequestError(f"{file} does not exist; save the model again with sentence-transformers, which writes it")
    names = tuple(str(folder.relative_to(source.directory)) for folder in folders)
    return {"dense": names, "dense_files": files_identity(weights) if weights else ""}


def _unsupported(source: ModelSource, name: str, supported: str) -> RequestError:
    return RequestError(f"{source.reference!r} has a {name} module, which is not supported; supported are {supported}")


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
    """Return the name of the class of torch.nn that a cross-encoder applies to its scores. If the model's files name none, a
    single label has a sigmoid, and several labels have their logits."""
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


def _read_text_options(folder: Path, task: Task | None = None) -> dict[str, Any]:
    """Return the maximum length and the lower case of texts, from the files of sentence-transformers."""
    config = _sentence_config(folder)
    own_length = None if task is None else config.get(f"{task}_length")
    expansion = config.get("query_expansion") or {}
    if task == "query" and expansion.get("strategy") == "fixed":
        own_length = expansion["length"]
    return {"max_length": own_length or config.get("max_seq_length"), "lower_case": bool(config.get("do_lower_case"))}


def _sentence_config(folder: Path) -> dict[str, Any]:
    """Return the options of the Transformer module. Raise RequestError for options of the tokenizer that are not supported."""
    config_file = next((file for name in CONFIG_FILES if (file := folder / name).is_file()), None)
    config: dict[str, Any] = read_json(config_file) if config_file is not None else {}
    if config.get("processing_kwargs"):
        raise RequestError(f"{config_file} has processing_kwargs, which are not supported; remove them")
    return config


def read_task(task: str | None) -> Task | None:
    """Return the task of texts. Raise RequestError for an unknown one."""
    if task is None or task in TASK_PROMPTS:
        return task
    raise RequestError(f"--task {task!r} is no task of texts; give query or document, or leave it out")


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
    return _read_prompt(folder, None)


def _read_prompt(folder: Path, task: Task | None) -> str:
    """Return the prompt of a task that the directory defines, or its default for all texts, or an empty text."""
    settings = read_json(folder / PROMPTS) if (folder / PROMPTS).is_file() else {}
    prompts = settings.get("prompts") or {}
    own_names = () if task is None else TASK_PROMPTS[task]
    name = next((name for name in own_names if name in prompts), settings.get("default_prompt_name"))
    if name is None:
        return ""
    if not isinstance(prompts.get(name), str):
        raise RequestError(f"{folder / PROMPTS} has no prompt {name!r}, its default; it has {', '.join(prompts) or 'none'}")
    return str(prompts[name])
