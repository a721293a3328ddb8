"""The only reader of environment variables. Read once, at the moment of use, into a frozen value."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from upshift.value import Value


class Settings(Value):
    """What the environment may set. Every field has the variable's name in its comment; nothing else is read anywhere."""

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


def quiet_libraries() -> None:
    """Libraries that print from C++ read these when they are loaded; called once, by a program's entry point."""
    for name, value in (("KINETO_LOG_LEVEL", "99"), ("TRANSFORMERS_VERBOSITY", "error"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1")):
        os.environ.setdefault(name, value)
    for name in ("torchao", "torch.utils._pytree"):  # of kernels for GPUs that are not here; of torchao's use of torch
        logging.getLogger(name).setLevel(logging.ERROR)


def wait_briefly() -> None:
    """Threads of torch and llama.cpp that wait for each other do so in a loop, for milliseconds: beside other work they take the
    cores from whom they wait for. Called before either is loaded; so long a loop is as fast where nothing else runs, and none at
    all is not (docs/log.md)."""
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


@contextmanager
def without_telemetry() -> Iterator[None]:
    """OpenVINO's converter and NNCF send usage data unless they believe to run in somebody's continuous integration."""
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
