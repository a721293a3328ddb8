"""Define the options ``--replicas`` and ``--ray``, and start the workers that share the texts of a file.

Only a command that uses workers imports them, because they import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from upshift.errors import RequestError
from upshift.settings import read_ranks

GENERATOR = "upshift.inference.generation.generator:Generator"
PATHS = ("model", "draft")  # arguments that may be folders


class WorkerOptions(NamedTuple):
    """The options of the workers. Without Ray, one replica is the command's own process."""

    replicas: int | None
    on_ray: bool

    @property
    def are_used(self) -> bool:
        return self.on_ray or (self.replicas or 1) > 1


def refuse_workers(options: WorkerOptions, reason: str) -> None:
    """Raise RequestError with the reason if one of the options is set."""
    given = "--ray" if options.on_ray else "--replicas" if options.replicas is not None else None
    if given is not None:
        raise RequestError(f"{given} shares the texts of a file among workers, and {reason}; leave it out")


def refuse_ranks(command: str) -> None:
    """Raise RequestError if a launcher started this process as one of several ranks, which would all write one file."""
    ranks = read_ranks()
    if ranks is not None and ranks.size > 1:
        raise RequestError(
            f"a launcher started upshift {command} {ranks.size} times (this is rank {ranks.rank}); start it once: with "
            f"--replicas {ranks.size} for copies of the model, or --tensor-parallel {ranks.size} for one model on as many devices"
        )


@contextmanager
def generation_workers(generator: Any, options: WorkerOptions, arguments: Mapping[str, Any]) -> Iterator[Any]:
    """Start workers that answer prompts, or give None if the command answers them itself.

    ``generator``: that of this process. ``arguments``: those of each worker's Generator."""
    if not options.are_used:
        yield None
        return
    from upshift.hardware.replicas import count_replicas
    from upshift.inference.engine_environment import read_arguments
    from upshift.inference.workers.dispatcher import Job
    from upshift.inference.workers.text_workers import GenerationWorkers, open_workers, share_memory

    devices = read_arguments(arguments["engine_arguments"]).ranks * arguments["tensor_parallel"]
    given = _with_whole_paths(arguments)
    if not options.on_ray:
        count = count_replicas(options.replicas, devices=devices)
        given["max_memory"] = share_memory(generator.source, generator.host, count, arguments["max_memory"])
    with open_workers(Job(GENERATOR, given), options.replicas, on_ray=options.on_ray, devices=devices) as dispatcher:
        yield GenerationWorkers(generator, dispatcher)


@contextmanager
def encoding_workers(encoder: Any, options: WorkerOptions, arguments: Mapping[str, Any]) -> Iterator[Any]:
    """Start workers that encode texts, images or sounds, or write sounds down, or give None if the command does it itself.

    ``encoder``: the encoder or transcriber of this process. ``arguments``: those of each worker's."""
    if not options.are_used:
        yield None
        return
    from upshift.hardware.replicas import count_replicas
    from upshift.inference.workers.dispatcher import Job
    from upshift.inference.workers.text_workers import EncodingWorkers, open_workers, share_memory

    devices = arguments.get("tensor_parallel", 1)
    if not options.on_ray:
        share_memory(encoder.source, encoder.host, count_replicas(options.replicas, devices=devices), None)
    kind = type(encoder)
    job = Job(f"{kind.__module__}:{kind.__name__}", _with_whole_paths(arguments))
    with open_workers(job, options.replicas, on_ray=options.on_ray, devices=devices) as dispatcher:
        yield EncodingWorkers(encoder, dispatcher)


def _with_whole_paths(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the whole paths of folders, because a worker on Ray has another working folder."""
    folders = {name: arguments[name] for name in PATHS if arguments.get(name) and Path(arguments[name]).is_dir()}
    return {**arguments, **{name: str(Path(folder).resolve()) for name, folder in folders.items()}}
