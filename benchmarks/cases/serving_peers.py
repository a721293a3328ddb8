"""Servers that upshift serve is compared with, as processes of their own: ``serving_peers.py NAME MODEL PORT CLIENTS``.

llama.cpp f16|q8_0    its own server, as xllamacpp packages it, on a GGUF file of the same weights
genai fp32|int8       OpenVINO GenAI's continuous batching behind the thinnest HTTP that streams OpenAI's events

Both answer /v1/models and /v1/completions. They are no dependencies of Upshift:
``pip install xllamacpp openvino-genai openvino-tokenizers``. GenAI's batching takes files of optimum-intel alone, which wants an
older transformers, so they are made by an environment of its own, ``build/optimum``, in ``MODEL/genai-fp32`` and so on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from upshift.hardware.cpu_affinity import allowed_cpus, one_per_core
from upshift.inference.engine_environment import find_environment
from upshift.inference.weights import engine_folder, find_weights

PEERS = {"llama.cpp": "xllamacpp", "genai": "openvino_genai"}
PLACES = 1280  # of each client's sequence
THREADS = 2
CACHE_GB = 2
OPTIMUM = Path(__file__).parents[2] / "build" / "optimum"


def installed(contender: str) -> bool:
    name = contender.partition(" ")[0]
    if name in ("vllm", "upshift-vllm"):
        return find_environment(None) is not None
    return PEERS.get(name) is None or find_spec(PEERS[name]) is not None


def vllm_command(model: Path, port: int, clients: int) -> list[str]:
    """vLLM's own server with the settings that Upshift gives to its engine."""
    environment = find_environment(None)
    assert environment is not None
    cores = ",".join(map(str, one_per_core(allowed_cpus())))
    variables = [f"VLLM_CPU_OMP_THREADS_BIND={cores}", f"VLLM_CPU_KVCACHE_SPACE={CACHE_GB}", "TORCHDYNAMO_DISABLE=1"]
    server = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    server += ["--served-model-name", model.name]
    settings = ["--dtype", "float32", "--max-num-seqs", str(clients), "--enforce-eager", "--max-model-len", str(PLACES)]
    return ["env", "-u", "PYTHONPATH", "-u", "OMP_NUM_THREADS", *variables, *server, *settings]


def export_genai(model: Path, weights: str) -> None:
    """Make the model's files of GenAI where they are not there. Raises CalledProcessError: pip or the exporter has said why."""
    folder = model / f"genai-{weights}"
    if folder.is_dir():
        return
    programs = OPTIMUM / "bin"
    if not (programs / "optimum-cli").exists():
        subprocess.run([sys.executable, "-m", "venv", str(OPTIMUM)], check=True)
        pip = [str(programs / "python"), "-m", "pip"]
        subprocess.run(
            [*pip, "install", "--quiet", f"torch=={version('torch').partition('+')[0]}", "optimum-intel[openvino]"], check=True
        )
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "torchvision"], check=True)  # another build's, which fails to load
    export = [str(programs / "optimum-cli"), "export", "openvino", "-m", str(model), "--task", "text-generation-with-past"]
    subprocess.run([*export, "--weight-format", weights, str(folder)], check=True, stdout=sys.stderr)


def write_gguf(model: Path, rounded: str, folder: Path) -> Path:
    """Upshift's GGUF file of the weights, with the model's words, which llama.cpp's server asks for."""
    import gguf
    from transformers import AutoTokenizer

    from upshift.inference.generation.engines.gguf_export import FP32_FILE_TYPE, make_gguf

    reader = gguf.GGUFReader(make_gguf(find_weights(str(model)), folder, FP32_FILE_TYPE, THREADS))
    path = folder / f"server-{rounded}.gguf"
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type", "tokenizer.")):
            kind = field.types[0]
            nested = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=nested)
    tokenizer = AutoTokenizer.from_pretrained(model)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {place: word for word, place in tokenizer.get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([words.get(place, f"<unused {place}>") for place in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL if place in words else gguf.TokenType.UNUSED for place in range(size)])
    writer.add_token_merges(["<unused <unused"])  # none of letters: the model's words are bytes
    kind = gguf.GGMLQuantizationType[rounded.upper()]
    for tensor in reader.tensors:
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llamacpp(model: Path, rounded: str, port: int, clients: int) -> None:
    import xllamacpp

    folder = engine_folder("generate", find_weights(str(model)), "llamacpp")
    given = xllamacpp.CommonParams()
    given.model.path = str(write_gguf(model, rounded, folder))
    given.n_ctx, given.n_parallel, given.cont_batching = PLACES * clients, clients, True
    given.port = port
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = THREADS
    given.sampling.temp, given.sampling.ignore_eos = 0.0, True
    server = xllamacpp.Server(given)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


class GenAi:
    """Its own loop in a thread; each token is told to the request's queue."""

    def __init__(self, model: Path, weights: str, clients: int) -> None:
        import openvino
        import openvino_genai
        import openvino_tokenizers
        from transformers import AutoTokenizer

        folder = model / f"genai-{weights}"
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        pair = openvino_tokenizers.convert_tokenizer(self.tokenizer, with_detokenizer=True)
        for converted, name in zip(pair, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
            openvino.save_model(converted, folder / name)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = CACHE_GB, clients
        exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"} if weights == "fp32" else {}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", exact)
        self.config, self.tensor = openvino_genai.GenerationConfig, openvino.Tensor
        self.inbox: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        numbers, open_ = itertools.count(), dict[int, tuple[Any, Any, Any]]()
        while True:
            while not (self.inbox.empty() and open_):
                prompt, count, loop, told = self.inbox.get()
                config = self.config(max_new_tokens=count, ignore_eos=True, do_sample=False)
                ids = self.tensor(self.tokenizer(prompt, return_tensors="np")["input_ids"])
                number = next(numbers)
                open_[number] = (self.pipeline.add_request(number, ids, config), loop, told)
            self.pipeline.step()
            for number, (handle, loop, told) in list(open_.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        loop.call_soon_threadsafe(told.put_nowait, self.tokenizer.decode(output.generated_ids))
                if handle.get_status().name != "RUNNING":
                    loop.call_soon_threadsafe(told.put_nowait, None)
                    del open_[number]

    async def pieces(self, prompt: str, count: int) -> AsyncIterator[str]:
        told: asyncio.Queue[str | None] = asyncio.Queue()
        self.inbox.put((prompt, count, asyncio.get_running_loop(), told))
        while (text := await told.get()) is not None:
            yield text


def genai(model: Path, weights: str, port: int, clients: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    engine = GenAi(model, weights, clients)

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": model.name}]})

    async def complete(request: Request) -> Response:
        asked = await request.json()
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": model.name}

        async def events() -> AsyncIterator[str]:
            async for text in engine.pieces(asked["prompt"], asked["max_tokens"]):
                choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
                yield f"data: {json.dumps(head | {'choices': [choice]}, separators=(',', ':'))}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    peer, _, how = sys.argv[1].partition(" ")
    {"llama.cpp": llamacpp, "genai": genai}[peer](Path(sys.argv[2]), how, int(sys.argv[3]), int(sys.argv[4]))
