"""Define the options ``--replicas`` and ``--ray``, and start the workers that share the texts of a file.

Only a command that uses workers imports them, because they import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from upshift.errors import NothingFits, RequestError
from upshift.settings import read_ranks

GENERATOR = "upshift.inference.generation.generator:Generator"
PATHS = ("model", "draft")  # arguments that may be folders
# Items of each copy that is started unasked. The start takes some ten seconds, which fewer items do not save.
LEAST_PROMPTS = 256
LEAST_TEXTS = 20_000
LEAST_MEDIA = 2_000


class WorkerOptions(NamedTuple):
    """The options of the workers. Without Ray, one replica is the command's own process.

    ``replicas``: None starts one for each GPU or NUMA node, if there is work for them."""

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


def choose_replicas(options: WorkerOptions, model: Any, *, devices: int, total: int, least: int) -> WorkerOptions:
    """Return the options with the number of replicas, if the user gave none and several devices have work.

    ``model``: an encoder, a transcriber or a Generator. ``devices``: those of each replica. ``total``: the items to compute.
    ``least``: the items of each replica, below which there is one."""
    if options.on_ray or options.replicas is not None:
        return options
    from upshift.hardware.replicas import count_replicas
    from upshift.inference.workers.text_workers import share_memory

    count = count_replicas(None, devices=devices)
    if count == 1 or total < count * least:
        return options
    try:
        share_memory(model.source, model.host, count, None)
    except NothingFits:
        return options
    return options._replace(replicas=count)


@contextmanager
def generation_workers(generator: Any, options: WorkerOptions, arguments: Mapping[str, Any], total: int) -> Iterator[Any]:
    """Start workers that answer prompts, or give None if the command answers them itself.

    ``generator``: that of this process. ``arguments``: those of each worker's Generator. ``total``: the number of prompts."""
    from upshift.inference.engine_environment import read_arguments

    devices = read_arguments(arguments["engine_arguments"]).ranks * arguments["tensor_parallel"]
    if arguments["max_memory"] is None:  # the user's limit is that of one process
        options = choose_replicas(options, generator, devices=devices, total=total, least=LEAST_PROMPTS)
    if not options.are_used:
        yield None
        return
    from upshift.hardware.replicas import count_replicas
    from upshift.inference.workers.dispatcher import Job
    from upshift.inference.workers.text_workers import GenerationWorkers, open_workers, share_memory

    given = _with_whole_paths(arguments)
    if not options.on_ray:
        count = count_replicas(options.replicas, devices=devices)
        given["max_memory"] = share_memory(generator.source, generator.host, count, arguments["max_memory"])
    with open_workers(Job(GENERATOR, given), options.replicas, on_ray=options.on_ray, devices=devices) as dispatcher:
        yield GenerationWorkers(generator, dispatcher)


@contextmanager
def encoding_workers(
    encoder: Any, options: WorkerOptions, arguments: Mapping[str, Any], total: int, *, least: int = LEAST_TEXTS
) -> Iterator[Any]:
    """Start workers that encode texts, images or sounds, or write sounds down, or give None if the command does it itself.

    ``encoder``: the encoder or transcriber of this process. ``arguments``: those of each worker's. ``total``: the number of
    items. ``least``: as in ``choose_replicas``."""
    devices = arguments.get("tensor_parallel", 1)
    options = choose_replicas(options, encoder, devices=devices, total=total, least=least)
    if not options.are_used:
        yield None
        return
    from upshift.hardware.replicas import count_replicas
    from upshift.inference.workers.dispatcher import Job
    from upshift.inference.workers.text_workers import EncodingWorkers, open_workers, share_memory

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
