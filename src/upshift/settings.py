"""Read and set environment variables. They are read at the moment of use, and no other module reads them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from upshift.errors import RequestError
from upshift.value import Value


class Settings(Value):
    """Hold the values that a user may set in the environment. The comment of each field names its variable."""

    cache_dir: Path  # UPSHIFT_CACHE; profiles, probe results and trial outcomes; safe to delete
    hub_offline: bool  # HF_HUB_OFFLINE; never contact a model hub
    cuda_visible_devices: str | None  # CUDA_VISIBLE_DEVICES; which GPUs this process may see
    vllm_python: Path | None  # UPSHIFT_VLLM_PYTHON; the Python interpreter of an environment that has vLLM


def read_settings() -> Settings:
    env = os.environ
    return Settings(
        cache_dir=Path(env.get("UPSHIFT_CACHE") or platformdirs.user_cache_dir("upshift")),
        hub_offline=env.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"},
        cuda_visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        vllm_python=Path(env["UPSHIFT_VLLM_PYTHON"]) if env.get("UPSHIFT_VLLM_PYTHON") else None,
    )


class Ranks(Value):
    """Hold what a launcher says of this process. The comment of each field lists its variables; the first one set counts."""

    rank: int  # RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID
    size: int  # WORLD_SIZE, OMPI_COMM_WORLD_SIZE, PMI_SIZE, SLURM_NTASKS
    local_rank: int  # LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID, SLURM_LOCALID; on this host
    address: str | None  # MASTER_ADDR; where the ranks meet
    port: int | None  # MASTER_PORT
    local_size: int = 1  # LOCAL_WORLD_SIZE; set by torchrun, which does not bind ranks to cores as mpirun and srun do
    store_is_there: bool = False  # TORCHELASTIC_USE_AGENT_STORE; else rank 0 opens it
    restarts: int = 0  # TORCHELASTIC_RESTART_COUNT; after deaths of ranks, not after hosts came or went
    launch: str | None = None  # TORCHELASTIC_RUN_ID; the same over all restarts

    def meeting_point(self) -> tuple[str, int]:
        """Return the address and the port where the ranks meet. Raise RequestError if the launcher names none."""
        if self.address is None or self.port is None:
            raise RequestError(
                f"this is rank {self.rank} of {self.size}, and nothing says where they meet; set MASTER_ADDR to the host of rank "
                "0 and MASTER_PORT to a port that is free there, for all ranks"
            )
        return self.address, self.port


RANK_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


LOCAL_RANK_NAMES = tuple(local_rank for _, _, local_rank in RANK_NAMES)
MAX_PORT = 2**16 - 1
MAX_RANKS = 2**31 - 1  # a process group's ranks are 32-bit integers


def read_ranks() -> Ranks | None:
    """Return what the launcher says of this process, or None if no launcher started it.

    A script of sbatch has Slurm's rank variables, too, but not SLURM_STEP_ID, which srun sets. A single task of srun or mpirun
    is no rank: it has no others to meet. A single rank of torchrun is one, because torchrun may start it again. Raise
    RequestError for variables that are no numbers, that contradict each other, or of which some are missing."""
    env = os.environ
    rows = [row for row in RANK_NAMES if row[0] != "SLURM_PROCID" or "SLURM_STEP_ID" in env]
    for rank_name, size_name, local_rank_name in rows:
        if rank_name in env and size_name in env:
            is_single = rank_name != "RANK" and env[size_name] == "1"
            return None if is_single else _read_ranks(rank_name, size_name, local_rank_name)
    _check_no_rank(rows[0])
    return None


def _check_no_rank(names: tuple[str, str, str]) -> None:
    """Raise RequestError if some of torchrun's variables are set: the process would train alone beside other ranks.

    A job script may set WORLD_SIZE=1 for one process, and LOCAL_RANK=-1 means "no ranks" in older scripts of transformers.
    """
    alone = {"WORLD_SIZE": "1", "LOCAL_RANK": "-1"}
    present = [name for name in names if name in os.environ and os.environ[name] != alone.get(name)]
    if present:
        missing = " and ".join(name for name in names if name not in os.environ)
        settings = ", ".join(f"{name}={os.environ[name]}" for name in present)
        verb = "is" if len(present) == 1 else "are"
        raise RequestError(
            f"{settings} {verb} set without {missing}; start the ranks with a launcher such as torchrun, which sets all of "
            f"{', '.join(names)}, or unset {' and '.join(present)}"
        )


def _read_ranks(rank_name: str, size_name: str, own_local_rank_name: str) -> Ranks:
    """Return the ranks by the names of one launcher. Another launcher's name of the local rank counts if its own is not set."""
    env = os.environ
    size = _read_number(size_name, least=1, most=MAX_RANKS)
    rank = _read_number(rank_name, least=0, most=size - 1, limit=f", because {size_name} is {size}")
    local_size = _read_number("LOCAL_WORLD_SIZE", least=1, most=size, default=1, limit=f", because {size_name} is {size}")
    local_rank_name = next((name for name in (own_local_rank_name, *LOCAL_RANK_NAMES) if name in env), None)
    if local_rank_name is None and size > 1:
        raise RequestError(
            f"{rank_name}={rank} and {size_name}={size} are set without LOCAL_RANK, the number of this rank on its host; start "
            "the ranks with a launcher such as torchrun, or set LOCAL_RANK=0 where each host has one rank"
        )
    most_local = local_size - 1 if "LOCAL_WORLD_SIZE" in env else size - 1
    local_rank = 0 if local_rank_name is None else _read_number(local_rank_name, least=0, most=most_local)
    run = env.get("TORCHELASTIC_RUN_ID")
    return Ranks(
        rank=rank,
        size=size,
        local_rank=local_rank,
        address=env.get("MASTER_ADDR"),
        port=_read_number("MASTER_PORT", least=1, most=MAX_PORT) if "MASTER_PORT" in env else None,
        local_size=local_size,
        store_is_there=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_read_number("TORCHELASTIC_RESTART_COUNT", least=0, most=MAX_RANKS, default=0),
        launch=None if run in (None, "", "none") else run,  # none: torchrun was told no --rdzv-id
    )


