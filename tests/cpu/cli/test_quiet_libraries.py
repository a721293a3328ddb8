"""Messages of libraries about their own parts do not stand between ours."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

LIBRARIES = ("torch", "transformers", "torchao", "torchao.quantization", "bitsandbytes", "peft", "datasets", "openvino")


def test_importing_the_libraries_prints_nothing() -> None:
    installed = [name for name in LIBRARIES if find_spec(name.partition(".")[0]) is not None]
    if "bitsandbytes" not in installed:
        pytest.skip("bitsandbytes is not installed")
    code = f"from upshift.settings import quiet_libraries; quiet_libraries(); import {', '.join(installed)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
