"""Write and read token sequences as TFRecord files, on a local disk or in a bucket (gs://), which a TPU's host reads
best.

A folder has shards and one index.json that says what is in them: widths are planned and steps counted without reading
them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from upshift.errors import JobFailed, RequestError
from upshift.training.batches.sampler import count_batches
from upshift.value import Value, first_problem
from upshift.xla.data.batches import IGNORED, Arrays, Batches, plan_buckets

INDEX = "index.json"
FEATURES = ("input_ids", "labels")
Example = Mapping[str, NDArray[Any]]  # input_ids and labels; the model shifts labels itself


class Index(Value):
    """The index of a folder. ``lengths`` with their ``counts`` are of the longer of input_ids and labels."""

    files: tuple[str, ...]
    num_examples: int = Field(ge=1)
    num_tokens: int
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    pad_token_id: int = 0


def write_records(examples: Iterable[Example], folder: str, *, pad_token_id: int = 0, shards: int = 1) -> Index:
    """Write records into a new folder, shard by shard in turn. Raise RequestError if records are there already, or
    there is no example."""
    if tf.io.gfile.exists(f"{folder}/{INDEX}"):
        raise RequestError(f"{folder} has records already; give another folder")
    names = [f"data-{number:05d}-of-{shards:05d}.tfrecord" for number in range(shards)]
    lengths: dict[int, int] = {}
    tokens = 0
    try:
        tf.io.gfile.makedirs(folder)
        writers = [tf.io.TFRecordWriter(f"{folder}/{name}") for name in names]
        for number, example in enumerate(examples):
            writers[number % shards].write(_serialized(example))
            length = max(len(example[name]) for name in FEATURES)
            lengths[length] = lengths.get(length, 0) + 1
            tokens += len(example["input_ids"])
        for writer in writers:
            writer.close()
        total = sum(lengths.values())
        if not total:
            raise RequestError(f"there is no example to write to {folder}; give data with text")
        rising = sorted(lengths)
        index = Index(
            files=tuple(names), num_examples=total, num_tokens=tokens, lengths=tuple(rising),
            counts=tuple(lengths[length] for length in rising), pad_token_id=pad_token_id,
        )  # fmt: skip
        with tf.io.gfile.GFile(f"{folder}/{INDEX}", "w") as file:  # last: a folder without it is not whole
            file.write(index.to_json())
    except tf.errors.OpError as error:
        raise JobFailed(f"records could not be written to {folder}: {error.message}") from None
    return index


def _serialized(example: Example) -> bytes:
    features = {
        name: tf.train.Feature(int64_list=tf.train.Int64List(value=np.asarray(example[name]).tolist())) for name in FEATURES
    }
    made: bytes = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    return made


def has_records(path: str) -> bool:
    return bool(tf.io.gfile.exists(f"{path}/{INDEX}"))


def read_index(folder: str) -> Index:
    try:
        with tf.io.gfile.GFile(f"{folder}/{INDEX}", "r") as file:
            return Index.model_validate(json.loads(file.read()))
    except tf.errors.OpError as error:
        raise RequestError(f"{folder} has no records ({error.message}); write them with upshift data to-tfrecord") from None
    except ValidationError as error:
        raise RequestError(f"{folder}/{INDEX} is not of this version ({first_problem(Index, error)}); write it again") from None


def record_batches(folder: str, *, global_batch: int, num_steps: int, seed: int = 0) -> Batches:
    """Return endless epochs, each shuffled anew by (seed, epoch), every example once; the last batch may be smaller."""
    index = read_index(folder)
    if index.num_examples < global_batch:
        found = f"{folder} has {index.num_examples} examples"
        raise RequestError(f"{found}, one global batch takes {global_batch}; use a smaller one, or more data")
    buckets = plan_buckets(index.lengths, index.counts, longest=index.lengths[-1], batch_size=global_batch, num_steps=num_steps)
    files = [f"{folder}/{name}" for name in index.files]
    examples = tf.data.TFRecordDataset(files).map(_parsed, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).cache()
    of_epoch = count_batches(index.num_examples, global_batch)

    def start(step: int) -> Iterator[Arrays]:
        epoch, batch = divmod(step, of_epoch)
        while True:
            shuffled = examples.shuffle(index.num_examples, seed=_mixed(seed, epoch), reshuffle_each_iteration=False)
            paddings = (np.int64(index.pad_token_id), np.int64(IGNORED), np.int64(0))
            batches = shuffled.padded_batch(global_batch, padding_values=paddings, drop_remainder=False)
            for ids, labels, mask in batches.skip(batch).prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
                yield {"input_ids": ids, "labels": labels, "attention_mask": mask}
            epoch, batch = epoch + 1, 0

    return Batches(
        start=start, global_batch=global_batch, buckets=buckets, pad_token_id=index.pad_token_id, num_examples=index.num_examples,
        identity=f"records {zlib.crc32(index.to_json().encode()):08x}",
    )  # fmt: skip


def _parsed(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    found = tf.io.parse_single_example(serialized, {name: tf.io.VarLenFeature(tf.int64) for name in FEATURES})
    ids, labels = (tf.sparse.to_dense(found[name]) for name in FEATURES)
    return ids, labels, tf.ones_like(ids)


def _mixed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
