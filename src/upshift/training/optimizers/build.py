"""Build the plan's optimizer, and run it in the backward pass if the plan says so.

There each parameter is updated as soon as its gradient is complete, and the gradient is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from upshift.errors import MissingExtra, RequestError
from upshift.internals.transformers_names import PARAMETER_NAMES
from upshift.planning.cost.optimizer import LOW_BIT_BLOCK, rounds_stochastically
from upshift.planning.optimizers import ALIASES, check_library, optimizers, read_optim_args
from upshift.planning.plan import Plan
from upshift.training.arguments import Arguments
from upshift.training.mup import split_by_rate
from upshift.training.optimizers.cpu_offload import HostOptimizer
from upshift.training.optimizers.muon import MuonWithAdamW, split_for_muon
from upshift.training.optimizers.sharded import ShardedOptimizer, UpdateSharding
from upshift.training.optimizers.stochastic_adamw import StochasticAdamW

Groups = list[dict[str, Any]]


# Parameters without weight decay by their names, as in transformers.Trainer.get_decay_parameter_names. A test compares both.
NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def build_optimizer(
    model: nn.Module,
    plan: Plan,
    arguments: Arguments,
    *,
    sharding: UpdateSharding | None = None,
    decayed: Collection[str] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer as transformers.Trainer builds the one of that name. Raise MissingExtra if its library is missing.

    transformers has no muon; muon takes AdamW's learning rate. ``sharding`` says how ranks divide the parameters: the optimizer
    then updates this rank's shards. ``decayed`` names the parameters with weight decay; None: by the rule of transformers.
    """

    def build_for_groups(groups: Groups) -> torch.optim.Optimizer:
        if plan.optim_offload:
            return HostOptimizer(groups, lambda host_groups: _builder(plan, arguments, device="cpu")(host_groups))
        return _builder(plan, arguments, device=plan.device)(groups)

    groups = parameter_groups(model, plan, arguments, decayed)
    if sharding is None:
        return build_for_groups(groups)
    return ShardedOptimizer(groups, build_for_groups, sharding)


def parameter_groups(model: nn.Module, plan: Plan, arguments: Arguments, decayed: Collection[str] | None = None) -> Groups:
    """Return the trained parameters in groups: those with weight decay, and those without.

    ``decayed`` names the parameters with weight decay. None: all but those of layer norms, and those whose names tell a bias or
    a norm.
    """
    names = set(PARAMETER_NAMES.get()(model, [nn.LayerNorm], NOT_DECAYED) if decayed is None else decayed)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups: Groups = [
        {"params": [parameter for name, parameter in trained if name in names], "weight_decay": arguments.weight_decay},
        {"params": [parameter for name, parameter in trained if name not in names], "weight_decay": 0.0},
    ]
    if plan.optim == "muon":
        groups = split_for_muon(model, groups)
    if plan.mup_base:
        groups = split_by_rate(model, plan.mup_base, groups, arguments.learning_rate)
    return [group for group in groups if group["params"]]


def _builder(plan: Plan, arguments: Arguments, *, device: str) -> Callable[[Groups], torch.optim.Optimizer]:
    """Return a function that makes the optimizer from its groups, for parameters on ``device``."""
    lr = arguments.learning_rate
    adam: dict[str, Any] = {"lr": lr, "betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    options: dict[str, Any] = {**read_optim_args(plan.optim, plan.optim_args)}
    added = optimizers()[plan.optim].added
    if added is not None:
        module, name = added.import_path
        return partial(getattr(import_module(module), name), lr=lr, **options)
    if rounds_stochastically(plan):
        return lambda groups: StochasticAdamW(groups, seed=arguments.seed, **adam)
    torch_builders: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
        "adamw_torch_fused": lambda groups: torch.optim.AdamW(groups, fused=True, **adam),
        "adamw_torch": lambda groups: torch.optim.AdamW(groups, foreach=True, **adam),
        "adafactor": lambda groups: _adafactor(groups, lr),
        "muon": lambda groups: MuonWithAdamW(groups, **adam),
        "sgd": lambda groups: torch.optim.SGD(groups, lr=lr, fused=True, **options),
        "adagrad": lambda groups: torch.optim.Adagrad(
            groups, lr=lr, fused=device == "cpu", **options
        ),  # its fused kernel runs on CPUs only
        "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=lr, foreach=False, **options),
    }
    return torch_builders.get(plan.optim) or _library_builder(plan, adam, options)


def _adafactor(groups: Groups, lr: float) -> torch.optim.Optimizer:
    from transformers import Adafactor  # late: it imports peft and bitsandbytes

    return Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)


def _library_builder(plan: Plan, adam: dict[str, Any], options: dict[str, Any]) -> Callable[[Groups], torch.optim.Optimizer]:
    if ALIASES.get(plan.optim, plan.optim) == "adamw_bnb_8bit":
        if plan.device != "cuda":
            raise RequestError(f"optim={plan.optim} needs a CUDA device, not {plan.device}; use adamw_torch_8bit")
        check_library("bitsandbytes", purpose=f"optim={plan.optim}", on_gpu=True)
        from bitsandbytes.optim import AdamW

        return lambda groups: AdamW(groups, optim_bits=8, **adam)
    try:
        from torchao.optim import AdamW4bit, AdamW8bit
    except ImportError:
        raise MissingExtra(library="torchao", extra="quant", purpose=f"optim={plan.optim}") from None
    low_bit = AdamW4bit if plan.optim == "adamw_torch_4bit" else AdamW8bit
    settings = {"block_size": LOW_BIT_BLOCK, "bf16_stochastic_round": plan.precision == "bf16-weights", **options}
    return lambda groups: low_bit(groups, **settings, **adam)


def update_in_backward(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Make ``backward()`` update every parameter of ``optimizer`` until the returned handles are removed.

    Groups and state stay those of one optimizer. A parameter must get its complete gradient in one backward pass.
    """
    return [
        parameter.register_post_accumulate_grad_hook(_update_hook(optimizer, number))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]


def _update_hook(optimizer: torch.optim.Optimizer, number: int) -> Callable[[Tensor], None]:
    """Return a hook that updates one parameter of the group ``number``."""

    def update(parameter: Tensor) -> None:
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[number], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None

    return update
