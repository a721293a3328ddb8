# needs torch
"""Write a base model's weights with an adapter merged into them (``upshift merge``), as peft's ``merge_and_unload`` does.

A group of stored tensors that transformers fuses on loading (as the experts of a layer), or splits, is converted to weights as
loading does. peft's arithmetic changes the weights, and they are converted back as transformers' saving does. Memory holds the
weights of one group, twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import MissingExtra, RequestError
from upshift.internals.transformers_names import MODEL_MAPPING, REVERT, WEIGHT_CONVERSIONS
from upshift.loading.files.checkpoint import CONFIG, METADATA, Checkpoint, find_checkpoint, find_model_folder, small_files
from upshift.loading.files.safetensors_header import StoredTensor, quote, read_header
from upshift.loading.files.safetensors_writer import NewTensor, copy_tensor, read_chunks
from upshift.loading.files.tensors import DTYPE_NAMES, DTYPES, bytes_of, dtype_of, read_into, read_tensor, shape_of
from upshift.loading.key_mapping import Group, NameMapping, convert_group, filled_shapes, map_names
from upshift.loading.load import build_empty, resolve_class
from upshift.loading.rewrite.rewrite import Progress, Rewrite, Rewritten, rewrite
from upshift.models.config import config_text
from upshift.models.source import ADAPTER_FILE, ADAPTER_WEIGHTS, ModelSource, find_model, with_adapter_head
from upshift.models.tasks import TASKS

if TYPE_CHECKING:
    from peft import LoraConfig

    from upshift.loading.lora import MergedWeight

# Prefixes of the tokenizer's files.
TOKENIZER_PREFIXES = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "vocab",
    "merges",
    "chat_template",
    "spiece",
    "sentencepiece",
)
PEFT_PREFIX = "base_model.model."  # the names of an adapter's tensors begin with it
SUPPORTED_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")  # init_lora_weights that do not change the base model
UNMERGEABLE = {  # fields of peft's LoraConfig, and what each does
    "alora_invocation_tokens": "acts from some tokens on only",
    "arrow_config": "is chosen token by token",
    "layer_replication": "makes layers that the base model has not",
    "trainable_token_indices": "trains some rows of the embedding, which upshift merge does not know",
}


@dataclass(frozen=True)
class MergedTensors:
    """The tensors of the merged model."""

    tensors: list[NewTensor]  # under their stored names
    is_untied: bool  # weights that were tied are now separate
    lost: dict[str, int]  # sizes of the weights that neither the base model nor the adapter has, by name


def merge(adapter: str, output: Path, *, progress: Progress) -> Rewritten:
    """Write the merged model.

    Its weights equal peft's to the bit in fp32. In bf16 and fp16 they equal those that peft merges on a CPU."""
    folder = Path(adapter)
    lora = _read_adapter(folder)
    source, base = find_model_folder(str(lora.base_model_name_or_path))
    if "quantization_config" in source.config:
        raise RequestError(f"the weights of {source.reference!r} are quantized; name what they were made from in {ADAPTER_FILE}")
    checkpoint = find_checkpoint(base)
    files_class = source.config.get("architectures")
    source = with_adapter_head(source, folder)
    model = _build_empty(source, lora, checkpoint, folder)
    merged = _merge_tensors(model, lora, folder, _without_old_head(checkpoint, model, files_class))
    copies = small_files(base) | {name: file for name, file in small_files(folder).items() if name.startswith(TOKENIZER_PREFIXES)}
    config = copies.pop(CONFIG)
    job = Rewrite(
        description=f"merge {adapter}",
        folder=base,
        tensors=merged.tensors,
        sources=(*checkpoint.files, config, folder / ADAPTER_WEIGHTS, folder / ADAPTER_FILE),
        metadata={**METADATA, **checkpoint.metadata},
        copies=copies,
        documents={CONFIG: _merged_config(source, model, merged.is_untied)},
        noted=merged.lost,
    )
    return rewrite(job, output, progress)


