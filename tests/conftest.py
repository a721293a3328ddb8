"""Keep tests off the network, give them a cache folder, let SIGINT interrupt them, and build the command line once.

Property tests have no deadline. The garbage collector runs seldom, and does not visit the objects of libraries."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import typer.testing

from cpu_seconds import CpuSeconds
from shared_traces import session_folder, share
from upshift.importing import importing

# Another process on the machine must not fail a test, and a failure must come back on every machine. The examples are the
# same at every run: what 50 of them do not find, no later run finds either.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("house")
# A collection for every 20,000 new objects, in place of 700. Plans and traces make many objects that stay for a while, and few
# cycles: collections took a fifth of the seconds of the light tests and a tenth of an export's.
gc.set_threshold(20_000, 10, 10)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds())


@pytest.fixture(scope="session", autouse=True)
def _closed_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("UPSHIFT_VLLM_PYTHON", raising=False)  # races have the engines of the tests' own environment
        base = tmp_path_factory.getbasetemp()
        patch.setenv("UPSHIFT_CACHE", str(share(base, session_folder(base))))
        # A shell starts what runs in the background with SIGINT ignored, and every process of a test would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield


@pytest.fixture(scope="session", autouse=True)
def _command_line_is_built_once() -> Iterator[None]:
    """Share upshift's commands between calls of the command line: Typer builds all of them at each call, in 25 ms.

    A command keeps the names of its help option from the first context that it was parsed in. So what a test builds by
    ``typer.main.get_command``, and parses without the context of ``upshift``, is not shared: ``-h`` would be unknown later.
    """
    build = typer.main.get_command
    call = typer.Typer.__call__
    built: list[Any] = []

    def command_of(app: typer.Typer) -> Any:
        command_line = sys.modules.get("upshift.cli.main")
        if command_line is None or app is not vars(command_line).get("app"):
            return None
        if not built:
            built.append(build(app))
        return built[0]

    def call_once_built(app: typer.Typer, *arguments: Any, **options: Any) -> Any:
        command = command_of(app)
        return call(app, *arguments, **options) if command is None else command(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.Typer, "__call__", call_once_built)
        patch.setattr("typer.testing._get_command", lambda app: command_of(app) or build(app))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import all that tests import, and keep it out of the garbage collector's way: else each of its full collections visits two
    million objects that stay, which is a second for every measurement of memory."""
    with importing():
        result = yield
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a file's last test, keep what stays out of the garbage collector's way, too: modules that a test imported, and caches
    of torch. An hour of tests made each full collection take two seconds, and every training makes several."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a case of bytes by its argument: bytes may hold the time (gzip), and then two workers name one test differently."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One file of minutes: begun last, it would run alone on one core.
    items.sort(key=lambda item: not item.path.is_relative_to(Path(__file__).parent / "pretended_gpu"))
    on_gpu = [item for item in items if item.path.is_relative_to(Path(__file__).parent / "gpu")]
    if not on_gpu:
        return
    import torch  # not before: the light tests run where torch is not installed

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
