"""Names that libraries do not promise: the installed versions have them, nothing else breaks without them, and the plain
fall-backs give the same."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from torch._export import utils as export_utils
from torch.fx import graph_module
from transformers import LlamaConfig, LlamaForCausalLM

import upshift
from upshift.errors import MissingInternal
from upshift.internals import lookup, torch_names, transformers_names
from upshift.internals.lookup import Internal, Mark
from upshift.internals.torch_names import fast_export
from upshift.planning.layout import Layout
from upshift.training.distributed import fsdp
from upshift.training.distributed.context_parallel import document_of_each_token, within_documents

IMPORT_ALL = """
import importlib, pkgutil, sys
from upshift.internals import lookup
from upshift.internals.torch_names import COLLECTIVES
import upshift
find, gone = lookup._import_name, []
def without(name):
    if name == COLLECTIVES.name:
        return find(name)
    gone.append(name)
    raise AttributeError(name)
lookup._import_name, lookup._mentions = without, lambda *_: False
for module in pkgutil.walk_packages(upshift.__path__, "upshift."):
    importlib.import_module(module.name)
upshift.Trainer, upshift.Encoder, upshift.Generator
print("looked up:", gone)
"""


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take names away, as a new version of their library would."""
    find, mentions, of = lookup._import_name, lookup._mentions, Internal.of

    def take(*names: Internal) -> None:
        taken = {one.name for one in names}

        def without(name: str) -> Any:
            if name in taken:
                raise AttributeError(name)
            return find(name)

        def without_attribute(one: Internal, owner: Any) -> Any:
            if one.name in taken:
                raise one.missing()
            return of(one, owner)

        monkeypatch.setattr(lookup, "_import_name", without)
        monkeypatch.setattr(lookup, "_mentions", lambda module, name: f"{module}:{name}" not in taken and mentions(module, name))
        monkeypatch.setattr(Internal, "of", without_attribute)
        torch_names._torch_leaves.cache_clear()
        torch_names._fake_type.cache_clear()

    yield take
    torch_names._torch_leaves.cache_clear()
    torch_names._fake_type.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("module", [torch_names, transformers_names])
def test_the_installed_version_has_every_name(module: Any) -> None:
    values = [one if isinstance(one, tuple) else (one,) for one in vars(module).values()]
    names = [name for value in values for name in value if isinstance(name, Internal)]
    assert len(names) > 20
    for name in names:
        if "_cuda_" in name.name and torch.version.cuda is None:
            continue  # a torch for the CPU has none of CUDA's functions
        if isinstance(name, Mark):
            assert lookup._mentions(*name.name.split(":")), name
        elif ":" in name.name:
            name.get()


def test_upshift_s_trainer_replaces_only_methods_that_are_listed() -> None:
    theirs = {name for kind in transformers.Trainer.__mro__ if kind is not object for name in vars(kind)}
    ours = [kind for kind in upshift.Trainer.__mro__ if kind.__module__.startswith("upshift.")]
    replaced = {name for kind in ours for name in vars(kind) if name[0] == "_" and name[1] != "_" and name in theirs}
    listed = {one.attribute for one in transformers_names.TRAINER_METHODS}
    assert replaced <= listed <= theirs


def test_the_package_imports_without_any_of_them() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "looked up: []"  # nothing is looked up before it is used


def test_a_trainer_is_refused_where_transformers_renamed_a_method(without: Any, model: Path, tmp_path: Path) -> None:
    without(next(one for one in transformers_names.TRAINER_METHODS if one.attribute == "_save_checkpoint"))
    with pytest.raises(MissingInternal, match="upshift.Trainer needs Trainer._save_checkpoint"):
        upshift.Trainer(LlamaForCausalLM.from_pretrained(model), transformers.TrainingArguments(str(tmp_path)))


