"""Load a model, and make it run as the plan says.

``prepare_model`` applies everything in one order: the rank's part of the model, attention, activation checkpointing,
compilation, and what ranks divide of all that (distributed/).

The other functions load the weights, also those that stay on the host or the disk until they are needed, run matrix products of
the layers in fp8 by torchao (weights keep their precision; operands are scaled and cast before each product), offload
activations to host memory, and compute the loss in the plan's precision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from upshift.benchmarking.meters import tensor_bytes
from upshift.errors import MissingInternal, RequestError
from upshift.internals.torch_names import autocast_copy
from upshift.internals.transformers_names import ATTENTION, PACKED_ROWS
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.fill_model import check_files, check_missing
from upshift.loading.load import build_empty, load_placed, load_source
from upshift.loading.offload.disk_store import converted_folder
from upshift.loading.offload.hooks import buffer_bytes, mapped_bytes, recompute_offloaded
from upshift.loading.placement.apply import PlacementOptions
from upshift.models.adapter import base_of, complete_model, name_base
from upshift.models.build import build_model, choose_class, disable_cache, find_stacks, name_padding
from upshift.models.ops.activation_checkpointing import recompute_layers
from upshift.models.ops.block_attention import set_attention
from upshift.models.ops.chunked_loss import chunked_head, labels_counted
from upshift.models.ops.sequence_loss import sequence_losses
from upshift.models.source import ModelSource, source_of_files
from upshift.planning.optimizers import check_library
from upshift.planning.plan import Plan
from upshift.training.batches.collate import MicroBatch, every_second_row, to_device, to_tensors
from upshift.training.checkpoint.model import read_adapter
from upshift.training.checkpoint.sharded import stages_of
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.distributed.context_parallel import apply_context_parallel
from upshift.training.distributed.fsdp import shard_weights
from upshift.training.distributed.mesh import Mesh
from upshift.training.distributed.parallelize import parallelize
from upshift.training.distributed.pipeline_stage import layers_per_stage, stage_modules
from upshift.training.held_memory import keep_freed_memory
from upshift.training.mup import scale_initial_weights
from upshift.training.preferences.preference_loss import PreferenceLoss, log_ratios
from upshift.training.sharded_init import build_empty_model, can_read_slices, fill_model

FP8_MULTIPLE = 16  # both sides of an fp8 matrix product (torch._scaled_mm)


def convert_to_fp8(model: nn.Module, *, emulate: bool) -> int:
    """Convert in place the linear modules of the layers whose sizes fit fp8 products, but not the head. Return their number.

    ``emulate`` casts to fp8 and computes the products in fp32, for devices without fp8.
    """
    check_library("torchao", purpose="precision=fp8")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulate)
    converted = 0

    def fits(module: nn.Module, _: str) -> bool:
        nonlocal converted
        if not isinstance(module, nn.Linear) or module.in_features % FP8_MULTIPLE or module.out_features % FP8_MULTIPLE:
            return False
        converted += 1
        return True

    for _, stack in find_stacks(model):
        for layer in stack:
            convert_to_float8_training(layer, module_filter_fn=fits, config=config)
    return converted


LOW_PRECISIONS = ("bf16", "fp16", "fp8")  # of a plan: products of 16 or 8 bits
MIN_OFFLOADED_BYTES = 2**16  # copying a smaller tensor costs more than it saves
# Of the copies that autocast makes of fp32 weights. While a tensor is saved, torch says that autocast is off.
AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)
Packed = tuple[torch.device, Tensor]


class _WeightStorages:
    """Recognize tensors that share memory with a weight, or with a weight's copy that autocast made.

    Weights are looked up by their numbers of elements when a tensor is saved, because FSDP replaces the weights of a layer while
    it computes. It also frees them then, and activations get their addresses: only the present address of a weight counts.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, list[tuple[nn.Module, str]]] = {}
        self._copies: set[int] = set()  # addresses of the copies that autocast keeps until it ends
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                for elements in _storage_elements(parameter):
                    self._names.setdefault(elements, []).append((module, name))

    def contain(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._copies:
            return True
        for module, name in self._names.get(storage.nbytes() // tensor.element_size(), ()):
            parameter = getattr(module, name)
            if isinstance(parameter, DTensor):  # a shard of it is never saved whole
                continue
            if address == parameter.untyped_storage().data_ptr():
                return True
            if tensor.dtype in AUTOCAST_DTYPES and parameter.dtype == torch.float32 and parameter.requires_grad:
                copy = autocast_copy(parameter).untyped_storage().data_ptr()
                self._copies.add(copy)
                if address == copy:
                    return True
        return False


def _storage_elements(parameter: nn.Parameter) -> set[int]:
    """Return how many elements the memory of a weight may have: those of the whole weight, and with the padding of its gathers.

    FSDP gathers shards of one size, so it pads a weight whose first dimension the ranks do not divide."""
    whole = parameter.numel()
    if not isinstance(parameter, DTensor):
        return {whole, parameter.untyped_storage().nbytes() // parameter.element_size()}
    rows = parameter.shape[0] if parameter.dim() else 1
    mesh = parameter.device_mesh
    shards = prod(mesh.size(number) for number, placement in enumerate(parameter.placements) if placement.is_shard())
    return {whole, -(-rows // shards) * shards * (whole // max(rows, 1))}


def offload_activations(model: nn.Module) -> AbstractContextManager[object]:
    """Keep the tensors that the forward pass saves for the backward pass in host memory while open.

    torch.autograd.graph.save_on_cpu would also copy the weights, which autograd saves beside the activations.
    """
    weights = _WeightStorages(model)

    def pack(tensor: Tensor) -> Packed:
        if tensor.nbytes < MIN_OFFLOADED_BYTES or weights.contain(tensor):
            return tensor.device, tensor
        # Copies run on the stream that wrote the tensor, and come back on the same stream.
        host = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: Packed) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def load_offloaded(
    source: ModelSource, config: PretrainedConfig, model_class: type[PreTrainedModel], plan: Plan, *, dtype: torch.dtype
) -> PreTrainedModel:
    """Load the model with its frozen weights on the host or the disk. Raise RequestError for a model without an adapter.

    Only the adapter is trained.
    """
    if source.adapter is None:
        raise RequestError(f"weight_offload={plan.weight_offload} is for frozen weights; add an adapter, such as --lora-rank 16")
    with torch.device("meta"):
        empty = build_model(config, model_class, dtype=dtype)
    options = PlacementOptions(make_device_map(empty, plan), None, converted_folder())
    return load_placed(source_of_files(source), options, dtype=dtype, model_class=model_class)


def make_device_map(model: PreTrainedModel, plan: Plan) -> dict[str, str | int]:
    """Return the device of each module.

    The layers are offloaded. So is an embedding to the disk, if only rows of it are read. Everything else is on the plan's
    device.
    """
    device = "cpu" if plan.device == "cpu" else 0
    offload_device = "disk" if plan.weight_offload == "disk" else "cpu"
    devices: dict[str, str | int] = {"": device}
    for path, _ in find_stacks(model):
        devices[path] = offload_device
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if offload_device == "disk" and (head is None or head.weight is not embedding.weight):
        for path, module in model.named_modules(remove_duplicate=False):
            if module is embedding:
                devices[path] = offload_device
    return devices


def in_memory_bytes(model: nn.Module, *others: object) -> int:
    """Return the bytes of the tensors of a model and other objects. For weights on the disk only their read buffers count."""
    return tensor_bytes(model, *others) - mapped_bytes(model) + buffer_bytes(model)


def configure_process(plan: Plan) -> None:
    """Set the choices that belong to the whole process. Call it before tensors exist.

    What starts the ranks has chosen the GPU of each: a launcher's local rank may be another number than its rank.
    """
    if plan.host_memory == "keep":
        keep_freed_memory()
    if plan.device == "cpu":
        torch.set_num_threads(plan.threads_per_process)
    matmul_precision = "highest"
    if plan.precision == "tf32":
        matmul_precision = "high" if plan.device == "cuda" else "medium"
    torch.set_float32_matmul_precision(matmul_precision)


def check_weights(source: ModelSource) -> None:
    """Raise RequestError if the files lack weights of the model. It reads only the headers, before anything slow starts."""
    stored = source_of_files(source)
    if "quantization_config" in stored.config:  # only transformers knows their form; it reports missing weights itself
        return
    config = stored.hf_config
    model_class, _ = choose_class(config, source.reference)
    check_files(stored, build_empty(model_class, config, torch.float32))


def load_or_build(source: ModelSource, plan: Plan, *, from_config: bool, seed: int) -> nn.Module:
    """Return the trainable model in the plan's weight precision, on the host.

    Weights that no file contains, such as those of a new adapter, are random.
    """
    dtype = weight_dtype(source, plan)
    config = source.hf_config
    model_class, _ = choose_class(config, source.reference)
    torch.manual_seed(seed)  # the same weights on every rank
    if from_config:
        if plan.weight_offload != "none":
            raise RequestError(f"weight_offload={plan.weight_offload} reads the model's files, and --from-config has none")
        random_model = build_model(config, model_class, dtype=dtype)
        if plan.mup_base:
            scale_initial_weights(random_model, plan.mup_base)
        return complete_model(random_model, source)
    if source.directory is None:
        raise RequestError(f"{source.reference!r} is a config without weights; add --from-config for random weights")
    find_safetensors(source.directory)
    whole = complete_model(_load_weights(source, config, model_class, plan, dtype=dtype), source)
    if source.adapter is not None:
        name_base(whole, source)
    if source.adapter_directory is not None:
        read_adapter(source.adapter_directory, whole)
    return whole


def load_shards(source: ModelSource, plan: Plan, mesh: Mesh, *, seed: int) -> tuple[nn.Module, int] | None:
    """Load and prepare a rank's part of the model, and read only that part of the files.

    Return the part and the number of parameters of the whole model, or None if the whole model must be built first.
    """
    if source.directory is None or not can_read_slices(source, plan):
        return None
    torch.manual_seed(seed)
    config = source.hf_config
    model_class, _ = choose_class(config, source.reference)
    empty = build_empty_model(source, config, model_class, dtype=weight_dtype(source, plan))
    if empty is None:
        return None
    count = sum(parameter.numel() for parameter in empty.model.parameters())
    model = prepare_model(empty.model, plan, mesh)
    fill_model(model, empty, plan)
    return model, count


def weight_dtype(source: ModelSource, plan: Plan) -> torch.dtype:
    """Return the dtype in which a plan loads the weights of the model inside an adapter, or of a model without one."""
    return torch.bfloat16 if plan.precision == "bf16-weights" or source.base_dtype == "bfloat16" else torch.float32


def _load_weights(
    source: ModelSource, config: PretrainedConfig, model_class: type[PreTrainedModel], plan: Plan, *, dtype: torch.dtype
) -> PreTrainedModel:
    """Load the model from files. Let transformers load quantized weights, whose form it alone knows."""
    if plan.weight_offload != "none":
        return load_offloaded(source, config, model_class, plan, dtype=dtype)
    if source.quantized_from is None and "quantization_config" not in source_of_files(source).config:
        return load_source(source_of_files(source), dtype=dtype, model_class=model_class)
    arguments = _quantization_arguments(source)
    if source.new_head_on is not None:
        arguments["config"] = source_of_files(source).hf_config
    loaded: Any = model_class.from_pretrained(  # with information about the loading, which its type does not include
        source.directory, dtype=dtype, use_safetensors=True, output_loading_info=True, **arguments
    )
    model: PreTrainedModel
    model, loading_info = loaded
    check_missing(set(loading_info["missing_keys"]), model, source)
    return model


def _quantization_arguments(source: ModelSource) -> dict[str, Any]:
    """Return the arguments with which from_pretrained quantizes unquantized weights to 4 bits while it loads them."""
    if source.quantized_from is None or "quantization_config" in source_of_files(source).config:
        return {}
    return {"quantization_config": BitsAndBytesConfig.from_dict(source.config["quantization_config"]), "device_map": {"": "cpu"}}


def prepare_model(model: nn.Module, plan: Plan, mesh: Mesh) -> nn.Module:
    """Apply the plan to ``model`` (a transformers or a peft model) in place and move the rank's part to the plan's device."""
    if plan.precision == "fp8":
        convert_to_fp8(model, emulate=plan.device != "cuda")
    model = parallelize(model, mesh)
    is_empty = any(parameter.is_meta for parameter in model.parameters())  # then its weights are read last (sharded_init.py)
    if plan.weight_offload == "none" and not plan.layout.gathers and not is_empty:
        model.to(plan.device)
    elif plan.weight_offload != "none":
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            weight.data = weight.data.to(plan.device)  # an adapter starts on the device of the frozen weights around it
    modules = stage_modules(model)
    bases = [base_of(module) for module in modules]
    for base in bases:
        if plan.attention != ATTENTION.of(base.config):
            set_attention(base, plan.attention)
    apply_context_parallel(bases, mesh)
    recomputed_layers = layers_per_stage(plan.activation_checkpointing, modules)
    for module, recomputed in zip(modules, recomputed_layers, strict=True):
        recompute_layers(module, recomputed, plan.recompute_granularity)
        recompute_offloaded(module)
        compile_layers(module, plan)
        if plan.layout.gathers:
            shard_weights(module, mesh)
    return model


def empty_whole_model(model: nn.Module, source: ModelSource, plan: Plan) -> nn.Module:
    """Return the whole model without weights, as it is saved, on a rank that has a part of it.

    An adapter is around it, because peft saves the weights of the modules that it finds in the model.
    """
    config = source.hf_config
    model_class, _ = choose_class(config, source.reference)
    with torch.device("meta"):
        whole = build_model(config, model_class, dtype=weight_dtype(source, plan))
        if source.adapter is not None:
            adapted = complete_model(whole, source)
            name_base(adapted, source)
            return adapted
    part_config = getattr(stages_of(model)[0], "config", None)
    pad_token_id = None if part_config is None else getattr(part_config.get_text_config(), "pad_token_id", None)
    if pad_token_id is not None:  # a run names the padding token of a reward model after it has loaded the model
        name_padding(whole.config, pad_token_id)
    for part in stages_of(model):
        generation_config = getattr(part, "generation_config", None)
        if generation_config:
            whole.generation_config = generation_config
            break
    return whole


def compile_layers(model: nn.Module, plan: Plan) -> None:
    """Compile the model as the plan says, after dropping what this process compiled for other models.

    torch compiles one function only a few times.
    """
    if plan.torch_compile != "off":
        torch.compiler.reset()
    if plan.torch_compile == "layer":
        for _, stack in find_stacks(model):
            for layer in stack:
                layer.compile()
    elif plan.torch_compile == "model":
        model.compile()


@contextmanager
def chunked_loss(model: nn.Module, plan: Plan, *, label_smoothing: float = 0.0) -> Iterator[None]:
    """Compute the model's loss in chunks of tokens while open, if the plan says so. Such a loss also smooths labels."""
    chunk_tokens = plan.loss_chunk_tokens
    if not chunk_tokens and plan.layout.vocabulary_parallel:  # which needs the chunked loss: one chunk of all tokens
        chunk_tokens = plan.sequence_length * plan.per_device_train_batch_size
    if not chunk_tokens:
        yield
        return
    with chunked_head(base_of(model), chunk_tokens=chunk_tokens, label_smoothing=label_smoothing):
        yield


def autocast(plan: Plan) -> AbstractContextManager[Any]:
    """Return autocast for the forward pass, or nothing. The backward pass runs in the precisions that the forward pass chose.

    Weights that ranks gather have the lower precision already (distributed/fsdp.py), and so have weights with fp32 masters
    (distributed/zero1.py).
    """
    if not uses_autocast(plan):
        return contextlib.nullcontext()
    return torch.autocast(plan.device, dtype=torch.float16 if plan.precision == "fp16" else torch.bfloat16)


def uses_autocast(plan: Plan) -> bool:
    """Return whether autocast casts weights when they are used."""
    return plan.precision in LOW_PRECISIONS and not (plan.layout.gathers or plan.layout.master_weights)


@contextmanager
def losses_in_fp32(plan: Plan) -> Iterator[None]:
    """Compute losses in fp32 while open, as autocast does.

    If autocast is off because weights have 16 bits, some models compute the loss from logits of 16 bits, with a precision of
    three digits. A chunked loss is computed in fp32 already.
    """
    if plan.precision not in LOW_PRECISIONS or uses_autocast(plan) or plan.loss_chunk_tokens:
        yield
        return
    original = functional.cross_entropy

    def in_fp32(logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return original(logits.float(), *args, **options)

    functional.cross_entropy = in_fp32  # type: ignore[assignment]  # it takes the same arguments
    try:
        yield
    finally:
        functional.cross_entropy = original


@contextmanager
def no_cache(model: nn.Module) -> Iterator[None]:
    """Stop the model, while open, from keeping keys and values.

    In training they cost memory, and with them transformers does not separate texts that share a row. The setting goes into the
    config, because some classes read it only there. Afterwards the config is as it was.
    """
    configs_with_cache = disable_cache(model)
    try:
        yield
    finally:
        for config in configs_with_cache:
            config.use_cache = True


@contextmanager
def without_search_for_packed_rows(inputs: Mapping[str, Any], plan: Plan) -> Iterator[None]:
    """Tell transformers that no row holds several sequences while open, if ``inputs`` has no positions.

    It would look for such rows in the positions that the model makes, and so wait for the GPU in every micro-batch.
    """
    replaced: AbstractContextManager[None] = contextlib.nullcontext()
    if plan.device != "cpu" and "position_ids" not in inputs:
        with contextlib.suppress(MissingInternal):  # this transformers waits, or no longer searches
            PACKED_ROWS.get()
            replaced = PACKED_ROWS.replaced(_no_packed_rows)
    with replaced:
        yield


def _no_packed_rows(position_ids: Tensor) -> None:
    return None


def compute_loss(model: nn.Module, plan: Plan, micro_batch: MicroBatch, preference: PreferenceLoss | None = None) -> torch.Tensor:
    """Return the mean loss of a micro-batch's labels, or that of label 0 everywhere if it has none.

    For pairs and rated answers, return their mean loss by ``preference``.
    """
    if micro_batch.margins is not None:
        return _compute_reward_loss(model, plan, micro_batch, preference or PreferenceLoss())
    if micro_batch.ratings is not None:
        micro_batch = every_second_row(micro_batch, first=0)
    inputs = to_tensors(micro_batch, plan.device)
    if not micro_batch.num_label_tokens:
        inputs["labels"] = torch.zeros_like(inputs["labels"])  # a mean over no label would be NaN, and so would its gradients
    with _forward_settings(model, plan, inputs), _counting_labels(model, micro_batch):
        if micro_batch.reference is None:
            loss: torch.Tensor = model(**inputs).loss
            return loss
        log_probabilities = -sequence_losses(model, inputs)
    reference = to_device(torch.from_numpy(micro_batch.reference), plan.device)
    counts = micro_batch.num_label_tokens > 0
    preference = preference or PreferenceLoss()
    if micro_batch.ratings is None:
        assert micro_batch.label_counts is not None
        num_tokens = to_device(torch.from_numpy(micro_batch.label_counts), plan.device)
        return preference.mean_loss(log_probabilities, reference, num_tokens, counts=counts)
    ratings = to_device(torch.from_numpy(micro_batch.ratings), plan.device)
    return preference.mean_loss_of_ratings(log_probabilities, reference, ratings, counts=counts)


def _compute_reward_loss(model: nn.Module, plan: Plan, micro_batch: MicroBatch, preference: PreferenceLoss) -> torch.Tensor:
    """Return the mean loss of pairs by the rewards that the model gives their rows."""
    assert micro_batch.margins is not None
    inputs = to_tensors(micro_batch, plan.device)
    with _forward_settings(model, plan, inputs):
        rewards = model(**inputs).logits.squeeze(-1).float()
    margins = to_device(torch.from_numpy(micro_batch.margins), plan.device)
    return preference.mean_loss_of_rewards(rewards, margins, counts=micro_batch.num_label_tokens > 0)


def compute_log_probabilities(model: nn.Module, plan: Plan, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the log-probability of the labels of each row [rows], in fp32."""
    inputs = to_tensors(micro_batch, plan.device)
    with _forward_settings(model, plan, inputs), _counting_labels(model, micro_batch):
        return -sequence_losses(model, inputs)


def sum_log_ratios(model: nn.Module, plan: Plan, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the sum of the log-ratios of the mismatched answers of a micro-batch, and their number [2].

    Both are 0 if it does not count. KTO's KL term is the mean log-ratio of a global batch.
    """
    mismatched = every_second_row(micro_batch, first=1)
    assert mismatched.reference is not None
    log_probabilities = compute_log_probabilities(model, plan, mismatched)
    if not micro_batch.num_label_tokens:
        return torch.zeros(2, dtype=torch.float64, device=plan.device)
    ratios = log_ratios(log_probabilities, to_device(torch.from_numpy(mismatched.reference), plan.device))
    return torch.stack([ratios.double().sum(), torch.full((), float(len(ratios)), device=ratios.device).double()])


def _counting_labels(model: nn.Module, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    """Return a context in which a loss in chunks knows how many labels the micro-batch has."""
    labels = micro_batch.arrays.get("labels")
    if labels is None:
        return contextlib.nullcontext()
    num_labels = int(np.count_nonzero(labels != IGNORED)) if micro_batch.num_label_tokens else labels.size
    return labels_counted(base_of(model), num_labels, positions=labels.size)


@contextmanager
def _forward_settings(model: nn.Module, plan: Plan, inputs: dict[str, Tensor]) -> Iterator[None]:
    """Run the model in the precision and with the memory of the plan while open."""
    offloading = offload_activations(model) if plan.activation_offload else contextlib.nullcontext()
    with autocast(plan), losses_in_fp32(plan), offloading, no_cache(model), without_search_for_packed_rows(inputs, plan):
        yield
