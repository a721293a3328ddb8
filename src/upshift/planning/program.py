"""Define the training programs for which a plan can be made: what each one always does, and which choices it has.

The facts are of the programs' documentation and source, by program and never by model. None was fitted to a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from upshift.errors import RequestError
from upshift.hardware import AttentionKernel
from upshift.hardware.spec import Host
from upshift.models.profile import Granularity
from upshift.planning.layout import Layout
from upshift.text import did_you_mean

ProgramName = Literal["upshift", "transformers", "axolotl", "llama-factory", "torchtitan", "megatron"]
OWN: ProgramName = "upshift"
PLAIN: Mapping[str, Any] = {"loss_kernel": "eager"}  # of choices that compiling changes
PROGRAM_NAMES: tuple[ProgramName, ...] = get_args(ProgramName)


@dataclass(frozen=True)
class Program:
    """A training program. A field of a plan that it does not name may have any value."""

    title: str = ""
    always: Mapping[str, Any] = field(default_factory=dict)  # choices of Plan that it makes by itself
    when_compiled: Mapping[str, Any] = field(default_factory=dict)  # the same, of those that compile their layers
    layout: Mapping[str, Any] = field(default_factory=dict)  # of Layout, where the ranks can have them
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # that it has words for, by field of Plan or Layout
    quarters: Sequence[int] = (0, 1, 2, 3, 4)  # of the layers that it can recompute
    granularity: Granularity | None = "selective"  # what its selective recomputation keeps; None: all but attention's core
    replicates_alone: bool = False  # ranks that divide no weights have no other parallelism
    takes_adapters: bool = True
    takes_images: bool = False  # rows with images are planned for it
    kernels: Mapping[int, AttentionKernel] = field(default_factory=dict)  # of attention, by the chip's major capability

    def kernel_on(self, host: Host) -> AttentionKernel | None:
        """Return the kernel of attention that the program runs on a host's GPUs; None: the one that torch takes today."""
        capability = host.gpu.compute_capability if host.gpu is not None else None
        return self.kernels.get(capability[0]) if capability is not None else None

    @property
    def granularities(self) -> Sequence[Granularity]:
        """Return the ways to recompute a layer."""
        return self.values.get("recompute_granularity", ("full", "selective"))

    def narrow(self, choices: dict[str, list[Any]], *, num_layers: int) -> dict[str, list[Any]]:
        """Return the values of each choice that the program has. Raise RequestError for a choice of which it has none."""
        narrowed = dict(choices)
        for name, values in choices.items():
            if name == "activation_checkpointing":
                counts = {round(num_layers * quarter / 4) for quarter in self.quarters}
                narrowed[name] = [value for value in values if value in counts]
            elif name in self.values:
                narrowed[name] = [value for value in values if value in self.values[name]]
            if name == "recompute_granularity" and not narrowed[name]:
                narrowed[name] = ["full"]
            if not narrowed[name]:
                raise RequestError(
                    f"{self.title} has {name} {_listed(self.values[name])}, and here it can be {_listed(values)}; use another "
                    "--program, --on or --allow"
                )
        return narrowed

    def complete(self, combination: dict[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the choices of a plan with those that follow from whether it is compiled, unless they are ``fixed``."""
        is_compiled = combination["torch_compile"] != "off"
        following = {name: value if is_compiled else PLAIN[name] for name, value in self.when_compiled.items()}
        return {**combination, **following, **{name: fixed[name] for name in following if name in fixed}}

    def arrange(self, layout: Layout, *, sharing: int) -> Layout | None:
        """Return a layout as the program runs it; None where it has no such layout.

        ``sharing``: the ranks that sum gradients.
        """
        others = layout.ranks_per_replica * layout.expert_parallel
        if self.replicates_alone and sharing > 1 and others > 1 and not layout.gathers:
            return None
        if sharing > 1 and not self.has("fully_shard", layout.fully_shard):
            return None
        arranged = self.layout_of(layout)
        # What does not apply has its plain value, which may be one that the program does not have.
        apart = {"fully_shard", *(() if layout.context_parallel > 1 else ("context_kind",))}
        names = (name for name in Layout.model_fields if name not in apart)
        return arranged if all(self.has(name, getattr(arranged, name)) for name in names) else None

    def has(self, name: str, value: Any) -> bool:
        """Return whether the program has a value of a field."""
        return name not in self.values or value in self.values[name]

    def layout_of(self, layout: Layout) -> Layout:
        """Return the layout with what the program always does, where it has ranks to do it with."""
        possible = {
            "gather_again": layout.sequence_parallel and layout.tensor_parallel > 1,
            "vocabulary_parallel": layout.tensor_parallel > 1,
            "context_kind": layout.context_parallel > 1,
            "master_weights": layout.fully_shard in ("no", "optimizer"),
            "overlap": True,
        }
        update = {name: value for name, value in self.layout.items() if possible[name]}
        if update.get("master_weights"):  # one rank has all of the optimizer's state
            update["fully_shard"] = "optimizer"
        return layout.model_copy(update=update) if update else layout

    def check(self, fixed: Mapping[str, Any]) -> None:
        """Raise RequestError for a requested value that the program does not have."""
        for name, value in fixed.items():
            if name == "context_kind" and fixed.get("context_parallel") == 1:  # it has its plain value
                continue
            valid = [self.always[name]] if name in self.always else self.values.get(name)
            if valid is not None and value not in valid:
                raise RequestError(
                    f"--set {name}={_text(value)} is not possible with {self.title}; use {_listed(valid)}, or another --program"
                )


def _listed(values: Sequence[Any]) -> str:
    return " or ".join(_text(value) for value in values)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


# What only Upshift does.
WITHOUT_OURS: Mapping[str, Sequence[Any]] = {
    "packing": (False,),
    "mup_base": ("",),
    "optimizer_in_backward": (False,),
    "loss_chunk_tokens": (0,),
    "weight_offload": ("none",),
    "activation_offload": (False,),
    "host_memory": ("system",),
    "attention": ("sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"),
}
# The Trainer of transformers with accelerate: FSDP2 or DeepSpeed's ZeRO; context parallelism is torch's ring, for FSDP2 alone
# (accelerate's ParallelismConfig). Fused kernels are Liger's (use_liger_kernel), on request. All layers are recomputed, or none.
# Updates of bf16 weights are rounded to the nearest value.
TRANSFORMERS_VALUES: Mapping[str, Sequence[Any]] = {
    **WITHOUT_OURS,
    "precision": ("fp32", "tf32", "bf16", "fp16", "bf16-weights"),
    "recompute_granularity": ("full",),
    "loss_kernel": ("eager", "fused"),
    "tensor_parallel": (1,),
    "pipeline_parallel": (1,),
    "expert_parallel": (1,),
    "context_kind": ("ring",),
    "master_weights": (False,),
    "bf16_gradients": (False,),
    "overlap": (True,),
}
TRANSFORMERS = Program(
    title="transformers' Trainer",
    always={"rounding": "nearest"},
    values=TRANSFORMERS_VALUES,
    quarters=(0, 4),
    replicates_alone=True,
    takes_images=True,
)
# Both run transformers' Trainer with peft. They pack short texts.
PACKED_VALUES: Mapping[str, Sequence[Any]] = {**TRANSFORMERS_VALUES, "packing": (False, True)}
AXOLOTL_VALUES: Mapping[str, Sequence[Any]] = {
    **PACKED_VALUES,
    "torch_compile": ("off", "model"),
    "activation_offload": (False, True),
}
# torchtitan recomputes by operator unless told otherwise: all but every second mm (selective_ac_option = "op" in its
# train_configs). It has loss parallel wherever there is tensor parallelism (disable_loss_parallel is off), and compiles its loss
# with the layers (build_cross_entropy_loss of components/loss.py). torch's sdpa runs FlashAttention 2 there, also on an H100.
TORCHTITAN = Program(
    title="torchtitan",
    when_compiled={"loss_kernel": "compiled"},
    layout={"vocabulary_parallel": True},
    values={
        **WITHOUT_OURS,
        "precision": ("fp32", "bf16", "fp8"),
        "torch_compile": ("off", "layer"),
        "optim": ("adamw_torch_fused", "adamw_torch"),
        "recompute_granularity": ("full", "alternate"),
        "attention": ("sdpa", "flex_attention"),
        "fused_kernels": (False,),
        "optim_offload": (False,),
        "loss_kernel": ("eager", "compiled"),
        "fully_shard": ("no", "gradients", "weights"),
        "context_kind": ("ring",),
        "master_weights": (False,),
        "bf16_gradients": (False,),
        "gather_again": (False,),
        "overlap": (True,),
    },
    quarters=(0, 1, 2, 4),
    granularity="alternate",
    replicates_alone=True,
    takes_adapters=False,
    kernels={8: "flash_2", 9: "flash_2"},
)
# Megatron Core with Transformer Engine. Weights in bf16, gradients in fp32, the rest by the distributed optimizer: 6 + 12 / d
# bytes a parameter (Megatron Core user guide, "Distributed Optimizer"). Column-parallel inputs are gathered again, and embedding,
# logits and loss divided by words (Korthikanti et al. 2022, section 4.2.2; Shoeybi et al. 2019, section 3). Transformer Engine's
# modules fuse norm, rotary embedding and SwiGLU, and its cross entropy writes the gradient over the logits. Its selective
# recomputation is of attention's core, which the fused kernel repeats in any case.
MEGATRON = Program(
    title="Megatron with Transformer Engine",
    always={"fused_kernels": True, "loss_kernel": "fused"},
    layout={"master_weights": True, "gather_again": True, "vocabulary_parallel": True},
    values={
        **WITHOUT_OURS,
        "precision": ("bf16", "fp8"),
        "torch_compile": ("off",),
        "optim": ("adamw_torch_fused",),
        "attention": ("sdpa",),
        "recompute_granularity": ("full",),
        "fully_shard": ("optimizer",),
        "pipeline_schedule": ("1f1b", "interleaved_1f1b"),
    },
    takes_adapters=False,
)
PROGRAMS: Mapping[ProgramName, Program] = {
    "upshift": Program(title="Upshift", values={"bf16_gradients": (False,), "context_kind": ("ulysses",)}),
    "transformers": TRANSFORMERS,
    "axolotl": replace(TRANSFORMERS, title="Axolotl", values=AXOLOTL_VALUES),
    "llama-factory": replace(TRANSFORMERS, title="LLaMA-Factory", values=PACKED_VALUES),
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
}


def read_program(name: str | None, *, has_images: bool = False) -> ProgramName:
    """Return the program of ``--program``, or the default, which for rows with images is transformers' Trainer.

    Raise RequestError for one that trains nothing, or that is not planned for rows with images."""
    if name is None:
        return "transformers" if has_images else OWN
    able = [program for program, facts in PROGRAMS.items() if facts.takes_images]
    if has_images and name in PROGRAM_NAMES and name not in able:
        raise RequestError(f"--program {name} is not planned for rows with images; use one of {', '.join(able)}")
    known = next((program for program in PROGRAM_NAMES if program == name), None)
    if known is None:
        raise RequestError(
            f"--program {name!r} is no program that trains{did_you_mean(name, PROGRAM_NAMES)}; use one of "
            f"{', '.join(PROGRAM_NAMES)}"
        )
    return known


def check_program(program: ProgramName, host: Host, *, has_adapter: bool, has_images: bool) -> None:
    """Raise RequestError for a host or an adapter for which the program is not planned."""
    if program == OWN or has_images and host.device == "cpu":
        return
    if host.device != "cuda":
        raise RequestError(f"--program {program} is planned for GPUs, and {host.name} has none; leave it out, or use --on")
    if has_adapter and not PROGRAMS[program].takes_adapters:
        adapters = [name for name, facts in PROGRAMS.items() if facts.takes_adapters]
        raise RequestError(f"--program {program} is not planned with an adapter; use one of {', '.join(adapters)}")
