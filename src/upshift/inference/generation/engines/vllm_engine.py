"""Run vLLM from the model's own files, in a Python environment of its own (docs/inference_gpu.md).

Upshift's setup becomes vLLM's engine arguments, and what the user fixes replaces them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.hardware import detect
from upshift.hardware.cpu_affinity import allowed_cpus, cores_of, one_per_core
from upshift.hardware.spec import Host
from upshift.inference.adapters import engine_arguments
from upshift.inference.computing_device import free_memory
from upshift.inference.engine_environment import DTYPES, WORKER, EngineArguments, EngineEnvironment
from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.engines.text_engine import ProcessEngine
from upshift.inference.generation.grammar import WHITESPACE, Form, TokenGuide
from upshift.inference.generation.model import cache_bytes
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.race.types import Quality
from upshift.inference.registry import EngineSetup, Precision
from upshift.inference.weights import check_stored_quality, count_parameters, weights_size
from upshift.models.config import heads_of
from upshift.models.profile_cache import positions_of
from upshift.models.source import ModelSource
from upshift.settings import vllm_environment
from upshift.units import GIB

DTYPE_OF_PRECISION = {**{precision: dtype for dtype, precision in DTYPES.items()}, "stored": "auto"}  # auto: vLLM's choice
WEIGHT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
CACHE_SHARE = 0.25  # the share of a CPU's free memory that keys and values may take
LEAST_GIB = 1  # vLLM takes whole GiB
MIN_TEMPERATURE = 0.01  # vLLM raises a smaller one to it
# The options of generation that vLLM has, beside the lengths and the seed.
SHARED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
TAKEN = {*SHARED, *LENGTHS, "do_sample", "seed", "eos_token_id", "stop_strings", "sequence_bias"}


def find_unsupported(options: GenerationOptions) -> str | None:
    """Return the name of an option that vLLM does not have, or None. An option at its default counts as none."""
    for name, field in GenerationOptions.model_fields.items():
        if name not in TAKEN and getattr(options, name) != field.default:
            return name
    if any(len(tokens) > 1 for tokens, _ in options.sequence_bias or ()):
        return "sequence_bias"
    return "temperature" if options.do_sample and options.temperature < MIN_TEMPERATURE else None


def check_supported(options: GenerationOptions) -> None:
    """Raise RequestError for an option that vLLM does not have."""
    name = find_unsupported(options)
    if name is not None:
        limits = {"temperature": f" below {MIN_TEMPERATURE:g}", "sequence_bias": " of several tokens"}
        limit = limits.get(name, "")
        raise RequestError(
            f"the engine vllm has no {name}{limit}; leave it out, or ask for another engine, such as --engine torch"
        )


def check_request(options: GenerationOptions, guide: TokenGuide | None) -> None:
    """Raise RequestError for an option, or for a form of the answer, that vLLM does not have."""
    check_supported(options)
    if guide is not None and guide.form is None:
        raise RequestError(
            "the engine vllm neither limits the tokens of reasoning nor holds an answer to a form after reasoning; leave out "
            "thinking_token_budget, and send enable_thinking=false with a form or a forced tool"
        )


def check_arguments(arguments: EngineArguments, source: ModelSource, host: Host) -> None:
    """Raise RequestError for degrees that the model or this machine does not allow."""
    text_config: Any = source.hf_config.get_text_config(decoder=True)
    tensor = arguments.tensor_parallel_size or 1
    heads = heads_of(text_config)
    if heads is not None and heads.queries % tensor:
        raise RequestError(
            f"tensor_parallel_size={tensor} does not divide the {heads.queries} heads of {source.reference!r}; use one of "
            f"{', '.join(str(degree) for degree in range(1, heads.queries + 1) if heads.queries % degree == 0)}"
        )
    stages = arguments.pipeline_parallel_size or 1
    layers = getattr(text_config, "num_hidden_layers", None)
    if layers is not None and stages > layers:
        raise RequestError(f"pipeline_parallel_size={stages} is more than the {layers} layers of {source.reference!r}; use fewer")
    devices, kind = (detect().num_devices, "GPUs") if host.device == "cuda" else (len(one_per_core(allowed_cpus())), "cores")
    if arguments.ranks > devices:
        raise RequestError(
            f"tensor_parallel_size x pipeline_parallel_size x data_parallel_size is {arguments.ranks}, and this machine has "
            f"{devices} {kind}; use fewer"
        )
    longest = positions_of(source)
    if arguments.max_model_len is not None and longest is not None and arguments.max_model_len > longest:
        raise RequestError(
            f"max_model_len={arguments.max_model_len:,} is more than the {longest:,} positions of {source.reference!r}; use fewer"
        )


def check_environment(
    environment: EngineEnvironment, source: ModelSource, host: Host, engine: str | None, quality: Quality
) -> None:
    """Raise RequestError for arguments that are not possible, or for a quality that vLLM cannot have with quantized weights."""
    check_arguments(environment.arguments, source, host)
    check_stored_quality(source, engine, quality, environment)


class VllmEngine(ProcessEngine):
    """The engine of vLLM."""

    name = "vllm"

    def __init__(self, build: DecoderBuild) -> None:
        environment = build.setup.environment
        assert environment is not None and build.source.directory is not None
        on_cpu = build.setup.device == "cpu"
        fixed = environment.arguments
        cache = _cache_gib(build) if on_cpu else None
        arguments = _engine_arguments(build, cache)
        variables = [
            vllm_environment(
                cores=_cores(build.setup, fixed, replica) if on_cpu else None,
                cache_gib=cache,
                gpus=None if on_cpu or fixed.replicas == 1 else range(replica * fixed.shards, (replica + 1) * fixed.shards),
                compiles=not arguments.get("enforce_eager", False),
            )
            for replica in range(fixed.replicas)
        ]
        super().__init__(environment.python, WORKER, variables, arguments, _parameter_bytes(build), build.adapters)

    def sampling(self, sequence: GeneratedSequence) -> dict[str, Any]:
        """Return the SamplingParams of a sequence. Stop strings end it on our side, because vLLM sees no texts."""
        options = sequence.options
        least = max(options.min_new_tokens, options.min_length - len(sequence.prompt))
        sampling: dict[str, Any] = {
            "max_tokens": sequence.tokens_left,
            "min_tokens": min(max(least, 0), sequence.tokens_left),
            "ignore_eos": True,  # the ids that end a text are those of the options alone
            "stop_token_ids": list(options.eos_token_id),
            "repetition_penalty": options.repetition_penalty,
            "frequency_penalty": options.frequency_penalty,
            "presence_penalty": options.presence_penalty,
            "temperature": 0.0,
        }
        if options.do_sample:
            seed = int(np.random.SeedSequence((options.seed, sequence.index)).generate_state(1)[0])
            sampling |= {
                "temperature": options.temperature,
                "top_k": options.top_k,
                "top_p": options.top_p,
                "min_p": options.min_p or 0.0,
                "seed": seed,
            }
        if options.sequence_bias:
            sampling["logit_bias"] = {str(token): bias for (token,), bias in options.sequence_bias}
        if sequence.form is not None:
            sampling["structured_outputs"] = _structured_outputs(sequence.form)
        return sampling

    def greedy(self, new_tokens: int) -> dict[str, Any]:
        return {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True}


def _structured_outputs(form: Form) -> dict[str, str]:
    """Return the fields of vLLM's StructuredOutputsParams. The spaces in JSON are as few as with the other engines."""
    text = form.text
    if form.kind == "json":
        schema = json.loads(text)
        if isinstance(schema, dict):
            text = json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema})
    return {form.kind: text}


