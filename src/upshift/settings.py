"""Read environment variables, at the moment of use, into a frozen value. No other module reads them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from upshift.errors import RequestError
from upshift.value import Value


class Settings(Value):
    """Values that the environment may set. Every field has the variable's name in its comment; nothing else is read anywhere."""

    cache_dir: Path  # UPSHIFT_CACHE; profiles, probe results and trial outcomes; safe to delete
    hub_offline: bool  # HF_HUB_OFFLINE; never contact a model hub
    cuda_visible_devices: str | None  # CUDA_VISIBLE_DEVICES; which GPUs this process may see


def read_settings() -> Settings:
    env = os.environ
    return Settings(
        cache_dir=Path(env.get("UPSHIFT_CACHE") or platformdirs.user_cache_dir("upshift")),
        hub_offline=env.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"},
        cuda_visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
    )


class Ranks(Value):
    """A launcher's description of this process. For each field the first variable that is set counts."""

    rank: int  # RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID
    size: int  # WORLD_SIZE, OMPI_COMM_WORLD_SIZE, PMI_SIZE, SLURM_NTASKS
    local_rank: int  # LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID, SLURM_LOCALID; on this host
    address: str | None  # MASTER_ADDR; where the ranks meet
    port: int | None  # MASTER_PORT
    local_size: int = 1  # LOCAL_WORLD_SIZE; torchrun's, which binds no rank to cores; mpirun and srun do
    store_is_there: bool = False  # TORCHELASTIC_USE_AGENT_STORE; else rank 0 opens it
    restarts: int = 0  # TORCHELASTIC_RESTART_COUNT; after deaths of ranks, not after hosts came or went
    launch: str | None = None  # TORCHELASTIC_RUN_ID; the same over all restarts


RANK_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def read_ranks() -> Ranks | None:
    """Return the ranks, or None if no launcher started this process.

    A script of sbatch has Slurm's numbers too, and no SLURM_STEP_ID of srun's."""
    env = os.environ
    for rank, size, local_rank in RANK_NAMES:
        if rank in env and size in env and (rank != "SLURM_PROCID" or "SLURM_STEP_ID" in env):
            run = env.get("TORCHELASTIC_RUN_ID")
            return Ranks(
                rank=int(env[rank]),
                size=int(env[size]),
                local_rank=int(env.get(local_rank, "0")),
                address=env.get("MASTER_ADDR"),
                port=int(env["MASTER_PORT"]) if "MASTER_PORT" in env else None,
                local_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
                store_is_there=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                restarts=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
                launch=None if run in (None, "", "none") else run,  # none: torchrun was told no --rdzv-id
            )
    return None


LIBRARY_PREFIXES = ("CUDA_", "DS_", "GLOO_", "GOMP_", "KMP_", "LD_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "THP_MEM_", "TORCH_")


def read_library_variables() -> dict[str, str]:
    """Return the variables of the libraries underneath, which Upshift leaves to them, and PATH, for doctor.

    No keys, no tokens."""
    return {name: value for name, value in sorted(os.environ.items()) if name == "PATH" or name.startswith(LIBRARY_PREFIXES)}


# Messages of libraries about their own parts, by logger: what stands in them.
NOISE = {
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),  # kernels for GPUs that are not here
    "torchao.kernel.intmm": ("Detected no triton",),  # likewise
    "torch.utils._pytree": ("is an Enum subclass",),  # torchao's use of torch
    "torch._subclasses.fake_tensor": ("failed while attempting to run meta for",),  # of an error that is raised as well
}


class _WithoutNoise(logging.Filter):
    def __init__(self, noise: tuple[str, ...]) -> None:
        super().__init__()
        self._noise = noise

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in self._noise)


def quiet_libraries() -> None:
    """Hide messages of libraries about their own parts, before the libraries are loaded.

    Only the entry point of a program calls it: importing upshift changes nobody's logging. Libraries that print from C++ read
    variables when they are loaded."""
    for name, value in (("KINETO_LOG_LEVEL", "99"), ("TRANSFORMERS_VERBOSITY", "error"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1")):
        os.environ.setdefault(name, value)
    for name, noise in NOISE.items():
        logging.getLogger(name).addFilter(_WithoutNoise(noise))


class OwnRank(Value):
    rank: int
    port: int  # where rank 0 waits, on this host


OWN_RANK = "UPSHIFT_OWN_RANK"  # Upshift's own, for a rank that cannot be forked


def environment_of_rank(own: OwnRank) -> dict[str, str]:
    """Return the environment of a rank that begins as a new process."""
    return {**os.environ, OWN_RANK: own.to_json()}


def take_own_rank() -> OwnRank | None:
    """Return the rank as which Upshift started this process, once: what this process starts is no rank."""
    text = os.environ.pop(OWN_RANK, None)
    return None if text is None else OwnRank.from_json(text, origin=OWN_RANK)


def count_gpus_by_bus() -> None:
    """Let CUDA number GPUs as NVML does, by which they are found: by their place on the bus. CUDA's own first is the fastest one.

    Call it before a library that looks for GPUs is loaded."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def take_gpu(number: int) -> None:
    """Choose one of the GPUs that this process may use, as CUDA counts them.

    Call it before a library that looks for GPUs is loaded."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[number] if visible else str(number)


def quiet_tensorflow() -> None:
    """Keep TensorFlow and XLA from printing what they find of GPUs and instruction sets. They read this when they are loaded."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")


def quiet_torchft() -> None:
    """Keep torchft's servers from printing each meeting of the copies from Rust. They read this when they are loaded."""
    os.environ.setdefault("RUST_LOG", "warn")


def wait_briefly() -> None:
    """Shorten the loops in which threads of torch and llama.cpp wait for each other. Call it before either is loaded.

    The loops last for milliseconds: beside other work they take the cores from the threads that they wait for. So long a loop
    is as fast if nothing else runs, and none at all is not (docs/log.md)."""
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


XLA_FLAGS = "TF_XLA_FLAGS"
KEEP_XLA_PROGRAMS = "--tf_xla_persistent_cache_directory="


def keep_xla_programs(folder: Path) -> None:
    """Make XLA keep its compiled programs in ``folder`` for later processes.

    TensorFlow reads this at a process's first compilation."""
    said = os.environ.get(XLA_FLAGS, "")
    if KEEP_XLA_PROGRAMS not in said:
        os.environ[XLA_FLAGS] = f"{said} {KEEP_XLA_PROGRAMS}{folder}".strip()


def tpu_compiler_environment(accelerator_type: str) -> dict[str, str]:
    """Return the environment for a child process that compiles for TPUs without one.

    libtpu asks no metadata server for its machine and takes no lock, as no TPU is opened, and jax looks for no TPU."""
    said = {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": accelerator_type,
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip
    return {**os.environ, **said}


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Keep OpenVINO's converter and NNCF from sending usage data: they send none in somebody's continuous integration."""
    said = {"CI": "true", "NNCF_CI": "1"}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def read_tensorflow_cluster() -> dict[str, Any]:
    """Return TF_CONFIG, which TensorFlow reads itself: the workers of a run and which one this is. Empty if it is not set."""
    text = os.environ.get("TF_CONFIG", "")
    try:
        found = json.loads(text) if text else {}
    except json.JSONDecodeError:
        raise RequestError(f"TF_CONFIG is not JSON: {text[:60]!r}; set it as tf.distribute says, or unset it") from None
    return found if isinstance(found, dict) else {}


def read_tpu_name() -> str | None:
    """Return TPU_NAME, which TensorFlow's cluster resolver reads, too."""
    return os.environ.get("TPU_NAME") or None
