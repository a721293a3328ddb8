"""The functions of the Python package take what the options of their commands take, and the other way round.

A difference has a reason here.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer

import upshift
from upshift.cli.main import app
from upshift.errors import RequestError
from upshift.training.arguments import Arguments

ROOT: Any = typer.main.get_command(app)
EXAMPLE = Path(__file__).parents[3] / "examples" / "decoder_8b.json"
COMMANDS = {
    "plan": upshift.plan,
    "train": upshift.train,
    "tune": upshift.tune,
    "inspect": upshift.inspect,
    "bench compare": upshift.compare,
}
# The parameter's name, where it is another one than the option's.
RENAMED = {
    "plan": {"images_": "images", "set_": "fixed", "steps": "total_steps", "is_quick": "quick"},
    "train": {"set_": "fixed", "plan": "plan_file"},
    "tune": {"set_": "fixed", "study": "study_name"},
    "bench compare": {"timeout": "timeout_seconds"},
}
LAYOUT = ("nproc", "fully_shard", "tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel")
# Options without a parameter, by the reason.
NO_PARAMETER: dict[str, dict[str, tuple[str, ...]]] = {
    "plan": {
        "fixed takes the fields of the layout": LAYOUT,
        "upshift.Generator and upshift.Encoder plan their own engines": (
            "generate", "encode", "prompt_length", "output_length", "concurrency", "max_latency_ms", "max_ttft_ms", "max_tpot_ms",
        ),
        "the result is a Planning, and these are its methods or functions of upshift.planning.analysis": (
            "why", "shadow_prices", "largest", "compare", "price", "tokens", "deadline", "lock", "check", "rows",
        ),
        "it returns a value, and neither reads nor writes files": ("as_json", "html", "write", "from_"),
        "upshift.train plans for its data": (
            "data", "text_column", "data_format", "loss_on", "chat_template", "split", "long_rows", "objective", "kto_loss",
        ),
        "it is the default": ("train",),
    },
    "train": {
        "fixed takes the fields of the layout": LAYOUT,
        "a call of Python says all this in its arguments": ("config", "init", "from_axolotl", "from_llama_factory"),
        "it returns a Record": ("as_json",),
        "upshift.xla has a function of its own": ("backend",),
    },
    "tune": {"fixed takes the fields of the layout": LAYOUT, "it returns a TuneResult": ("as_json", "html")},
    "inspect": {
        "upshift.load_model places a model": ("batch", "dtype", "max_memory", "placement"),
        "it returns an Inspection": ("as_json",),
    },
    "bench compare": {"it returns a value": ("as_json", "results")},
}  # fmt: skip
# Parameters without an option, by the reason.
NO_OPTION: dict[str, dict[str, tuple[str, ...]]] = {
    "plan": {},
    "train": {"objects of Python": ("tokenizer", "watcher")},
    "tune": {
        "objects of Python": ("tokenizer", "progress", "host"),
        "options of each trial's training": ("eval_data", "mup_base", "plan_file"),
    },
    "inspect": {},
    "bench compare": {"an object of Python": ("on_sample",)},
}


def parameters_of(function: Any) -> set[str]:
    """Return the names that a function takes, those of a typed ``**options`` included."""
    names = set()
    hints = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            names |= set(get_type_hints(get_args(hints[parameter.name])[0]))
        else:
            names.add(parameter.name)
    return names


def options_of(command: str) -> set[str]:
    node = ROOT
    for word in command.split():
        node = node.get_command(None, word)
    return {parameter.name for parameter in node.params}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_and_parameters_are_the_same(command: str) -> None:
    parameters = parameters_of(COMMANDS[command])
    if "arguments" in parameters:  # a dictionary of these
        parameters = parameters - {"arguments"} | (set(Arguments.model_fields) & options_of(command))
    renamed = RENAMED.get(command, {})
    options = {renamed.get(name, name) for name in options_of(command)}
    without_parameter = [name for names in NO_PARAMETER[command].values() for name in names]
    without_option = [name for names in NO_OPTION[command].values() for name in names]
    assert options - parameters == set(without_parameter)
    assert parameters - options == set(without_option)


def test_a_plan_uses_what_only_the_command_took_before() -> None:
    asked: Any = {"sequence_length": 128, "global_batch": 8, "on": "1xh200", "lora_rank": 8}
    planning = upshift.plan(EXAMPLE, **asked, max_grad_norm=0, risk=0.01, program="transformers", images=0)
    workload = planning.workload
    assert (workload.clips_gradients, workload.risk, workload.program) == (False, 0.01, "transformers")
    for wrong in ({"max_grad_norm": -1.0}, {"max_grad_norm": float("nan")}, {"risk": 0.7}, {"program": "nobody"}, {"images": -1}):
        with pytest.raises(RequestError, match=str(next(iter(wrong.values())))):
            upshift.plan(EXAMPLE, **(asked | wrong))
