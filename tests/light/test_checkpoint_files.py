"""What is read of a checkpoint's files, and that every damaged one is refused in one line. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from upshift.errors import RequestError
from upshift.loading.files.checkpoint import find_checkpoint, find_safetensors
from upshift.loading.files.safetensors_header import BITS, LENGTH_BYTES, MAX_BYTES, Header, parse_header, read_header

BIG = 2**63
NOWHERE = Path("model.safetensors")
Entries = dict[str, Any]


def entry(dtype: str, shape: list[Any], begin: Any, end: Any, **more: Any) -> Entries:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


WHOLE = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32), "c": entry("I64", [], 32, 40)}


def content_of(header: Entries | str | bytes, data: int = 40, *, length: int | None = None) -> bytes:
    """Of a file whose data are ``data`` zeros."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(text) if length is None else length).to_bytes(LENGTH_BYTES, "little") + text + bytes(data)


def parsed(content: bytes) -> Header:
    return parse_header(content, file=NOWHERE, file_bytes=len(content))


def refused(call: Callable[[], object]) -> str:
    """The message: one line, of a length to be read."""
    with pytest.raises(RequestError) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 900, message
    return message


def changed(name: str, **fields: Any) -> Entries:
    return WHOLE | {name: WHOLE[name] | fields}


