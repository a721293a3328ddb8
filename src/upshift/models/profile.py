"""Define ModelProfile: what planning needs of a model, for any architecture, with no weights loaded and without torch.

A training step is cut into segments in forward order: the gap before the first layer, each layer of each stack, the gap
between or after the stacks (the last gap holds the loss head). Every segment knows, as exact polynomials of micro-batch
``b`` and sequence length ``s``, what it leaves in memory, how high it rises while it runs, and what it computes. Planning
walks the segments; nothing is multiplied by a guessed number of bytes per layer.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from upshift.units import FLOP_CONVENTION
from upshift.value import Value

Objective = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "image-classification",
]
TracedPrecision = Literal["fp32", "bf16", "bf16-pure"]
# Of recomputation; the first two in Megatron-LM's words (Korthikanti et al. 2022, section 5).
Granularity = Literal["full", "selective", "alternate"]


class Variant(NamedTuple):
    """One way to run the step. Variants are traced apart because their kernels or saved tensors differ."""

    precision: TracedPrecision
    attention: str
    masked: bool
    divided: bool = False  # also as one of two ranks of tensor parallelism
    selective: bool = False  # recomputed selectively too
    alternate: bool = False  # and alternately
    compiled: bool = False  # also what layers keep when they are compiled


# What the chunked loss was traced with, and what plans use; a larger size moves the peak by chunk x vocabulary only.
LOSS_CHUNK_TOKENS = 512
BLOCK_QUERIES = 128  # of block attention: measured in docs/log.md


def labelled_share(objective: str) -> float:
    """Return the share of tokens with a label. masked-lm: BERT, https://arxiv.org/abs/1810.04805, section 3.1."""
    return 0.15 if objective == "masked-lm" else 1.0


def num_sides(objective: str) -> int:
    """Return 2 if an encoder and a decoder each take ``sequence_length`` tokens of a sequence twice as long, else 1."""
    return 2 if objective == "seq2seq-lm" else 1


class Polynomial(NamedTuple):
    """The polynomial c0 + c1*b + c2*s + c3*b*s + c4*s*s + c5*b*s*s, in bytes, FLOPs or counts. JSON: a list of six numbers."""

    one: float = 0.0
    b: float = 0.0
    s: float = 0.0
    bs: float = 0.0
    ss: float = 0.0
    bss: float = 0.0

    def at(self, batch: int, sequence: int) -> float:
        bs = batch * sequence
        return (
            self.one
            + self.b * batch
            + self.s * sequence
            + self.bs * bs
            + self.ss * sequence * sequence
            + self.bss * bs * sequence
        )


def highest(polynomials: tuple[Polynomial, ...], batch: int, sequence: int) -> float:
    """Return the upper envelope of several polynomials at one point, or 0 when there are none."""
    return max((polynomial.at(batch, sequence) for polynomial in polynomials), default=0.0)


class PassCost(Value):
    """One direction (forward or backward) of one segment. Bytes are relative to what is live when the segment is entered."""

    left: Polynomial  # bytes that stay live when the segment is left (negative where the backward pass frees)
    released: Polynomial  # of those, bytes that go when the whole forward pass ends (autocast's copies of weights)
    rise: tuple[Polynomial, ...]  # upper envelope of live bytes while the segment runs
    matmul_flops: Polynomial  # executed, recomputation included; one multiply-add = 2 FLOPs
    attention_flops: Polynomial  # executed by fused attention kernels; a causal kernel counts half
    moved_bytes: Polynomial  # read and written by every kernel that is not a matrix product
    matmul_bytes: Polynomial  # read and written by matrix products and attention
    num_kernels: int


class GradientsGo(Value):
    """The first backward pass where each gradient goes as soon as it is whole: its parameter is updated then."""

    rise: tuple[Polynomial, ...]  # upper envelope of live bytes, without gradients that were whole before
    moments: tuple[tuple[int, Polynomial], ...]  # elements of a parameter, and live bytes when its gradient is whole
    born: Polynomial  # bytes of all gradients that become whole


class Segment(Value):
    """The costs of forward, first backward (gradients are born), and backward onto existing gradients (accumulation)."""

    forward: PassCost
    backward: PassCost
    backward_accumulating: PassCost
    gradients_go: GradientsGo | None = None  # None: of a rank that shares the layer
    compiled: Polynomial | None = None  # bytes that stay after its forward pass when compiled; None: not known, or no layer


