"""Define the protocol of an engine that takes whole requests, and run such an engine in a process of its own.

The engine batches requests and chooses tokens by itself. The process is a worker script (vllm_worker.py), which documents the
messages. It ends with this process, because its standard input ends."""

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from upshift.errors import JobFailed, RequestError
from upshift.inference.generation.sequence import GeneratedSequence

MAX_WORDS = 400  # characters of the last line that a process wrote
END_SECONDS = 10.0


class TextRequest(NamedTuple):
    """A request to an engine: the token ids of the prompt, and the engine's own arguments of sampling."""

    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    logits: bool = False


class Progress(NamedTuple):
    """Hold what one step of an engine gave to a request. ``logits``: [tokens, V] fp32, if the request wants them."""

    request: int
    tokens: Sequence[int]
    logits: np.ndarray | None = None
    has_ended: bool = False


class TextEngine(Protocol):
    """An engine that takes whole requests."""

    weight_bytes: int  # read in every step
    positions: int  # of a prompt with its answer

    @property
    def pid(self) -> int:
        """Return the id of the engine's process."""
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
        """Wait for the next tokens, and return them. Raise JobFailed if the engine has ended."""
        ...

    def abort(self, requests: Iterable[int]) -> None:
        """End requests before they are complete."""
        ...

    def reset(self) -> None:
        """Forget the computed beginnings of prompts. No request is unfinished."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


class EngineProcess:
    """A process that runs a worker script under another interpreter.

    ``name``: of the engine, for messages. Its processes form a session, and end together."""

    def __init__(self, name: str, python: Path, worker: Path, environment: Mapping[str, str]) -> None:
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
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read_answers, args=(self._process.stdout, self._answers), daemon=True).start()
        self._finalizer = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raise JobFailed if the process has ended."""
        try:
            self._input.write(json.dumps(message) + "\n")
            self._input.flush()
        except (BrokenPipeError, ValueError):  # ValueError: it is closed
            raise self._failure() from None

    def receive(self) -> dict[str, Any]:
        """Wait for the next answer. Raise JobFailed if the process has failed or ended."""
        answer = self._answers.get()
        if answer is None:
            raise self._failure()
        if "failed" in answer:
            self.close()
            raise JobFailed(f"the engine {self._name} failed: {answer['failed']}")
        return answer

    def close(self) -> None:
        """Kill the process with all processes that it started."""
        self._finalizer()

    def _failure(self) -> JobFailed:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.close()
        code = self._process.returncode
        ending = f"signal {-code} ({signal.Signals(-code).name})" if code is not None and code < 0 else f"exit {code}"
        return JobFailed(f"the process of the engine {self._name} ended with {ending}{self._last_words()}; run the command again")

    def _last_words(self) -> str:
        """Return the last line of the process's log, after a colon, or nothing."""
        lines = Path(self._log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1][-MAX_WORDS:]}" if lines else ""


def _read_answers(stdout: IO[str], answers: queue.Queue[dict[str, Any] | None]) -> None:
    """Put the answers of a process into a queue, and None at their end."""
    for line in stdout:
        answers.put(json.loads(line))
    answers.put(None)


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
    """A TextEngine in a process. A subclass says how it starts, and translates options of sampling."""

    name = ""  # for messages

    def __init__(self, process: EngineProcess, arguments: Mapping[str, Any], weight_bytes: int) -> None:
        """Start the engine with its own arguments, and wait until it is ready. Raise JobFailed if it does not start."""
        self.weight_bytes = weight_bytes
        self._process = process
        self._next_number = 1
        process.send({"start": dict(arguments)})
        ready = process.receive()["ready"]
        self.positions: int = ready["positions"]

    @property
    def pid(self) -> int:
        """Return the id of the engine's process, which is the id of its session, too."""
        return self._process.pid

    def check(self, prompt_tokens: int, new_tokens: int, name: str) -> None:
        if prompt_tokens + new_tokens > self.positions:
            raise RequestError(
                f"{name} has {prompt_tokens:,} tokens, with an answer of {new_tokens:,} more than the {self.positions:,} "
                f"positions that the engine {self.name} has here; shorten it, ask for fewer tokens, or give a greater "
                "max_model_len"
            )

    def add(self, requests: Iterable[TextRequest]) -> list[int]:
        messages = []
        numbers = []
        for number, request in enumerate(requests, start=self._next_number):
            sampling = dict(request.sampling)
            messages.append({"id": number, "prompt": list(request.prompt), "sampling": sampling, "logits": request.logits})
            numbers.append(number)
        self._next_number += len(numbers)
        self._process.send({"add": messages})
        return numbers

    def step(self) -> list[Progress]:
        logits: dict[int, np.ndarray] = {}
        while True:
            answer = self._process.receive()
            for number, rows in answer.get("logits", ()):
                logits[number] = np.stack([np.frombuffer(base64.b64decode(row), dtype=np.float32) for row in rows.split()])
            if "refused" in answer:
                _, reason = answer["refused"]
                raise RequestError(f"the engine {self.name} refused a prompt: {reason}")
            if "tokens" in answer:
                return [Progress(number, tokens, logits.get(number)) for number, tokens in answer["tokens"]]
            if "ended" in answer:
                return [Progress(number, (), has_ended=True) for number in answer["ended"]]

    def abort(self, requests: Iterable[int]) -> None:
        self._process.send({"abort": list(requests)})

    def reset(self) -> None:
        self._process.send({"reset": True})
        while "reset" not in self._process.receive():
            continue

    def close(self) -> None:
        self._process.close()
