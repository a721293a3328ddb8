"""Answer a file of requests in the form of OpenAI's batches, with the engine of a server, and without a web server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from upshift.errors import RequestError
from upshift.inference.resumable_output import UnfinishedLines, output_identity
from upshift.models.source import find_model
from upshift.serving.app import Server
from upshift.serving.batches import LineAnswer, answer_when_free
from upshift.serving.messages import EngineRequest
from upshift.serving.metrics import Metrics
from upshift.serving.model_pool import ModelPool
from upshift.serving.protocols.batch_requests import BatchLine, format_result, read_batch_lines
from upshift.serving.replicas import ReplicaSet
from upshift.serving.request_checks import Limits

BLOCK_LINES = 256  # that are answered together, and written when all are answered
REQUEST_SECONDS = 7 * 24 * 3600.0  # nobody waits for an answer


class BatchCounts(NamedTuple):
    total: int
    resumed: int  # answered by an earlier, interrupted run
    failed: int  # of those that this run answered


def read_batch_file(path: Path) -> list[BatchLine]:
    """Return the requests of a file. Raise RequestError for the first line that is no request."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"--prompts {path} cannot be read: {error.strerror}; give a file of batch requests") from None
    lines, problems = read_batch_lines(content, None)
    if problems:
        place = "" if problems[0]["line"] is None else f" line {problems[0]['line']}"
        raise RequestError(f"{path}{place}: {problems[0]['message']}")
    return lines


def answer_batch_file(
    request: EngineRequest, name: str, prompts: Path, output: Path, on_progress: Callable[[int, int], None]
) -> BatchCounts:
    """Write the answers to the requests of a file, in their order. Continue the answers of an earlier, interrupted run.

    ``name`` is the model that requests ask for. ``on_progress`` receives the answered and all requests. Requests that fail have
    their error as their answer."""
    lines = read_batch_file(prompts)
    other = next((line for line in lines if line.body.get("model") != name), None)
    if other is not None:
        requested_model = other.body.get("model")
        raise RequestError(
            f"{prompts}: the request {other.custom_id!r} asks for the model {requested_model!r}; write {name!r} in each line"
        )
    identity = output_identity(prompts, find_model(request.model), request.to_json())
    with closing(UnfinishedLines(output, len(lines), identity)) as answers:
        resumed = answers.done
        failed = asyncio.run(_answer_lines(request, name, lines, answers, on_progress)) if resumed < len(lines) else 0
        answers.finish()
    return BatchCounts(len(lines), resumed, failed)


async def _answer_lines(
    request: EngineRequest,
    name: str,
    lines: list[BatchLine],
    answers: UnfinishedLines,
    on_progress: Callable[[int, int], None],
) -> int:
    """Answer the lines that have no answer yet. Return how many requests failed."""
    metrics = Metrics()
    pool = ModelPool({name: ReplicaSet(request)}, metrics)
    server = Server(pool, metrics, Limits(request_seconds=REQUEST_SECONDS))
    failed = 0
    try:
        await pool.start()
        free_rows = asyncio.Semaphore(request.concurrency)

        async def answer(line: BatchLine) -> LineAnswer:
            async with free_rows:
                return await answer_when_free(server.answer_line, line)

        while answers.done < len(lines):
            on_progress(answers.done, len(lines))
            block = lines[answers.done : answers.done + BLOCK_LINES]
            results = await asyncio.gather(*map(answer, block))
            failed += sum(reply.status != 200 for reply in results)
            answers.add(format_result(line, reply.status, reply.body) for line, reply in zip(block, results, strict=True))
        on_progress(answers.done, len(lines))
    finally:
        await pool.stop()
    return failed
