"""Define ModelProfile: the facts about a model that planning needs. It works for any architecture, without weights or torch.

A training step is cut into segments in forward order: the gap before the first layer, each layer of each stack, and the gaps
between and after the stacks. The last gap holds the loss head. Each segment has exact polynomials of the micro-batch ``b`` and
the sequence length ``s`` for the bytes that it leaves in memory, its peak while it runs, and its FLOPs. Planning adds up the
segments, and guesses no number of bytes per layer.
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
# Granularity of recomputation. The first two are Megatron-LM's terms (Korthikanti et al. 2022, section 5).
Granularity = Literal["full", "selective", "alternate"]


class Variant(NamedTuple):
    """One way to run the step. Each variant is traced on its own, because its kernels or saved tensors differ."""

    precision: TracedPrecision
    attention: str
    masked: bool
    divided: bool = False  # also trace it as one of two ranks of tensor parallelism
    selective: bool = False  # also trace it with selective recomputation
    alternate: bool = False  # also trace it with alternate recomputation
    compiled: bool = False  # also calculate the bytes that compiled layers save


def with_eager_attention(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Return the variants of a model that has no ``sdpa``: ``eager`` computes whole scores, with an added mask or without one.

    Each has the flags of the ``sdpa`` variant whose place it takes."""
    others = [variant for variant in variants if variant.attention not in ("sdpa", "eager")]
    replaced = [variant._replace(attention="eager", masked=False) for variant in variants if variant.attention == "sdpa"]
    eager = replaced or [variant for variant in variants if variant.attention == "eager"]
    return tuple(dict.fromkeys((*others, *eager)))


# Both traces and plans use this size. A larger one raises the peak by chunk x vocabulary only.
LOSS_CHUNK_TOKENS = 512
BLOCK_QUERIES = 128  # queries in a block of block attention; measured in docs/log.md


def labelled_share(objective: str) -> float:
    """Return the share of tokens that have a label. Source for masked-lm: BERT, https://arxiv.org/abs/1810.04805, section 3.1."""
    return 0.15 if objective == "masked-lm" else 1.0


def num_sides(objective: str) -> int:
    """Return 2 if an encoder and a decoder each take ``sequence_length`` tokens of a sequence twice as long, else 1."""
    return 2 if objective == "seq2seq-lm" else 1


class Polynomial(NamedTuple):
    """The polynomial c0 + c1*b + c2*s + c3*b*s + c4*s*s + c5*b*s*s, in bytes, FLOPs or counts. In JSON it is six numbers."""

    one: float = 0.0
    b: float = 0.0
    s: float = 0.0
    bs: float = 0.0
    ss: float = 0.0
    bss: float = 0.0

    def at(self, batch: int, sequence: int) -> float:
        """Return the value at one batch and sequence length."""
        bs = batch * sequence
        return (
            self.one
            + self.b * batch
            + self.s * sequence
            + self.bs * bs
            + self.ss * sequence * sequence
            + self.bss * bs * sequence
        )


def highest_at(polynomials: tuple[Polynomial, ...], batch: int, sequence: int) -> float:
    """Return the largest value of several polynomials at one point, or 0 if there are none."""
    return max((polynomial.at(batch, sequence) for polynomial in polynomials), default=0.0)


class PassCost(Value):
    """The cost of one segment's forward or backward pass. Bytes are relative to those that are live when the segment begins."""

    left: Polynomial  # bytes that stay live when the segment ends (negative if the backward pass frees memory)
    released: Polynomial  # the part of these that is freed at the end of the forward pass (autocast's copies of weights)
    rise: tuple[Polynomial, ...]  # upper envelope of live bytes while the segment runs
    matmul_flops: Polynomial  # executed, recomputation included; one multiply-add = 2 FLOPs
    attention_flops: Polynomial  # executed by fused attention kernels; a causal kernel counts half
    moved_bytes: Polynomial  # read and written by every kernel that is not a matrix product
    matmul_bytes: Polynomial  # read and written by matrix products and attention
    num_kernels: int


