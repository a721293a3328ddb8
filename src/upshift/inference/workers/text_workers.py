"""Compute the texts of a file with several workers, as a Generator or an encoder computes them in one process.

The first worker races the engines on its share of the devices, and all workers use the result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from upshift.errors import NothingFits
from upshift.hardware.replicas import count_replicas
from upshift.hardware.spec import Host
from upshift.inference.computing_device import available_memory
from upshift.inference.encoding.raced_model import RacedModel
from upshift.inference.generation.generator import Completion, Generator
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.prompts import Prompt
from upshift.inference.media.encoder import MediaEncoder
from upshift.inference.race.race import Race
from upshift.inference.weights import needed_memory
from upshift.inference.workers.dispatcher import Dispatcher, Job, Task
from upshift.inference.workers.process_pool import ProcessPool
from upshift.inference.workers.ray_pool import RayPool
from upshift.models.source import ModelSource
from upshift.units import format_bytes

BLOCKS_OF_A_WORKER = 8  # at least, if there are enough texts: a slower worker then gets fewer of them
LEAST_BLOCK = 32  # texts that a worker computes together


@contextmanager
def open_workers(job: Job, replicas: int | None, *, on_ray: bool, devices: int = 1) -> Iterator[Dispatcher]:
    """Start workers, and end them with the context.

    Args:
        job: what each worker builds.
        replicas: the number of workers. None: with Ray, one for each GPU of the cluster, or without GPUs for each host.
        on_ray: whether they run on a Ray cluster, or on this machine.
        devices: the GPUs of each worker.

    Raise RequestError for more workers than there are devices.
    """
    pool: ProcessPool | RayPool
    if on_ray:
        pool = RayPool(job, replicas, devices=devices)
    else:
        pool = ProcessPool(job, count_replicas(replicas, devices=devices), devices=devices)
    try:
        yield Dispatcher(pool)
    finally:
        pool.close()


def share_memory(
    source: ModelSource, host: Host, replicas: int, max_memory: Mapping[str | int, str | int] | None
) -> Mapping[str | int, str | int] | None:
    """Return the memory limit of each of several replicas on a CPU, or None on a GPU or if the free memory is unknown.

    Raise NothingFits if a replica's share is too small for the model."""
    free_bytes = available_memory(host, max_memory)
    if host.gpu is not None or free_bytes is None:
        return max_memory
    share = free_bytes // replicas
    needed = needed_memory(source, "fp32")
    if needed > share:
        raise NothingFits(
            f"--replicas {replicas} takes {format_bytes(replicas * needed)} for {source.reference!r}, and "
            f"{format_bytes(free_bytes)} of memory is free; ask for at most {max(free_bytes // needed, 1)}"
        )
    return {"cpu": share}


def _block_size(workers: int, total: int, largest: int, least: int = LEAST_BLOCK) -> int:
    """Return the number of texts that a worker gets at a time."""
    return min(max(-(-total // (BLOCKS_OF_A_WORKER * workers)), least), largest)


class GenerationWorkers:
    """Workers that each have a Generator of the same model. ``generator`` is that of this process, which loads no engine."""

    def __init__(self, generator: Generator, dispatcher: Dispatcher) -> None:
        self._generator = generator
        self._dispatcher = dispatcher

    @property
    def size(self) -> int:
        return self._dispatcher.pool.size

    def block_size(self, total: int, largest: int) -> int:
        """Return the number of texts that a worker gets at a time. ``largest``: how many may be in memory together."""
        return _block_size(self.size, total, largest)

    def prepare(self, ids: list[list[int]], options: GenerationOptions, *, total: int) -> Race:
        """Return the result of the race, as ``Generator.prepare`` does. All workers load the winner."""
        race: Race = self._dispatcher.ask(Task("prepare", (ids, options), {"total": total}))
        if race.divided is not None:
            raise NothingFits(f"a worker has too little memory for the whole model ({race.divided}); ask for fewer --replicas")
        self._generator.race = race
        self._dispatcher.set_up(Task("prepare", (ids, options), {"total": total, "result": race}))
        return race

    def complete_blocks(
        self, blocks: Iterable[list[Prompt]], options: GenerationOptions, *, first: int
    ) -> Iterator[tuple[list[Prompt], list[Completion]]]:
        """Yield each block of prompts with its completions, in their order. ``first``: the index of the first prompt."""
        given: deque[list[Prompt]] = deque()

        def tasks() -> Iterator[Task]:
            start = first
            for block in blocks:
                given.append(block)
                yield Task("complete", (block, options), {"first": start})
                start += len(block)

        for completions in self._dispatcher.in_order(tasks()):
            yield given.popleft(), completions


class EncodingWorkers:
    """Workers that each have an encoder, or a transcriber, of the same model. ``encoder`` is that of this process, which loads no
    engine."""

    def __init__(self, encoder: RacedModel | MediaEncoder, dispatcher: Dispatcher) -> None:
        self._encoder = encoder
        self._dispatcher = dispatcher

    @property
    def size(self) -> int:
        return self._dispatcher.pool.size

    def block_size(self, total: int, largest: int, *, least: int = LEAST_BLOCK) -> int:
        """Return the number of items that a worker gets at a time.

        ``largest``: how many may be in memory together. ``least``: how many it computes together."""
        return _block_size(self.size, total, largest, least)

    def prepare_sample(self, sample: Sequence[Any], total: int) -> None:
        """Race the engines on a sample, as the encoder's ``prepare_sample`` does. All workers load the winner."""
        race: Race = self._dispatcher.ask(Task("prepare_sample", (sample, total)))
        self._encoder.race = race
        self._dispatcher.set_up(Task("prepare_sample", (sample, total), {"result": race}))

    def encode(self, blocks: Iterable[Sequence[Any]], method: str) -> Iterator[Any]:
        """Yield the results of each block of items, in their order. ``method``: that of the encoder which computes them."""
        return self._dispatcher.in_order(Task(method, (block,)) for block in blocks)
