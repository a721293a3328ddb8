"""Define the protocol of an engine that takes whole requests, and run such an engine in processes of its own.

The engine batches requests and chooses tokens by itself. A process is a worker script (vllm_worker.py), which documents the
messages. It ends with this process, because its standard input ends. Several processes are replicas: each has the whole model."""

from __future__ import annotations

import base64
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from upshift.errors import EngineEnded, JobFailed, RequestError
from upshift.inference.generation.sequence import GeneratedSequence

MAX_WORDS = 400  # characters of the last line that a process wrote
END_SECONDS = 10.0


class TextRequest(NamedTuple):
    """A request to an engine: the token ids of the prompt, and the engine's own arguments of sampling.

    ``top``: the number of likeliest tokens to report beside each new token. None reports no log-probabilities. ``prompt_top``:
    the same for the tokens of the prompt. ``adapter``: the folder of a LoRA adapter that changes the model for this request."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    logits: bool = False
    top: int | None = None
    prompt_top: int | None = None
    adapter: str | None = None


class ScoredToken(NamedTuple):
    """The log-probability of a token, the likeliest tokens at its position with theirs, and its rank: 1 for the likeliest."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


class Progress(NamedTuple):
    """Hold what one step of an engine gave to a request.

    ``logits``: [tokens, V] fp32, if the request wants them. ``scores``: the scores of the tokens, if the request wants them.
    ``prompt_scores``: the scores of all tokens of the prompt but the first. They come before the first new token.
    ``cached_tokens``: the tokens of the prompt that the engine had computed before. ``refusal``: why the engine does not take
    the request."""

    request: int
    tokens: Sequence[int]
    logits: np.ndarray | None = None
    has_ended: bool = False
    scores: Sequence[ScoredToken] = ()
    prompt_scores: Sequence[ScoredToken] = ()
    cached_tokens: int = 0
    refusal: str | None = None


class TextEngine(Protocol):
    """An engine that takes whole requests."""

    weight_bytes: int  # read in every step
    positions: int  # the most tokens of a prompt with its answer
    cache_tokens: int | None  # the tokens that fit for all requests together; None: unknown

    @property
    def pids(self) -> list[int]:
        """Return the ids of the engine's processes, without those that they have started."""
        ...

    def check(self, prompt_tokens: int, new_tokens: int, name: str) -> None:
        """Raise RequestError if the engine has too few positions for a prompt with its answer. ``name`` names the prompt."""
        ...

    def sampling(self, sequence: GeneratedSequence) -> dict[str, Any]:
        """Return the engine's arguments of sampling for the rest of a sequence."""
        ...

    def greedy(self, new_tokens: int) -> dict[str, Any]:
        """Return the engine's arguments of sampling for exactly this number of likeliest tokens."""
        ...

    def add(self, requests: Iterable[TextRequest]) -> list[int]:
        """Begin requests. Return their numbers."""
        ...

    def step(self) -> list[Progress]:
        """Wait for the next tokens, and return them. Raise EngineEnded if the engine has ended."""
        ...

    def abort(self, requests: Iterable[int]) -> None:
        """End requests before they are complete."""
        ...

    def wait(self) -> None:
        """Wait until a process of the engine has ended."""
        ...

    def reset(self) -> None:
        """Forget the computed beginnings of prompts. No request is unfinished."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


Answers = queue.Queue[tuple[int, dict[str, Any] | None]]  # the number of a process, and its answer; None: the process has ended


class EngineProcess:
    """A process that runs a worker script under another interpreter.

    ``name``: the engine's name, for messages. Its processes form a session, and end together. Its answers go into ``answers``
    with its ``number``. At its end it sets ``ended``."""

    def __init__(
        self,
        name: str,
        python: Path,
        worker: Path,
        environment: Mapping[str, str],
        answers: Answers,
        ended: threading.Event,
        number: int,
    ) -> None:
        self._name = name
        self._log = tempfile.NamedTemporaryFile(prefix=f"upshift-{name}-", suffix=".log")  # noqa: SIM115  lives as long as it
        self._process = subprocess.Popen(
            [str(python), "-I", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for us: we end it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input: IO[str] = self._process.stdin
        threading.Thread(target=_read_answers, args=(self._process.stdout, answers, ended, number), daemon=True).start()
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raise EngineEnded if the process has ended."""
        try:
            self._input.write(json.dumps(message) + "\n")
            self._input.flush()
        except (BrokenPipeError, ValueError):  # ValueError: it is closed
            raise self.failure() from None

    def close(self) -> None:
        """Kill the process with all processes that it started, and remove its log."""
        self._finalizer()
        self._log.close()

    def failure(self) -> EngineEnded:
        """Return the error that says how the process ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        last_words = self._last_words()
        self.close()
        code = self._process.returncode
        ending = f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit {code}"
        return EngineEnded(f"the process of the engine {self._name} ended with {ending}{last_words}; run the command again")

    def _last_words(self) -> str:
        """Return the last line of the process's log, after a colon, or nothing."""
        if self._log.closed:
            return ""
        lines = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1][-MAX_WORDS:]}" if lines else ""


def _read_answers(stdout: IO[str], answers: Answers, ended: threading.Event, number: int) -> None:
    """Put the answers of a process into the queue. At their end put None, and set ``ended``."""
    for line in stdout:
        answers.put((number, json.loads(line)))
    answers.put((number, None))
    ended.set()


def _end(process: subprocess.Popen[str]) -> None:
    """Kill all processes of a worker's session, and close its pipes."""
    with suppress(ProcessLookupError, PermissionError):  # they have ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


