"""Cache the probe's measurements for later processes, for this hardware and these library versions."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from upshift.disk_full import write_cache_file
from upshift.errors import RequestError
from upshift.hardware.probe import probe, with_measured
from upshift.hardware.spec import Host, Measured
from upshift.settings import read_settings
from upshift.versions import installed_version

logger = logging.getLogger(__name__)

FORMAT = "3"  # raise it when the probe measures more
MIN_CORE_SHARE = 0.75  # of the cores' time; a probe that runs alone gets more; beside six busy processes rates were a twentieth
LOW_SHARE_SECONDS = 600.0  # how long a probe with less of the cores' time is valid


def measure(host: Host, *, refresh: bool = False, budget_seconds: float = 10.0) -> Host:
    """Return `host` with `measured` filled, from the cache if possible, else by `probe`, with its errors.

    A cached result of the same hardware and library versions is used if the probe had the cores almost alone, or if it is recent.
    The cache is the folder `probe` in the cache folder and may be deleted.
    """
    path = _cache_path(host)
    if not refresh and path.is_file():
        try:
            cached = Measured.from_file(path)
            ran_alone = cached.core_share is None or cached.core_share >= MIN_CORE_SHARE
            if ran_alone or time.time() - path.stat().st_mtime < LOW_SHARE_SECONDS:
                return with_measured(host, cached)
        except RequestError as error:
            logger.warning("probing again: %s", error)
    probed = probe(host, budget_seconds=budget_seconds)
    if probed.measured is not None:
        _store(path, probed.measured)
    return probed


def _cache_path(host: Host) -> Path:
    name = f"{FORMAT}-{host.fingerprint}-torch-{installed_version('torch')}-transformers-{installed_version('transformers')}.json"
    return read_settings().cache_dir / "probe" / name


def _store(path: Path, measured: Measured) -> None:
    write_cache_file("the probe's result is", path, measured.to_json(indent=1))