class StackTrace(Value):
    """One stack's measured segments: entry i of ``plain`` / ``recomputed`` belongs to Stack.traced_layers[i]."""

    plain: tuple[Segment, ...]
    recomputed: dict[Granularity, tuple[Segment, ...]]  # under activation checkpointing; empty where it is not offered


class StepTrace(Value):
    """One forward and backward under one precision, attention kernel and kind of mask."""

    precision: TracedPrecision
    attention: str  # sdpa | block | eager
    masked: bool  # an explicit attention mask (padding or packing) is built
    tensor_parallel: int  # 2: one of two ranks; its terms stand in the same order as those of the trace of 1
    gaps: tuple[Segment, ...]  # before, between and after the stacks: len(stacks) + 1
    gaps_recomputed: dict[Granularity, tuple[Segment, ...]]  # beside recomputed layers, which hold other tensors at the border
    chunked_gap: Segment | None  # the last gap with the loss computed in chunks; None where the head cannot be split
    stacks: tuple[StackTrace, ...]


class Stack(Value):
    """A repeated run of layers, e.g. ``model.layers``. ``assignment[l]``: which of ``traced_layers`` stands for layer l."""

    path: str
    traced_layers: tuple[int, ...]
    assignment: tuple[int, ...]
    layer_trainable: tuple[int, ...]  # trainable parameters of each traced layer

    @property
    def num_layers(self) -> int:
        return len(self.assignment)


class ParameterShape(Value):
    """A shape of parameters, and how many parameters of the model have it. Optimizers' state depends on shapes."""

    shape: tuple[int, ...]
    count: int

    @property
    def elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


class Parameters(Value):
    total: int  # tied parameters once
    embedding: int
    layers: int
    head: int  # 0 where the head is tied to the embedding
    other: int
    buffers_bytes: int
    tied: bool
    trainable: int  # those with gradients and optimizer state; the others are frozen
    trainable_layers: int
    trainable_head: int  # a head that is tied to the embedding included
    always_fp32: int  # trainable ones that stay fp32 beside bf16 weights, as peft's adapters do
    always_bf16: int = 0  # frozen ones below an adapter that are in bf16, whatever the plan
    quantized: int = 0  # frozen ones below an adapter that are stored in 4 bits
    quantized_bytes: int = 0  # with their scales
    trainable_shapes: tuple[ParameterShape, ...]
    frozen_shapes: tuple[ParameterShape, ...] = ()  # of the others; of weights that are stored in 4 bits, as they are used
    looked_up: tuple[ParameterShape, ...] = ()  # of these, tables of which only rows are read: no product is computed with them

    @property
    def product_shapes(self) -> tuple[ParameterShape, ...]:
        """Return the shapes of trainable matrices that something is multiplied with."""
        tables = {entry.shape: entry.count for entry in self.looked_up}
        left = ((entry.shape, entry.count - tables.get(entry.shape, 0)) for entry in self.trainable_shapes)
        return tuple(ParameterShape(shape=shape, count=count) for shape, count in left if count > 0 and len(shape) > 1)

    @property
    def adapter(self) -> bool:
        """Return whether these are the parameters of a model with a peft adapter around it."""
        return self.always_fp32 > 0

    @property
    def largest(self) -> int:
        """Return the number of elements of the largest trainable tensor."""
        return max((shape.elements for shape in self.trainable_shapes), default=0)

    @property
    def num_tensors(self) -> int:
        """Return how many tensors are trained."""
        return sum(shape.count for shape in self.trainable_shapes)

    def weight_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes of all parameters, if a plan's weights take ``parameter_bytes`` each."""
        planned = self.total - self.quantized - self.always_bf16
        fixed = self.quantized_bytes + 2 * self.always_bf16
        return planned * parameter_bytes + self.always_fp32 * (4 - parameter_bytes) + fixed

    def gradient_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes of all gradients. Each has the dtype of its trainable parameter."""
        return self.trainable * parameter_bytes + self.always_fp32 * (4 - parameter_bytes)


class TensorParallel(Value):
    """The parts of the model that its own plan divides among the ranks of a tensor-parallel group."""

    divisor: int  # a degree must divide it: heads, and every divided dimension
    layers: int  # parameters of the layers that are divided
    outside: int  # likewise, of embedding and head


class Experts(Value):
    """A mixture of experts."""

    count: int  # of one layer
    parameters: int  # of all experts of all layers
    per_token: int  # of one layer, that a token is sent to


class CachedLayers(Value):
    """Layers whose caches are alike.

    Each keeps elements for a token (keys and values), up to ``window`` tokens, or for a sequence however long it is (states of
    a recurrence or a convolution)."""

    count: int = Field(gt=0)
    per_token: int = Field(ge=0)
    per_sequence: int = Field(ge=0)
    heads: int = Field(gt=0, description="of keys; one that all queries share cannot be divided among ranks")
    window: int | None = Field(None, gt=0)


class Isolation(Value):
    """The result of a test on a small copy of the model with random weights: which tokens of a row or a batch reach a text's
    results."""

    proven: bool = False
    reason: str = Field("it was not tested", description="why nothing is proven; empty where it is")
    packing: dict[str, str] = Field(
        default_factory=dict,
        description="by attention kernel, why texts must not share a row; empty: no text there changes another's results",
    )
    padding: Literal["unmasked", "masked", "none"] = Field(
        "masked",
        description="behind a text. unmasked: it changes nothing; masked: a mask must say where it is; none: it changes results",
    )
    padding_reason: str = Field("", description="what was seen of padding that changes results")
    left_padding: str = Field("", description="why texts must not be padded on the left, as generation does; empty: they may be")
    by_token: str = Field("", description="why a text must not be generated token by token, with a cache; empty: it may be")
    loss_splits: bool = Field(True, description="a batch's loss is the mean of its texts' losses, each weighed by its labels")

    loss_shifts: bool = Field(True, description="a label's loss is of the place before it: the loss of next tokens")

    def why_not_packed(self, kernel: str) -> str | None:
        """Return why texts must not share a row with this attention kernel, or None if they may."""
        if not self.proven:
            return f"that texts in a row do not reach each other is not proven: {self.reason}"
        return self.packing.get(kernel, f"texts in a row were not tested with {kernel} attention") or None


class Declares(Value):
    """Abilities that the model's own class declares."""

    tensor_parallel_plan: dict[str, str] = Field(default_factory=dict)
    pipeline_parallel_plan: tuple[str, ...] = ()
    expert_parallel: bool = False
    no_split_modules: tuple[str, ...] = ()
    attention_kernels: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    gradient_checkpointing_per_layer: bool = False  # each layer can be told apart, so k of L can be recomputed
    can_generate: bool = False


