"""Find conflicts: choices of a plan that exclude each other, and the rules of attention kernels and muP behind them.

Some attention kernels compute only the visible part of packed rows. They have transformers' names, and each needs certain
devices. PyTorch's own kernel (``sdpa``) needs a mask for packed sequences. With a mask it takes a slower kernel that computes
every pair.

With muP, learning rates of a narrow model hold for a wide one. Yang et al., Tensor Programs V, 2022 (arXiv:2203.03466), table 3:
the form that needs no multiplier in the forward pass, so that the trained model is a model like any other.

A test of the model says whether texts may share a row, a batch may be split, and ranks may share layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from upshift.errors import RequestError
from upshift.hardware.spec import Host
from upshift.models.profile import Isolation, ModelProfile
from upshift.planning.layout import Layout, why_not_split
from upshift.planning.optimizers import ALIASES, optimizers
from upshift.planning.plan import ALONE, Plan
from upshift.planning.workload import PAIR_OBJECTIVES


@dataclass(frozen=True)
class KernelFacts:
    """The requirements of an attention kernel."""

    capabilities: tuple[tuple[int, int], tuple[int, int]]  # CUDA devices from the first version to below the second
    library: str | None = None  # its import name; None: torch alone
    install: str = ""
    halves_only: bool = False  # 16-bit inputs
    one_row: bool = False  # finds sequences in a micro-batch of one row only (transformers' _is_packed_sequence)


PACKED_KERNELS: dict[str, KernelFacts] = {
    "flex_attention": KernelFacts(((7, 5), (99, 0))),
    "flash_attention_2": KernelFacts(
        ((8, 0), (99, 0)), "flash_attn", "pip install flash-attn --no-build-isolation", halves_only=True, one_row=True
    ),
    "flash_attention_3": KernelFacts(
        ((9, 0), (10, 0)),
        "flash_attn_interface",
        "build the hopper folder of github.com/Dao-AILab/flash-attention",
        halves_only=True,
        one_row=True,
    ),
}


def why_kernel_unusable(name: str, host: Host, profile: ModelProfile) -> str | None:
    """Return why one of PACKED_KERNELS cannot run this model on this host, or None."""
    facts = PACKED_KERNELS[name]
    if host.device != "cuda" or host.gpu is None:
        return "it trains on CUDA devices only"
    if name not in profile.declares.attention_kernels:
        return f"{profile.architecture} does not declare it, or drops attention weights"
    first, first_unsupported = facts.capabilities
    capability = host.gpu.compute_capability
    if capability is None or not first <= capability < first_unsupported:
        required = f"{first[0]}.{first[1]}" + (
            "" if first_unsupported[0] == 99 else f" to below {first_unsupported[0]}.{first_unsupported[1]}"
        )
        actual = "is unknown" if capability is None else f"is {capability[0]}.{capability[1]}"
        return f"it needs compute capability {required}, and this device's {actual}"
    if name == "flex_attention" and host.measured is not None and host.measured.gpu_compiler is False:
        return "Triton compiles it, and Triton, a C compiler or Python.h is not installed here: pip install triton"
    if facts.library is not None and find_spec(facts.library) is None:
        return f"the library {facts.library} is not installed: {facts.install}"
    return None


ADAM = (None, "8bit-optimizer", "4bit-optimizer")  # the rule applies to the optimizers with these names for --allow


def read_base(text: str) -> dict[str, int]:
    """Return the fields of the config in which the base differs, from ``hidden_size=64,num_attention_heads=2``."""
    pairs = [assignment.partition("=") for assignment in text.split(",")]
    if not all(equals and name and value.isdecimal() and int(value) > 0 for name, equals, value in pairs):
        raise RequestError(f"mup_base={text!r}: write the widths of the base, such as hidden_size=64,num_attention_heads=2")
    return {name: int(value) for name, _, value in pairs}


def base_text(fields: dict[str, int]) -> str:
    """Return the text from which ``read_base`` reads the fields."""
    return ",".join(f"{name}={value}" for name, value in fields.items())


def conflict_with_mup(plan: Plan) -> str | None:
    """Return why muP cannot run with the plan's other choices, or None."""
    if not plan.mup_base:
        return None
    if optimizers()[plan.optim].allow not in ADAM:
        return f"muP's learning rates are those of AdamW's updates, not of optim={plan.optim}; use optim=adamw_torch_fused"
    if plan.layout != ALONE:
        return "muP compares whole parameters with its base's; ranks may have parts of the batch (--nproc), not of the model"
    return None


