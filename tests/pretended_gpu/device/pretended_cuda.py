"""Put a CUDA device that is not there into torch: PRETENDED_GPUS=h100, or 4x4090 for several (the keys of pynvml.GPUS).

The C++ part (pretended_cuda.cpp) computes; this part stands in for the functions of ``torch.cuda`` that a CPU build lacks. As on
a real device, a child that was forked after the driver had been asked for anything may not use it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY = os.environ["PRETENDED_GPU_LIBRARY"]
ctypes.CDLL(LIBRARY)  # before torch is imported: torch asks for CUDA's hooks once

import pynvml  # noqa: E402
import torch  # noqa: E402


def _load_extension() -> Any:
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_loader

    loader = ExtensionFileLoader("pretended_cuda_ext", LIBRARY)
    spec = spec_from_loader("pretended_cuda_ext", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


ext = _load_extension()
MIB = 2**20
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"  # of torch's wheels for CUDA 13
MOST_GPUS = 8
CONTEXT_BYTES = 500 * MIB  # that a process holds on a device beside its tensors
gpus: list[pynvml.Gpu] = []


def visible_gpus() -> list[pynvml.Gpu]:
    """Return the GPUs that torch sees. torch itself reads CUDA_VISIBLE_DEVICES."""
    present = pynvml.all_gpus()
    chosen = torch.cuda._parse_visible_devices()
    numbered = [pynvml.instances(gpu)[0] if gpu.instances else gpu for gpu in present]
    if chosen and isinstance(chosen[0], str):
        numbered = [part for gpu in present for part in pynvml.instances(gpu) or [gpu]]
        chosen = torch.cuda._transform_uuid_to_ordinals(chosen, [gpu.uuid for gpu in numbered])
    wrong = next((position for position, number in enumerate(chosen) if int(number) >= len(numbered)), len(chosen))
    return [numbered[int(number)] for number in chosen[:wrong]]


def take_gpus() -> None:
    """Take the GPUs that the environment names."""
    gpus[:] = visible_gpus()
    ext.set_device_count(len(gpus))
    for device, gpu in enumerate(gpus):
        ext.set_limit(device, gpu.mib * MIB)
    if taken := os.environ.get("PRETENDED_LEFT"):  # "8 after 3": other processes leave 8 MiB after the third copy to the host
        mib, copies = taken.split(" after ")
        ext.set_left(int(mib) * MIB, int(copies))


take_gpus()


class Driver:
    """What a process has asked of the driver. A fork after the first question cannot use the device."""

    was_asked = False
    is_bad_fork = False


def _ask_driver() -> None:
    Driver.was_asked = True


def _after_fork() -> None:
    Driver.is_bad_fork = Driver.is_bad_fork or Driver.was_asked
    # A fork makes a new thread pool at its first use. The backward pass has a thread for each device, and two that make it at the
    # same time abort the process (ParallelOpenMP.cpp: "Invalid thread pool").
    torch.set_num_threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_after_fork)
cuda = torch.cuda


def _lazy_init() -> None:
    if Driver.is_bad_fork:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' start method"
        )
    _ask_driver()
    if not cuda._initialized:
        ext.initialize()
    cuda._initialized = True


def _index(device: Any = None) -> int:
    if device is None:
        return int(ext.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(ext.current_device()) if index is None else index


def is_available() -> bool:
    if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1":
        _ask_driver()
    return bool(gpus)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", _index(device))
        self.stream_id = self.cuda_stream = 1

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None:
        ext.arrive()

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        ext.arrive()
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    def __init__(self, **_: Any) -> None:
        self.seconds = 0.0
        self.ticket = 0  # of the last copy to the host before it

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()
        self.ticket = ext.last_ticket()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        ext.arrive_until(self.ticket)

    def query(self) -> bool:
        ext.arrive_until(self.ticket)
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.seconds - self.seconds)


def get_device_properties(device: Any = None) -> Any:
    _lazy_init()
    gpu = gpus[_index(device)]
    return types.SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], total_memory=gpu.mib * MIB, multi_processor_count=132,
        gcnArchName="", warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        L2_cache_size=50 * MIB, uuid=gpu.uuid, shared_memory_per_block_optin=232448, shared_memory_per_block=49152,
        is_integrated=0,
    )  # fmt: skip


def get_device_capability(device: Any = None) -> tuple[int, int]:
    _lazy_init()
    return gpus[_index(device)].capability


def memory_allocated(device: Any = None) -> int:
    return int(ext.allocated_and_peak(_index(device))[0])


def max_memory_allocated(device: Any = None) -> int:
    return int(ext.allocated_and_peak(_index(device))[1])


def memory_stats(device: Any = None) -> dict[str, int]:
    allocated, peak = ext.allocated_and_peak(_index(device))
    return {
        "allocated_bytes.all.current": allocated, "allocated_bytes.all.peak": peak, "reserved_bytes.all.current": allocated,
        "reserved_bytes.all.peak": peak, "inactive_split_bytes.all.current": 0, "num_alloc_retries": 0, "num_ooms": 0,
    }  # fmt: skip


def mem_get_info(device: Any = None) -> tuple[int, int]:
    _lazy_init()
    total = gpus[_index(device)].mib * MIB
    of_others = total - ext.limit_now(_index(device))
    return max(total - of_others - memory_allocated(device) - CONTEXT_BYTES, 0), total


def set_device(device: Any) -> None:
    index = _index(device)
    if index < 0:
        return
    if index >= len(gpus):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    _lazy_init()
    ext.set_device(index)


class DeviceContext:
    def __init__(self, device: Any) -> None:
        self.index = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self.before = ext.current_device()
        if self.index >= 0:
            set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        ext.set_device(self.before)


@contextlib.contextmanager
def stream(_: Any) -> Iterator[None]:
    yield


class CUDAGraph:
    """A graph whose replay runs the recorded operators again on the same tensors."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls = ext.Graph()

    def replay(self) -> None:
        self.calls.replay()

    def reset(self) -> None:
        self.calls.clear()

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextlib.contextmanager
def graph(recorded: CUDAGraph, *_: Any, **__: Any) -> Iterator[None]:
    recorded.calls.begin()
    try:
        yield
    finally:
        recorded.calls.end()


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return including_emulation or gpus[_index()].capability >= (8, 0)


