"""List the undocumented names of PyTorch that Upshift uses, each with the feature that needs it.

If PyTorch no longer has a name, using the constant raises an error, and only that feature is lost. The functions at the end
have fall-backs that give the same results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any
from unittest import mock

from upshift.errors import MissingInternal
from upshift.internals.lookup import Internal

TRACING = "Measuring a model without its weights"
COMPILED = "The memory of compiled layers"
MODULES = "Replacing a module's tensors"
ONEDNN = "The engine onednn"
ONEDNN_INSTEAD = "use another engine (--engine)"
PIPELINE = "Pipeline parallelism"
PIPELINE_INSTEAD = "use pipeline_parallel=1"
TENSOR = "Tensor parallelism"
TENSOR_INSTEAD = "use tensor_parallel=1"
DIVIDED = "Exchanging tensors between ranks"
DIVIDED_INSTEAD = "use context_parallel=1 and fully_shard=off"

# Tracing: fake tensors and facts about each operator.
FAKE_TENSOR_MODE = Internal("torch", "torch._subclasses.fake_tensor:FakeTensorMode", TRACING)
FAKE_TENSOR = Internal("torch", "torch._subclasses.fake_tensor:FakeTensor", TRACING)
FAKE_CACHE_KEY = Internal("torch", "torch._subclasses.fake_tensor:_DispatchCacheKey", "Tracing a model faster")
FAKE_CACHE_ENTRY = Internal("torch", "torch._subclasses.fake_tensor:_DispatchCacheValidEntry", "Tracing a model faster")
MAKE_SUBCLASS = Internal("torch", "torch:Tensor._make_subclass", "Tracing a model faster")
UNSAFE_VIEW = Internal("torch", "torch.ops:aten._unsafe_view.default", "Tracing a model faster")
CONSTANT_LIMIT = Internal("torch", "torch._subclasses.fake_tensor:CONSTANT_NUMEL_LIMIT", "Tracing a tower for images")
NO_MODES = Internal("torch", "torch.utils._python_dispatch:_disable_current_modes", "Tracing a tower for images")
DISPATCH_MODE = Internal("torch", "torch.utils._python_dispatch:TorchDispatchMode", TRACING)
SCHEMA = Internal("torch", "OpOverload._schema", TRACING)
OPERATOR = Internal("torch", "OpOverload._overloadpacket", TRACING)
AUTOGRAD_NODE = Internal("torch", "torch._C:_current_autograd_node", TRACING)
TENSOR_HOLDERS = Internal("torch", "Tensor._use_count", TRACING)
STORAGE_HOLDERS = Internal("torch", "torch._C:_storage_Use_Count", "Counting who holds a tensor's memory")
STORAGE = Internal("torch", "UntypedStorage._cdata", "Telling one tensor's memory from another's")
VERSION = Internal("torch", "Tensor._version", "Seeing that weights were changed", "leave out the check of numbers")

# The partition of a compiled layer.
PARTITION = Internal("torch", "torch._inductor.compile_fx:partition_fn", COMPILED, "use torch_compile=off")
LOAD_PASSES = Internal("torch", "torch._inductor.fx_passes.joint_graph:lazy_init", COMPILED, "use torch_compile=off")
JOINT_GRAPH = Internal("torch", "torch._functorch.aot_autograd:aot_export_joint_simple", COMPILED, "use torch_compile=off")
DECOMPOSITIONS = Internal("torch", "torch._inductor.decomposition:select_decomp_table", COMPILED, "use torch_compile=off")
VIRTUALIZED = Internal("torch", "torch._inductor.virtualized:V", COMPILED, "use torch_compile=off")
CPP_COMPILER = Internal("torch", "torch._inductor.cpp_builder:get_cpp_compiler", "Finding the C++ compiler")
NO_COMPILER = Internal("torch", "torch._inductor.exc:InvalidCxxCompiler", "Finding the C++ compiler")
COMPILED_CALL = Internal("torch", "Module._compiled_call_impl", "Compiling a Trainer's layers", "use torch_compile=off")

# Modules and graphs.
PARAMETERS = Internal("torch", "Module._parameters", MODULES)
BUFFERS = Internal("torch", "Module._buffers", MODULES)
CHILDREN = Internal("torch", "Module._modules", MODULES)
FORWARD_HOOKS = Internal("torch", "Module._forward_hooks", "Activation checkpointing of a model with frozen embeddings")
APPLY = Internal("torch", "Module._apply", "Moving a rank's own part of a model", "use fully_shard=off")
FLASH_FOR_CPU = Internal(
    "torch",
    "torch.ops:aten._scaled_dot_product_flash_attention_for_cpu",
    "Selective activation checkpointing",
    "use activation_checkpointing=full",
)
ERASED = Internal("torch", "Node._erased", ONEDNN, ONEDNN_INSTEAD)
METADATA_CHECK = Internal("torch", "torch.ops:aten._assert_tensor_metadata.default", ONEDNN, ONEDNN_INSTEAD)
LINEAR_POINTWISE = Internal("torch", "torch.ops:mkldnn._linear_pointwise", ONEDNN, ONEDNN_INSTEAD)
REORDER_WEIGHT = Internal("torch", "torch.ops:mkldnn._reorder_linear_weight", ONEDNN, ONEDNN_INSTEAD)
EXPORT_ERROR = Internal("torch", "torch._dynamo:exc.UserError", ONEDNN, ONEDNN_INSTEAD)

# Several processes.
COLLECTIVES = Internal("torch", "torch.ops:_c10d_functional", DIVIDED, DIVIDED_INSTEAD)
EXCHANGES = tuple(
    Internal("torch", f"torch.ops:_c10d_functional.{operation}", DIVIDED, DIVIDED_INSTEAD)
    for operation in ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor", "wait_tensor")
)
CHUNK_CAT = Internal("torch", "torch:_chunk_cat", DIVIDED, DIVIDED_INSTEAD)
BAD_FORK = Internal("torch", "torch.cuda:_is_in_bad_fork", "Starting processes that use a GPU", "make CUDA_VISIBLE_DEVICES empty")
NVML_INDEX = Internal("torch", "torch.cuda:_get_nvml_device_index", "Starting processes that use a GPU faster")
DEFAULT_STORE = Internal("torch", "torch.distributed.distributed_c10d:_get_default_store", "What ranks tell each other")
FLIGHT_RECORDER = Internal("torch", "torch._C:_distributed_c10d", "Naming the collective that ranks wait in")
FSDP_GATHER = Internal(
    "torch",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultAllGather",
    "Going on after a rank ran out of memory",
    "use fully_shard=off",
)
FSDP_SUM = Internal(
    "torch",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives:DefaultReduceScatter",
    "Going on after one rank ran out of memory",
    "use fully_shard=off",
)
PIPELINE_STAGE = Internal("torch", "torch.distributed.pipelining.stage:_PipelineStageBase", PIPELINE, PIPELINE_INSTEAD)
PIPELINE_SCHEDULE = Internal("torch", "torch.distributed.pipelining.schedules:PipelineScheduleSingle", PIPELINE, PIPELINE_INSTEAD)
SCHEDULE_BACKWARD = Internal("torch", "Schedule._has_backward", PIPELINE, PIPELINE_INSTEAD)
SCHEDULE_STEP = Internal("torch", "Schedule._step_microbatches", PIPELINE, PIPELINE_INSTEAD)
FAKE_STORE = Internal("torch", "torch.testing._internal.distributed.fake_pg:FakeStore", TENSOR, TENSOR_INSTEAD)
OUTSIDE_MODES = Internal("torch", "torch.utils._python_dispatch:_disable_current_modes", TENSOR, TENSOR_INSTEAD)
SPLIT_TENSOR = Internal("torch", "Shard._split_tensor", "Checkpoints of divided tensors")
SCALER_STATES = Internal("torch", "GradScaler._per_optimizer_states", "Training in fp16 on several ranks", "use precision=bf16")
LAST_RATE = Internal("torch", "LRScheduler._last_lr", "Population based training")

# Names with fall-backs.
SOFTMAX_BACKWARD = Internal("torch", "torch:_softmax_backward_data", "The backward pass of block attention")
NORMS = Internal("torch", "torch:_foreach_norm", "The norm of gradients")
ARCHITECTURES = Internal("torch", "torch._C:_cuda_getArchFlags", "Comparing torch's kernels with a GPU")
EXCLUDED_KEY = Internal("torch", "torch._C:_SetExcludeDispatchKeyGuard", "Activations on the host beside autocast")
DISPATCH_KEY = Internal("torch", "torch._C:DispatchKey", "Activations on the host beside autocast")
TREE = Internal("torch", "torch.utils:_pytree", "Walking over nested tensors")
LAZY_GRAPHS = Internal("torch", "torch.fx._lazy_graph_module:_use_lazy_graph_module", "Exporting a model faster")
LISTING = Internal("torch", "torch._export.utils:_materialize_cpp_cia_ops", "Exporting a model faster")


def is_fork_after_cuda() -> bool:
    """Return whether this process was forked from one that had queried CUDA. Such a fork cannot use a GPU.

    Some libraries query CUDA while they are imported (torchao 0.18: float8_utils, mx_formats/kernels)."""
    return "torch" in sys.modules and bool(BAD_FORK.get()())


@contextmanager
def cuda_not_started() -> Iterator[None]:
    """Answer questions about GPUs from NVML while libraries are imported, so that a later fork of this process can use a GPU.

    CUDA answers where NVML cannot. See torch's note on "Poison fork in multiprocessing"."""
    import torch

    cuda = torch.cuda
    ask_cuda = cuda.get_device_capability

    def capability(device: Any = None) -> tuple[int, int]:
        return _nvml_capability(device) or ask_cuda(device)

    with (
        mock.patch.object(cuda, "is_available", lambda: cuda.device_count() > 0),
        mock.patch.object(cuda, "get_device_capability", capability),
    ):
        yield