def layout_conflict_with_pairs(layout: Layout) -> str | None:
    """Return why the ranks of a layout cannot compute the losses of pairs, or None. They may divide the batch and the weights."""
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"):
        degree = getattr(layout, name)
        if degree > 1:
            return (
                f"{name}={degree} is not for {PAIR_OBJECTIVES}, because each rank computes whole pairs; use data-parallel "
                "ranks (--nproc), which may divide the weights (fully_shard)"
            )
    return None


def conflict_with_pairs(plan: Plan) -> str | None:
    """Return why a plan cannot compute the losses of pairs of sequences, or None.

    The loss of a pair needs both of its sequences in one process. A rated completion and its mismatched one count as a pair.
    """
    layout_problem = layout_conflict_with_pairs(plan.layout)
    if layout_problem is not None:
        return layout_problem
    if plan.packing:
        return f"packing=True is not for {PAIR_OBJECTIVES}, because two rows are compared; use packing=False"
    if plan.torch_compile == "model":
        return f"torch_compile=model is not possible with {PAIR_OBJECTIVES}; use torch_compile=layer"
    if plan.loss_kernel != "eager":
        return f"loss_kernel={plan.loss_kernel} is not for {PAIR_OBJECTIVES}; use eager"
    if plan.per_device_train_batch_size % 2:
        return odd_micro_batch(plan.per_device_train_batch_size)
    return None


def odd_micro_batch(size: int) -> str:
    """Return why micro-batches of an odd number of sequences are not for pairs."""
    return (
        f"per_device_train_batch_size={size} is not for {PAIR_OBJECTIVES}, whose pairs are two sequences each; use an even number"
    )


def conflict(plan: Plan, *, clips_gradients: bool) -> str | None:
    """Return why this plan cannot run, or None."""
    problem = next(filter(None, (rule(plan) for rule in CONFLICT_RULES)), None)
    if problem is not None:
        return problem
    if plan.optimizer_in_backward:
        return _update_in_backward_conflict(plan, clips_gradients)
    return _optim_offload_conflict(plan)


def _bf16_weights_conflict(plan: Plan) -> str | None:
    if plan.precision != "bf16-weights" or plan.rounds_to_nearest:
        return None
    if not optimizers()[plan.optim].rounds:
        rounding = ", ".join(name for name, facts in optimizers().items() if facts.rounds)
        return (
            f"optim={plan.optim} rounds its updates of bf16 weights to the nearest value and so loses small ones; "
            f"with precision=bf16-weights use one of {rounding}"
        )
    if plan.num_processes > 1 and optimizers()[plan.optim].library is not None:
        return f"each process would round the bf16 weights differently with optim={plan.optim}; use num_processes=1"
    return None


def _interleaving_conflict(plan: Plan) -> str | None:
    if divides_evenly(plan.layout, plan.gradient_accumulation_steps):
        return None
    return (
        f"interleaved_1f1b takes micro-batches in groups of pipeline_parallel={plan.layout.pipeline_parallel}, and "
        f"{plan.gradient_accumulation_steps} are not a multiple of it; use another pipeline_schedule or micro-batch"
    )


def _selective_recomputation_conflict(plan: Plan) -> str | None:
    if not _chooses_operators(plan) or plan.torch_compile == "off":
        return None
    return (
        f"recompute_granularity={plan.recompute_granularity} chooses among a layer's operators, which are one when it is "
        "compiled; use torch_compile=off, or recompute_granularity=full"
    )