class ModelProfile(Value):
    key: str  # hash of config + library versions + traced range; names the cache file
    model_hash: str  # hash of the config alone; a plan is made for it
    architecture: str  # class name, e.g. LlamaForCausalLM
    model_type: str
    objective: Objective
    versions: dict[str, str]
    vocab_size: int | None
    hidden_size: int | None
    max_positions: int | None  # None: the architecture sets no limit
    parameters: Parameters
    declares: Declares
    isolation: Isolation = Isolation()
    stacks: tuple[Stack, ...]
    steps: tuple[StepTrace, ...]
    sequence_range: tuple[int, int]  # the polynomials were fitted on these lengths, and hold between them
    kv_elements: Polynomial | None  # key and value elements of the whole model's cache; None where it does not generate
    cache: tuple[CachedLayers, ...] = ()  # of the layers that keep one, as the model's own cache has them
    tensor_parallel: TensorParallel | None
    tensor_parallel_reason: str  # why it can, or cannot, be planned
    experts: Experts | None
    heads: tuple[int, int] | None  # of queries and of keys, where the config says
    chunked_loss_reason: str  # why the loss head can, or cannot, be computed in chunks
    forward_flops: Polynomial  # convention below, whole model, no recomputation
    backward_flops: Polynomial  # as above
    flop_convention: str = FLOP_CONVENTION

    def step(self, *, precision: TracedPrecision, attention: str, masked: bool, tensor_parallel: int = 1) -> StepTrace | None:
        for step in self.steps:
            if (step.precision, step.attention, step.masked, step.tensor_parallel) == (
                precision, attention, masked, tensor_parallel,
            ):  # fmt: skip
                return step
        return None

    @property
    def num_layers(self) -> int:
        return sum(stack.num_layers for stack in self.stacks)

    @property
    def masks_padding(self) -> bool:
        """Return whether a mask must say where padding is: attention looks at later positions, or the loss counts them."""
        return self.objective != "causal-lm" or self.isolation.padding != "unmasked"

    def train_flops(self, batch: int, sequence: int) -> float:
        """Return the model FLOPs of one forward and backward, in the convention above."""
        return self.forward_flops.at(batch, sequence) + self.backward_flops.at(batch, sequence)