class ReleasedGradients(Value):
    """The memory of a first backward pass that updates each parameter, and frees its gradient, once the gradient is complete."""

    rise: tuple[Polynomial, ...]  # upper envelope of live bytes, without the gradients that were completed before
    moments: tuple[tuple[int, Polynomial], ...]  # elements of a parameter, and live bytes when its gradient is complete
    born: Polynomial  # bytes of all gradients that are completed


class Segment(Value):
    """The costs of the forward pass, a first backward pass that allocates gradients, and one that adds to existing gradients."""

    forward: PassCost
    backward: PassCost
    backward_accumulating: PassCost
    gradients_go: ReleasedGradients | None = None  # None if ranks share the layer
    compiled: Polynomial | None = None  # bytes that a compiled layer saves; None: unknown, or not a layer


class StackTrace(Value):
    """The segments of one stack. Entry i of ``plain`` and ``recomputed`` belongs to Stack.traced_layers[i]."""

    plain: tuple[Segment, ...]
    recomputed: dict[Granularity, tuple[Segment, ...]]  # with activation checkpointing; empty if the model does not offer it


class StepTrace(Value):
    """One forward and backward pass in one precision, with one attention kernel, with or without a mask."""

    precision: TracedPrecision
    attention: str  # sdpa | block | eager
    masked: bool  # an explicit attention mask (padding or packing) is built
    tensor_parallel: int  # 2: one of two ranks, with terms in the same order as in the trace of 1
    gaps: tuple[Segment, ...]  # before, between and after the stacks: len(stacks) + 1
    gaps_recomputed: dict[Granularity, tuple[Segment, ...]]  # next to recomputed layers, which hold other tensors at the border
    chunked_gap: Segment | None  # the last gap with the loss computed in chunks; None if the head cannot be split
    stacks: tuple[StackTrace, ...]


class Stack(Value):
    """A list of layers such as ``model.layers``. ``assignment[l]`` is the index in ``traced_layers`` that represents layer l."""

    path: str
    traced_layers: tuple[int, ...]
    assignment: tuple[int, ...]
    layer_trainable: tuple[int, ...]  # trainable parameters of each traced layer
    layer_frozen: tuple[int, ...] = ()  # frozen parameters of each traced layer; empty: as many in each

    @property
    def num_layers(self) -> int:
        return len(self.assignment)


