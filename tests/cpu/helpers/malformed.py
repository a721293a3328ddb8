"""Requests that are none: broken JSON, wrong types, bodies that are too large, too slow or never end, clients that leave.

``python tests/cpu/helpers/malformed.py --count 10000`` sends so many to a server of a tiny model, and prints statuses and memory.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import psutil
from running_server import KEY, Running, serving, wait, write_models

GOOD = json.dumps({"model": "tiny", "prompt": "fox", "max_tokens": 2, "seed": 1}).encode()
WRONG_VALUES: list[Any] = [None, [], {}, -1, 1e308, "x" * 1000, [[[]]], True, {"a": [1] * 50}]
FIELDS = ("model", "prompt", "max_tokens", "seed", "stop", "stream", "n", "logprobs", "logit_bias", "frequency_penalty", "\x00")
SCHEMAS: list[Any] = [
    *WRONG_VALUES, {"type": "object"}, {"$ref": "#"}, {"enum": []}, {"type": "string", "pattern": "(a*)*b{9999}"},
    {"anyOf": [{"maxItems": 10**9}] * 50}, {"type": "integer", "minimum": 5, "maximum": 1},
]  # fmt: skip
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize", "/v1/files", "/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/x",
    "/health", "/rerank", "/score",
)  # fmt: skip
TYPES = (
    "application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "application/xml",
)  # fmt: skip
EXPECTED = {200, 400, 403, 404, 405, 413}
LARGEST = 100_000  # bytes, as the server is started
SETTLED = 1000  # requests after which it has loaded what it needs


def broken(server: Running, chance: random.Random, count: int) -> list[int]:
    """The statuses of those that stayed for one."""
    found = []
    with httpx2.Client(base_url=server.url, timeout=30, headers=KEY) as client:
        for _ in range(count):
            kind = chance.randrange(7)
            if kind == 0:
                leave(server, chance)
                continue
            body = spoiled(kind, chance)
            answer = client.post(chance.choice(PATHS), content=body, headers={"content-type": chance.choice(TYPES)})
            found.append(answer.status_code)
    return found


def spoiled(kind: int, chance: random.Random) -> bytes:
    body = bytearray(GOOD)
    if kind == 1:
        for _ in range(chance.randrange(1, 6)):
            body[chance.randrange(len(body))] = chance.randrange(256)
    elif kind == 2:
        del body[chance.randrange(len(body)) :]
    elif kind == 3:
        body = bytearray(json.dumps({**json.loads(GOOD), chance.choice(FIELDS): chance.choice(WRONG_VALUES)}).encode())
    elif kind == 6:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": chance.choice(SCHEMAS)}}
        said = [{"role": "user", "content": "fox"}]
        body = bytearray(json.dumps({"model": "tiny", "messages": said, "max_tokens": 2, "response_format": form}).encode())
    elif kind == 4 and chance.random() < 0.1:
        body = bytearray(GOOD[:-1] + b" " * LARGEST + b"}")
    return bytes(body)


def leave(server: Running, chance: random.Random) -> None:
    """Says less than it announced, or does not wait for the answer."""
    with connected(server, len(GOOD)) as connection:
        connection.sendall(GOOD[: chance.choice([0, 5, len(GOOD)])])


def connected(server: Running, length: int) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {KEY['Authorization']}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode())
    return connection


def slow(server: Running, found: list[int]) -> None:
    """A byte a second, until it is told that this is too slow."""
    with connected(server, len(GOOD)) as connection:
        connection.settimeout(1.0)
        for byte in GOOD:
            connection.sendall(bytes([byte]))
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                continue
            found.append(int(answer.split()[1]))
            return


def many(server: Running, count: int, seed: int) -> dict[str, Any]:
    """``count`` requests in four threads, and eight slow clients beside them."""
    process = psutil.Process(server.process.pid)
    engine = psutil.Process(server.engine()["processes"][0])
    broken(server, random.Random(seed), SETTLED)
    before = [one.memory_info().rss for one in (process, engine)]
    statuses: list[int] = []
    told: list[int] = []

    def several(place: int) -> None:
        statuses.extend(broken(server, random.Random(f"{seed}.{place}"), count // 4))

    crowd = [threading.Thread(target=several, args=(place,)) for place in range(4)]
    crowd += [threading.Thread(target=slow, args=(server, told)) for _ in range(8)]
    start = time.perf_counter()
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    seconds = time.perf_counter() - start
    wait(lambda: server.engine()["in_flight"] == 0)
    growth = [one.memory_info().rss / old - 1 for one, old in zip((process, engine), before, strict=True)]
    answer = server.post("/v1/completions", json.loads(GOOD))
    return {
        "requests": count, "seconds": round(seconds, 1), "statuses": dict(Counter(statuses)), "slow": dict(Counter(told)),
        "server_growth": growth[0], "engine_growth": growth[1], "server_mib": before[0] >> 20, "afterwards": answer.status_code,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="upshift-malformed-") as name:
        folder = Path(name)
        write_models(folder)
        (folder / "keys").write_text("first\nsecond\n")
        limits = ("--port", "0", "--concurrency", "4", "--max-body-mb", str(LARGEST / 1e6))
        asked = ("tiny", "enc", "--api-key-file", str(folder / "keys"), "--engine", "torch", *limits)
        asked += ("--batch-folder", str(folder / "batches"), "--adapter-folder", str(folder))
        with serving(folder, folder / "log", *asked) as server:
            print(json.dumps(many(server, options.count, options.seed)))


if __name__ == "__main__":
    main()