def _nvml_capability(device: Any) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device by its number or name. None if NVML cannot tell."""
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(NVML_INDEX.get()(device or 0))  # the current device is 0 before CUDA starts
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except (MissingInternal, RuntimeError, pynvml.NVMLError):  # RuntimeError: torch finds no number for a UUID
        return None
    finally:
        pynvml.nvmlShutdown()
    return major, minor


def dispatch_mode(handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """Return a context manager that calls ``handle(operator, args, kwargs)`` in place of every operator."""
    base: Any = DISPATCH_MODE.get()

    class HandlerMode(base):  # type: ignore[misc]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Return False, because nothing is compiled in this mode.

            Otherwise PyTorch wraps __torch_dispatch__ in a guard that costs as much as an operator."""
            return False

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handle(function, args, kwargs or {})

    return HandlerMode()


def softmax_backward(gradient: Any, probabilities: Any) -> Any:
    """Return the gradient of softmax's input. Softmax is over the last dimension, and both arguments have the input's shape."""
    try:
        return SOFTMAX_BACKWARD.get()(gradient, probabilities, -1, gradient.dtype)
    except MissingInternal:
        weighted = gradient * probabilities
        return weighted - probabilities * weighted.sum(-1, keepdim=True)


def norms(tensors: list[Any]) -> list[Any]:
    """Return the 2-norm of each tensor, in its own dtype."""
    try:
        return list(NORMS.get()(tensors))
    except MissingInternal:
        import torch

        return [torch.linalg.vector_norm(tensor) for tensor in tensors]


