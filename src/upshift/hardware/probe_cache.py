"""Keep what the probe measured for later processes: once for this hardware and these library versions."""

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

FORMAT = "2"  # raise when more is measured
SHARED = 0.75  # of the cores' time; a probe that runs alone has more: beside six busy processes rates were a twentieth
SHARED_SECONDS = 600.0  # a probe that had less of the cores' time counts for so long


def measure(host: Host, *, refresh: bool = False, budget_seconds: float = 10.0) -> Host:
    """Return `host` with `measured` filled.

    It comes from the cache if this hardware and these library versions were probed before, alone or just now. The cache is
    `probe/` in the cache folder, safe to delete. Raises as `probe` does.
    """
    path = _cache_path(host)
    if not refresh and path.is_file():
        try:
            kept = Measured.from_file(path)
            if kept.core_share is None or kept.core_share >= SHARED or time.time() - path.stat().st_mtime < SHARED_SECONDS:
                return with_measured(host, kept)
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