@pytest.mark.parametrize("name", [torch_names.FSDP_GATHER, torch_names.FSDP_SUM])
def test_ranks_do_not_keep_pace_where_torch_has_no_exchange_to_count(
    name: Internal, without: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once; the run itself goes on."""
    layout = Layout(fully_shard="weights", shard_size=2)
    fsdp._missing_internal.cache_clear()
    assert fsdp.can_catch_up(layout)
    without(name)
    fsdp._missing_internal.cache_clear()
    assert not fsdp.can_catch_up(layout) and not fsdp.can_catch_up(layout)
    fsdp._missing_internal.cache_clear()
    (line,) = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert name.attribute in line and "ends the run" in line


def test_measuring_is_refused_without_fake_tensors_and_loading_goes_on(without: Any, model: Path) -> None:
    from upshift.loading.load import load_model
    from upshift.models.source import find_model
    from upshift.models.tracing.segments import Tracer

    without(torch_names.FAKE_TENSOR_MODE, torch_names.FAKE_TENSOR)
    with pytest.raises(MissingInternal, match="without its weights needs torch._subclasses.fake_tensor.FakeTensorMode"):
        Tracer(find_model(str(model)))

    assert load_model(str(model)).num_parameters() > 0


def test_loading_is_refused_without_what_it_needs(without: Any, model: Path) -> None:
    without(transformers_names.SET_TENSOR)
    from upshift.loading.load import load_model

    with pytest.raises(MissingInternal, match="Loading a model needs transformers.core_model_loading.set_param_for_module"):
        load_model(str(model))


def test_a_fast_export_has_the_same_graph_also_without_torch_s_names(without: Any) -> None:
    """It writes the source of fewer graphs, and lists the operators once."""
    programs = []
    calls = []
    find = lookup._import_name  # it keeps what it found, which is the mock or the function of an earlier test
    for context, taken in ((nullcontext, ()), (fast_export, ()), (fast_export, (torch_names.LAZY_GRAPHS, torch_names.LISTING))):
        without(*taken)
        find.cache_clear()
        with (
            ExitStack() as stack,
            mock.patch.object(graph_module, "_exec_with_source", wraps=graph_module._exec_with_source) as written,
            mock.patch.object(export_utils, "_materialize_cpp_cia_ops", wraps=export_utils._materialize_cpp_cia_ops) as listed,
            context(),
        ):
            stack.callback(find.cache_clear)
            module = nn.Sequential(nn.Linear(3, 2), nn.GELU())
            programs.append(torch.export.export(module, (torch.ones(4, 3),), strict=False).run_decompositions())
        calls.append((written.call_count, listed.call_count))
    for program in programs[1:]:
        assert str(program.graph) == str(programs[0].graph)
        assert str(program.graph_signature) == str(programs[0].graph_signature)
    slow, fast, without_names = calls
    assert fast[0] < slow[0] / 2, calls
    assert fast[1] == 1 < slow[1], calls
    assert without_names[0] > slow[0] / 2 and without_names[1] > 1, calls


def test_softmax_s_backward_is_the_same_without_torch_s(without: Any) -> None:
    scores = torch.randn(3, 5, 7, requires_grad=True, dtype=torch.float64)
    gradient = torch.randn(3, 5, 7, dtype=torch.float64)
    probabilities = scores.softmax(-1)
    (expected,) = torch.autograd.grad(probabilities, scores, gradient)
    assert torch.allclose(torch_names.softmax_backward(gradient, probabilities), expected)
    without(torch_names.SOFTMAX_BACKWARD)
    assert torch.allclose(torch_names.softmax_backward(gradient, probabilities), expected)


def test_norms_are_the_same_without_torch_s(without: Any) -> None:
    tensors = [torch.randn(4, 3), torch.randn(7).bfloat16()]
    expected = torch_names.norms(tensors)
    without(torch_names.NORMS)
    found = torch_names.norms(tensors)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert all(torch.allclose(one.float(), other.float(), rtol=1e-2) for one, other in zip(found, expected, strict=True))


def test_trees_are_walked_the_same_without_torch_s(without: Any) -> None:
    tree = {"a": [torch.ones(2), (1, None)], "b": Pair(torch.zeros(1), OrderedDict(c="text")), "d": {}}
    leaves, changed = torch_names.tree_leaves(tree), torch_names.tree_map(torch.Tensor, torch.numel, tree)
    without(torch_names.TREE)
    assert [id(leaf) for leaf in torch_names.tree_leaves(tree)] == [id(leaf) for leaf in leaves]
    again = torch_names.tree_map(torch.Tensor, torch.numel, tree)
    assert again == changed and type(again["b"]) is Pair


def test_without_fake_tensors_nothing_is_fake(without: Any) -> None:
    with torch_names.FAKE_TENSOR_MODE.get()():
        made = torch.ones(2)
    assert torch_names.is_fake(made) and not torch_names.is_fake(torch.ones(2))
    without(torch_names.FAKE_TENSOR)
    assert not torch_names.is_fake(torch.ones(2))


def test_a_module_s_tensors_are_what_torch_says() -> None:
    layer = nn.BatchNorm1d(3)
    assert torch_names.PARAMETERS.of(layer) == dict(layer.named_parameters(recurse=False))
    assert torch_names.BUFFERS.of(layer) == dict(layer.named_buffers(recurse=False))


def test_documents_of_a_row_are_kept_apart() -> None:
    """Against a loop over all pairs of tokens."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [5, 6, 7, 8, 9, 10, 11, 12]])
    documents = document_of_each_token(positions)
    assert documents is not None and documents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8]
    assert document_of_each_token(positions[1:]) is None
    within = within_documents(lambda batch, head, query, key: key <= query, positions, documents)
    for row, numbers in enumerate([[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8]):
        for query in range(8):
            for key in range(8):
                assert bool(within(row, 0, query, key)) == (numbers[query] == numbers[key] and key <= query)