def _read_adapter(folder: Path) -> LoraConfig:
    if not (folder / ADAPTER_FILE).is_file():
        raise RequestError(f"{str(folder)!r} has no {ADAPTER_FILE}; give a directory that peft's save_pretrained wrote")
    settings = find_model(str(folder)).adapter or {}
    try:
        from peft import LoraConfig
    except ImportError:
        raise MissingExtra(library="peft", extra="peft", purpose="upshift merge") from None
    if settings.get("peft_type") != "LORA":
        raise RequestError(f"{folder} is an adapter of the kind {settings.get('peft_type')!r}; upshift merge takes LORA")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise RequestError(f"{folder} has no {ADAPTER_WEIGHTS}; save the adapter again with peft, as safetensors")
    read_header(folder / ADAPTER_WEIGHTS)
    try:
        config: LoraConfig = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError) as error:
        raise RequestError(f"{folder / ADAPTER_FILE} is no config of LoRA: {error}") from None
    for name, reason in UNMERGEABLE.items():
        if getattr(config, name, None):
            raise RequestError(f"{folder} cannot be merged: {name} {reason}")
    if config.init_lora_weights not in SUPPORTED_INITIALIZATIONS:
        raise RequestError(
            f"{folder} began with init_lora_weights={config.init_lora_weights!r}, which changes the base model, too; save it "
            "with peft's path_initial_model_for_weight_conversion, and merge that"
        )
    config.init_lora_weights = False  # the weights are read, so they need no random values
    config.inference_mode = True
    return config


def _build_empty(source: ModelSource, lora: LoraConfig, checkpoint: Checkpoint, folder: Path) -> PreTrainedModel:
    """Return an empty model of the class that the adapter was trained around, in the dtype of most of the stored bytes.

    ``folder``: the adapter's folder. Its head may have other labels than the config of the base model.
    """
    config = source.hf_config
    class_name = (lora.auto_mapping or {}).get("base_model_class") or _auto_class_of(lora)
    auto_class = getattr(transformers, class_name, None) if class_name else None
    mapping = MODEL_MAPPING.read(auto_class)
    if mapping is not None and (type(config) not in mapping or _config_names_generator(config, source, auto_class)):
        auto_class = None
    sizes: Counter[torch.dtype] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[dtype_of(tensor)] += tensor.nbytes * dtype_of(tensor).is_floating_point
    (dtype, _), *_ = sizes.most_common(1)
    model_class = resolve_class(config, source, auto_class)
    model = build_empty(model_class, config, dtype)
    num_labels = _num_labels_of(model, folder)
    if num_labels is None:
        return model
    config.num_labels = num_labels
    model = build_empty(model_class, config, dtype)
    if getattr(config.get_text_config(), "pad_token_id", None) is None:
        config.get_text_config().pad_token_id = _padding_of_tokenizer(folder)
    return model


def _auto_class_of(lora: LoraConfig) -> str | None:
    """Return the name of the Auto class for an adapter's task, as peft's AutoPeftModel classes choose. None: it has no task."""
    return next((task.auto_class for task in TASKS if task.peft_type and task.peft_type == lora.task_type), None)


def _num_labels_of(model: PreTrainedModel, folder: Path) -> int | None:
    """Return the number of labels of an adapter's whole head, or None if it is that of the model, or has another form."""
    stored = read_header(folder / ADAPTER_WEIGHTS).by_name()
    for name, weight in model.named_parameters():
        tensor = stored.get(f"{PEFT_PREFIX}{name}")
        if tensor is None or len(weight) != model.config.num_labels:
            continue
        shape = shape_of(tensor)
        if shape[1:] == tuple(weight.shape[1:]) and shape[0] != len(weight):
            return shape[0]
    return None


def _padding_of_tokenizer(folder: Path) -> int | None:
    """Return the padding token, or else EOS, of the tokenizer beside an adapter, as reward models are trained. None: neither.

    A decoder that classifies looks for the end of a text by it.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError):  # there is no tokenizer, or none that transformers can read
        return None
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((candidate for candidate in candidates if candidate is not None), None)


def _config_names_generator(config: PretrainedConfig, source: ModelSource, auto_class: Any) -> bool:
    """Return whether the config names a class that generates text, as the adapter's Auto class does."""
    generating = (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM)
    return auto_class in generating and bool(config.architectures) and resolve_class(config, source).can_generate()


