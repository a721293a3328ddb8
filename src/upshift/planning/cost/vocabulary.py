"""Predict the segment with the head and the loss if the loss has a kernel of its own, or if ranks divide its words.

The traced segment holds some live bytes for every word and token: bf16 logits, their fp32 copy, log-probabilities, gradients.

- loss_kernel=compiled: fp32 values live in registers alone. The logits stay, and in the backward pass their gradient beside
  them.
- loss_kernel=fused: the gradient takes the place of the logits (Transformer Engine's and Liger Kernel's cross entropy).
- vocabulary_parallel: a rank has the logits of its own words alone (Megatron-LM's vocab_parallel_cross_entropy, Shoeybi et al.
  2019, section 3; torch.distributed.tensor.parallel.loss_parallel). With sequence parallelism ranks gather the head's input.
  torch's loss_parallel computes the loss and its gradient operator by operator: at their height, with one fp32 value more.
"""

from __future__ import annotations

from dataclasses import dataclass

from upshift.models.profile import ModelProfile, PassCost, Polynomial, Segment, StepTrace
from upshift.planning.cost.divide import of_constants, scaled, total
from upshift.planning.cost.share import compute_bytes
from upshift.planning.plan import Plan

MOST_BYTES = 32  # at most, for a word of a token, or for an element of its hidden state
LABEL_BYTES = 64  # of a token's labels, beside these bytes
FULL_BYTES = 4  # of an fp32 value
# Words of the logits' size that a loss kernel moves, forward and backward: compiled, they are read for the sum of exponentials
# and for the loss, then read and their gradient written; fused, read once and the gradient written over them.
MOVED_WORDS = {"compiled": (2.0, 2.0), "fused": (2.0, 0.0)}


def with_own_loss(profile: ModelProfile, trace: StepTrace, plan: Plan) -> StepTrace:
    """Return the trace with the plan's way of computing the loss.

    Return the same trace if that is the model's own way, over all words.
    """
    if plan.loss_kernel == "eager" and not plan.layout.vocabulary_parallel:
        return trace
    head = _Head(profile.vocab_size or 0, profile.hidden_size or 0, plan)
    declared = "embedding_rowwise" in profile.declares.tensor_parallel_plan.values()
    part = 1.0 / plan.layout.tensor_parallel if plan.layout.vocabulary_parallel and not declared else 1.0

    def divided(gaps: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return (of_constants(gaps[0], part), *gaps[1:-1], head.segment(gaps[-1]))

    again = {way: divided(gaps) for way, gaps in trace.gaps_recomputed.items()}
    return trace.model_copy(update={"gaps": divided(trace.gaps), "gaps_recomputed": again})


def bytes_a_word(size: float, vocabulary: int, hidden: int) -> float:
    """Return how many of ``size`` bytes a token belong to each word of the vocabulary.

    It is the multiple of 2 that leaves the fewest whole elements of hidden states, or the nearest if no multiple leaves whole
    ones.
    """
    words = range(-MOST_BYTES, MOST_BYTES + 1, 2)
    rests = [(abs(rest := round((size - word * vocabulary) / hidden)), rest, word) for word in words]
    exact = [entry for entry in rests if abs(size - entry[2] * vocabulary - entry[1] * hidden) <= LABEL_BYTES]
    whole = [entry for entry in exact if entry[0] <= MOST_BYTES]
    return float(min(whole or rests)[2])


@dataclass(frozen=True)
class _Head:
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
        others = 1.0 - 1.0 / layout.tensor_parallel if layout.vocabulary_parallel and layout.sequence_parallel else 0.0
        return Polynomial(bs=compute_bytes(self.plan) * self.hidden * others)

    def segment(self, gap: Segment) -> Segment:
        nothing, gathered = Polynomial(), self._gathered
        left, again = (nothing, gathered) if self.plan.layout.gather_again else (gathered, nothing)
        entered = bytes_a_word(gap.forward.left.bs, self.vocabulary, self.hidden)
        size = compute_bytes(self.plan)
        most = {"eager": float(MOST_BYTES), "compiled": 2.0 * size, "fused": 1.0 * size}[self.plan.loss_kernel]
        stays = min(entered, most if self.plan.loss_kernel == "eager" else size)
        before, after, freed = (0.0, 0.0), (entered, stays), scaled(left, -1.0)
        return Segment(
            forward=self._moves(
                self._pass(gap.forward, before, stays if self.plan.loss_kernel != "eager" else most, left, gathered), 0
            ),
            backward=self._moves(self._pass(gap.backward, after, most, freed, again), 1),
            backward_accumulating=self._moves(self._pass(gap.backward_accumulating, after, most, freed, again), 1),
        )

    def _moves(self, cost: PassCost, direction: int) -> PassCost:
        """Return the cost with the bytes of logits that the kernel moves. The norm before the head, small beside them, is left
        out."""
        if self.plan.loss_kernel == "eager":
            return cost
        words = MOVED_WORDS[self.plan.loss_kernel][direction] * compute_bytes(self.plan) * self.vocabulary / self._ranks
        return cost.model_copy(update={"moved_bytes": cost.moved_bytes._replace(bs=words)})

    def _pass(self, cost: PassCost, entered: tuple[float, float], most: float, left: Polynomial, rise: Polynomial) -> PassCost:
        """Return the cost of a pass with the plan's way of computing the loss.

        ``entered``: bytes of a word that are live before the pass, as traced and now. ``most``: bytes of a word that may be live
        in it.
        """

        def now(size: Polynomial) -> Polynomial:
            word = bytes_a_word(size.bs, self.vocabulary, self.hidden)
            live = min(max(entered[0] + word, 0.0), most)
            if self.plan.loss_kernel == "eager" and live > 2 * FULL_BYTES:
                live += FULL_BYTES
            rest = (size.bs - word * self.vocabulary) / (self._ranks if self.plan.layout.sequence_parallel else 1)
            words = (live - entered[1]) * self.vocabulary / self._ranks
            return size._replace(one=size.one / self._ranks, bs=rest + words)

        def work(size: Polynomial) -> Polynomial:
            return scaled(size, 1.0 / self._ranks)

        return cost.model_copy(
            update={
                "left": total(now(cost.left), left), "rise": tuple(total(now(term), rise) for term in cost.rise),
                "released": work(cost.released), "matmul_flops": work(cost.matmul_flops),
                "moved_bytes": work(cost.moved_bytes), "matmul_bytes": work(cost.matmul_bytes),
            }
        )  # fmt: skip
