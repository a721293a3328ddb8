"""Encode texts, or score pairs of texts, in an engine's process.

Requests that wait together are encoded together. A request with many texts, or with long ones, is encoded in parts, between
which others have their turns."""

from __future__ import annotations

import base64
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from upshift.benchmarking.meters import resident_bytes
from upshift.errors import EngineEnded, EngineFailed, RequestError
from upshift.inference.encoding.cross_encoder import CrossEncoder
from upshift.inference.encoding.encoder import Encoder
from upshift.inference.encoding.run import activate
from upshift.inference.encoding.text_pair import Pair
from upshift.inference.generation.prompts import check_prompts, read_prompts
from upshift.inference.tokenizer import load_tokenizer, panics_as_errors
from upshift.inference.workers.own_processes import own_bytes, watch_processes
from upshift.serving.engine.admission import MAX_FAILURES, smooth
from upshift.serving.engine.tokenization import check_token_ids, token_replies
from upshift.serving.load_test.traffic import WORDS
from upshift.serving.messages import (
    EXPECTED_TOKENS,
    RACING,
    Cancel,
    ContextTooLong,
    DescribeTokenizer,
    Detokenize,
    Embed,
    EngineRequest,
    Heartbeat,
    Ready,
    Refused,
    Tokenize,
    Vector,
)
from upshift.value import Value

MAX_BATCH_TEXTS = 512  # of several requests that are encoded together
PART_TEXTS = 32  # of a request, before the next request has its turn
PART_CHARACTERS = 2**16  # of these texts, unless one is longer: a tokenizer reads 1.3 MB of text in a second
MEMORY_SECONDS = 1.0  # between two measurements of the memory
MIN_PASS_TOKENS = 4096  # that are encoded together: fewer are slower for each token
PASS_SECONDS = 0.1  # of more tokens than that


@dataclass(eq=False)
class WaitingTexts:
    """A request, and how far it is: how many of its inputs are tokenized, and how many are answered.

    ``ids`` are those of inputs that are tokenized, and not yet encoded."""

    request: Embed
    tokenized: int = 0
    answered: int = 0
    ids: list[list[int]] = field(default_factory=list)
    has_failed: bool = False

    @property
    def texts_left(self) -> int:
        return len(self.request.inputs) - self.tokenized + len(self.ids)

    @property
    def is_taken(self) -> bool:
        """Return whether all inputs are encoded, or are in the next pass."""
        return not self.texts_left

    def take_ids(self, texts: int, tokens: int, *, takes_any: bool) -> list[list[int]]:
        """Take the token ids of the next inputs out, as far as there is room. With ``takes_any``, the first always has room."""
        count = 0
        for ids in self.ids[:texts]:
            tokens -= len(ids)
            if tokens < 0 and (count or not takes_any):
                break
            count += 1
        taken, self.ids = self.ids[:count], self.ids[count:]
        return taken


Part = tuple[WaitingTexts, list[list[int]]]  # a request, and the token ids of some of its texts


def serve_embeddings(
    request: EngineRequest, inbox: queue.Queue[Any], send: Callable[[list[Value]], None], *, reads_pairs: bool = False
) -> None:
    """Answer the requests of the inbox until it gives None. With ``reads_pairs``, the model is a cross-encoder."""
    worker = EmbeddingWorker(request, reads_pairs=reads_pairs)
    send([worker.ready])
    watch_processes(worker.encoding.engine, inbox.put)
    try:
        answer_requests(worker, inbox, send)
    finally:
        send(worker.take_answers())


def answer_requests(worker: EmbeddingWorker, inbox: queue.Queue[Any], send: Callable[[list[Value]], None]) -> None:
    """Answer the requests of the inbox with a worker that is ready, until it gives None."""
    while True:
        refusals: list[Value] = []
        while not (worker.waiting or refusals) or not inbox.empty():
            message = inbox.get()
            if message is None:
                return
            if isinstance(message, EngineEnded):
                raise message
            refusals += worker.take(message)
        send(refusals)
        worker.encode_waiting()
        send(worker.take_answers())
        send([worker.heartbeat()])