class ProcessEngine:
    """A TextEngine in one or several processes, which are replicas. A request goes to the replica with the fewest.

    A subclass says how the engine starts, and translates options of sampling."""

    name = ""  # for messages

    def __init__(
        self,
        python: Path,
        worker: Path,
        environments: Sequence[Mapping[str, str]],
        arguments: Mapping[str, Any],
        weight_bytes: int,
        adapters: Sequence[str] = (),
    ) -> None:
        """Start the engine with its own arguments, and wait until it is ready. Raise JobFailed if it does not start.

        ``environments``: the variables of each replica. ``adapters``: the folders of the adapters that requests may name."""
        self.weight_bytes = weight_bytes
        self._answers: Answers = queue.Queue()
        self._ended = threading.Event()
        self._processes = [
            EngineProcess(self.name, python, worker, environment, self._answers, self._ended, number)
            for number, environment in enumerate(environments)
        ]
        self._replicas: dict[int, int] = {}  # the replica of each running request
        self._extras: dict[str, dict[int, Any]] = {}  # by the kind of message, then by request, until its tokens come
        self._next_number = 1
        self._send_all({"start": dict(arguments), "adapters": list(adapters)})
        ready = [self._receive()["ready"] for _ in self._processes]
        self.positions: int = min(message["positions"] for message in ready)
        tokens = [message["cache_tokens"] for message in ready if message.get("cache_tokens")]
        self.cache_tokens = sum(tokens) if len(tokens) == len(ready) else None

    @property
    def pids(self) -> list[int]:
        """Return the ids of the replicas' processes, which are those of their sessions, too."""
        return [process.pid for process in self._processes]

    def check(self, prompt_tokens: int, new_tokens: int, name: str) -> None:
        if prompt_tokens + new_tokens > self.positions:
            raise RequestError(
                f"{name} has {prompt_tokens:,} tokens, with an answer of {new_tokens:,} more than the {self.positions:,} "
                f"positions that the engine {self.name} has here; shorten it, ask for fewer tokens, or give a greater "
                "max_model_len"
            )

    def add(self, requests: Iterable[TextRequest]) -> list[int]:
        messages: list[list[dict[str, Any]]] = [[] for _ in self._processes]
        numbers = []
        running = Counter(self._replicas.values())
        for number, request in enumerate(requests, start=self._next_number):
            replica = min(range(len(self._processes)), key=lambda index: running[index])
            running[replica] += 1
            self._replicas[number] = replica
            messages[replica].append({"id": number, **request._asdict()})
            numbers.append(number)
        self._next_number += len(numbers)
        for process, added in zip(self._processes, messages, strict=True):
            if added:
                self._send(process, {"add": added})
        return numbers

    def step(self) -> list[Progress]:
        while True:
            answer = self._receive()
            for kind in ("logits", "scores", "prompt_scores", "cached"):
                self._extras.setdefault(kind, {}).update((number, value) for number, value in answer.get(kind, ()))
            if "refused" in answer:
                number, reason = answer["refused"]
                return [Progress(number, (), has_ended=True, refusal=f"the engine {self.name} refused a prompt: {reason}")]
            if "tokens" in answer:
                return [self._progress(number, tokens) for number, tokens in answer["tokens"]]
            if "ended" in answer:
                for number in answer["ended"]:
                    self._replicas.pop(number, None)
                return [Progress(number, (), has_ended=True) for number in answer["ended"]]

    def _progress(self, number: int, tokens: Sequence[int]) -> Progress:
        """Return the new tokens of a request, with all that came before them."""
        extras = {kind: values.pop(number) for kind, values in self._extras.items() if number in values}
        logits = None
        if "logits" in extras:
            logits = np.stack([np.frombuffer(base64.b64decode(row), dtype=np.float32) for row in extras["logits"].split()])
        return Progress(
            number,
            tokens,
            logits,
            scores=_read_scores(extras.get("scores", ())),
            prompt_scores=_read_scores(extras.get("prompt_scores", ())),
            cached_tokens=extras.get("cached", 0),
        )

    def abort(self, requests: Iterable[int]) -> None:
        by_replica: dict[int, list[int]] = {}
        for number in requests:
            replica = self._replicas.pop(number, None)
            if replica is not None:  # it runs
                by_replica.setdefault(replica, []).append(number)
        for replica, numbers in by_replica.items():
            self._send(self._processes[replica], {"abort": numbers})

    def wait(self) -> None:
        """Wait until one of the processes has ended."""
        self._ended.wait()

    def reset(self) -> None:
        self._send_all({"reset": True})
        missing = len(self._processes)
        while missing:
            missing -= "reset" in self._receive()

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _send_all(self, message: Mapping[str, Any]) -> None:
        for process in self._processes:
            self._send(process, message)

    def _send(self, process: EngineProcess, message: Mapping[str, Any]) -> None:
        """Send a message to a process. If it has ended, end all, and raise EngineEnded."""
        try:
            process.send(message)
        except EngineEnded:
            self.close()
            raise

    def _receive(self) -> dict[str, Any]:
        """Wait for the next answer of any process. If one has failed or ended, end all, and raise JobFailed."""
        number, answer = self._answers.get()
        if answer is None:
            failure = self._processes[number].failure()
            self.close()
            raise failure
        if "failed" in answer:
            self.close()
            raise JobFailed(f"the engine {self.name} failed: {answer['failed']}")
        return answer


def _read_scores(rows: Iterable[Sequence[Any]]) -> list[ScoredToken]:
    return [
        ScoredToken(token, logprob, tuple((int(other), float(value)) for other, value in top), rank)
        for token, logprob, top, rank in rows
    ]


def check_taken(progress: Progress) -> None:
    """Raise RequestError if the engine does not take the request."""
    if progress.refusal is not None:
        raise RequestError(progress.refusal)