def _engine_arguments(build: DecoderBuild, cache_gib: int | None) -> dict[str, Any]:
    """Return vLLM's engine arguments: those of the setup, replaced by those that the user fixes."""
    setup = build.setup
    assert setup.environment is not None
    arguments: dict[str, Any] = {
        "model": str(build.source.directory),
        "dtype": DTYPE_OF_PRECISION.get(setup.precision, "bfloat16"),
        "max_num_seqs": math.ceil(setup.batch / setup.environment.arguments.replicas),
        "skip_tokenizer_init": not build.serves,  # tokens in, tokens out; a form needs the texts of tokens
        "disable_log_stats": True,
        "max_logprobs": -1,
        "logprobs_mode": "raw_logprobs" if build.serves else "raw_logits",  # the race compares logits
    }
    arguments |= engine_arguments(build.adapters)
    if build.serves:
        arguments["structured_outputs_config"] = {"backend": "guidance"}  # llguidance, as for the other engines
    if setup.precision == "fp8":
        arguments["quantization"] = "fp8"
    if cache_gib is not None:
        arguments["enforce_eager"] = True  # compiling takes minutes, and products of matrices take most of a step
        tokens = int(cache_gib * GIB / _token_bytes(build))
        longest = positions_of(build.source)
        if longest is not None and tokens < longest:
            arguments["max_model_len"] = tokens
    return arguments | setup.environment.arguments.of_a_replica


def _parameter_bytes(build: DecoderBuild) -> int:
    """Return the bytes of the weights. Quantized weights are as large as their files."""
    precision = build.setup.precision
    return weights_size(build.source) if precision == "stored" else WEIGHT_BYTES[precision] * count_parameters(build.source)


def _token_bytes(build: DecoderBuild) -> float:
    """Return the bytes of a token's keys and values in the setup's precision. Without a figure, return one byte."""
    full_bytes = cache_bytes(build.source)
    return 1.0 if full_bytes is None else full_bytes.token * (1.0 if build.setup.precision == "fp32" else 0.5)


def _cache_gib(build: DecoderBuild) -> int:
    """Return the whole GiB of memory for keys and values of a replica on a CPU: enough for all of its sequences, but at most a
    share of what is free."""
    free_bytes = free_memory(detect().cpu_alone())
    longest = positions_of(build.source)
    assert build.setup.environment is not None
    replicas = build.setup.environment.arguments.replicas
    limit = LEAST_GIB if free_bytes is None else int(CACHE_SHARE * free_bytes / replicas / GIB)
    needed = limit if longest is None else math.ceil(build.setup.batch / replicas * longest * _token_bytes(build) / GIB)
    return max(min(needed, limit), LEAST_GIB)


def _cores(setup: EngineSetup, arguments: EngineArguments, replica: int) -> str:
    """Return the CPUs of each rank of a replica, one hardware thread of each core, such as 0,1|2,3.

    A quota of a cgroup may allow fewer threads than there are cores."""
    allowed = allowed_cpus()
    threads = max(setup.threads // arguments.ranks, 1)
    first = replica * arguments.shards
    shares = [
        one_per_core(set(cores_of(rank, arguments.ranks, allowed) or allowed))[:threads]
        for rank in range(first, first + arguments.shards)
    ]
    return "|".join(",".join(map(str, share)) for share in shares)