def _optim_offload_conflict(plan: Plan) -> str | None:
    if not plan.optim_offload:
        return None
    if optimizers()[plan.optim].library is not None:
        return f"optim_offload keeps torch's own optimizers on the host, not optim={plan.optim}; use adamw_torch_fused"
    if plan.precision == "fp16":
        return "optim_offload cannot look for overflows of fp16 gradients before it moves them; use precision=bf16"
    return None


WHOLE_MATRICES = ("muon", "adafactor")  # their updates need rows and columns together


def layout_conflict(plan: Plan) -> str | None:
    """Return why no model can run with the plan's layout and its other choices, or None."""
    layout = plan.layout
    if layout == ALONE:
        return None
    if layout.master_weights and layout.fully_shard != "optimizer":
        return f"master_weights are divided with the optimizer's state, not with fully_shard={layout.fully_shard}; use optimizer"
    if layout.gathers and not layout.overlap:
        return "torch's fully_shard exchanges while it computes and cannot be told not to; leave overlap=True"
    return _compiled_model_conflict(plan) or _divided_optimizer_conflict(plan)


def _compiled_model_conflict(plan: Plan) -> str | None:
    if plan.torch_compile != "model":
        return None
    if plan.layout.pipeline_parallel > 1:
        return (
            f"pipeline_parallel={plan.layout.pipeline_parallel} runs a part of the model's forward pass, which "
            "torch_compile=model makes one; use torch_compile=layer"
        )
    if plan.layout.context_parallel > 1:
        return (
            f"context_parallel={plan.layout.context_parallel} cuts each micro-batch before the model is called; "
            "use torch_compile=layer"
        )
    return None


def _divided_optimizer_conflict(plan: Plan) -> str | None:
    layout = plan.layout
    facts = optimizers()[plan.optim]
    divides = layout.fully_shard != "no" or layout.tensor_parallel > 1 or layout.expert_parallel > 1
    if divides and (plan.optim in WHOLE_MATRICES or (facts.added is not None and not facts.added.elementwise)):
        return (
            f"optim={plan.optim} looks at whole matrices, and each rank updates its part of them; "
            "use optim=adamw_torch_fused, or ranks that divide nothing"
        )
    if (divides or layout.pipeline_parallel > 1) and facts.library is not None:
        return (
            f"the quantized state of optim={plan.optim} cannot be saved in parts; "
            "use optim=adamw_torch_fused, whose state the ranks divide, or ranks that divide nothing"
        )
    return None


def sharing_facts(plan: Plan) -> tuple[Hashable, ...]:
    """Return all that decides, beside a plan's other choices, whether the plan is legal.

    The rules of this module read no more of its layout, ranks and micro-batches.
    """
    layout = plan.layout
    degrees = (layout.tensor_parallel, layout.context_parallel, layout.pipeline_parallel, layout.expert_parallel)
    counts = (plan.num_processes, plan.data_parallel, plan.gradient_accumulation_steps)
    return (
        layout == ALONE,
        layout.fully_shard,
        layout.master_weights,
        layout.overlap,
        layout.splits_backward,
        divides_evenly(layout, plan.gradient_accumulation_steps),
        plan.per_device_train_batch_size % 2,
        *(degree > 1 for degree in degrees),
        *(count > 1 for count in counts),
    )


def divides_evenly(layout: Layout, micro_batches: int) -> bool:
    """Return whether the pipeline's schedule takes ``micro_batches`` micro-batches."""
    return layout.pipeline_schedule != "interleaved_1f1b" or micro_batches % layout.pipeline_parallel == 0


