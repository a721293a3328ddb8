"""A library that an optimizer needs is asked for what it has: code for GPUs, not only a name that can be imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_profile import make_profile

from upshift.errors import MissingExtra, RequestError
from upshift.hardware import describe
from upshift.planning import optimizers
from upshift.planning.optimizers import check_library, has_gpu_code
from upshift.planning.search import space
from upshift.planning.workload import Workload


@pytest.mark.parametrize(
    ("files", "on_gpu"),
    [
        (["libgpulib_cpu.so"], False),
        ([], False),
        (["libgpulib_cpu.so", "libgpulib_cuda124.so"], True),
        (["libgpulib_rocm64.so"], True),
        (["libgpulib_cuda128.dll"], True),
        (["libgpulib_cuda.txt", "libother_cuda124.so", "libgpulib_xpu2025.so"], False),
    ],
)
def test_a_build_for_cpus_is_no_library_for_gpus(
    files: list[str], on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "gpulib"
    package.mkdir()
    for name in ("__init__.py", *files):
        (package / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(optimizers.EXTRAS, "gpulib", "gpu")
    assert has_gpu_code("gpulib") is on_gpu
    check_library("gpulib", purpose="optim=made_up")
    if on_gpu:
        check_library("gpulib", purpose="optim=made_up", on_gpu=True)
    else:
        with pytest.raises(RequestError, match=r"optim=made_up needs gpulib with its code for GPUs, .* pip install"):
            check_library("gpulib", purpose="optim=made_up", on_gpu=True)


def test_a_missing_library_has_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_gpu_code("no_such_library_at_all")
    monkeypatch.setitem(optimizers.EXTRAS, "no_such_library_at_all", "gpu")
    with pytest.raises(MissingExtra):
        check_library("no_such_library_at_all", purpose="optim=made_up", on_gpu=True)


@pytest.mark.parametrize(("allow", "libraries"), [((), set()), (("8bit-optimizer",), {"bitsandbytes", "torchao"})])
def test_a_library_is_looked_for_only_where_its_optimizer_is_allowed(
    allow: tuple[str, ...], libraries: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for one visits every folder of sys.path, and a search lists the choices hundreds of times."""
    looked_for = set()

    def find(library: str) -> None:
        looked_for.add(library)

    monkeypatch.setattr(space, "find_spec", find)
    monkeypatch.setattr(optimizers, "find_spec", find)
    workload = Workload(sequence_length=1024, global_batch=8, allow=allow)
    assert space.choices(describe("4xh100"), make_profile(), workload)["optim"]
    assert looked_for == libraries