def _read_number(name: str, *, least: int, most: int, default: int | None = None, limit: str = "") -> int:
    """Return a variable as a number. Raise RequestError for another text, or for a number outside the bounds.

    ``limit``: why there is an upper bound, after a comma."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text or "")
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise RequestError(
            f"the environment variable {name}={text} is no number from {least} to {most}{limit}; start the ranks with a launcher "
            f"such as torchrun, which sets it, or unset it"
        )
    return number


class NcclPaths(Value):
    """Hold how a user restricts the paths of NCCL between the GPUs of a host. Empty: the variable is not set."""

    p2p_disable: str  # NCCL_P2P_DISABLE
    p2p_level: str  # NCCL_P2P_LEVEL
    shm_disable: str  # NCCL_SHM_DISABLE

    @property
    def peers_are_off(self) -> bool:
        """Return whether no GPU may read another one's memory (NCCL's documentation, "Environment Variables")."""
        return self.p2p_disable not in ("", "0") or self.p2p_level.upper() in ("LOC", "0")


def read_nccl_paths() -> NcclPaths:
    env = os.environ
    return NcclPaths(
        p2p_disable=env.get("NCCL_P2P_DISABLE", ""),
        p2p_level=env.get("NCCL_P2P_LEVEL", ""),
        shm_disable=env.get("NCCL_SHM_DISABLE", ""),
    )


# Variables that ask transformers' tracker callbacks for the model or its checkpoints, or switch a tracker off. By tracker.
UNUSABLE_TRACKER_VARIABLES = {
    "wandb": ("WANDB_LOG_MODEL", "WANDB_WATCH"),
    "mlflow": ("HF_MLFLOW_LOG_ARTIFACTS", "DISABLE_MLFLOW_INTEGRATION"),
}
_OFF = ("", "0", "false", "no", "off")


def unusable_tracker_variables(tracker: str) -> dict[str, str]:
    """Return the variables of UNUSABLE_TRACKER_VARIABLES that are set and not off, with their values."""
    values = {name: os.environ.get(name, "") for name in UNUSABLE_TRACKER_VARIABLES.get(tracker, ())}
    return {name: value for name, value in values.items() if value.lower() not in _OFF}


LIBRARY_PREFIXES = ("CUDA_", "DS_", "GLOO_", "GOMP_", "KMP_", "LD_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "THP_MEM_", "TORCH_")


def read_library_variables() -> dict[str, str]:
    """Return PATH and the variables of the libraries that Upshift uses. No keys or tokens are among them."""
    return {name: value for name, value in sorted(os.environ.items()) if name == "PATH" or name.startswith(LIBRARY_PREFIXES)}


# Messages of libraries about their own parts: for each logger, the texts that such a message contains.
NOISE = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),  # kernels for GPUs that this machine does not have
    "torchao.kernel.intmm": ("Detected no triton",),  # the same
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),  # torch's do it, too
    "torch.utils._pytree": ("is an Enum subclass",),  # torchao's use of torch
    "torch._subclasses.fake_tensor": ("failed while attempting to run meta for",),  # the error is raised as well
}


class _WithoutNoise(logging.Filter):
    def __init__(self, noise: tuple[str, ...]) -> None:
        super().__init__()
        self._noise = noise

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in self._noise)


def quiet_libraries() -> None:
    """Hide messages of libraries about their own parts. Call it before the libraries are loaded.

    Only the entry point of a program calls it, because importing upshift must not change a user's logging. Libraries that print
    from C++ read the variables when they are loaded."""
    for name, value in (("KINETO_LOG_LEVEL", "99"), ("TRANSFORMERS_VERBOSITY", "error"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1")):
        os.environ.setdefault(name, value)
    for name, noise in NOISE.items():
        logging.getLogger(name).addFilter(_WithoutNoise(noise))


class AssignedRank(Value):
    rank: int
    port: int  # where rank 0 waits, on this host


OWN_RANK = "UPSHIFT_OWN_RANK"  # set by Upshift for a rank that cannot be forked


def environment_for_rank(rank: AssignedRank) -> dict[str, str]:
    """Return the environment for a rank that starts as a new process."""
    return {**os.environ, OWN_RANK: rank.to_json()}


def environment_for_local_rank(local_rank: int) -> dict[str, str]:
    """Return the environment for a process that takes this GPU of those that this process may use, as transformers reads it."""
    return {**os.environ, "LOCAL_RANK": str(local_rank)}


def take_assigned_rank() -> AssignedRank | None:
    """Return the rank that Upshift gave to this process, and remove it: processes that this one starts are no ranks."""
    text = os.environ.pop(OWN_RANK, None)
    return None if text is None else AssignedRank.from_json(text, origin=OWN_RANK)


def count_gpus_by_bus() -> None:
    """Make CUDA number GPUs by their position on the PCI bus, as NVML does. By default CUDA numbers the fastest GPU first.

    Call it before a library that looks for GPUs is loaded."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def take_gpus(numbers: Sequence[int]) -> None:
    """Choose some of the GPUs that this process may use, as CUDA counts them.

    Call it before a library that looks for GPUs is loaded."""
    os.environ["CUDA_VISIBLE_DEVICES"] = _name_gpus(numbers)


