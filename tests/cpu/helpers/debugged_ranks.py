"""Two ranks of a layout with a weight of layer 1 that overflows: each writes what was found where it runs. Run as a program."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from real_ranks import VOCABULARY, full_batch
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.debugging import DebugUnderflowOverflow, NumericsError
from upshift.planning.plan import Plan
from upshift.training import rank_processes
from upshift.training.arguments import Arguments
from upshift.training.distributed.mesh import init_mesh
from upshift.training.prepare import prepare_model
from upshift.training.rank_processes import join_processes, rank_environment
from upshift.training.step import TrainStep

LAYOUTS: dict[str, dict[str, Any]] = {
    "fully_shard": {"fully_shard": "weights", "shard_size": 2},
    "pipeline": {"pipeline_parallel": 2},
    "tensor": {"tensor_parallel": 2},
}


def work(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=64, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    plan, folder = given["plan"], Path(given["said"])
    place = init_mesh(plan)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(3e38)
    prepared = prepare_model(model, plan, place)
    debug = DebugUnderflowOverflow(prepared, tell=lambda line: None)
    stepper = TrainStep(prepared, place, Arguments(max_steps=9))
    try:
        stepper.step(full_batch(plan, place.data_rank))
    except NumericsError:
        (folder / str(rank_environment()[0])).write_text(json.dumps(debug.findings[-1].what))
        raise


def main(layout: str, said: Path) -> None:
    rank_processes.PATIENCE_SECONDS = 2.0
    said.mkdir()
    plan = Plan.model_validate(
        {
            "model": "x", "host": "h", "device": "cpu", "precision": "fp32", "sequence_length": 16,
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_processes": 2, "layout": LAYOUTS[layout],
        }
    )  # fmt: skip
    join_processes(plan, work, {"plan": plan, "said": said})


if __name__ == "__main__":
    for name in LAYOUTS:  # everything is imported once, and each world forked
        child = os.fork()
        if child == 0:
            main(name, Path(sys.argv[1]) / name)
            os._exit(1)  # a world that found nothing
        os.waitpid(child, 0)
