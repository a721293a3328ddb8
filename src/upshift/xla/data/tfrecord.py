"""Write and read token sequences as TFRecord files, on a local disk or in a bucket (gs://), which TPU hosts read best.

A folder has several shards, and an index.json with the lengths of the sequences. So widths are planned and steps are counted
without reading the shards."""

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
Example = Mapping[str, NDArray[Any]]  # input_ids and labels; the model shifts the labels itself


class Index(Value):
    """Describe the records of a folder. A sequence's length is that of its input_ids or its labels, whichever is longer."""

    files: tuple[str, ...]
    num_examples: int = Field(ge=1)
    num_tokens: int
    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    pad_token_id: int = 0


def write_records(examples: Iterable[Example], folder: str, *, pad_token_id: int = 0, shards: int = 1) -> Index:
    """Write records into a new folder, one shard after the other in turn.

    Raise RequestError if the folder has records already, or if there is no example. Raise JobFailed if writing fails."""
    if tf.io.gfile.exists(f"{folder}/{INDEX}"):
        raise RequestError(f"{folder} has records already; give another folder")
    names = [f"data-{number:05d}-of-{shards:05d}.tfrecord" for number in range(shards)]
    lengths: dict[int, int] = {}
    tokens = 0
    try:
        tf.io.gfile.makedirs(folder)
        writers = [tf.io.TFRecordWriter(f"{folder}/{name}") for name in names]
        for number, example in enumerate(examples):
            writers[number % shards].write(_serialize(example))
            length = max(len(example[name]) for name in FEATURES)
            lengths[length] = lengths.get(length, 0) + 1
            tokens += len(example["input_ids"])
        for writer in writers:
            writer.close()
        total = sum(lengths.values())
        if not total:
            raise RequestError(f"there is no example to write to {folder}; give data with text")
        sorted_lengths = sorted(lengths)
        index = Index(
            files=tuple(names),
            num_examples=total,
            num_tokens=tokens,
            lengths=tuple(sorted_lengths),
            counts=tuple(lengths[length] for length in sorted_lengths),
            pad_token_id=pad_token_id,
        )
        with tf.io.gfile.GFile(f"{folder}/{INDEX}", "w") as file:  # written last: a folder without it is incomplete
            file.write(index.to_json())
    except tf.errors.OpError as error:
        raise JobFailed(f"records could not be written to {folder}: {error.message}") from None
    return index


def _serialize(example: Example) -> bytes:
    features = {}
    for name in FEATURES:
        numbers = tf.train.Int64List(value=np.asarray(example[name]).tolist())
        features[name] = tf.train.Feature(int64_list=numbers)
    serialized: bytes = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    return serialized


def has_records(path: str) -> bool:
    return bool(tf.io.gfile.exists(f"{path}/{INDEX}"))


def read_index(folder: str) -> Index:
    """Read the index of a folder. Raise RequestError if there is none, or if another version wrote it."""
    try:
        with tf.io.gfile.GFile(f"{folder}/{INDEX}", "r") as file:
            return Index.model_validate(json.loads(file.read()))
    except tf.errors.OpError as error:
        raise RequestError(f"{folder} has no records ({error.message}); write them with upshift data to-tfrecord") from None
    except ValidationError as error:
        raise RequestError(f"{folder}/{INDEX} is not of this version ({first_problem(Index, error)}); write it again") from None


def record_batches(folder: str, *, global_batch: int, num_steps: int, seed: int = 0) -> Batches:
    """Return the batches of endless epochs over a folder of records.

    Each epoch has every example once, in an order that depends on the seed and the epoch. Its last batch may have fewer rows.
    Raise RequestError if the folder has fewer examples than a global batch."""
    index = read_index(folder)
    if index.num_examples < global_batch:
        size = f"{folder} has {index.num_examples} examples"
        raise RequestError(f"{size}, one global batch takes {global_batch}; use a smaller one, or more data")
    buckets = plan_buckets(index.lengths, index.counts, longest=index.lengths[-1], batch_size=global_batch, num_steps=num_steps)
    files = [f"{folder}/{name}" for name in index.files]
    examples = tf.data.TFRecordDataset(files).map(_parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).cache()
    batches_per_epoch = count_batches(index.num_examples, global_batch)

    def start(step: int) -> Iterator[Arrays]:
        epoch, batch = divmod(step, batches_per_epoch)
        while True:
            shuffled = examples.shuffle(index.num_examples, seed=_epoch_seed(seed, epoch), reshuffle_each_iteration=False)
            paddings = (np.int64(index.pad_token_id), np.int64(IGNORED), np.int64(0))
            batches = shuffled.padded_batch(global_batch, padding_values=paddings, drop_remainder=False)
            for ids, labels, mask in batches.skip(batch).prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
                yield {"input_ids": ids, "labels": labels, "attention_mask": mask}
            epoch += 1
            batch = 0

    return Batches(
        start=start,
        global_batch=global_batch,
        buckets=buckets,
        pad_token_id=index.pad_token_id,
        num_examples=index.num_examples,
        identity=f"records {zlib.crc32(index.to_json().encode()):08x}",
    )


def _parse(serialized: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    features = tf.io.parse_single_example(serialized, {name: tf.io.VarLenFeature(tf.int64) for name in FEATURES})
    ids, labels = (tf.sparse.to_dense(features[name]) for name in FEATURES)
    return ids, labels, tf.ones_like(ids)


def _epoch_seed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