DAMAGED_FILES = {
    "an empty file": (b"", "length of its header"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "length of its header"),
    "a truncated header": (content_of(WHOLE)[:50], "truncated"),
    "truncated data": (content_of(WHOLE)[:-1], "truncated"),
    "bytes behind the data": (content_of(WHOLE) + b"\0", "belong to no tensor"),
    "a header of 2**63 bytes": (content_of(WHOLE, length=BIG), "the most that the format allows"),
    "a header of 2**64 - 1 bytes": (content_of(WHOLE, length=2**64 - 1), "the most that the format allows"),
    "a header over the limit": (content_of(WHOLE, length=MAX_BYTES + 1), "the most that the format allows"),
    "a header behind the end": (content_of(WHOLE, length=MAX_BYTES), "truncated"),
    "a length that is too short": (content_of(WHOLE, length=20), "not JSON"),
    "an empty header": (content_of(""), "begins with"),
    "space before it": (content_of(" {}", 0), "begins with"),
    "a list": (content_of("[]", 0), "begins with"),
    "bytes that are not UTF-8": (content_of(b'{"\xff": 1}'), "not UTF-8"),
    "half of a surrogate pair": (content_of({"\ud800": WHOLE["a"]}, 24), "not UTF-8"),
    "half of one in metadata": (content_of({"__metadata__": {"a": "\udc00"}}, 0), "not UTF-8"),
    "no JSON": (content_of('{"a": }'), "not JSON"),
    "a zero byte behind it": (content_of("{}\0", 0), "not JSON"),
    "a raw line break in a name": (content_of('{"a\n": 1}'), "not JSON"),
    "lists, nested deeply": (content_of('{"a":' + 100_000 * "[" + 100_000 * "]" + "}"), "nested too deeply"),
    "objects, nested deeply": (content_of(100_000 * '{"a":' + "1" + 100_000 * "}"), "nested too deeply"),
    "lists, nested somewhat": (content_of({"a": WHOLE["a"] | {"shape": json.loads(300 * "[" + 300 * "]")}}), "shape"),
    "a pickle": (b"\x80\x02}q\0." + bytes(40), "the most that the format allows"),
    "a tensor twice": (content_of('{"a": 1, "b": 2, "a": 1}'), "'a' twice"),
    "a field twice": (content_of('{"a": {"dtype": "U8", "shape": [1], "shape": [1], "data_offsets": [0, 1]}}', 1), "twice"),
    "metadata twice": (content_of('{"__metadata__": {}, "__metadata__": {}}', 0), "'__metadata__' twice"),
    "metadata of numbers": (content_of({"__metadata__": {"a": 1}}, 0), "text to text"),
    "metadata of null": (content_of({"__metadata__": None}, 0), "text to text"),
    "metadata of a list": (content_of({"__metadata__": ["a"]}, 0), "text to text"),
    "a tensor of null": (content_of({"a": None}, 0), "dtype, shape and data_offsets belong"),
    "a tensor as a list": (content_of({"a": ["U8", [1], [0, 1]]}, 1), "dtype, shape and data_offsets belong"),
    "a field too many": (content_of(changed("a", strides=[3, 1])), "dtype, shape and data_offsets belong"),
    "a field too few": (content_of({"a": {"dtype": "U8", "shape": [0]}}, 0), "dtype, shape and data_offsets belong"),
    "an unknown dtype": (content_of(changed("a", dtype="F31")), "unknown dtype 'F31'"),
    "a dtype in lower case": (content_of(changed("a", dtype="f32")), "unknown dtype"),
    "a dtype of null": (content_of(changed("a", dtype=None)), "unknown dtype"),
    "a dtype as a list": (content_of(changed("a", dtype=["F32"])), "unknown dtype"),
    "a shape that does not fit": (content_of(changed("a", shape=[2, 4])), "do not fit its shape"),
    "a size of true": (content_of(changed("a", shape=[True, 6])), "whole numbers"),
    "a size in quotes": (content_of(changed("a", shape=["6"])), "whole numbers"),
    "a size of null": (content_of(changed("a", shape=[None])), "whole numbers"),
    "a size that is a fraction": (content_of(changed("a", shape=[6.0])), "'6.0'"),
    "a size with an exponent": (content_of('{"a": {"dtype": "U8", "shape": [1e0], "data_offsets": [0, 1]}}', 1), "'1e0'"),
    "negative sizes": (content_of(changed("a", shape=[-2, -3])), "'-2'"),
    "minus zero": (content_of('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [-0, 1]}}', 1), "'-0'"),
    "not a number": (content_of(changed("a", shape=[float("nan")])), "'NaN'"),
    "infinity": (content_of(changed("a", shape=[float("inf")])), "'Infinity'"),
    "a shape that is a number": (content_of(changed("a", shape=6)), "whole numbers"),
    "too many dimensions": (content_of(changed("a", shape=[6] + 100 * [1])), "up to 64"),
    "a number of 21 digits": (content_of(changed("a", shape=[10**20])), "'100000000000000000000'"),
    "a number of 5,000 digits": (content_of('{"a": {"dtype": "U8", "shape": [' + 5000 * "9" + "]}}", 1), "'999"),
    "a product over 2**64": (content_of(changed("a", shape=[2**62, 4, 6])), "do not fit its shape"),
    "no elements, of a size over 2**63": (content_of({"a": entry("U8", [BIG, 0], 0, 0)}, 0), "beyond 2**63"),
    "half bytes": (content_of({"a": entry("F4", [3], 0, 1)}, 1), "do not fit its shape"),
    "offsets that overlap": (content_of(changed("b", data_offsets=[20, 28])), "overlaps"),
    "the same bytes twice": (content_of({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4), "overlaps"),
    "a hole": (content_of({"a": WHOLE["a"], "c": WHOLE["c"]}), "hole"),
    "a hole at the beginning": (content_of({"a": entry("U8", [1], 1, 2)}, 2), "hole"),
    "an end behind the file": (content_of(WHOLE, 39), "truncated"),
    "offsets behind the file": (content_of(changed("c", data_offsets=[BIG, BIG + 8])), "hole"),
    "offsets that run backwards": (content_of(changed("a", data_offsets=[24, 0])), "first byte and its end"),
    "negative offsets": (content_of(changed("a", data_offsets=[-24, 0])), "'-24'"),
    "offsets of true and false": (content_of({"a": entry("U8", [1], False, True)}, 1), "first byte and its end"),
    "offsets that are fractions": (content_of({"a": entry("U8", [1], 0.0, 1.0)}, 1), "'0.0'"),
    "three offsets": (content_of(changed("a", data_offsets=[0, 12, 24])), "first byte and its end"),
    "no offsets": (content_of(changed("a", data_offsets=None)), "first byte and its end"),
    "names and text of a megabyte": (content_of({2**20 * "n": entry(2**20 * "F", [2], 0, 8)}, 8), "unknown dtype"),
    "a line break in a name": (content_of({"a\nb": entry("F33", [2], 0, 8)}, 8), "unknown dtype"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_a_damaged_file_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    content, words = DAMAGED_FILES[damage]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    for call in (lambda: parsed(content), lambda: read_header(file), lambda: find_checkpoint(tmp_path)):
        message = refused(call)
        assert words in message and "model.safetensors" in message


def test_a_whole_file() -> None:
    header = parsed(content_of(WHOLE | {"__metadata__": {"format": "pt"}}))
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in header.tensors] == [
        ("a", "F32", (2, 3), 24), ("b", "BF16", (4,), 8), ("c", "I64", (), 8),
    ]  # fmt: skip
    assert [tensor.offset - header.bytes for tensor in header.tensors] == [0, 24, 32]
    assert header.metadata == {"format": "pt"} and {tensor.file for tensor in header.tensors} == {NOWHERE}


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", tmp_path / "zero\0", tmp_path / (300 * "n")):
        refused(lambda path=path: read_header(path))


# Checkpoints of several files


def write_shards(folder: Path, **more: Any) -> None:
    """Two shards of two tensors each, and their index."""
    for number, names in enumerate(("ab", "cd")):
        header = {name: entry("U8", [2], 2 * place, 2 * place + 2) for place, name in enumerate(names)}
        (folder / f"s{number}.safetensors").write_bytes(content_of(header, 4))
    write_index(folder, {name: f"s{number}.safetensors" for number, names in enumerate(("ab", "cd")) for name in names} | more)


def write_index(folder: Path, names: Any) -> None:
    index = {"metadata": {"total_size": 8}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    found = find_checkpoint(tmp_path)
    assert list(found.tensors) == ["a", "b", "c", "d"] and found.total_bytes == 8
    assert found.files == (tmp_path / "s0.safetensors", tmp_path / "s1.safetensors")


def test_one_file_comes_before_shards(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content_of(WHOLE))
    assert set(find_checkpoint(tmp_path).tensors) == set(WHOLE)


def test_shards_may_lie_in_a_folder_below(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "s1.safetensors").rename(tmp_path / "below" / "s1.safetensors")
    write_index(tmp_path, dict.fromkeys("ab", "s0.safetensors") | dict.fromkeys("cd", "below/s1.safetensors"))
    assert list(find_checkpoint(tmp_path).tensors) == ["c", "d", "a", "b"]


def truncate(folder: Path) -> None:
    os.truncate(folder / "s1.safetensors", 20)


def index_text(text: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_bytes(text) and None


def index_of(names: Any) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, names)


def other_name(name: str) -> Callable[[Path], None]:
    return lambda folder: write_shards(folder, a=name)


def outside(folder: Path) -> None:
    other = folder.parent / "outside.safetensors"
    (folder / "s1.safetensors").rename(other)
    (folder / "s1.safetensors").symlink_to(other)


def twice(folder: Path) -> None:
    (folder / "s1.safetensors").write_bytes((folder / "s0.safetensors").read_bytes())


def circle(folder: Path) -> None:
    (folder / "s1.safetensors").unlink()
    (folder / "s1.safetensors").symlink_to("s1.safetensors")


DAMAGED_SHARDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a missing shard": (lambda folder: (folder / "s1.safetensors").unlink(), "has no 's1.safetensors'"),
    "a truncated shard": (truncate, "s1.safetensors is no whole safetensors file: it is truncated"),
    "a tensor that no shard has": (other_name("s1.safetensors"), "against its index, the tensor 'a'"),
    "a tensor that the index has not": (index_of({"a": "s0.safetensors"} | dict.fromkeys("cd", "s1.safetensors")), "tensor 'b'"),
    "a tensor too many": (lambda folder: write_shards(folder, e="s1.safetensors"), "has not the tensor 'e'"),
    "a shard as a folder": (other_name("."), "names the file '.'"),
    "a shard above": (other_name("../s0.safetensors"), "names the file '../s0.safetensors'"),
    "a shard above, further on": (other_name("x/../../s0.safetensors"), "names the file"),
    "an absolute shard": (other_name("/s0.safetensors"), "names the file '/s0.safetensors'"),
    "a shard of another kind": (other_name("config.json"), "names the file 'config.json'"),
    "a pickle as a shard": (other_name("s0.bin"), "has no 's0.bin'"),
    "a line break in a shard's name": (other_name("s0\n.safetensors"), "names the file"),
    "a zero in a shard's name": (other_name("s0\0.safetensors"), "names the file"),
    "a shard's name of a megabyte": (other_name(2**20 * "s" + ".safetensors"), "has no 's"),
    "a link outside the folder": (outside, "outside its folder"),
    "a link to itself": (circle, "s1.safetensors"),
    "an index that is empty": (index_text(b""), "not valid JSON"),
    "an index that is not UTF-8": (index_text(b'{"\xff": 1}'), "not valid JSON"),
    "an index that is a list": (index_text(b"[]"), "weight_map"),
    "an index that is nested deeply": (index_text(100_000 * b"[" + 100_000 * b"]"), "not valid JSON"),
    "an index with a key twice": (index_text(b'{"weight_map": {"a": "s0.safetensors", "a": "s1.safetensors"}}'), "twice"),
    "no map": (index_text(b"{}"), "weight_map"),
    "an empty map": (index_of({}), "weight_map"),
    "a map to numbers": (index_of({"a": 0}), "weight_map"),
    "a map that is a list": (index_of(["a"]), "weight_map"),
    "an index and no shard": (lambda folder: [file.unlink() for file in folder.glob("*.safetensors")] and None, "has no 's0"),
    "a tensor in two shards": (twice, "s1.safetensors has"),
    "nothing": (lambda folder: [file.unlink() for file in folder.iterdir()] and None, "has no 'model.safetensors'"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED_SHARDS)
def test_damaged_shards_are_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    change, words = DAMAGED_SHARDS[damage]
    folder = tmp_path / "model"
    folder.mkdir()
    write_shards(folder)
    change(folder)
    assert words in refused(lambda: find_checkpoint(folder))


@pytest.mark.parametrize("shared", [False, True])
def test_the_hubs_cache_may_link_to_its_blobs(shared: bool, tmp_path: Path) -> None:
    """With blobs of the model's own, and with those that models share (huggingface_hub 2)."""
    blob, folder = tmp_path / "models--a--b" / "blobs" / "1f", tmp_path / "models--a--b" / "snapshots" / "2e"
    folder.mkdir(parents=True)
    blob.parent.mkdir()
    content = tmp_path / "blobs" / "3d" / "4c" if shared else blob
    content.parent.mkdir(parents=True, exist_ok=True)
    content.write_bytes(content_of(WHOLE))
    if shared:
        blob.symlink_to(content)
    (folder / "model.safetensors").symlink_to(Path("../../blobs/1f"))
    assert set(find_checkpoint(folder).tensors) == set(WHOLE)
    (tmp_path / "link").symlink_to(folder)
    assert set(find_checkpoint(tmp_path / "link").tensors) == set(WHOLE)


def test_where_only_safetensors_will_do_a_pickle_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    assert "upshift shard" in refused(lambda: find_safetensors(tmp_path))


# Against the safetensors library


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, tuple[str, list[int], int]]:
    """Of up to four tensors: dtype, shape and bytes, by name."""
    made = {}
    for name in draw(st.lists(st.text(max_size=8).filter(lambda name: name != "__metadata__"), max_size=4, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(BITS))), draw(st.lists(st.integers(0, 5), max_size=3))
        if prod(shape) * BITS[dtype] % 8 == 0:
            made[name] = (dtype, shape, prod(shape) * BITS[dtype] // 8)
    return made


def same_as_the_library(content: bytes, header: Header) -> None:
    theirs = {name: (info["dtype"], info["shape"], len(info["data"])) for name, info in safetensors.deserialize(content)}
    assert {tensor.name: (tensor.dtype, list(tensor.shape), tensor.nbytes) for tensor in header.tensors} == theirs


@given(tensors(), st.booleans(), st.booleans(), st.integers(0, 9), st.randoms(use_true_random=False))
def test_any_valid_header_is_read(made: Any, ascii_only: bool, indented: bool, padding: int, order: Any) -> None:
    header, end = {"__metadata__": {"format": "pt", "": "\u2028"}}, 0
    for name, (dtype, shape, nbytes) in made.items():
        fields = list(entry(dtype, shape, end, end + nbytes).items())
        order.shuffle(fields)
        header[name] = dict(fields)
        end += nbytes
    items = list(header.items())
    order.shuffle(items)
    text = json.dumps(dict(items), ensure_ascii=ascii_only, indent=2 if indented else None) + padding * " "
    content = content_of(text, end)
    found = parsed(content)
    same_as_the_library(content, found)
    assert found.metadata == header["__metadata__"] and found.bytes + end == len(content)


@given(tensors())
def test_what_the_library_writes_is_read(made: Any) -> None:
    names = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I64": np.int64, "BOOL": np.bool_, "U8": np.uint8}
    known = {name: value for name, value in made.items() if value[0] in names}
    content = save({name: np.zeros(shape, names[dtype]) for name, (dtype, shape, _) in known.items()}, {"format": "np"})
    found = parsed(content)
    assert {tensor.name: (tensor.dtype, list(tensor.shape), tensor.nbytes) for tensor in found.tensors} == known
    assert found.metadata == {"format": "np"}


def accepted_only_if_valid(content: bytes) -> None:
    try:
        header = parsed(content)
    except RequestError:
        return
    same_as_the_library(content, header)


@given(st.binary(max_size=200), st.integers(0, 20))
def test_any_bytes_are_read_or_refused(text: bytes, data: int) -> None:
    accepted_only_if_valid(text)
    accepted_only_if_valid(content_of(text, data))
    accepted_only_if_valid(content_of(b"{" + text, data))


PIECES = [
    b'"a"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"1", b"-", b"1e1", b"null", b"true", b'"dtype"', b'"\\ud800"', b"\xff",
]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.sampled_from(PIECES) | st.binary(max_size=2)), max_size=4))
def test_any_changed_header_is_read_or_refused(changes: list[tuple[int, int, bytes]]) -> None:
    text = json.dumps(WHOLE).encode()
    for place, removed, added in changes:
        place %= len(text) + 1
        text = text[:place] + added + text[place + removed :]
    accepted_only_if_valid(content_of(text))