def _without_old_head(checkpoint: Checkpoint, model: PreTrainedModel, files_class: list[str] | None) -> Checkpoint:
    """Return the checkpoint without the tensors that the adapter's class does not use, if the files are of another class."""
    if type(model).__name__ in (files_class or ()):
        return checkpoint
    used = {name for group in map_names(model, checkpoint.tensors).groups for _, name in group.sources}
    return replace(checkpoint, tensors={name: tensor for name, tensor in checkpoint.tensors.items() if name in used})


def _merge_tensors(model: PreTrainedModel, lora: LoraConfig, folder: Path, checkpoint: Checkpoint) -> MergedTensors:
    from upshift.loading.lora import AdaptedModel

    names = map_names(model, checkpoint.tensors)
    targets = {group.sources[0][1]: group.target for group in names.groups if group.converter is None}
    parameters = {name for name, _ in model.named_parameters()}
    _tie_weights(model, {target: checkpoint.tensors[name] for name, target in targets.items()})
    merged_weights = AdaptedModel(model, lora, folder).weights
    fused_weights = find_fused_weights(model, names, checkpoint.tensors, merged_weights)
    tensors: list[NewTensor] = []
    written: set[int] = set()
    origins: dict[int, StoredTensor] = {}
    for name, stored in checkpoint.tensors.items():
        merged_weight = merged_weights.get(targets.get(name, ""))
        if name in fused_weights.tensors:
            tensors.append(fused_weights.tensors[name])
        elif merged_weight is None or merged_weight.is_base:
            tensors.append(copy_tensor(stored))
        else:
            tensors.append(_to_new_tensor(name, stored, merged_weight))
        if merged_weight is not None:
            written.add(merged_weight.key)
            origins[merged_weight.origin] = stored
    lost = {}
    for name, merged_weight in merged_weights.items():
        if name in targets.values() or name in fused_weights.names:
            continue
        if merged_weight.key in written:
            continue
        if merged_weight.replacement is not None or merged_weight.origin in origins:  # the adapter has it, or it is now untied
            tensors.append(_to_new_tensor(name, origins.get(merged_weight.origin), merged_weight))
            written.add(merged_weight.key)
        elif name in parameters:
            lost[name] = prod(merged_weight.shape)
    keys_by_origin = {(merged_weight.origin, merged_weight.key) for merged_weight in merged_weights.values()}
    tied = Counter(origin for origin, _ in keys_by_origin)
    return MergedTensors(tensors, max(tied.values()) > 1, lost)


