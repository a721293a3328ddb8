"""Define the training plan: every choice that changes how a job runs, and nothing else. Make the plain default plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd
from typing import Literal

from pydantic import Field, field_validator

from upshift.hardware.spec import Host
from upshift.models.profile import Granularity, ModelProfile, TracedPrecision
from upshift.planning.layout import Layout
from upshift.planning.optimizers import optimizers
from upshift.planning.workload import Workload
from upshift.value import Value

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-weights", "fp8"]
Attention = Literal["sdpa", "block", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"]
Compile = Literal["off", "layer", "model"]
HostMemory = Literal["system", "keep"]
WeightOffload = Literal["none", "host", "disk"]
LossKernel = Literal["eager", "compiled", "fused"]
Rounding = Literal["stochastic", "nearest"]

ALONE = Layout()
HOW_RECOMPUTED: dict[Granularity, str] = {"full": "", "selective": " selectively", "alternate": " alternately"}
CHOICE_KINDS = ("precision", "micro-batch", "ranks", "layout", "recompute", "compile", "optimizer", "other")
SEPARATOR = " · "  # between the choices of a label
# With compiled layers there are fewer widths, because each new width compiles a layer again.
PAD_MULTIPLE = 8
COMPILED_PAD_MULTIPLE = 64

_CHANGES_MATHEMATICS: dict[str, str] = {
    "bf16-weights": "weights, gradients and optimizer state in bf16, updates rounded stochastically; no fp32 master copy",
    "fp8": "matrix products of the layers in fp8, scaled by tensor",
    "8bit-optimizer": "AdamW state quantized to 8 bits",
    "4bit-optimizer": "AdamW state quantized to 4 bits",
    "adafactor": "factored second moments instead of AdamW's",
    "muon": "orthogonalized updates of the layers' matrices instead of AdamW's",
    "sgd": "no adaptive step sizes",
    "adagrad": "step sizes that only shrink, instead of AdamW's",
    "rmsprop": "no first moment unless momentum is asked for",
}


@cache
def changes_of_mathematics() -> Mapping[str, str]:
    """Return the choices that change the mathematics: their descriptions by the name with which a user allows them."""
    return {**_CHANGES_MATHEMATICS, **{name: facts.added.changes for name, facts in optimizers().items() if facts.added}}


class Plan(Value):
    """A training plan. The fields carry the names of transformers.TrainingArguments where one exists."""

    device: Literal["cpu", "cuda"]
    host: str = Field(description="fingerprint of the host that it was made for")
    model: str = Field(description="hash of the model config that it was made for")
    sequence_length: int = Field(gt=0)
    precision: Precision = Field(
        "fp32",
        description="tf32: fp32 weights with cheaper fp32 matrix products (TF32 on GPUs; oneDNN on CPUs, which is "
        "fp32-accurate where the CPU has no AMX); bf16, fp16: autocast over fp32 weights; bf16-weights: all in bf16; "
        "fp8: bf16 with the layers' matrix products in fp8",
    )
    per_device_train_batch_size: int = Field(gt=0, description="micro-batch: sequences (rows, when packing) at once")
    gradient_accumulation_steps: int = Field(1, gt=0)
    packing: bool = Field(False, description="several sequences in one row, each attending to itself only")
    activation_checkpointing: int = Field(0, ge=0, description="recompute this many of the layers")
    recompute_granularity: Granularity = Field(
        "full",
        description="of these layers; selective: keep the results of matrix products and attention; alternate: of every "
        "second product",
    )
    attention: Attention = Field(
        "sdpa",
        description="block: matrix products over blocks of queries (CPU); flex_attention, flash_attention_2 and 3: kernels that "
        "skip what packed sequences do not see of each other (CUDA)",
    )
    torch_compile: Compile = "off"
    optim: str = "adamw_torch_fused"
    optim_args: str = Field("", description="options of the optimizer, such as momentum=0.9 for sgd")
    mup_base: str = Field(
        "",
        description="muP: initial weights and learning rates scaled so that those of this narrower config hold, such as "
        "hidden_size=64,num_attention_heads=2",
    )
    optimizer_in_backward: bool = Field(False, description="each parameter is updated, its gradient freed, as it is born")
    optim_offload: bool = Field(False, description="the optimizer's state and its update are on the host (CUDA)")
    activation_offload: bool = Field(False, description="activations wait for the backward pass in host memory (CUDA)")
    weight_offload: WeightOffload = Field(
        "none",
        description="frozen weights of the layers come when they are needed: from the memory of the host (CUDA), or from files",
    )
    fused_kernels: bool = Field(
        False, description="one kernel each for norms, rotary embedding and gated activation, which keeps its input alone"
    )
    loss_kernel: LossKernel = Field(
        "eager", description="compiled: fp32 logits are never in memory; fused: nor are gradients beside the logits"
    )
    loss_chunk_tokens: int = Field(0, ge=0, description="0: the model's own loss over all logits at once")
    rounding: Rounding = Field("stochastic", description="of updates of bf16 weights; nearest: as other programs round them")
    num_processes: int = Field(1, gt=0, description="ranks: one for each GPU, or each share of a CPU's cores")
    layout: Layout = Field(Layout(), description="how they share the job; unset: each has its own part of the batch")
    threads_per_process: int = Field(1, gt=0, description="CPU threads of each process")
    host_memory: HostMemory = Field("system", description="keep: freed host memory stays with the process (glibc)")

    @field_validator("optim")
    @classmethod
    def _is_planned(cls, name: str) -> str:
        if name not in optimizers():
            raise ValueError("no optimizer that is planned")
        return name

    @property
    def global_batch(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.data_parallel

    @property
    def data_parallel(self) -> int:
        """Return the number of ranks, or groups of ranks, with sequences of their own."""
        return self.num_processes // self.layout.ranks_per_replica

    @property
    def mechanisms(self) -> tuple[bool, ...]:
        """Return which kinds of parallelism, sharding and recomputation the plan uses.

        The ratio of two predicted speeds is less certain if the plans differ in these.
        """
        layout = self.layout
        degrees = (layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel, layout.expert_parallel)
        return (*(degree > 1 for degree in degrees), layout.fully_shard != "no", self.activation_checkpointing > 0)

    @property
    def flattens(self) -> bool:
        """Return whether a packed micro-batch is one long row. These kernels compute nothing between the sequences in it."""
        return self.packing and self.attention in ("block", "flash_attention_2", "flash_attention_3")

    @property
    def pad_multiple(self) -> int:
        """Return the number of which the widths of micro-batches are multiples."""
        return min(COMPILED_PAD_MULTIPLE if self.torch_compile != "off" else PAD_MULTIPLE, self.sequence_length)

    @property
    def changes_mathematics(self) -> tuple[str, ...]:
        """Return the names, for ``--allow``, of the plan's choices that change the mathematics."""
        changes = [self.precision] if self.precision in _CHANGES_MATHEMATICS else []
        allow = optimizers()[self.optim].allow
        return tuple(changes if allow is None else [*changes, allow])

    @property
    def traced_precision(self) -> TracedPrecision:
        """Return the precision of the trace that has this plan's tensor sizes.

        fp16 and fp8 have the sizes of bf16, and tf32 those of fp32.
        """
        if self.precision in ("fp32", "tf32"):
            return "fp32"
        # Gathered weights are in bf16 already: nothing is cast in the layers.
        is_pure = self.precision == "bf16-weights" or self.layout.gathers or self.layout.master_weights
        return "bf16-pure" if is_pure else "bf16"

    @property
    def rounds_to_nearest(self) -> bool:
        """Return whether updates of bf16 weights are rounded to the nearest value, as torch's own optimizers do."""
        return self.precision == "bf16-weights" and self.rounding == "nearest"

    @property
    def parameter_bytes(self) -> int:
        return 2 if self.precision == "bf16-weights" else 4

    def choices(self) -> tuple[tuple[str, str], ...]:
        """Return (kind, text) for each choice that is not the plain one. Kinds are those of CHOICE_KINDS."""
        recomputed = f"recompute {self.activation_checkpointing}{HOW_RECOMPUTED[self.recompute_granularity]}"
        choices = [
            (True, "precision", self.precision),
            (True, "micro-batch", f"{self.per_device_train_batch_size} x {self.gradient_accumulation_steps}"),
            (self.num_processes > 1, "ranks", self._processes_label()),
            (self.layout != ALONE, "layout", self.layout.label()),
            (self.activation_checkpointing > 0, "recompute", recomputed),
            (self.attention != "sdpa", "other", f"{self.attention} attention"),
            (self.torch_compile != "off", "compile", f"compile {self.torch_compile}"),
            (self.fused_kernels, "other", "fused kernels"),
            (self.loss_kernel != "eager", "other", f"{self.loss_kernel} loss"),
            (self.loss_chunk_tokens > 0, "other", "chunked loss"),
            (self.packing, "other", "packed"),
            (self.rounds_to_nearest, "other", "rounded to nearest"),
            (self.host_memory != "system", "other", "keep memory"),
            (self.weight_offload != "none", "other", f"weights on {self.weight_offload}"),
            (self.activation_offload, "other", "activations on host"),
            (True, "optimizer", f"{self.optim} {self.optim_args}" if self.optim_args else self.optim),
            (self.mup_base != "", "other", f"muP from {self.mup_base}"),
            (self.optimizer_in_backward, "optimizer", "in backward"),
            (self.optim_offload, "optimizer", "optimizer on host"),
        ]
        return tuple((kind, text) for is_chosen, kind, text in choices if is_chosen)

    def label(self) -> str:
        """Return one short line: ``bf16 · 4 x 2 · compile layer · adamw_torch_fused``."""
        return SEPARATOR.join(text for _, text in self.choices())

    def _processes_label(self) -> str:
        if self.device == "cpu":
            return f"{self.num_processes} processes x {self.threads_per_process} threads"
        return f"{self.num_processes} ranks"


TRAINER_BATCH = 8  # per_device_train_batch_size of transformers.TrainingArguments


def plain_default(host: Host, profile: ModelProfile, workload: Workload) -> Plan:
    """Return the plan of transformers.Trainer without any options: fp32, 8 sequences at once, fused AdamW, padding.

    A batch is not split if its loss does not follow from the losses of its parts.
    """
    if profile.isolation.loss_splits:
        together = workload.rows_together
        ranks = gcd(host.num_devices, workload.num_units)
        sequences_per_rank = workload.global_batch // ranks
        micro_batch = together * max(
            units for units in range(1, TRAINER_BATCH // together + 1) if sequences_per_rank // together % units == 0
        )
    else:
        ranks = 1
        sequences_per_rank = workload.global_batch
        micro_batch = workload.global_batch
    return Plan(
        device=host.device,
        host=host.fingerprint,
        model=profile.model_hash,
        sequence_length=workload.sequence_length,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=sequences_per_rank // micro_batch,
        num_processes=ranks,
        threads_per_process=host.cpu.usable_cores if host.cpu else 1,
        attention="sdpa" if "sdpa" in profile.declares.attention_kernels else "eager",
    )
