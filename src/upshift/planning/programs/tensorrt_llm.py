"""Write a plan of generation as the options of ``trtllm-serve MODEL --extra_llm_api_options FILE`` (TensorRT-LLM 1.2).

The keys are fields of ``tensorrt_llm.llmapi.llm_args.TorchLlmArgs``.
"""

from __future__ import annotations

from typing import Any

from upshift.errors import RequestError
from upshift.planning.inference.plan import InferencePlan
from upshift.planning.programs.job import yaml_text

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def config_of(plan: InferencePlan, *, longest: int, is_stored: bool) -> str:
    """Return the file's text. Raise RequestError for weights and caches that TensorRT-LLM reads from their own files alone.

    ``longest``: tokens of a complete sequence. ``is_stored``: the model's files have the plan's weights.
    """
    if plan.weights not in DTYPES and not is_stored:
        raise RequestError(
            f"a configuration of trtllm cannot express {plan.weights} weights of a model that is stored without them; give a "
            "model that is stored so, or leave it out of --allow"
        )
    if plan.kv_cache not in (*DTYPES, "fp8"):
        raise RequestError(
            f"a configuration of trtllm cannot express kv {plan.kv_cache}; leave {plan.kv_cache}-kv out of --allow"
        )
    # The engine counts the next tokens of running sequences beside the tokens of prompts.
    document: dict[str, Any] = {
        "dtype": "auto" if is_stored else DTYPES[plan.weights],
        "tensor_parallel_size": plan.tensor_parallel,
        "pipeline_parallel_size": plan.pipeline_parallel,
        "max_batch_size": plan.max_concurrency,
        "max_num_tokens": plan.prefill_chunk_tokens + plan.max_concurrency,
        "max_seq_len": longest,
        "enable_chunked_prefill": True,
        "kv_cache_config": {"dtype": "fp8" if plan.kv_cache == "fp8" else "auto"},
        "cuda_graph_config": None,
    }
    if plan.execution == "graphs":
        document["cuda_graph_config"] = {"max_batch_size": plan.max_concurrency, "enable_padding": True}
    return yaml_text(_comments(plan), document)


def _comments(plan: InferencePlan) -> list[str]:
    comments = [f"trtllm-serve MODEL --extra_llm_api_options THIS_FILE, for the plan {plan.label()}"]
    if plan.replicas > 1:
        gpus = plan.tensor_parallel * plan.pipeline_parallel
        comments.append(
            f"The file is of one server. Start {plan.replicas}, each with {gpus} GPU{'s' * (gpus > 1)} of its own "
            "(CUDA_VISIBLE_DEVICES), behind a load balancer."
        )
    return comments