def _tie_weights(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    """Tie weights as from_pretrained does: two weights that are both stored become one if their bytes are equal.

    ``stored``: the stored tensors by the weight's name."""
    missing = set(model.state_dict()) - stored.keys()
    for name, tied_name in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if name in stored and tied_name in stored and _have_equal_bytes(stored[name], stored[tied_name]):
            missing.add(name)
    model.tie_weights(missing_keys=missing)


def _have_equal_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return all(chunk == other_chunk for chunk, other_chunk in zip(read_chunks(first), read_chunks(second), strict=True))


def _to_new_tensor(name: str, stored: StoredTensor | None, merged_weight: MergedWeight) -> NewTensor:
    if merged_weight.replacement is not None:
        return NewTensor(
            name, DTYPE_NAMES[merged_weight.replacement.dtype], merged_weight.shape, partial(_merged_bytes, merged_weight, None)
        )
    assert stored is not None
    if stored.shape != merged_weight.shape:
        raise RequestError(
            f"{stored.file}: tensor {quote(stored.name)} is {list(stored.shape)} where config.json says "
            f"{list(merged_weight.shape)}; take both from one model"
        )
    return NewTensor(name, stored.dtype, merged_weight.shape, partial(_merged_bytes, merged_weight, stored))


def _merged_bytes(merged_weight: MergedWeight, stored: StoredTensor | None) -> Iterator[memoryview]:
    from upshift.loading.lora import merged_rows

    def rows(start: int, stop: int) -> Tensor:
        assert stored is not None
        row_bytes = stored.nbytes // stored.shape[0]
        shape = (stop - start, *stored.shape[1:])
        offset = stored.offset + start * row_bytes
        nbytes = (stop - start) * row_bytes
        weight = torch.empty(shape, dtype=DTYPES[stored.dtype])
        read_into(replace(stored, shape=shape, offset=offset, nbytes=nbytes), weight)
        return weight

    for weight in merged_rows(merged_weight, rows):
        yield bytes_of(weight)


def _merged_config(source: ModelSource, model: PreTrainedModel, untied: bool) -> bytes:
    new_config = {**source.config, "architectures": [type(model).__name__]}
    if model.config.num_labels != source.hf_config.num_labels:  # the head is the adapter's
        fields = model.config.to_dict()
        new_config |= {name: fields[name] for name in ("id2label", "label2id", "pad_token_id") if name in fields}
    if untied:
        new_config["tie_word_embeddings"] = False
        for key, value in new_config.items():
            if isinstance(value, dict) and "tie_word_embeddings" in value:
                new_config[key] = {**value, "tie_word_embeddings": False}
    return config_text(new_config).encode()


def find_fused_weights(
    model: PreTrainedModel, names: NameMapping, tensors: Mapping[str, StoredTensor], merged_weights: Mapping[str, MergedWeight]
) -> FusedWeights:
    """Return the names of the weights that are fused or split on loading, and the stored tensors that the adapter changes."""
    shapes = {name: torch.Size(shape_of(tensor)) for name, tensor in tensors.items()}
    WEIGHT_CONVERSIONS.put(model, list(names.used_transforms))
    fused_weights = FusedWeights()
    for group in names.groups:
        if group.converter is not None:
            targets = list(filled_shapes(group, shapes, model))
            fused_weights.names |= set(targets)
            if any(not merged_weights[target].is_base for target in targets if target in merged_weights):
                merging = _GroupMerge(model, group, tensors, merged_weights)
                fused_weights.tensors |= {name: merging.tensor(tensors[name]) for _, name in group.sources}
    return fused_weights


class FusedWeights:
    """The weights that are fused or split on loading."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # the names of all such weights of the model
        self.tensors: dict[str, NewTensor] = {}  # the tensors that the adapter changes, by their stored names


class _GroupMerge:
    """The merging of one group. It runs when its first tensor is written. Each tensor is freed when it is written."""

    def __init__(
        self,
        model: PreTrainedModel,
        group: Group,
        tensors: Mapping[str, StoredTensor],
        merged_weights: Mapping[str, MergedWeight],
    ) -> None:
        self._model = model
        self._group = group
        self._tensors = tensors
        self._merged_weights = merged_weights
        self._split_tensors: dict[str, Tensor] = {}

    def tensor(self, stored: StoredTensor) -> NewTensor:
        return NewTensor(stored.name, DTYPE_NAMES[dtype_of(stored)], shape_of(stored), partial(self._tensor_bytes, stored.name))

    def _tensor_bytes(self, name: str) -> Iterator[memoryview]:
        if name not in self._split_tensors:
            self._split_tensors = self._merge()
        yield bytes_of(self._split_tensors.pop(name))

    def _merge(self) -> dict[str, Tensor]:
        stored = {name: self._tensors[name] for _, name in self._group.sources}
        weights = convert_group(self._group, {name: read_tensor(tensor) for name, tensor in stored.items()}, self._model)
        changed = {target: self._merge_weight(target, weights.pop(target)) for target in list(weights)}
        split = REVERT.get()(self._model, changed)
        for name, tensor in stored.items():
            if name not in split or tuple(split[name].shape) != shape_of(tensor):
                raise RequestError(
                    f"{self._group.target} is made of {len(stored)} stored tensors, and transformers does not give {name} back "
                    "of it; merge this adapter with peft's merge_and_unload"
                )
        return {name: split[name].to(dtype_of(tensor)) for name, tensor in stored.items()}

    def _merge_weight(self, target: str, weight: Tensor) -> Tensor:
        from upshift.loading.lora import merged_rows

        merged_weight = self._merged_weights.get(target)
        if merged_weight is None or merged_weight.is_base:
            return weight
        blocks = list(merged_rows(merged_weight, lambda start, stop: weight[start:stop].clone()))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
