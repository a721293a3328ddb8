"""Names that libraries do not promise: where they may stand, and what is said where a library has them no longer. No torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_house import PACKAGE, at, nodes, refuse, sources

from upshift.errors import MissingInternal
from upshift.internals import (
    jax_names,
    lookup,
    openvino_names,
    optuna_names,
    peft_names,
    torch_names,
    transformers_names,
    trl_names,
    uvicorn_names,
)
from upshift.internals.lookup import Internal, Mark

FILES = {
    "jax": jax_names, "openvino": openvino_names, "optuna": optuna_names, "peft": peft_names, "torch": torch_names,
    "transformers": transformers_names, "trl": trl_names, "uvicorn": uvicorn_names,
}  # fmt: skip
# Modules that a library's own pages document, though not all that is in them; from no others is anything imported elsewhere.
DOCUMENTED = {
    "torch": {
        "torch.distributed", "torch.distributed.device_mesh", "torch.distributed.fsdp", "torch.distributed.pipelining",
        "torch.distributed.tensor", "torch.distributed.tensor.placement_types", "torch.export", "torch.export.graph_signature",
        "torch.fx", "torch.nn", "torch.nn.functional", "torch.nn.modules.module", "torch.optim.adamw",
        "torch.optim.lr_scheduler", "torch.overrides", "torch.profiler", "torch.utils.checkpoint", "torch.utils.cpp_extension",
        "torch.utils.data", "torch.utils.flop_counter", "torch.utils.hooks",
    },
    "transformers": {
        "transformers.cache_utils", "transformers.generation", "transformers.integrations.sdpa_attention",
        "transformers.masking_utils", "transformers.modeling_layers", "transformers.modeling_outputs",
        "transformers.modeling_utils", "transformers.pytorch_utils", "transformers.quantizers", "transformers.trainer_callback",
        "transformers.trainer_utils", "transformers.utils",
    },
    "peft": {"peft.utils"},
    "jax": {"jax.experimental"},
    "accelerate": {"accelerate.utils"},
}  # fmt: skip
OF_PYTHON = {  # begin with an underscore and are documented, or are what multiprocessing calls after a fork
    "os._exit", "sys._current_frames", "sys._getframe", "atexit._clear", "atexit._run_exitfuncs",
}  # fmt: skip
NAMED_TUPLE = {"_fields", "_replace", "_asdict"}


def internals() -> list[tuple[str, Internal]]:
    found = []
    for library, module in FILES.items():
        for value in vars(module).values():
            found += [(library, one) for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, Internal)]
    return found


def elsewhere() -> list[Path]:
    return [file for file in sources() if not file.is_relative_to(PACKAGE / "internals")]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def own_names() -> frozenset[str]:
    """Private names that the package's own classes and functions define, less those that are a library's."""
    found = set()
    for file in elsewhere():
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return frozenset(name for name in found if is_private(name)) - {one.attribute for _, one in internals()}


def private_names(file: Path, allowed: frozenset[str]) -> Iterator[str]:
    """What a file uses of others' private names, with its line."""
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in ("upshift", "__future__"):
            library, parts = node.module.split(".")[0], [*node.module.split("."), *(alias.name for alias in node.names)]
            private = any(is_private(part) for part in parts)
            undocumented = library in DOCUMENTED and "." in node.module and node.module not in DOCUMENTED[library]
            if private or undocumented:
                yield f"{at(file, node.lineno)} from {node.module} import {', '.join(alias.name for alias in node.names)}"
        if isinstance(node, ast.Import):
            whole = [alias.name for alias in node.names]
            yield from (f"{at(file, node.lineno)} import {name}" for name in whole if any(map(is_private, name.split("."))))
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in allowed | NAMED_TUPLE:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and not ast.unparse(node.value).startswith("super(") and ast.unparse(node) not in OF_PYTHON:
                yield f"{at(file, node.lineno)} {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "mock.patch.object"):
            named = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else ""
            if isinstance(named, str) and is_private(named) and named not in allowed | NAMED_TUPLE:
                yield f"{at(file, node.lineno)} {ast.unparse(node)}"


def test_private_names_stand_in_one_file_for_each_library() -> None:
    allowed = own_names()
    refuse(
        [line for file in elsewhere() for line in private_names(file, allowed)],
        "a name that a library does not promise: put it into src/upshift/internals, with the feature that needs it",
    )


@pytest.mark.parametrize(
    "text",
    [
        "from transformers.masking_utils import _x", "from torch._dynamo import config", "import jax._src.lib",
        "from transformers.core_model_loading import rename_source_key", "model._parameters['weight']", "torch._C.x()",
        "getattr(model, '_tp_plan', None)", "with mock.patch.object(model, '_modules', {}): pass",
    ],
)  # fmt: skip
def test_a_private_name_elsewhere_is_seen(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "made.py"
    file.write_text(text)
    allowed = own_names()
    monkeypatch.setattr("test_house.ROOT", tmp_path)
    assert len(list(private_names(file, allowed))) == 1


def test_every_name_is_in_its_library_s_file() -> None:
    assert {(library, one.library) for library, one in internals()} == {(library, library) for library in FILES}


@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for _, one in internals()])
def test_a_name_that_is_gone_is_refused_in_words(one: Internal, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for each name: it says the feature, the library, the name, and what else to do."""

    def gone(*_: object) -> None:
        raise AttributeError

    monkeypatch.setattr(lookup, "_import_name", gone)
    monkeypatch.setattr(lookup, "_mentions", lambda *_: False)
    monkeypatch.setattr(lookup, "installed_version", lambda library: "99.1")
    ways = [lambda: one.get()] if ":" in one.name and not isinstance(one, Mark) else [lambda: one.of(object())]
    ways += [lambda: one.put(object(), 1)]
    if isinstance(one, Mark):
        ways = [lambda: one.put(object(), 1), lambda: one.read(object())]
    for way in ways:
        with pytest.raises(MissingInternal) as refused:
            way()
        words = str(refused.value)
        assert refused.value.exit_code == 2 and "\n" not in words
        assert words.startswith(one.feature) and f"{one.library} 99.1 does not have" in words
        assert one.name.replace(":", ".") in words and f"pip install '{one.library}<99.1'" in words and one.instead in words
