"""Data larger than memory: a process reads files of 96 MiB, and never holds as much."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from upshift.units import MIB

ALLOWED = 80 * MIB  # of anonymous memory, beyond what the process holds once it has its libraries
DATA = 96 * MIB
WORD = "word" * 300  # few tokens in many bytes: the tokenizer is quick, and memory is what is looked at
LINE = f"{WORD} " * 50

CHILD = """
import sys, threading, time
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
import pyarrow.parquet
from upshift.training.batches.layout import Layout
from upshift.training.batches.sampler import BatchSource
from upshift.training.data.corpus import read_corpus
from upshift.training.data.text_files import TextFile
from upshift.training.data.tokenizer import tokenize
from upshift.training.data.tokens import cut_sequences

tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "word" * 300: 2}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
tokenize(["word" * 300], wrapped)
highest = 0

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    global highest
    while True:
        highest = max(highest, anonymous())
        time.sleep(0.002)

before = anonymous()
threading.Thread(target=watch, daemon=True).start()
lines, token_ids, *others = sys.argv[1:]
for _ in range(2):
    sequences = cut_sequences(tokenize(read_corpus(token_ids).documents, None), 512)
    batch = next(BatchSource(sequences=sequences, global_batch=8, layout=Layout(micro_batch=8)).batches())
    print(type(sequences.tokens).__name__, int(sequences.lengths.sum()), batch.micro_batches[0].arrays["input_ids"].sum())
for path in others:
    size = 0
    for document in read_corpus(path).documents:
        size += sum(map(len, document.pieces())) if isinstance(document, TextFile) else len(document)
    print(size)
print(highest - before)
found = tokenize(read_corpus(lines).documents, wrapped)
print(found.num_documents, found.num_tokens, highest - before)
"""


COUNT = DATA // len(LINE)
FEW = COUNT // 6  # a text is tokenized more slowly than it is read
NUM_IDS = DATA // 4 // 400 * 400


def write_files(folder: Path) -> list[Path]:
    record = json.dumps({"text": LINE})
    (folder / "few.jsonl").write_text(f"{record}\n" * FEW)
    (folder / "a.json").write_text("[" + ", ".join([record] * COUNT) + "]")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(f"{record}\n".encode() * COUNT, 1))
    (folder / "a.csv").write_text("text\n" + f"{LINE}\n" * COUNT)
    (folder / "a.txt").write_text(f"{LINE}\n" * COUNT)
    ids = pa.array(np.random.default_rng(0).integers(0, 70_000, NUM_IDS, np.int32))
    offsets = pa.array(np.arange(0, NUM_IDS + 1, 400, np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)})
    pq.write_table(table, folder / "a.parquet", row_group_size=8192)
    return [folder / name for name in ("few.jsonl", "a.parquet", "a.json", "a.jsonl.gz", "a.csv", "a.txt")]


def test_data_that_does_not_fit_into_memory_is_read(tmp_path):
    command = [sys.executable, "-c", CHILD, *map(str, write_files(tmp_path))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    first, again, *sizes, kilobytes, text = run.stdout.splitlines()
    assert [int(size) for size in sizes] == [len(LINE) * COUNT] * 3 + [len(LINE) * COUNT + COUNT]
    documents, tokens, _ = text.split()
    assert (int(documents), int(tokens)) == (FEW, 51 * FEW)
    assert first == again, "a run that is resumed reads the same tokens in the same order"
    assert int(kilobytes) * 1024 < ALLOWED < DATA, run.stdout
    assert first.split()[:2] == ["memmap", str(NUM_IDS)]
