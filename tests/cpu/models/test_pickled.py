"""Old PyTorch files: what torch.save wrote is read as it was, a pickle with code inside is refused and runs nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from upshift.errors import JobFailed, RequestError
from upshift.loading.files import bin_process, checkpoint
from upshift.loading.files.checkpoint import find_checkpoint
from upshift.loading.files.tensors import read_tensor
from upshift.loading.load import load_model

NAME = "pytorch_model.bin"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkpoints"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def weights() -> dict[str, Any]:
    torch.manual_seed(0)
    shared, wide = torch.randn(4, 6), torch.randn(8, 8)
    return OrderedDict(
        a=shared, b=shared, turned=shared.T, part=wide[2:5, ::2], parameter=torch.nn.Parameter(torch.randn(3)),
        bf16=torch.randn(5).bfloat16(), fp16=torch.randn(5).half(), fp8=torch.randn(5).to(torch.float8_e4m3fn),
        whole=torch.arange(7), flag=torch.tensor([True, False]), number=torch.tensor(2.5), none=torch.empty(0, 3), wide=wide,
    )  # fmt: skip


def same(folder: Path, expected: dict[str, Tensor]) -> None:
    found = find_checkpoint(folder).tensors
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        read = read_tensor(found[name])
        assert read.dtype == tensor.dtype and read.shape == tensor.shape and torch.equal(read.float(), tensor.float()), name


def test_one_file(folder: Path, cache: Path) -> None:
    torch.save(weights(), folder / NAME)
    same(folder, weights())
    assert find_checkpoint(folder).metadata == {"format": "pt"}
    made = [path.stat().st_mtime_ns for path in sorted(cache.rglob("*.safetensors"))]
    same(folder, weights())
    assert [path.stat().st_mtime_ns for path in sorted(cache.rglob("*.safetensors"))] == made, "rewritten twice"
    assert sorted(path.name for path in folder.iterdir()) == [NAME]


def test_a_model_in_shards(folder: Path, cache: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    expected = AutoModelForCausalLM.from_config(config).state_dict()
    config.save_pretrained(folder)
    files = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    index = {name: files[number % 2] for number, name in enumerate(expected)}
    for file in files:  # the second as before torch 1.6
        shard = {name: tensor.clone() for name, tensor in expected.items() if index[name] == file}
        torch.save(shard, folder / file, _use_new_zipfile_serialization=file == files[0])
    write_index(folder, index | {"d": files[0]})
    with pytest.raises(RequestError, match="00001-of-00002.bin has not the tensor 'd'"):
        find_checkpoint(folder)
    assert [path.suffix for path in cache.iterdir()] == [".lock"], "something half-written is left"
    next(cache.iterdir()).with_suffix(".tmp").mkdir()  # of a process that was killed
    write_index(folder, index)
    same(folder, expected)
    loaded = load_model(str(folder), dtype="auto")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.items())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    (folder / files[1]).unlink()
    with pytest.raises(RequestError, match="has no 'pytorch_model-00002"):
        find_checkpoint(folder)


def write_index(folder: Path, index: dict[str, str]) -> None:
    (folder / f"{NAME}.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")


def test_a_full_disk_is_told_before(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(weights(), folder / NAME)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(JobFailed, match="100 B free"):
        find_checkpoint(folder)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


# What is refused


class Call:
    """Pickled as a call, which pickle.load would make."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def saved(content: Any, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def compressed(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return buffer.getvalue()


MARK = "mark-of-code"  # made in the working folder by code that runs
PLAIN = {"a": torch.zeros(1000)}
REFUSED = {
    "a shell command": (saved(PLAIN | {"b": Call(os.system, f"touch {MARK}")}), "holds code ('posix.system')"),
    "a shell command, as before torch 1.6": (saved(PLAIN | {"b": Call(os.system, f"touch {MARK}")}, zipped=False), "holds code"),
    "a bare pickle": (pickle.dumps(Call(os.system, f"touch {MARK}"), 2), "holds code"),
    "eval": (saved({"a": Call(eval, f"open({MARK!r}, 'w')")}), "holds code ('eval')"),
    "an open file": (saved({"a": Call(open, MARK, "w")}), "holds code"),
    "torch's own unpickler": (saved({"a": Call(torch.load, MARK)}), "holds code ('torch.serialization.load')"),
    "an object": (saved({"a": SimpleNamespace(x=1)}), "holds code ('types.SimpleNamespace')"),
    "a whole model": (saved(torch.nn.Linear(2, 2)), "holds code ('torch.nn.modules.linear.Linear')"),
    "more memory than weights": (saved({"a": Call(bytearray, 2**33)}), "takes more memory"),
    "a tensor larger than the file": (saved({"a": torch.zeros(1).expand(10**7)}), "would be tensors of"),
    "a compressed archive": (compressed(saved(PLAIN)), "is compressed"),
    "a truncated archive": (saved(PLAIN)[:-100], "is no whole file of torch.save"),
    "a truncated old file": (saved(PLAIN, zipped=False)[:-100], "is no whole file of torch.save"),
    "nothing": (b"", "is no whole file of torch.save"),
    "text": (b"weights\n" * 100, "is no whole file of torch.save"),
    "only a tensor": (saved(torch.zeros(3)), "no tensors by name"),
    "an empty dictionary": (saved({}), "no tensors by name"),
    "a dictionary below": (saved({"state_dict": PLAIN}), "'state_dict' of the type dict"),
    "a number beside tensors": (saved(PLAIN | {"step": 3}), "'step' of the type int"),
    "a name that is a number": (saved({1: torch.zeros(3)}), "the name 1"),
    "a name that is not UTF-8": (saved({"\ud800": torch.zeros(3)}), "names are text"),
    "the name of metadata": (saved({"__metadata__": torch.zeros(3)}), "names are text"),
    "a sparse tensor": (saved({"a": torch.eye(3).to_sparse()}), "sparse"),
    "a tensor without data": (saved({"a": torch.zeros(3, device="meta")}), "meta"),
    "a quantized tensor": (saved({"a": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)}), "qint8"),
}  # fmt: skip


def in_fork(arguments: list[str], folder: Path) -> tuple[int, str]:
    """How the process of a pickle ends, and what it answers; forked, as importing torch again takes seconds."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.chdir(folder)
            sys.stdout = (folder / "answer").open("w")
            status = bin_process.run_command(arguments)
            sys.stdout.close()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (folder / "answer").read_text(encoding="utf-8")


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_weights_alone_is_refused_in_one_line(what: str, folder: Path) -> None:
    content, words = REFUSED[what]
    (folder / NAME).write_bytes(content)
    code, said = in_fork([str(folder / NAME), str(folder / "made.safetensors")], folder)
    assert code == 1 and words in (message := json.loads(said)["refused"]), said
    assert message.isprintable() and str(folder / NAME) in message and len(message) < 600
    assert sorted(path.name for path in folder.iterdir()) == ["answer", NAME]


def test_a_process_of_its_own_reads_it(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.chdir(folder)
    content, words = REFUSED["a shell command"]
    (folder / NAME).write_bytes(content)
    with pytest.raises(RequestError) as caught:
        find_checkpoint(folder)
    assert words in str(caught.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"] and not (folder / MARK).exists()


def test_a_process_that_ends_without_an_answer(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(PLAIN, folder / NAME)
    monkeypatch.setattr(checkpoint, "PROCESS", "upshift.no_such_module")
    with pytest.raises(RequestError, match="the process that reads it ended"):
        find_checkpoint(folder)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