def _name_gpus(numbers: Sequence[int]) -> str:
    """Return the names of GPUs, which are counted among those that this process may use."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return ",".join(visible[number] if visible else str(number) for number in numbers)


def quiet_tensorflow() -> None:
    """Keep TensorFlow and XLA from printing what they find of GPUs and instruction sets. Call it before they are loaded."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def quiet_torchft() -> None:
    """Keep torchft's servers from printing each meeting of the replicas. Call it before torchft is loaded."""
    os.environ.setdefault("RUST_LOG", "warn")


def wait_briefly() -> None:
    """Shorten the busy-wait loops of threads in torch and llama.cpp. Call it before either is loaded.

    By default a thread loops for milliseconds, and if other work runs, it takes cores from the threads that it waits for. The
    shorter loop is as fast on an idle machine; waiting without a loop is slower (docs/log.md)."""
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


XLA_FLAGS = "TF_XLA_FLAGS"
KEEP_XLA_PROGRAMS = "--tf_xla_persistent_cache_directory="


def keep_xla_programs(folder: Path) -> None:
    """Make XLA store its compiled programs in ``folder`` for later processes.

    TensorFlow reads the variable at the first compilation of a process."""
    flags = os.environ.get(XLA_FLAGS, "")
    if KEEP_XLA_PROGRAMS not in flags:
        os.environ[XLA_FLAGS] = f"{flags} {KEEP_XLA_PROGRAMS}{folder}".strip()


def tpu_compiler_environment(accelerator_type: str) -> dict[str, str]:
    """Return the environment for a child process that compiles for TPUs on a machine without one.

    With it libtpu asks no metadata server and takes no lock, because no TPU is opened, and jax does not look for a TPU."""
    variables = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": accelerator_type,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return {**os.environ, **variables}


def outside_environment() -> dict[str, str]:
    """Return the environment for a Python interpreter of another environment, which must not find our libraries."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def vllm_environment(*, cores: str | None, cache_gib: int | None, gpus: Sequence[int] | None, compiles: bool) -> dict[str, str]:
    """Return the environment for a process of vLLM, which finds its libraries in an environment of its own.

    Variables that the user has set stay.

    Args:
        cores: the CPUs of each rank, such as 0,1|2,3. None: the model runs on GPUs.
        cache_gib: memory for keys and values on a CPU.
        gpus: the GPUs of this process among those that this process may use. None: all.
        compiles: whether vLLM may compile. It does so even in a single function of an engine that runs uncompiled."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}  # the model is a folder
    if cores is not None:
        # The engine's loop runs in the worker's process, which saves the start of another one: a third of the time.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if cache_gib is not None:
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gib)
    if not compiles:
        variables["TORCHDYNAMO_DISABLE"] = "1"
    inherited = outside_environment()
    inherited.pop("OMP_NUM_THREADS", None)
    if gpus is not None:
        inherited["CUDA_VISIBLE_DEVICES"] = _name_gpus(gpus)
    return {**variables, **inherited}


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Keep OpenVINO's converter and NNCF from sending usage data: they send none if they run in continuous integration."""
    variables = {"CI": "true", "NNCF_CI": "1"}
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_tensorflow_cluster() -> dict[str, Any]:
    """Return TF_CONFIG, which TensorFlow also reads: the workers of a run, and which of them this is. Empty if it is not set."""
    text = os.environ.get("TF_CONFIG", "")
    try:
        cluster = json.loads(text) if text else {}
    except json.JSONDecodeError:
        raise RequestError(f"TF_CONFIG is no JSON: {text[:60]!r}; set it as tf.distribute says, or unset it") from None
    if not isinstance(cluster, dict):
        raise RequestError(f"TF_CONFIG is no JSON object: {text[:60]!r}; set it as tf.distribute says, or unset it")
    return cluster


def read_tpu_name() -> str | None:
    """Return TPU_NAME, which TensorFlow's cluster resolver also reads."""
    return os.environ.get("TPU_NAME") or None