def _zero_bubble_conflict(plan: Plan) -> str | None:
    if not plan.layout.splits_backward:
        return None
    request = "pipeline_schedule=zero_bubble"
    advice = "use pipeline_schedule=1f1b"
    if plan.loss_chunk_tokens:
        return f"{request} runs a loss's backward pass twice, and chunks of it are gone after once; {advice}"
    if plan.torch_compile != "off":
        return f"{request} runs a part of a layer's backward pass, which is one when compiled; {advice}, or torch_compile=off"
    if plan.activation_checkpointing:  # measured: three times the memory of 1f1b
        return f"{request} keeps recomputed layers until weights' gradients come; {advice}, or activation_checkpointing=0"
    return why_not_split(plan.layout)


def _packed_kernel_conflict(plan: Plan) -> str | None:
    if plan.attention not in PACKED_KERNELS:
        return None
    if PACKED_KERNELS[plan.attention].halves_only and plan.precision in ("fp32", "tf32"):
        return f"attention={plan.attention} computes in 16 bits only; use precision=bf16 or fp16"
    if _chooses_operators(plan):
        return (
            f"recompute_granularity={plan.recompute_granularity} does not know the operators of attention={plan.attention} "
            "and would run them again; use recompute_granularity=full, or attention=sdpa"
        )
    return None


def _chooses_operators(plan: Plan) -> bool:
    return plan.recompute_granularity != "full" and plan.activation_checkpointing > 0


def _weight_offload_conflict(plan: Plan) -> str | None:
    if plan.weight_offload == "none":
        return None
    request = f"weight_offload={plan.weight_offload}"
    if plan.num_processes > 1:
        return f"{request} reads each layer for one process, and several would read it as often; use num_processes=1"
    if plan.torch_compile != "off":
        return f"{request} brings a layer's weights when it is called, and a compiled one does not wait; use torch_compile=off"
    if _chooses_operators(plan):
        return f"{request} reads a layer's weights again where its operators are chosen from; use recompute_granularity=full"
    if plan.precision == "fp8":
        return f"{request} reads weights as they are stored, and precision=fp8 converts them; use precision=bf16"
    return None


def _fused_kernel_conflict(plan: Plan) -> str | None:
    if plan.layout.master_weights and plan.precision not in ("bf16", "fp8" if plan.fused_kernels else "bf16"):
        return f"master_weights keeps bf16 copies of fp32 weights, which precision={plan.precision} has no use for; use bf16"
    if plan.fused_kernels and (plan.torch_compile != "off" or _chooses_operators(plan)):
        return (
            "fused_kernels leaves torch.compile nothing to fuse and selective recomputation no operators to choose; "
            "use torch_compile=off and recompute_granularity=full"
        )
    if plan.loss_kernel != "eager" and plan.loss_chunk_tokens:
        return f"loss_kernel={plan.loss_kernel} takes all logits at once; use loss_chunk_tokens=0"
    return None


def _update_in_backward_conflict(plan: Plan, clips_gradients: bool) -> str | None:
    if clips_gradients:
        return (
            "optimizer_in_backward updates weights before the norm of all gradients is known; "
            "train without clipping (max_grad_norm 0) or without optimizer_in_backward"
        )
    if plan.gradient_accumulation_steps > 1 or plan.num_processes > 1:
        return (
            "optimizer_in_backward needs the whole global batch in one micro-batch of one process; "
            "use gradient_accumulation_steps=1 and num_processes=1"
        )
    if plan.precision == "fp16":
        return "optimizer_in_backward cannot skip a step whose scaled fp16 gradients overflow; use precision=bf16"
    if plan.optim_offload:
        return "optimizer_in_backward and optim_offload exclude each other; use one of them"
    return None


# Each returns why a plan cannot run, or None. The first reason is the one that the user sees.
CONFLICT_RULES: tuple[Callable[[Plan], str | None], ...] = (
    _bf16_weights_conflict,
    _packed_kernel_conflict,
    _interleaving_conflict,
    _zero_bubble_conflict,
    _selective_recomputation_conflict,
    _weight_offload_conflict,
    _fused_kernel_conflict,
    conflict_with_mup,
    layout_conflict,
)


