"""A pretended vLLM for tests of the protocol: a Python interpreter that runs this file, whatever script it is given.

The model's next logits depend on the last token alone, by a table. The file ``mode`` beside the table says how it misbehaves."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any

REFUSED = 7  # a prompt that begins with this token
# Of the engine arguments of vLLM 0.32.0, those that Upshift gives or lets the user fix.
ARGUMENTS = [
    "model", "dtype", "quantization", "max_num_seqs", "max_model_len", "skip_tokenizer_init", "disable_log_stats", "max_logprobs",
    "logprobs_mode", "enforce_eager", "structured_outputs_config", "enable_lora", "max_loras", "max_lora_rank",
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "kv_cache_dtype",
    "max_num_batched_tokens", "gpu_memory_utilization", "enable_prefix_caching", "speculative_config",
]  # fmt: skip
VERSIONS = {
    "python": "3.12.0", "vllm": "0.0.1", "torch": "2.0.0", "quantizations": ["fp8", "gptq"], "arguments": ARGUMENTS, "lacks": [],
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {  # what an environment says of itself, by mode
    "no vllm": {"vllm": None},
    "no prefix cache": {"arguments": [name for name in ARGUMENTS if name != "enable_prefix_caching"]},
    "older": {"arguments": [name for name in ARGUMENTS if name != "structured_outputs_config"]},
    "newer": {"lacks": ["SamplingParams.flat_logprobs"]},
}


def make_interpreter(folder: Path, table: list[list[float]], mode: str = "") -> Path:
    """Write a program that pretends to be the interpreter of an environment with vLLM."""
    (folder / "table.json").write_text(json.dumps(table))
    (folder / "mode").write_text(mode)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {Path(__file__).resolve()} {folder} "$@"\n')
    program.chmod(0o755)
    return program


def write_package() -> dict[str, str]:
    """The files of a package vllm by their names, with the names that Upshift looks for and nothing else."""
    from upshift.inference.generation.engines.vllm_worker import ENGINE_ARGUMENTS, USED

    files: dict[str, str] = {}
    for (file, name), used in {ENGINE_ARGUMENTS: tuple(ARGUMENTS), **USED}.items():
        methods = {one.split(".")[0]: one.partition(".")[2] for one in used if "." in one}
        fields = "".join(f"    {one}: object = None\n" for one in used if "." not in one)
        defined = "".join(f"    def {method}(self, *, {parameter}): ...\n" for method, parameter in methods.items())
        files[file] = files.get(file, "") + f"class {name}:\n{fields}{defined}\n"
    return files


def answer(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def run(folder: Path) -> None:
    table = json.loads((folder / "table.json").read_text())
    mode = (folder / "mode").read_text()
    arguments = json.loads(sys.stdin.readline())["start"]
    (folder / "start.json").write_text(json.dumps({**arguments, "pid": os.getpid()}))
    if arguments.keys() - set(ARGUMENTS):
        answer(failed=f"TypeError: EngineArgs has no {sorted(arguments.keys() - set(ARGUMENTS))}")
        return
    if mode == "unknown model":
        answer(failed="ValueError: Model architectures ['Odd'] are not supported for now")
        return
    answer(ready={"positions": arguments.get("max_model_len", 64), "vocabulary": len(table), "cache_tokens": 500})
    live: dict[int, dict[str, Any]] = {}
    steps = 0
    for line in sys.stdin:
        message = json.loads(line)
        with (folder / "messages.jsonl").open("a") as log:
            log.write(line)
        for request in message.get("add", ()):
            if request["prompt"][0] == REFUSED:
                answer(refused=[request["id"], "ValueError: this prompt is refused"])
                continue
            live[request["id"]] = {**request, "last": request["prompt"][-1], "given": 0}
        for number in message.get("abort", ()):
            live.pop(number, None)
        if "reset" in message:
            answer(reset=True)
        while live and "abort" not in message:
            steps += 1
            if mode == "killed" and steps > 4:
                print("the pretended engine is killed", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            step(live, table)


def score(row: list[float], token: int, count: int) -> list[Any]:
    """What vLLM says of a token: its log-probability, those of the likeliest, and its rank."""
    total = math.log(sum(map(math.exp, row)))
    order = sorted(range(len(row)), key=lambda other: -row[other])
    return [token, row[token] - total, [[other, row[other] - total] for other in order[:count]], 1 + order.index(token)]


def step(live: dict[int, dict[str, Any]], table: list[list[float]]) -> None:
    tokens, logits, ended = [], [], []
    for number, request in list(live.items()):
        row = table[request["last"]]
        if request["prompt_top"] is not None and not request["given"]:
            pairs = zip(request["prompt"], request["prompt"][1:], strict=False)
            answer(prompt_scores=[[number, [score(table[last], token, request["prompt_top"]) for last, token in pairs]]])
        sampling = request["sampling"]
        request["last"] = row.index(max(row))
        request["given"] += 1
        tokens.append([number, [request["last"]]])
        if request["top"] is not None:
            answer(scores=[[number, [score(row, request["last"], request["top"])]]])
        if request["logits"]:
            logits.append([number, base64.b64encode(struct.pack(f"{len(row)}f", *row)).decode() + "\n"])
        if request["given"] == sampling["max_tokens"] or request["last"] in sampling.get("stop_token_ids", ()):
            ended.append(number)
            del live[number]
    if logits:
        answer(logits=logits)
    answer(tokens=tokens)
    if ended:
        answer(ended=ended)


if __name__ == "__main__":
    if sys.argv[-1] == "--describe":
        print(json.dumps({**VERSIONS, **MODES.get((Path(sys.argv[1]) / "mode").read_text(), {})}))
    else:
        run(Path(sys.argv[1]))
