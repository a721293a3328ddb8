"""Coverage-guided fuzzing of the safetensors header (https://github.com/google/atheris), not part of the tests:

    pip install atheris
    python tests/fuzz/fuzz_header.py -max_total_time=600 FOLDER

FOLDER, made where it is not there, keeps the inputs that reached something new. A finding is an exception that is no
RequestError, a message of several lines, or a header that is read here and not by the safetensors library.
"""

from __future__ import annotations

import json
import sys
import tempfile
from math import prod
from pathlib import Path

import atheris
import safetensors

with atheris.instrument_imports(include=["upshift.loading", "json"]):
    from upshift.errors import RequestError
    from upshift.loading.files.safetensors_header import BITS, KEYS, LENGTH_BYTES, METADATA, parse_header

DATA_BYTES = 40  # behind the header, in most inputs
U8 = {"dtype": "U8", "shape": [40], "data_offsets": [0, 40]}
SEEDS = (
    {},
    {METADATA: {"format": "pt"}, "a": U8},
    {"a": U8 | {"shape": [2, 12], "data_offsets": [0, 24]}, "b": {"dtype": "F64", "shape": [2], "data_offsets": [24, 40]}},
    {"e": {"dtype": "F4", "shape": [0, 7], "data_offsets": [0, 0]}, "a": U8 | {"dtype": "BF16", "shape": [20]}},
)
WORDS = (
    "{", "}", "[", "]", ":", ",", '"', "\\u", "\\ud800", "-0", "1e0", "NaN", "null", "true", str(2**63), str(2**64), METADATA,
    *KEYS, *BITS,
)  # fmt: skip
ODD = (-1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 0.0, 1.5, True, None, "1", [], {})


def one_input(content: bytes) -> None:
    """The first byte says what the rest is: a file, the JSON of one, or choices of which one is put together."""
    kind, text = content[:1], content[1:]
    if kind in (b"", b"\0"):
        check(text)
    elif kind < b"\x80":
        check(with_length(text) + bytes(DATA_BYTES))
    else:
        check(put_together(atheris.FuzzedDataProvider(text)))


def with_length(text: bytes) -> bytes:
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def put_together(choices: atheris.FuzzedDataProvider) -> bytes:
    """Tensors that mostly lie as they should, with a value here and there that does not."""

    def value(usual: object) -> object:
        return usual if choices.ConsumeIntInRange(0, 15) else ODD[choices.ConsumeIntInRange(0, len(ODD) - 1)]

    header: dict[str, object] = {METADATA: {"a": value("pt")}} if choices.ConsumeBool() else {}
    end, dtypes = 0, sorted(BITS)
    for number in range(choices.ConsumeIntInRange(0, 6)):
        dtype = dtypes[choices.ConsumeIntInRange(0, len(dtypes) - 1)]
        shape = [choices.ConsumeIntInRange(0, 6) for _ in range(choices.ConsumeIntInRange(0, 3))]
        begin, end = end, end + prod(shape) * BITS[dtype] // 8
        name = str(value(number)) if choices.ConsumeBool() else choices.ConsumeUnicode(4)
        offsets = [value(begin), value(end)]
        header[name] = {"dtype": value(dtype), "shape": value([value(size) for size in shape]), "data_offsets": value(offsets)}
    return with_length(json.dumps(header).encode()) + bytes(end)


def check(file: bytes) -> None:
    try:
        header = parse_header(file, file=Path("model.safetensors"), file_bytes=len(file))
    except RequestError as error:
        assert str(error).isprintable(), error
        return
    ours = {tensor.name: (tensor.dtype, list(tensor.shape), tensor.nbytes) for tensor in header.tensors}
    theirs = {name: (found["dtype"], found["shape"], len(found["data"])) for name, found in safetensors.deserialize(file)}
    assert ours == theirs, (ours, theirs)


def main() -> None:
    folder = Path(sys.argv[-1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS):
        (folder / f"seed-{number}").write_bytes(b"\1" + json.dumps(seed).encode())
    (folder / "seed-choices").write_bytes(b"\x80" + bytes(range(256)))
    with tempfile.NamedTemporaryFile("w", suffix=".dict") as words:
        words.writelines(json.dumps(word) + "\n" for word in WORDS)
        words.flush()
        atheris.Setup([*sys.argv[:-1], f"-dict={words.name}", str(folder)], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