class EmbeddingWorker:
    """The encoder of an engine's process, with the requests that wait for it."""

    def __init__(self, request: EngineRequest, *, reads_pairs: bool = False) -> None:
        start = time.perf_counter()
        self.request = request
        self.reads_pairs = reads_pairs
        self.encoder: Encoder | CrossEncoder = (CrossEncoder if reads_pairs else Encoder)(
            request.model,
            quality=request.quality,
            engine=request.engine,
            max_latency_ms=request.max_ttft_ms,
            race_seconds=request.race_seconds,
            tensor_parallel=request.tensor_parallel,
        )
        self.vocabulary: int | None = getattr(self.encoder.source.hf_config.get_text_config(), "vocab_size", None)
        self.waiting: deque[WaitingTexts] = deque()
        self._failed_passes = 0  # in a row
        self._answers: list[Value] = []  # that are not sent yet
        expected_texts = _expected_texts(request, self.encoder.tokenizer.shortest)
        texts = [_halve(text) for text in expected_texts] if reads_pairs else expected_texts
        ids = self._tokenize(texts)
        self.encoding = self.encoder.prepare(texts)
        seconds = {RACING: time.perf_counter() - start}
        start = time.perf_counter()
        self.encoding.rows(ids)
        warmup_seconds = time.perf_counter() - start
        self.text_seconds = warmup_seconds / len(texts)
        self.token_seconds = warmup_seconds / max(sum(map(len, ids)), 1)
        self._resident_bytes = self.resident_bytes()
        self._measured = time.monotonic()
        self.ready = Ready(
            task="score" if reads_pairs else "encode",
            setup=self.encoding.setup.label(),
            rows=MAX_BATCH_TEXTS,
            cache_tokens=None,
            positions=None,
            resident_bytes=self._resident_bytes,
            seconds=seconds | {"proving": warmup_seconds},
            capacity=len(texts) / warmup_seconds,
        )

    def heartbeat(self) -> Heartbeat:
        """Return the number of waiting requests, and the memory, which takes long to measure, of MEMORY_SECONDS ago."""
        now = time.monotonic()
        if now - self._measured >= MEMORY_SECONDS:
            self._measured = now
            self._resident_bytes = self.resident_bytes()
        return Heartbeat(live=0, waiting=len(self.waiting), resident_bytes=self._resident_bytes)

    def resident_bytes(self) -> int:
        """Return the bytes that this process occupies, with those of the engine's own processes."""
        return resident_bytes() + own_bytes(self.encoding.engine)

    @cached_property
    def _plain_tokenizer(self) -> Any:
        """Return the tokenizer without the model's prompt and length."""
        return load_tokenizer(self.encoder.source)

    def take(self, message: Embed | Tokenize | Detokenize | DescribeTokenizer | Cancel) -> list[Value]:
        """Add a request to the queue, or cancel one. Return what is answered at once: tokens, or a refusal if too many wait, or
        if the request would wait too long."""
        if isinstance(message, Tokenize | Detokenize | DescribeTokenizer):
            return token_replies(message, self._plain_tokenizer, _refuse_chat, self.vocabulary)
        if isinstance(message, Cancel):
            self.waiting = deque(waiting for waiting in self.waiting if waiting.request.id != message.id)
            return []
        turns = -(-len(message.inputs) // PART_TEXTS)  # of this request, between which each of the others has one
        wait = self.text_seconds * sum(min(waiting.texts_left, turns * PART_TEXTS) for waiting in self.waiting)
        if len(self.waiting) > self.request.max_waiting:  # one more than the limit, because the first one is encoded next
            reason = f"{len(self.waiting):,} requests wait already"
            return [Refused(id=message.id, status=429, why=reason, retry_after=wait)]
        promised = None if self.request.max_ttft_ms is None else self.request.max_ttft_ms / 1e3
        if promised is not None and wait > promised:
            reason = f"it would wait about {wait:.1f} s, and {promised:g} s are promised; try again later"
            return [Refused(id=message.id, status=429, why=reason, retry_after=wait - promised)]
        self.waiting.append(WaitingTexts(message))
        return []

    def take_answers(self) -> list[Value]:
        """Return the answers of the last pass, also if it raised an error, and forget them."""
        answers, self._answers = self._answers, []
        return answers

    def encode_waiting(self) -> None:
        """Encode the next texts of the waiting requests, which take turns. ``take_answers`` returns the answers.

        The texts have at most as many tokens as a pass may have, and there is at least one. A request with more of them, or with
        more than PART_TEXTS where others wait, goes on in the next passes."""
        parts: list[Part] = []
        texts_left = MAX_BATCH_TEXTS
        tokens_left = self._pass_tokens
        while self.waiting and texts_left > 0 and tokens_left > 0:
            waiting = self.waiting.popleft()
            try:
                with panics_as_errors():
                    self._tokenize_next(waiting)
            except Exception as error:  # from the tokenizer, at this request's texts
                self._fail(waiting, Refused.from_error(waiting.request.id, error))
                continue
            ids = waiting.take_ids(texts_left, tokens_left, takes_any=not parts)
            if ids:
                parts.append((waiting, ids))
            texts_left -= len(ids)
            tokens_left -= sum(map(len, ids))
            if not waiting.is_taken and (ids or not tokens_left):
                self.waiting.append(waiting)
            elif not waiting.is_taken:  # its next text is too long for what is left of this pass
                self.waiting.appendleft(waiting)
                break
        parts = [(waiting, ids) for waiting, ids in parts if not waiting.has_failed]
        if parts:
            self._encode(parts)

    @property
    def _pass_tokens(self) -> int:
        """Return how many tokens a pass may have, so that other requests wait PASS_SECONDS for its end."""
        return max(MIN_PASS_TOKENS, int(PASS_SECONDS / self.token_seconds) if self.token_seconds else 0)

    def _tokenize_next(self, waiting: WaitingTexts) -> None:
        """Turn the next texts of a request into token ids, unless there are some already."""
        if waiting.ids:
            return
        inputs = waiting.request.inputs
        end = start = waiting.tokenized
        characters = 0
        while end < min(start + PART_TEXTS, len(inputs)) and characters < PART_CHARACTERS:
            item = inputs[end]
            characters += len(item) if not _is_pair(item) else sum(map(len, item))  # type: ignore[arg-type]
            end += 1
        waiting.ids = self._tokenize(self._cut_documents(waiting.request, start, end))
        waiting.tokenized = end

    def _encode(self, parts: list[Part]) -> None:
        """Encode texts of all requests together. If that fails, encode those of each request by themselves, so that a bad request
        fails alone."""
        start_time = time.perf_counter()
        rows_of_ids = [ids for _, text_ids in parts for ids in text_ids]
        try:
            with panics_as_errors():
                rows: np.ndarray = self._rows(rows_of_ids)
        except EngineFailed as error:  # another engine would end at the same texts
            for waiting in _by_request(parts):
                self._fail(waiting, Refused.from_error(waiting.request.id, error))
            raise
        except EngineEnded:
            raise
        except Exception as error:  # caused by one of the requests
            self._encode_apart(_by_request(parts), error)
            return
        self._failed_passes = 0
        seconds = time.perf_counter() - start_time
        self.text_seconds = smooth(self.text_seconds, seconds / len(rows_of_ids))
        self.token_seconds = smooth(self.token_seconds, seconds / max(sum(map(len, rows_of_ids)), 1))
        start = 0
        for waiting, text_ids in parts:
            if not waiting.has_failed:
                self._answer(waiting, rows[start : start + len(text_ids)], text_ids)
            start += len(text_ids)

    def _encode_apart(self, parts: dict[WaitingTexts, list[Part]], error: Exception) -> None:
        """Encode each request by itself after a pass with all of them failed with ``error``. If it had one request, that fails.

        Raise EngineFailed at the last of MAX_FAILURES failed requests in a row, because the engine is broken."""
        if len(parts) > 1:
            for own_parts in parts.values():
                self._encode(own_parts)
            return
        (waiting,) = parts
        self._fail(waiting, Refused.from_error(waiting.request.id, error))
        if isinstance(error, RequestError):
            return
        self._failed_passes += 1
        if self._failed_passes >= MAX_FAILURES:
            raise EngineFailed(f"{self._failed_passes} passes failed in a row, the last one with: {error}") from error

    def _fail(self, waiting: WaitingTexts, refused: Refused) -> None:
        """Refuse a request, and give up its other texts."""
        waiting.has_failed = True
        self.waiting = deque(other for other in self.waiting if other is not waiting)
        self._answers.append(refused)

    def _rows(self, ids: list[list[int]]) -> np.ndarray:
        """Return vectors, or the scores of pairs without their activation, which a request may leave out."""
        return self.encoding.rows(ids, raw=True) if self.reads_pairs else self.encoding.rows(ids)

    def _answer(self, waiting: WaitingTexts, rows: np.ndarray, text_ids: list[list[int]]) -> None:
        """Answer with one message per text, because a line has a maximum length. Refuse the request if a vector has numbers
        that are not finite, or if there are too few dimensions."""
        request = waiting.request
        is_finite = np.isfinite(rows).all(1)
        if not is_finite.all():
            index = waiting.answered + int(is_finite.argmin())
            reason = f"input {index} has no vector of finite numbers: those of the model are too large for its precision"
            self._fail(waiting, Refused(id=request.id, status=500, why=reason, failure="OverflowError"))
            return
        if self.reads_pairs and not request.raw:
            rows = activate(rows, self.encoder.config)
        if request.dimensions is not None:
            if request.dimensions > rows.shape[1]:
                reason = f"dimensions is {request.dimensions:,}, and the model gives vectors of {rows.shape[1]:,}; ask for fewer"
                self._fail(waiting, Refused(id=request.id, status=400, why=reason))
                return
            rows = shorten(rows, request.dimensions, normalize=self.encoder.config.normalize)
        for row, ids in zip(rows, text_ids, strict=True):
            waiting.answered += 1
            encoded = base64.b64encode(row.astype("<f4").tobytes()).decode()
            is_last = waiting.answered == len(request.inputs)
            self._answers.append(Vector(id=request.id, row=encoded, tokens=len(ids), last=is_last))

    def _cut_documents(self, request: Embed, start: int, end: int) -> Sequence[Any]:
        """Return these inputs of a request, whose documents have at most as many tokens as it allows."""
        limit = request.max_document_tokens
        if limit is None:
            return request.inputs[start:end]

        def cut(text: Any) -> Any:
            ids = self._plain_tokenizer(text, add_special_tokens=False).input_ids
            return text if len(ids) <= limit else self._plain_tokenizer.decode(ids[:limit])

        if request.pairs:
            return [(first, cut(second)) for first, second in request.pairs[start:end]]
        return [cut(text) if index else text for index, text in enumerate(request.texts[start:end], start=start)]

    def _tokenize(self, texts: Sequence[Any]) -> list[list[int]]:
        """Return the token ids of texts or pairs. Token ids are taken as they are, and are not cut as a text is."""
        items = [Pair(*text) if _is_pair(text) else text for text in texts]
        text_ids = iter(self.encoder.tokenizer.tokenize([item for item in items if isinstance(item, str | Pair)]))
        all_ids = [next(text_ids) if isinstance(item, str | Pair) else self._check_length(item) for item in items]
        if self.reads_pairs:  # no client sends token ids, and these hold segments, too
            return all_ids
        for ids in all_ids:
            check_token_ids(ids, self.vocabulary)
        return all_ids

    def _check_length(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of one text. Raise RequestError if the model computes no text of this length."""
        shortest = self.encoder.tokenizer.shortest
        longest = self.encoder.tokenizer.longest
        if len(ids) < shortest:
            raise RequestError(f"an input has {len(ids):,} token ids, and the model computes {shortest:,} or more; give more")
        if longest is not None and len(ids) > longest:
            raise ContextTooLong(
                f"This model's maximum context length is {longest} tokens. However, your input has {len(ids)} tokens. Please "
                "reduce the length of the input."
            )
        return list(ids)


def _by_request(parts: list[Part]) -> dict[WaitingTexts, list[Part]]:
    """Return the parts of each request, in the order of their requests."""
    grouped: dict[WaitingTexts, list[Part]] = {}
    for part in parts:
        grouped.setdefault(part[0], []).append(part)
    return grouped


def _is_pair(text: Any) -> bool:
    return not isinstance(text, str) and len(text) == 2 and isinstance(text[0], str)


def _halve(text: str) -> Pair:
    """Return a pair of the two halves of a text, as long together as the text."""
    words = text.split(" ")
    return Pair(" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :]))


def _refuse_chat(request: Tokenize) -> list[int]:
    raise RequestError("the model encodes texts and has no chats; give a prompt instead of messages")


def _expected_texts(request: EngineRequest, shortest: int) -> list[str]:
    """Return texts like the expected ones: the first of the user's file, or made of common words, ``shortest`` or more."""
    if request.prompts is not None:
        path = Path(request.prompts)
        check_prompts(path, "--prompts")
        texts = [text for text in islice(read_prompts(path), MAX_BATCH_TEXTS) if isinstance(text, str)]
        if not texts:
            raise RequestError(f"--prompts {path} has chats alone, and {request.model!r} encodes texts; write a text a line")
        return texts
    words_per_text = max(request.prompt_length or EXPECTED_TOKENS[0], shortest)
    return [" ".join(WORDS[(first + offset) % len(WORDS)] for offset in range(words_per_text)) for first in range(len(WORDS))]


def shorten(rows: np.ndarray, dimensions: int, *, normalize: bool) -> np.ndarray:
    """Return the first ``dimensions`` columns of rows [N, D] as [N, dimensions].

    If ``normalize`` is set, scale the rows to length 1 again (Kusupati and others 2022, arXiv:2205.13147)."""
    shortened = rows[:, :dimensions]
    if normalize:
        lengths = np.linalg.norm(shortened, axis=1, keepdims=True)
        shortened = shortened / np.maximum(lengths, 1e-12)
    return shortened