class ParameterShape(Value):
    """A shape, and how many parameters of the model have it. The state of optimizers depends on shapes."""

    shape: tuple[int, ...]
    count: int

    @property
    def elements(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total


class Parameters(Value):
    """The number of a model's parameters, by part and by how they are trained and stored."""

    total: int  # tied parameters count once
    embedding: int
    layers: int
    head: int  # its own: of a head that is tied to the embedding, a bias or a copy beside an adapter, or 0
    other: int
    buffers_bytes: int
    tied: bool
    trainable: int  # parameters with gradients and optimizer state; the others are frozen
    trainable_layers: int
    trainable_head: int  # including a head that is tied to the embedding
    always_fp32: int  # trainable parameters that stay fp32 if the others are bf16, as in peft's adapters
    always_bf16: int = 0  # frozen parameters below an adapter that are bf16 in every plan
    trainable_bf16: int = 0  # trainable parameters that are bf16 in every plan: modules trained whole beside an adapter
    quantized: int = 0  # frozen parameters below an adapter that are stored in 4 bits
    quantized_bytes: int = 0  # bytes of these with their scales
    trainable_shapes: tuple[ParameterShape, ...]
    frozen_shapes: tuple[ParameterShape, ...] = ()  # for weights in 4 bits, the shape before they were packed
    looked_up: tuple[ParameterShape, ...] = ()  # the trainable tables that are only read by row, never used in a product

    @property
    def product_shapes(self) -> tuple[ParameterShape, ...]:
        """Return the shapes of the trainable matrices that are used in matrix products."""
        tables = {entry.shape: entry.count for entry in self.looked_up}
        remaining = ((entry.shape, entry.count - tables.get(entry.shape, 0)) for entry in self.trainable_shapes)
        return tuple(ParameterShape(shape=shape, count=count) for shape, count in remaining if count > 0 and len(shape) > 1)

    @property
    def whole_head(self) -> int:
        """Return the number of parameters that the head computes with, which may be the embedding's, too."""
        return self.head + (self.embedding if self.tied else 0)

    @property
    def adapter(self) -> bool:
        """Return whether the model has a peft adapter around it."""
        return self.always_fp32 > 0

    @property
    def largest(self) -> int:
        """Return the number of elements of the largest trainable tensor."""
        return max((shape.elements for shape in self.trainable_shapes), default=0)

    @property
    def num_tensors(self) -> int:
        """Return the number of trainable tensors."""
        return sum(shape.count for shape in self.trainable_shapes)

    def weight_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes of all parameters. ``parameter_bytes``: the bytes of one weight in the plan's precision."""
        planned = self.total - self.quantized - self.always_bf16 - self.trainable_bf16
        fixed = self.quantized_bytes + 2 * (self.always_bf16 + self.trainable_bf16)
        return planned * parameter_bytes + self.always_fp32 * (4 - parameter_bytes) + fixed

    def gradient_bytes(self, parameter_bytes: int) -> int:
        """Return the bytes of all gradients. Each has the dtype of its trainable parameter."""
        planned = self.trainable - self.trainable_bf16
        return planned * parameter_bytes + self.always_fp32 * (4 - parameter_bytes) + 2 * self.trainable_bf16


class TensorParallel(Value):
    """The parts of the model that its declared plan divides among the ranks of a tensor-parallel group."""

    divisor: int  # the greatest common divisor of heads and divided dimensions; each degree must divide it
    layers: int  # parameters in layers that are divided
    outside: int  # parameters of embedding and head that are divided


class Experts(Value):
    """The experts of a mixture-of-experts model."""

    count: int  # experts in one layer
    parameters: int  # parameters of all experts in all layers
    per_token: int  # experts of one layer that compute a token


class CachedLayers(Value):
    """Layers whose caches have equal sizes.

    Each layer caches elements for a token (keys and values, for up to ``window`` tokens), or for a sequence of any length (the
    states of a recurrence or a convolution)."""

    count: int = Field(gt=0)
    per_token: int = Field(ge=0)
    per_sequence: int = Field(ge=0)
    heads: int = Field(gt=0, description="of keys; one that all queries share cannot be divided among ranks")
    window: int | None = Field(None, gt=0)


class Images(Value):
    """The images of a row, as a trace ran them."""

    per_row: int = Field(gt=0)
    tokens: int = Field(gt=0, description="places that one image takes in a row")
    height: int = Field(gt=0, description="pixels")
    width: int = Field(gt=0, description="pixels")

    @property
    def tokens_per_row(self) -> int:
        """Return the places that the images of a row take."""
        return self.per_row * self.tokens

    def describe(self) -> str:
        """Return the number of a row's images, and the size of one."""
        return f"{self.per_row} image{'s' if self.per_row > 1 else ''} of {self.width} x {self.height} pixels"


class Isolation(Value):
    """The tokens of a row or a batch that affect a text's results, as tested on a small copy of the model."""

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
    left_padding: str = Field(
        "it was not tested", description="why texts must not be padded on the left, as generation does; empty: they may be"
    )
    by_token: str = Field("", description="why a text must not be generated token by token, with a cache; empty: it may be")
    reads_ahead: bool = Field(False, description="a token's results depend on the tokens behind it, so that no text is generated")
    shortest: int = Field(1, description="tokens of the shortest text that a model which encodes computes")
    loss_splits: bool = Field(True, description="a batch's loss is the mean of its texts' losses, each weighed by its labels")
    loss_shifts: bool = Field(True, description="a label is predicted from the labels before it: the loss of next tokens")
    exact_tokens: int | None = Field(
        None,
        description="a longer text changes the results of the other texts of its row or batch, as dynamic NTK and LongRoPE do; "
        "None: no length does",
    )
    drops_layers: bool = Field(False, description="in training it leaves out whole layers at random (LayerDrop)")
    missing_token_ids: tuple[str, ...] = Field((), description="unset in the config, and a training step fails without them")
    short_of_memory: bool = Field(False, description="the test ran out of memory, so a later one may prove more")

    def why_too_long(self, longest: int) -> str | None:
        """Return how a text of ``longest`` tokens changes the results of other texts, or None if it does not."""
        if self.exact_tokens is None or longest <= self.exact_tokens:
            return None
        return (
            f"the longest text has up to {longest:,} tokens, and above {self.exact_tokens:,} the model rotates the positions of "
            "all texts of a batch by factors that follow from the longest one (rope_parameters)"
        )

    def why_not_packed(self, kernel: str) -> str | None:
        """Return why texts must not share a row under this attention kernel, or None if they may."""
        if not self.proven:
            return f"that texts in a row do not reach each other is not proven: {self.reason}"
        return self.packing.get(kernel, f"texts in a row were not tested with {kernel} attention") or None


class Declares(Value):
    """The abilities that the model's class declares."""

    tensor_parallel_plan: dict[str, str] = Field(default_factory=dict)
    pipeline_parallel_plan: tuple[str, ...] = ()
    expert_parallel: bool = False
    no_split_modules: tuple[str, ...] = ()
    attention_kernels: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    gradient_checkpointing_per_layer: bool = False  # each layer has its own switch, so that k of L can be recomputed
    can_generate: bool = False


class ModelRuns(Value):
    """Describe what runs of the whole model give: its FLOPs, and the sizes of its cache. No variant of the step changes them."""

    forward_flops: Polynomial
    backward_flops: Polynomial
    kv_elements: Polynomial | None
    cache: tuple[CachedLayers, ...]


class ModelProfile(Value):
    """The facts about a model that planning needs."""

    key: str  # hash of config, library versions and traced range; names the cache file
    model_hash: str  # hash of the config only; plans refer to it
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
    sequence_range: tuple[int, int]  # the polynomials were fitted to lengths from the first to the second, and hold between them
    kv_elements: Polynomial | None  # key and value elements in the whole model's cache; None if it does not generate
    cache: tuple[CachedLayers, ...] = ()  # the layers that have a cache
    tensor_parallel: TensorParallel | None
    tensor_parallel_reason: str  # why it can, or cannot, be planned
    experts: Experts | None
    heads: tuple[int, int] | None  # heads of queries, and of keys; None if the config does not say
    chunked_loss_reason: str  # why the loss head can, or cannot, be computed in chunks
    forward_flops: Polynomial  # the whole model's, by flop_convention, without recomputation
    backward_flops: Polynomial  # likewise
    flop_convention: str = FLOP_CONVENTION
    images: Images | None = None  # None: rows of text alone
    is_estimated: bool = False  # from the sizes in the config, without a trace

    def step(self, *, precision: TracedPrecision, attention: str, masked: bool, tensor_parallel: int = 1) -> StepTrace | None:
        for step in self.steps:
            if (step.precision, step.attention, step.masked, step.tensor_parallel) == (
                precision,
                attention,
                masked,
                tensor_parallel,
            ):
                return step
        return None

    @property
    def num_layers(self) -> int:
        return sum(stack.num_layers for stack in self.stacks)

    @property
    def masks_padding(self) -> bool:
        """Return whether a mask must mark padding, because attention or the loss would use the padding tokens."""
        return self.objective != "causal-lm" or self.isolation.padding != "unmasked"

    def train_flops(self, batch: int, sequence: int) -> float:
        """Return the model FLOPs of one forward and backward pass, by flop_convention."""
        return self.forward_flops.at(batch, sequence) + self.backward_flops.at(batch, sequence)
