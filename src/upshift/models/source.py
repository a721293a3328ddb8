"""Find a model by its reference: a local Hugging Face directory, a config.json, a hub id, or a stored ModelSource.

Only JSON is read, never weights.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import socket
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict

from pydantic import Field, ValidationInfo, field_serializer, field_validator, model_validator

from upshift.errors import RequestError
from upshift.models.config import decode_floats, encode_floats, read_json
from upshift.settings import read_settings
from upshift.text import did_you_mean
from upshift.value import Value

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BaseDtype = Literal["float32", "bfloat16"]
QuantizedFrom = Literal["float32", "bfloat16", "float16"]

ADAPTER_HISTORY = ("base_model_name_or_path", "revision", "peft_version", "auto_mapping")  # fields that no plan depends on
ADAPTER_INITIAL = "init_lora_weights"  # some of its schemes need the real weights or data, and no plan depends on them
ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
HEAD_FILE = "adapter_head.json"  # beside an adapter: the class and the labels of the model around which it was trained
HEAD_FIELDS = ("architectures", "id2label", "label2id", "problem_type", "pad_token_id")  # of config.json
TASK_OF_HEAD = {  # with the task, peft trains such a head whole next to the adapter
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
HEADS_OF_TASK = {  # the names of the modules that peft then trains whole (peft/peft_model.py)
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
QLORA = {  # transformers' fields for NF4 with quantized scales (QLoRA, arXiv:2305.14314)
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
HUB_ID = re.compile(r"(?!.*(--|\.\.))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b(?<!\.git)", re.ASCII)  # by the hub's own rules
ONE_LABEL: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # as transformers names it
MODEL_HELP = "give a Hugging Face directory, a config.json, or a hub id such as org/name"
HUB_SECONDS = 5.0  # a hub that takes no connection in this time cannot be asked
SHOWN_CHARACTERS = 100  # the most characters of a reference in a message
NAMES = re.compile(r"[\w.,\s-]*")  # of modules, with commas between them; other characters are of a regular expression
ALL_LINEAR = "all-linear"  # peft's word for every linear layer except the head
HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]  # weights, config and tokenizer; no pickled files


class AdapterOptions(Value):
    """Hold the adapter that a user wants to train, in the words of peft's LoraConfig. Every command that trains takes these."""

    lora_rank: int | None = Field(None, description="LoRA of this rank (r); None: no new adapter")
    lora_alpha: int | None = Field(None, description="LoRA's scale times the rank (lora_alpha); None: twice the rank")
    lora_dropout: float = Field(0.0, description="the probability that LoRA drops an input (lora_dropout)")
    lora_target: tuple[str, ...] = Field(
        (ALL_LINEAR,), description="names of the modules with LoRA (target_modules); all-linear: every linear layer but the head"
    )
    lora_modules_to_save: tuple[str, ...] = Field(
        (), description="names of modules that are trained whole beside LoRA (modules_to_save)"
    )
    lora_rslora: bool = Field(False, description="divide LoRA's scale by the root of the rank (use_rslora)")
    lora_dora: bool = Field(False, description="train the magnitude of the weights apart from their direction (use_dora)")
    load_in_4bit: bool = Field(False, description="store the weights below the adapter in 4 bits, as QLoRA does")

    @field_validator("lora_target", "lora_modules_to_save", mode="before")
    @classmethod
    def _split_names(cls, names: Any, info: ValidationInfo) -> Any:
        """Return names in alphabetical order, because peft does not heed their order. A text has commas between its names.

        A text that is a regular expression stays as it is."""
        if isinstance(names, str) and info.field_name == "lora_target" and _is_pattern(names):
            return (names,)
        if isinstance(names, str):
            split = [name.strip() for name in names.split(",")]
            if names and not any(split):
                option = _option_name(str(info.field_name))
                raise RequestError(f"{option} {names} names no module; give names separated by commas, such as q_proj,v_proj")
            names = split
        if isinstance(names, list | tuple | set | frozenset) and all(isinstance(name, str) for name in names):
            return tuple(sorted({name for name in names if name}))
        return names

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        """Raise RequestError for numbers and names that no adapter has. The rank may be missing: a search draws it later."""
        for option, number in (("--lora-rank", self.lora_rank), ("--lora-alpha", self.lora_alpha)):
            if number is not None and number < 1:
                raise RequestError(f"{option} {number} is not possible; give 1 or more, such as 16")
        if not 0 <= self.lora_dropout < 1:
            raise RequestError(f"--lora-dropout {self.lora_dropout:g} is not possible; give 0 or more and below 1, such as 0.05")
        if not self.lora_target:
            raise RequestError(f"--lora-target names no module; give names such as q_proj,v_proj, or {ALL_LINEAR}")
        if ALL_LINEAR in self.lora_target and len(self.lora_target) > 1:
            others = ",".join(name for name in self.lora_target if name != ALL_LINEAR)
            raise RequestError(f"--lora-target {ALL_LINEAR} stands alone; leave it out, or leave out {others}")
        self._check_pattern()
        return self

    def _check_pattern(self) -> None:
        """Raise RequestError for a regular expression that is none, or that stands beside names."""
        pattern = next((name for name in self.lora_target if _is_pattern(name)), None)
        if pattern is None:
            return
        if len(self.lora_target) > 1:
            raise RequestError(f"--lora-target {pattern} is a regular expression, and stands alone; join several with |")
        try:
            re.compile(pattern)
        except re.error as error:
            raise RequestError(
                f"--lora-target {pattern} is no regular expression ({error}); give one, or names separated by commas"
            ) from None

    @property
    def as_adapter_options(self) -> AdapterOptions:
        """Return these options alone."""
        return AdapterOptions(**{name: getattr(self, name) for name in AdapterOptions.model_fields})

    @property
    def targets_all(self) -> bool:
        """Return whether LoRA is in every linear layer but the head."""
        return self.lora_target == (ALL_LINEAR,)

    @property
    def target_pattern(self) -> str | None:
        """Return the regular expression of the paths of the modules with LoRA, or None if they are names."""
        return self.lora_target[0] if len(self.lora_target) == 1 and _is_pattern(self.lora_target[0]) else None

    @property
    def names_modules(self) -> bool:
        """Return whether the user named modules, which the model may not have."""
        return not self.targets_all or bool(self.lora_modules_to_save)

    def first_of_adapter(self) -> str | None:
        """Return the first given option that describes a new adapter, or None."""
        names = (
            _option_name(name)
            for name, field in AdapterOptions.model_fields.items()
            if name.startswith("lora_") and getattr(self, name) != field.default
        )
        return next(names, None)

    def check_rank(self) -> None:
        """Raise RequestError if there is no rank, and another option is of an adapter."""
        option = self.first_of_adapter()
        if self.lora_rank is None and option is not None:
            raise RequestError(f"{option} is an option of a new adapter; add --lora-rank, such as 16, or leave {option} out")

    @property
    def scale_numerator(self) -> int | None:
        """Return LoRA's scale times the rank, peft's lora_alpha: twice the rank if the user gave none."""
        return self.lora_alpha or (None if self.lora_rank is None else 2 * self.lora_rank)

    def check_same(self, previous: AdapterOptions, run: Path) -> None:
        """Raise RequestError that names the first option in which a run that resumes differs from what it was before."""
        before = previous.changed(lora_alpha=previous.scale_numerator)
        now = self.changed(lora_alpha=self.scale_numerator)
        for name in AdapterOptions.model_fields:
            old = getattr(before, name)
            new = getattr(now, name)
            if old != new:
                raise RequestError(
                    f"you gave {_show_option(name, new)}, and the run in {run} has {_show_option(name, old)}; resume with the "
                    "adapter of that run, or start anew in another output directory"
                )

    def lora_config(self, task: str | None) -> dict[str, Any]:
        """Return the fields of peft's LoraConfig that are not its defaults, and the five that every adapter of Upshift has.

        Fields at their defaults are left out, so that hashes of models do not change when a field is added."""
        assert self.lora_rank is not None
        fields: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": task,
            "r": self.lora_rank,
            "lora_alpha": self.scale_numerator,
            "target_modules": self.target_pattern or (ALL_LINEAR if self.targets_all else list(self.lora_target)),
        }
        optional = {
            "lora_dropout": self.lora_dropout,
            "modules_to_save": list(self.lora_modules_to_save),
            "use_rslora": self.lora_rslora,
            "use_dora": self.lora_dora,
        }
        return fields | {name: value for name, value in optional.items() if value}


