"""Cache the probe's measurements for later processes, for this hardware and these library versions."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

from upshift.disk_full import write_cache_file
from upshift.errors import RequestError
from upshift.hardware.probe import probe, with_measured
from upshift.hardware.spec import Host, Measured, Precision
from upshift.settings import read_nccl_paths, read_settings
from upshift.versions import installed_version

logger = logging.getLogger(__name__)

FORMAT = "4"  # raise it when the probe measures more
MIN_CORE_SHARE = 0.75  # of the cores' time; a probe that runs alone gets more; beside six busy processes rates were a twentieth
SHORT_SECONDS = 600.0  # how long a probe is valid that had less of the cores' time, or measured only a part
GPU_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp32_medium", "bf16", "fp16")  # those that the probe measures


def measure(host: Host, *, refresh: bool = False, budget_seconds: float = 10.0) -> Host:
    """Return `host` with `measured` filled, from the cache if possible, else by `probe`, with its errors.

    A cached result of the same hardware, library versions and paths of NCCL is used if the probe had the cores almost alone and
    measured everything, or if it is recent. The cache is the folder `probe` in the cache folder and may be deleted.
    """
    path = _cache_path(host)
    if not refresh and path.is_file():
        try:
            cached = Measured.from_file(path)
            ran_alone = cached.core_share is None or cached.core_share >= MIN_CORE_SHARE
            is_lasting = ran_alone and not cached.failed and has_all_gpu_rates(host, cached)
            if is_lasting or time.time() - path.stat().st_mtime < SHORT_SECONDS:
                return with_measured(host, cached)
        except RequestError as error:
            logger.warning("probing again: %s", error)
    probed = probe(host, budget_seconds=budget_seconds)
    if probed.measured is not None:
        _store(path, probed.measured)
    return probed


def has_all_gpu_rates(host: Host, measured: Measured) -> bool:
    """Return whether each rate was measured that the host's GPUs have, and the exchanges between several equal ones.

    A measurement fails while other programs hold the GPU's memory, and may succeed later. True without a CUDA GPU."""
    gpu = host.one_device().gpu
    if host.device != "cuda" or gpu is None:
        return True
    rates = measured.gpu
    if rates is None or rates.memory_bytes_per_second is None:
        return False
    if any(rates.matrix(precision) is None for precision in GPU_PRECISIONS if gpu.supports(precision) is not False):
        return False
    has_several_equal = host.gpu is not None and host.gpus_per_node > 1
    return bool(measured.gpu_exchanges) or not has_several_equal


def _cache_path(host: Host) -> Path:
    versions = f"torch-{installed_version('torch')}-transformers-{installed_version('transformers')}"
    nccl = read_nccl_paths().model_dump()
    paths = "".join(f"-{name}={value}" for name, value in nccl.items() if value) if host.gpus_per_node > 1 else ""
    suffix = f"-nccl-{hashlib.sha256(paths.encode()).hexdigest()[:8]}" if paths else ""
    return read_settings().cache_dir / "probe" / f"{FORMAT}-{host.fingerprint}-{versions}{suffix}.json"


def _store(path: Path, measured: Measured) -> None:
    write_cache_file("the probe's result is", path, measured.to_json(indent=1))