def current_device() -> int:
    _lazy_init()
    return int(ext.current_device())


def device_count() -> int:
    return len(gpus)


def _count_by_driver() -> int:
    _ask_driver()
    return len(gpus)


def synchronize(device: Any = None) -> None:
    _lazy_init()
    ext.arrive()


def _nothing(*_: Any, **__: Any) -> None: ...


def _memory_functions() -> dict[str, Any]:
    return {
        "memory_stats": memory_stats, "memory_allocated": memory_allocated, "max_memory_allocated": max_memory_allocated,
        "reset_peak_memory_stats": lambda device=None: ext.reset_peak(_index(device)), "mem_get_info": mem_get_info,
        "empty_cache": _nothing, "memory_reserved": memory_allocated, "max_memory_reserved": max_memory_allocated,
    }  # fmt: skip


def _functions() -> dict[str, Any]:
    return {
        **_memory_functions(),
        "is_available": is_available, "_is_compiled": lambda: True, "_lazy_init": _lazy_init, "init": _lazy_init,
        "is_initialized": lambda: cuda._initialized and not Driver.is_bad_fork, "_is_in_bad_fork": lambda: Driver.is_bad_fork,
        "device_count": device_count, "current_device": current_device, "set_device": set_device,
        "get_device_properties": get_device_properties, "get_device_capability": get_device_capability,
        "get_device_name": lambda device=None: gpus[_index(device)].name, "synchronize": synchronize,
        "Stream": Stream, "Event": Event, "ExternalStream": Stream, "current_stream": Stream, "default_stream": Stream,
        "stream": stream, "device": DeviceContext, "manual_seed": _nothing, "manual_seed_all": _nothing, "seed": _nothing,
        "seed_all": _nothing, "initial_seed": lambda: 0, "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state() for _ in gpus],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]), "is_bf16_supported": is_bf16_supported,
        "CUDAGraph": CUDAGraph, "graph": graph, "is_current_stream_capturing": ext.is_recording, "ipc_collect": _nothing,
        "cudart": lambda: types.SimpleNamespace(cudaHostRegister=_register_host, cudaHostUnregister=_unregister_host),
        "get_arch_list": ARCHITECTURES.split,
        "default_generators": (torch.default_generator,) * MOST_GPUS, "can_device_access_peer": lambda *_: False,
    }  # fmt: skip


def install() -> None:
    """Replace what a CPU build of torch refuses. Called once a process, by sitecustomize.py."""
    torch.version.cuda = "13.0"
    assert torch.__spec__ is not None
    # Upshift reads what torch was built for from the file beside torch/__init__.py.
    torch.__spec__.origin = str(Path(__file__).parent / "torch_with_cuda" / "__init__.py")
    for module, functions in ((cuda, _functions()), (cuda.memory, _memory_functions())):
        for name, function in functions.items():
            setattr(module, name, _of_its_own(function))
    torch._C._cuda_getArchFlags = lambda: ARCHITECTURES
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch._C._cuda_getDeviceCount = _count_by_driver
    torch._C._cuda_getDevice = current_device
    torch._C._nccl_version = lambda: 2 << 32 | 29 << 16 | 7
    torch.Tensor.record_stream = _of_its_own(_nothing)
    _resize_storages()
    _install_nccl()
    torch.Generator = _generator_class()


def _of_its_own(value: Any) -> Any:
    """Return another function that does the same: torch.compile has one rule for each function, whatever its names are."""
    if isinstance(value, type | tuple):
        return value
    return lambda *arguments, **options: value(*arguments, **options)


def _register_host(address: int, num_bytes: int, flags: int) -> int:
    ext.register_pinned(address, num_bytes)
    return 0


def _unregister_host(address: int) -> int:
    ext.unregister_pinned(address)
    return 0


def _resize_storages() -> None:
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return original(storage, num_bytes)
        ext.resize_storage(storage, num_bytes)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]


def _install_nccl() -> None:
    from torch.distributed import distributed_c10d

    ext.ProcessGroupNCCL.Options = types.SimpleNamespace
    distributed_c10d.ProcessGroupNCCL = ext.ProcessGroupNCCL  # type: ignore[attr-defined]
    distributed_c10d._NCCL_AVAILABLE = True


def _generator_class() -> type:
    original = torch.Generator

    class Generator(original):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            return original.__new__(original, "cpu")

    return Generator


host_waits, operator_calls, clear_counters = ext.host_waits, ext.operator_calls, ext.clear_counters
pinned_bytes_and_peak = ext.pinned_bytes_and_peak


def forget_questions() -> None:
    """Let a later fork use the device although an import asked for its capability: nothing was computed on it."""
    Driver.was_asked = False
    cuda._initialized = False
