"""Read from the launcher and the user's arguments which ranks there are, and how they share the model."""

from __future__ import annotations

import copy
from typing import Any

from upshift.errors import RequestError
from upshift.planning.layout import Layout
from upshift.planning.plan import ALONE, Plan
from upshift.settings import read_ranks

# Fields of fsdp_config. All others control accelerate's own wrapper, so take_fsdp refuses them.
HONOURED_OF_FSDP = ("reshard_after_forward", "version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params",
                    "state_dict_type", "cpu_ram_efficient_loading", "sync_module_states", "use_orig_params", "forward_prefetch",
                    "backward_prefetch", "limit_all_gathers")  # fmt: skip
KEEPS_WEIGHTS = (False, "false", "SHARD_GRAD_OP")  # values of reshard_after_forward


def join_ranks(arguments: Any) -> None:
    """Set use_cpu if a launcher started several processes without a GPU.

    Without use_cpu, transformers sees each process alone and would train as many copies. Raise RequestError if transformers
    still sees another number of ranks.
    """
    ranks = read_ranks()
    if ranks is None or ranks.size == 1 or arguments.world_size > 1 or arguments.device.type != "cpu":
        return
    arguments.use_cpu = True
    vars(arguments).pop("_setup_devices", None)  # a cached property, which reads use_cpu
    if arguments.device.type != "cpu" or arguments.world_size != ranks.size:
        raise RequestError(
            f"{ranks.size} ranks were launched, and transformers sees {arguments.world_size}; start the script with torchrun, "
            "and set TrainingArguments(use_cpu=True)"
        )


def local_ranks() -> int:
    """Return the number of ranks on this host."""
    ranks = read_ranks()
    return ranks.local_size if ranks is not None else 1


def take_fsdp(arguments: Any) -> tuple[Any, Layout]:
    """Return the arguments without fsdp, and the layout that fsdp asked for.

    With fsdp set, accelerate would wrap the model. Raise RequestError for options that cannot be honoured.
    """
    if not arguments.fsdp:
        return arguments, ALONE
    config = dict(arguments.fsdp_config or {})
    other = sorted(name for name, value in config.items() if value and name not in HONOURED_OF_FSDP)
    if other:
        raise RequestError(
            f"fsdp_config={{{other[0]!r}: {config[other[0]]!r}}} cannot be honoured: layers are wrapped by the plan; leave it "
            "out" + (", and set gradient_checkpointing=True" if other[0] == "activation_checkpointing" else "")
        )
    world = arguments.world_size
    if world == 1:
        raise RequestError("fsdp is for several processes, and this is one: start the script with torchrun, or leave it unset")
    plain = copy.copy(arguments)
    plain.fsdp, plain.fsdp_plugin_args = None, None
    keeps = config.get("reshard_after_forward", True) in KEEPS_WEIGHTS
    return plain, Layout(fully_shard="gradients" if keeps else "weights", shard_size=world)


def layout_fields(layout: Layout) -> tuple[str, ...]:
    """Return ``field=value`` assignments for the planner."""
    fields = ("fully_shard", "shard_size")
    return tuple(f"{name}={getattr(layout, name)}" for name in fields if getattr(layout, name) != getattr(ALONE, name))


def not_in_trainer(plan: Plan, *, optimizer_given: bool, averages: bool) -> str | None:
    """Return why the Trainer does not run a layout, or None. ``averages`` says that labels are counted over all ranks."""
    layout = plan.layout
    if layout.pipeline_parallel > 1:
        return "pipeline_parallel has logits in its last stage alone, and a Trainer wants them; use upshift train, or fully_shard"
    if layout.context_parallel > 1:
        return "context_parallel gives each rank the logits of its own tokens alone; use upshift train, or fully_shard"
    if layout.sequence_parallel:
        return "sequence_parallel divides the tokens of a row, and a collator's rows have any number; leave it out"
    if plan.num_processes > 1 and plan.optimizer_in_backward:
        return "optimizer_in_backward updates weights before the ranks' gradients are summed; leave it out"
    if optimizer_given and (layout.tensor_parallel > 1 or layout.fully_shard != "no"):
        return "an optimizer that the script made has whole weights, and this layout divides them; leave it to the Trainer"
    if layout.tensor_parallel > 1 and not averages:
        return "tensor_parallel computes the batches of its ranks together; leave average_tokens_across_devices at True"
    return None