def _is_pattern(target: str) -> bool:
    """Return whether a target is a regular expression of paths, as peft takes it, and not names or the end of a path."""
    return NAMES.fullmatch(target) is None


def _option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _show_option(field: str, value: Any) -> str:
    """Return an option with its value as the command line takes it, or ``no`` and the option if it is not given."""
    option = _option_name(field)
    if value is None or value is False or value == ():
        return f"no {option}"
    if value is True:
        return option
    return f"{option} {','.join(value) if isinstance(value, tuple) else format(value, 'g')}"


class AdapterKeywords(TypedDict, total=False):
    """The fields of ``AdapterOptions`` as keyword arguments. Names of modules are a sequence, or a text with commas."""

    lora_rank: int | None
    lora_alpha: int | None
    lora_dropout: float
    lora_target: str | Sequence[str]
    lora_modules_to_save: str | Sequence[str]
    lora_rslora: bool
    lora_dora: bool
    load_in_4bit: bool


class ModelSource(Value):
    """A model's configuration, its directory if it has one, the adapter around it, and its frozen parameters."""

    reference: str  # as the user wrote it
    directory: Path | None  # None for a config without a directory
    config: dict[str, Any]
    adapter: dict[str, Any] | None = None  # the peft config; None: no adapter
    adapter_name: str = "default"
    adapter_directory: Path | None = None  # the adapter's weights; None: they are random
    base: str | None = None  # the model inside the adapter, as the adapter or the user names it; None: ``reference``
    frozen: tuple[str, ...] | None = None  # paths of modules and parameters without gradients; None: as class and adapter set it
    # No plan changes these two dtypes of the model inside an adapter.
    base_dtype: BaseDtype = "float32"
    quantized_from: QuantizedFrom | None = None  # dtype of the 4-bit weights before they were quantized; None: no such weights
    # The class of the files, if they lack the head of the config: it is new and random, or the adapter has it. None: they have
    # the whole model.
    new_head_on: str | None = None
    images_per_row: int = Field(0, ge=0, description="images of each row that is planned; 0: rows of text alone")

    @field_validator("config", mode="before")
    @classmethod
    def _decode(cls, config: Any) -> Any:
        return decode_floats(config)

    @field_serializer("config")
    def _encode(self, config: dict[str, Any]) -> dict[str, Any]:
        encoded: dict[str, Any] = encode_floats(config)
        return encoded

    @property
    def base_reference(self) -> str:
        """Return the reference of the model without its adapter."""
        return self.base or self.reference

    @property
    def model_hash(self) -> str:
        """Return a short, stable hash of everything in the config that can change the computation."""
        return hashlib.sha256(json.dumps(self.config_identity, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def config_identity(self) -> dict[str, Any]:
        """Return everything in the config, and in that of an adapter, that can change the computation."""
        cosmetic = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}
        relevant = {key: value for key, value in self.config.items() if key not in cosmetic}
        relevant["architectures"] = self.config.get("architectures")
        if self.adapter is not None or self.frozen is not None:
            relevant = {"config": relevant, "adapter": self.adapter, "frozen": self.frozen}
            relevant["base"] = [self.base_dtype, self.quantized_from]
        return {"config": relevant, "images_per_row": self.images_per_row} if self.images_per_row else relevant

    @property
    def hf_config(self) -> PretrainedConfig:
        """Return a new copy of the config as transformers' config class, which the caller may change. Imports transformers.

        Raise RequestError for an architecture that the installed transformers does not know, and for values that its config
        class rejects."""
        return copy.deepcopy(self._parsed_config)

    @cached_property
    def _parsed_config(self) -> PretrainedConfig:
        from upshift.models.hf_config import parse_config

        return parse_config(self.config, self.reference)

    def write(self, path: Path) -> None:
        """Write the source to a JSON file, which ``find_model`` can read."""
        path.write_text(self.to_json(), encoding="utf-8")


def find_model(reference: str | Path) -> ModelSource:
    """Return the source for a local directory, a config.json, a stored ModelSource or a hub id.

    Raise RequestError, with the next step, if there is no such model."""
    reference = str(reference) if isinstance(reference, Path) else reference
    if not isinstance(reference, str):
        raise RequestError(f"model {_shorten(str(reference))} is not a text or a path; {MODEL_HELP}")
    path = Path(reference)
    try:
        path.exists()
    except OSError as error:  # the name is too long, or the folder may not be read
        raise RequestError(f"model {_shorten(reference)} cannot be read: {error.strerror}; {MODEL_HELP}") from None
    if _is_adapter(path):
        return _read_adapter(path)
    if path.is_dir():
        return ModelSource(reference=reference, directory=path, config=_read_config(path / "config.json", reference))
    if path.is_file():
        document = _read_json(path)
        if "model_type" not in document and "config" in document:
            return ModelSource.from_file(path)
        directory = path.parent if path.name == "config.json" else None
        return ModelSource(reference=reference, directory=directory, config=_read_config(path, reference))
    if path.suffix == ".json" or not HUB_ID.fullmatch(reference):
        raise RequestError(f"model {_shorten(reference)} does not exist; {MODEL_HELP}{_near_models(reference)}")
    return _fetch_config(reference)


def _near_models(reference: str) -> str:
    """Return ``; did you mean PATH?`` with the model directories whose paths look like the reference, or an empty text."""
    return did_you_mean(reference, [str(path) for path in _paths_like(Path(reference)) if _is_model(path)])


def _paths_like(path: Path) -> list[Path]:
    """Return the existing paths that differ from a path by the names of its folders alone. Its last name may be any."""
    if path.parent == path:
        return [path]
    parents = [path.parent] if path.parent.is_dir() else _paths_like(path.parent)
    return [folder for parent in parents if did_you_mean(str(path.parent), [str(parent)]) for folder in _folders_in(parent)]


def _folders_in(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:  # no such folder, or one that may not be read
        return []


def _is_model(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file() or (folder / ADAPTER_FILE).is_file()
    except OSError:  # it may not be read
        return False


def _shorten(reference: str) -> str:
    return repr(reference if len(reference) <= SHOWN_CHARACTERS else f"{reference[:SHOWN_CHARACTERS]}...")


def _is_adapter(path: Path) -> bool:
    return (path / ADAPTER_FILE).is_file() and not (path / "config.json").is_file()


def _read_adapter(directory: Path) -> ModelSource:
    """Read an adapter that peft saved, and return the source of its model with the adapter around it."""
    adapter = _read_json(directory / ADAPTER_FILE)
    base = adapter.get("base_model_name_or_path")
    if not base or "peft_type" not in adapter:
        raise RequestError(f"{directory / ADAPTER_FILE} names no base_model_name_or_path; save the adapter around its model")
    if _is_adapter(Path(str(base))):
        raise RequestError(
            f"{directory / ADAPTER_FILE} names {base!r} as its model, which is an adapter, too; make it for a whole model, as "
            "upshift merge writes one"
        )
    source = find_model(str(base))
    settings = {key: value for key, value in adapter.items() if key not in ADAPTER_HISTORY} | {"inference_mode": False}
    if isinstance(settings.get(ADAPTER_INITIAL), str):
        settings[ADAPTER_INITIAL] = True
    weights = directory if (directory / ADAPTER_WEIGHTS).is_file() else None
    source = with_adapter_head(source, directory)
    return _attach_adapter(source.changed(reference=str(directory), base=source.reference, adapter_directory=weights), settings)


def with_adapter_head(source: ModelSource, adapter: Path) -> ModelSource:
    """Return the source with the class and the labels that an adapter's folder names, because the adapter holds the head.

    Return it unchanged if the folder names none."""
    if not (adapter / HEAD_FILE).is_file():
        return source
    document = _read_json(adapter / HEAD_FILE)
    head = {name: document[name] for name in HEAD_FIELDS if name in document}
    old_class = _class_of_files(source)
    has_other_class = old_class not in head.get("architectures", [old_class])
    has_other_head = has_other_class or _num_labels(head) != _num_labels(source.config)
    return source.changed(config=source.config | head, new_head_on=old_class if has_other_head else None)


def _class_of_files(source: ModelSource) -> str:
    """Return the name of the class of a model's files: that of the config, or else the one that every command assumes."""
    named = source.config.get("architectures")
    if named:
        return str(named[0])
    from upshift.models.build import find_architecture  # it imports torch

    return find_architecture(source.hf_config, source.reference).model_class.__name__


def _num_labels(config: dict[str, Any]) -> int:
    return len(config.get("id2label") or "01")  # a config leaves out two labels without names


def find_model_to_train(
    reference: str | Path, options: AdapterOptions | None = None, *, has_reward_head: bool = False
) -> ModelSource:
    """Return the source to train for a reference, with the adapter that the options describe (LoRA: arXiv:2106.09685).

    With ``has_reward_head``, the model gives each text one number, its reward.

    Raise RequestError for options that need a rank, and if the model already has an adapter or quantized weights. That the model
    has the named modules is checked by ``models.adapter.check_module_names``, which builds it."""
    source = find_model(reference)
    if has_reward_head:
        source = _with_reward_head(source)
    options = options or AdapterOptions()
    option = options.first_of_adapter()
    if source.adapter is not None and option is not None:
        raise RequestError(
            f"{source.reference!r} has an adapter already, and {option} is an option of a new one; leave {option} out to train "
            f"that adapter, or give the model that it was made for ({source.base_reference!r}) and --lora-rank"
        )
    options.check_rank()
    if options.lora_rank is not None:
        source = _with_lora(source, options)
    if not options.load_in_4bit:
        return source
    if source.adapter is None:
        raise RequestError(
            "--load-in-4bit: weights in 4 bits are never trained themselves; add an adapter with --lora-rank, such as 16"
        )
    _check_not_quantized(source)
    # float16 weights are read as float32, which represents the same numbers.
    return source.changed(config=source.config | {"quantization_config": QLORA}, quantized_from=source.base_dtype)


def _with_lora(source: ModelSource, options: AdapterOptions) -> ModelSource:
    _check_not_quantized(source)
    classes = source.config.get("architectures") or [""]
    task = next((task for suffix, task in TASK_OF_HEAD.items() if str(classes[0]).endswith(suffix)), None)
    return _attach_adapter(source, options.lora_config(task))


def _with_reward_head(source: ModelSource) -> ModelSource:
    """Return the source with a head that gives a text one number: transformers' classifier of texts with one label, as in TRL.

    Return a classifier with one label unchanged. Raise RequestError for other classifiers, and if there is no such class."""
    from upshift.models.build import choose_text_classifier, find_architecture  # imports torch

    config = source.hf_config
    architecture = find_architecture(config, source.reference)
    if architecture.objective == "sequence-classification":
        if config.num_labels != 1:
            raise RequestError(
                f"{source.reference!r} is a classifier with {config.num_labels} labels, and --objective reward needs one with a "
                "single label, the reward; use a language model, which gets a new head"
            )
        return source
    if source.adapter is not None and source.adapter.get("task_type") != TASK_OF_HEAD["ForSequenceClassification"]:
        raise RequestError(
            f"{source.reference!r} is an adapter of a model without a reward head; merge it first with upshift merge, or give "
            f"the model that it was made for ({source.base_reference!r})"
        )
    classifier = choose_text_classifier(config, source.reference, purpose="--objective reward")
    return source.changed(
        config=source.config | {"architectures": [classifier.__name__], **ONE_LABEL},
        new_head_on=architecture.model_class.__name__,
    )


def source_of_files(source: ModelSource) -> ModelSource:
    """Return the source of the files in the directory of ``source``: quantized as they are, without adapter. A new head stays."""
    if source.adapter is None and source.quantized_from is None:
        return source
    stored = find_model(str(source.directory))
    if source.new_head_on is None:
        return stored
    head = {name: source.config[name] for name in HEAD_FIELDS if name in source.config}
    return stored.changed(config=stored.config | head, new_head_on=source.new_head_on)


def _check_not_quantized(source: ModelSource) -> None:
    if "quantization_config" in source.config:
        name = source.base_reference
        raise RequestError(f"the weights of {name!r} are quantized already; give the model that it was made from")


def _attach_adapter(source: ModelSource, adapter: dict[str, Any]) -> ModelSource:
    """Put an adapter around a source. The weights below it keep the config's dtype; quantized ones are dequantized to it."""
    dtype = str(source.config.get("dtype") or source.config.get("torch_dtype") or "float32")
    return source.changed(
        adapter=adapter,
        base_dtype="bfloat16" if dtype == "bfloat16" else "float32",
        quantized_from=dtype if "quantization_config" in source.config else None,
    )


def _read_config(path: Path, reference: str) -> dict[str, Any]:
    if not path.is_file():
        folders = (*path.parent.glob("checkpoint-*"), *path.parent.glob("*/checkpoint-*"))
        checkpoints = sorted(folder.name for folder in folders if folder.is_dir())
        if checkpoints:
            raise RequestError(
                f"{reference!r} has no config.json; it holds {checkpoints[-1]} of a training that has not ended; type the "
                "training's command again with --resume"
            )
        raise RequestError(
            f"{reference!r} has no config.json; give a directory written by save_pretrained, or a config.json"
            f"{_near_models(reference)}"
        )
    config = _read_json(path)
    if "model_type" not in config:
        raise RequestError(f'{path} has no "model_type"; it must be a transformers config.json')
    return config


def _read_json(path: Path) -> dict[str, Any]:
    document = read_json(path)
    return document if isinstance(document, dict) else {}


def _fetch_config(reference: str) -> ModelSource:
    from huggingface_hub import hf_hub_download  # comes with transformers

    path = _call_hub(reference, lambda offline: hf_hub_download(reference, "config.json", local_files_only=offline))
    return ModelSource(reference=reference, directory=path.parent, config=_read_config(path, reference))


def fetch_weights(source: ModelSource) -> None:
    """Download a hub model's weights and tokenizer to the hub's cache, next to its config. Do nothing for a local model."""
    name = source.base_reference
    if Path(name).exists():
        return
    from huggingface_hub import snapshot_download

    _call_hub(name, lambda offline: snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=offline))


def _call_hub(reference: str, download: Callable[[bool], str]) -> Path:
    """Return the path of what ``download`` fetches. If the hub cannot be asked, or must not be, its cache on this machine counts.

    ``download`` is called with whether it must use the cache alone. Raise RequestError for a model that is not there."""
    offline = read_settings().hub_offline
    failure = None if offline else _find_hub_failure()
    try:
        return Path(download(offline or failure is not None))
    except (OSError, ValueError) as error:  # all errors of huggingface_hub are OSErrors, but one for names of cached files
        reason = _describe_hub_error(error)
    if offline:
        reason = "is not in the local hub cache, and the hub was not asked (HF_HUB_OFFLINE); give"
    elif failure is not None:
        reason = f"is not in the local hub cache, and {failure}; check the network, set HF_ENDPOINT to a mirror, or give"
    raise RequestError(
        f"model {reference!r} is no local path and {reason} a local directory or config.json{_near_models(reference)}"
    )


def _describe_hub_error(error: Exception) -> str:
    """Return why the hub did not send a model, up to the words before "a local directory"."""
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):  # one of RepositoryNotFoundError
        return "the hub gives it to accounts with access only; ask for access on its page and type hf auth login, or give"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is private; type hf auth login for a private one, or give"
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return "has no config.json on the hub; give"
    return f"could not be read from the hub ({type(error).__name__}); give"


def _find_hub_failure() -> str | None:
    """Return why the hub, or the proxy before it, takes no connection, or None. huggingface_hub would repeat it for a minute."""
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    host = str(address.hostname)
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(host):
        address = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host = f"the proxy {address.hostname}"
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((str(address.hostname), port), timeout=HUB_SECONDS).close()
    except OSError as error:
        return f"{host} does not answer ({error.strerror or error})"
    return None