@contextmanager
def fast_export() -> Iterator[None]:
    """Make torch.export faster while the context is open. The exported graph is the same.

    An export changes its graph some forty times. torch writes and compiles Python source after each change; here it does so when
    the graph is called. torch also lists the operators of C++ again for each of its namespaces; here it lists them once."""
    with ExitStack() as stack:
        with suppress(MissingInternal):
            stack.enter_context(LAZY_GRAPHS.get()(True))
        with suppress(MissingInternal):
            stack.enter_context(LISTING.replaced(cache(LISTING.get())))
        yield


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists, mappings and types registered with torch, in order."""
    flatten = _torch_leaves()
    if flatten is not None:
        return list(flatten(tree))
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [leaf for branch in tree for leaf in tree_leaves(branch)]
    return [tree]


@cache
def _torch_leaves() -> Callable[[Any], list[Any]] | None:
    try:
        leaves: Callable[[Any], list[Any]] = TREE.get().tree_leaves
    except (MissingInternal, AttributeError):
        return None
    return leaves


def tree_map(leaf_type: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with ``function`` applied to every leaf of this type."""
    try:
        return TREE.get().tree_map_only(leaf_type, function, tree)
    except (MissingInternal, AttributeError):
        pass
    if isinstance(tree, leaf_type):
        return function(tree)
    if isinstance(tree, Mapping):
        return type(tree)(**{name: tree_map(leaf_type, function, branch) for name, branch in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*(tree_map(leaf_type, function, branch) for branch in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map(leaf_type, function, branch) for branch in tree)
    return tree


@cache
def _fake_type() -> type | None:
    try:
        fake_tensor_class: type = FAKE_TENSOR.get()
    except MissingInternal:
        return None
    return fake_tensor_class


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor is fake: it has a shape but no values. Without FakeTensor in torch, no tensor is."""
    fake_tensor_class = _fake_type()
    return fake_tensor_class is not None and isinstance(tensor, fake_tensor_class)


def autocast_copy(weight: Any) -> Any:
    """Return a view of the copy that autocast keeps of a CUDA weight until it ends, or of the weight itself outside autocast.

    autocast casts the operands of einsum, and einsum of one operand is a view of it. Inside an operator autocast is switched off
    for the operators that it calls. If there is no copy yet, this makes the one that a layer will use, so it has a gradient.
    """
    import torch

    try:
        switched_on = EXCLUDED_KEY.get()(DISPATCH_KEY.get().AutocastCUDA, False)
    except MissingInternal:
        return weight
    with switched_on, torch.enable_grad():
        return torch.einsum("...->...", weight)