def is_redundant(plan: Plan) -> bool:
    """Return whether the plan runs as another one of the space does. Such a plan is left out unless it is requested."""
    if plan.attention in PACKED_KERNELS and not plan.packing:  # without a mask sdpa runs a flash kernel itself
        return True
    if plan.recompute_granularity != "full" and not plan.activation_checkpointing:
        return True
    stochastic = plan.precision == "bf16-weights" and plan.optim == "adamw_torch"  # both names mean one implementation then
    return stochastic or plan.optim in ALIASES


def why_not_isolated(isolation: Isolation, plan: Plan, *, longest: int | None = None) -> str | None:
    """Return why this plan would not train as one process trains on each text alone, or None if it would.

    ``longest``: the tokens of the longest text; None: any up to the plan's ``sequence_length``."""
    too_long = isolation.why_too_long(plan.sequence_length if longest is None else longest)
    if plan.packing:
        reason = isolation.why_not_packed(plan.attention) or too_long
        if reason is not None:
            return f"packing=True with attention={plan.attention} would change what is learned: {reason}; use packing=False"
    if not isolation.loss_shifts and plan.layout.context_parallel > 1:
        degree = plan.layout.context_parallel
        return f"context_parallel={degree} needs a loss that shifts the labels itself; use context_parallel=1"
    if too_long is not None and plan.layout.context_parallel > 1:
        degree = plan.layout.context_parallel
        return f"with context_parallel={degree} no rank has all positions of a text: {too_long}; use context_parallel=1"
    splits_batch = plan.gradient_accumulation_steps > 1 or plan.data_parallel > 1
    if splits_batch and not isolation.loss_splits:
        return (
            "the model's loss is taken over a whole batch and is no mean over its texts, as with a router's loss "
            "(output_router_logits) or with experts that hold some tokens of a batch (expert_capacity); use "
            "gradient_accumulation_steps=1 and one process, or change the config"
        )
    return why_no_layer_drop(plan) if isolation.drops_layers else None


def why_no_layer_drop(plan: Plan) -> str | None:
    """Return why a model that leaves out layers at random cannot train by this plan, or None if it can."""
    if not plan.layout.exchanges and plan.layout.fully_shard == "no":
        return None
    return (
        f"the model leaves out layers at random (LayerDrop), each rank others, and with {plan.layout.label()} ranks wait for "
        "each other in a layer or its update; use data parallelism alone, or set layerdrop to 0 in the config"
    )


def warning_about_splits(isolation: Isolation, longest: int) -> str | None:
    """Return a warning that the loss of a batch depends on its micro-batches, or None for a longest text with which it does not.

    transformers' Trainer depends on them, too, so Upshift trains all the same."""
    reason = isolation.why_too_long(longest)
    if reason is None:
        return None
    return (
        f"{reason}; so the loss depends on which texts share a micro-batch, as it does in transformers.Trainer. "
        f"--sequence-length {isolation.exact_tokens} avoids it"
    )


def can_pack(profile: ModelProfile, kernels: Sequence[str], *, longest: int) -> bool:
    """Return whether texts of up to ``longest`` tokens may share a row with any of these attention kernels."""
    if profile.isolation.why_too_long(longest) is not None:
        return False
    return any(profile.isolation.why_not_packed(kernel) is None for kernel in kernels)


def why_never_packed(profile: ModelProfile, kernels: Sequence[str], *, longest: int) -> str | None:
    """Return why texts may not share a row with any of these attention kernels; None where they may with some."""
    if profile.objective != "causal-lm":
        return f"packing is for causal-lm, and the model trains on {profile.objective}"
    if can_pack(profile, kernels, longest=longest):
        return None
    isolation = profile.isolation
    return next((reason for kernel in kernels if (reason := isolation.why_not_packed(kernel))), isolation.why_too_long(longest))
