"""Adapt the traced segment of the head and the loss to the plan's kernel of the loss.

The traced segment holds some live bytes for every word and token: bf16 logits, their fp32 copy, log-probabilities and
gradients.

- loss_kernel=compiled: fp32 values live in registers alone. The logits stay, and in the backward pass their gradient beside
  them.
- loss_kernel=fused: the gradient takes the place of the logits (Transformer Engine's and Liger Kernel's cross entropy).
- vocabulary_parallel: a rank has the logits of its own words alone (Megatron-LM's vocab_parallel_cross_entropy, Shoeybi et al.
  2019, section 3; torch.distributed.tensor.parallel.loss_parallel). With sequence parallelism ranks gather the head's input.
  torch's loss_parallel computes the loss and its gradient operator by operator: at their peak, with one more fp32 value.
"""

from __future__ import annotations

from dataclasses import dataclass

from upshift.models.profile import ModelProfile, PassCost, Polynomial, Segment, StepTrace
from upshift.planning.cost.parallel_trace import add, scale, scale_constants
from upshift.planning.cost.partition import compute_bytes
from upshift.planning.plan import Plan

MAX_BYTES = 32  # the most for a word of a token, or for an element of its hidden state
LABEL_BYTES = 64  # of a token's labels, which come on top
FULL_BYTES = 4  # of an fp32 value
# How often a loss kernel moves bytes of the logits' size, forward and backward. A compiled one reads them for the sum of
# exponentials and for the loss, then reads them and writes their gradient. A fused one reads them once and writes the gradient
# over them.
MOVED_WORDS = {"compiled": (2.0, 2.0), "fused": (2.0, 0.0)}


def apply_loss_kernel(profile: ModelProfile, trace: StepTrace, plan: Plan) -> StepTrace:
    """Return the trace with the loss computed by the plan's kernel.

    Return the same trace if the model's own code computes the loss over all words.
    """
    if plan.loss_kernel == "eager" and not plan.layout.vocabulary_parallel:
        return trace
    head = _LossHead(profile.vocab_size or 0, profile.hidden_size or 0, plan)
    declares_rowwise = "embedding_rowwise" in profile.declares.tensor_parallel_plan.values()
    embedding_part = 1.0
    if plan.layout.vocabulary_parallel and not declares_rowwise:
        embedding_part = 1.0 / plan.layout.tensor_parallel

    def adapt(gaps: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return (scale_constants(gaps[0], embedding_part), *gaps[1:-1], head.segment(gaps[-1]))

    gaps_recomputed = {granularity: adapt(gaps) for granularity, gaps in trace.gaps_recomputed.items()}
    return trace.model_copy(update={"gaps": adapt(trace.gaps), "gaps_recomputed": gaps_recomputed})


def bytes_per_word(size: float, vocabulary: int, hidden: int) -> float:
    """Return how many of ``size`` bytes a token belong to each word of the vocabulary.

    It is the multiple of 2 that leaves the fewest whole bytes of hidden states. If no multiple leaves whole ones, it is the
    nearest.
    """
    candidates = []  # (size of the remainder, remainder in bytes of each hidden element, bytes of a word)
    exact = []
    for word in range(-MAX_BYTES, MAX_BYTES + 1, 2):
        remainder = round((size - word * vocabulary) / hidden)
        candidate = (abs(remainder), remainder, word)
        candidates.append(candidate)
        if abs(size - word * vocabulary - remainder * hidden) <= LABEL_BYTES and abs(remainder) <= MAX_BYTES:
            exact.append(candidate)
    return float(min(exact or candidates)[2])


@dataclass(frozen=True)
class _LossHead:
    """The head and the loss of a plan, for a model of ``vocabulary`` words and ``hidden`` elements of a hidden state."""

    vocabulary: int
    hidden: int
    plan: Plan

    @property
    def _ranks(self) -> int:
        return self.plan.layout.tensor_parallel if self.plan.layout.vocabulary_parallel else 1

    @property
    def _gathered(self) -> Polynomial:
        """Return the bytes of the other ranks' tokens in the head's input; nothing where each rank has all tokens."""
        layout = self.plan.layout
        others_share = 0.0
        if layout.vocabulary_parallel and layout.sequence_parallel:
            others_share = 1.0 - 1.0 / layout.tensor_parallel
        return Polynomial(bs=compute_bytes(self.plan) * self.hidden * others_share)

    def segment(self, gap: Segment) -> Segment:
        """Return the traced segment ``gap`` with the plan's kernel of the loss."""
        nothing = Polynomial()
        gathered = self._gathered
        saved = nothing if self.plan.layout.gather_again else gathered
        gathered_again = gathered if self.plan.layout.gather_again else nothing
        element_size = compute_bytes(self.plan)
        traced_logits = bytes_per_word(gap.forward.left.bs, self.vocabulary, self.hidden)
        if self.plan.loss_kernel == "eager":
            limit = float(MAX_BYTES)
            logits = min(traced_logits, limit)
            forward_limit = limit
        else:
            limit = {"compiled": 2.0 * element_size, "fused": 1.0 * element_size}[self.plan.loss_kernel]
            logits = min(traced_logits, element_size)
            forward_limit = logits
        before_forward = (0.0, 0.0)
        before_backward = (traced_logits, logits)
        freed = scale(saved, -1.0)
        forward = self._adapt_pass(gap.forward, before_forward, forward_limit, saved, gathered)
        backward = self._adapt_pass(gap.backward, before_backward, limit, freed, gathered_again)
        accumulating = self._adapt_pass(gap.backward_accumulating, before_backward, limit, freed, gathered_again)
        return Segment(
            forward=self._adapt_traffic(forward, 0),
            backward=self._adapt_traffic(backward, 1),
            backward_accumulating=self._adapt_traffic(accumulating, 1),
        )

    def _adapt_traffic(self, cost: PassCost, direction: int) -> PassCost:
        """Return the cost with the bytes of logits that the kernel moves. ``direction``: 0 is forward, 1 is backward.

        The norm before the head is left out: it is small beside them.
        """
        if self.plan.loss_kernel == "eager":
            return cost
        logits_bytes = MOVED_WORDS[self.plan.loss_kernel][direction] * compute_bytes(self.plan) * self.vocabulary / self._ranks
        return cost.model_copy(update={"moved_bytes": cost.moved_bytes._replace(bs=logits_bytes)})

    def _adapt_pass(
        self, cost: PassCost, live_before: tuple[float, float], limit: float, left: Polynomial, rise: Polynomial
    ) -> PassCost:
        """Return the cost of a pass with the plan's kernel of the loss.

        Args:
            live_before: bytes of a word that are live before the pass, in the trace and with the kernel.
            limit: the most bytes of a word that may be live in the pass.
            left: bytes of gathered tokens that the pass leaves.
            rise: bytes of gathered tokens while the pass runs.
        """

        def adapt(size: Polynomial) -> Polynomial:
            word = bytes_per_word(size.bs, self.vocabulary, self.hidden)
            traced_before, adapted_before = live_before
            live = min(max(traced_before + word, 0.0), limit)
            if self.plan.loss_kernel == "eager" and live > 2 * FULL_BYTES:
                live += FULL_BYTES
            ranks_sharing_tokens = self._ranks if self.plan.layout.sequence_parallel else 1
            hidden_bytes = (size.bs - word * self.vocabulary) / ranks_sharing_tokens
            logits_bytes = (live - adapted_before) * self.vocabulary / self._ranks
            return size._replace(one=size.one / self._ranks, bs=hidden_bytes + logits_bytes)

        def divide(size: Polynomial) -> Polynomial:
            return scale(size, 1.0 / self._ranks)

        return cost.model_copy(
            update={
                "left": add(adapt(cost.left), left),
                "rise": tuple(add(adapt(term), rise) for term in cost.rise),
                "released": divide(cost.released),
                "matmul_flops": divide(cost.matmul_flops),
                "moved_bytes": divide(cost.moved_bytes),
                "matmul_bytes": divide(cost.matmul_bytes),
            }
        )
