"""Define the events of a running job. One callback gets them as frozen values; other processes send them as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from upshift.value import Value

Unit = Literal["tokens", "rows"]  # what a run counts
FailedPass = Literal["step", "evaluation", "reference", "KL pass"]  # where memory ran out; all but the step compute no gradients
EARLY_STOPPING = "early stopping"  # the reason of a run that ends because its held-out loss no longer falls


@dataclass(frozen=True)
class Started:
    step: int  # optimizer steps done earlier; more than 0 when resumed
    max_steps: int
    tokens: int
    num_parameters: int
    plan_label: str
    resumed_from: str | None  # the checkpoint's path


@dataclass(frozen=True)
class StepDone:
    step: int
    max_steps: int
    tokens: int  # seen so far, padding not counted
    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens_per_second: float  # over the last steps; real tokens
    seconds_left: float
    resident_bytes: int  # of this process; on a GPU, in use on the device
    reward_accuracy: float | None = None  # of pairs: the share whose chosen answer has the larger reward
    reward_margin: float | None = None  # of pairs: the mean reward of the chosen answer over that of the rejected one
    kl: float | None = None  # of rated completions: KTO's KL term
    logged_loss: float | None = None  # mean since the previous logged step; None: this step is not logged
    logged_reward_accuracy: float | None = None  # of pairs: means since the previous logged step
    logged_reward_margin: float | None = None
    logged_kl: float | None = None
    unit: Unit = "tokens"  # of ``tokens`` and their speed; images and sounds are counted as rows


@dataclass(frozen=True)
class OutOfMemory:
    """Report that a step, or a pass without gradients, ran out of memory and was repeated with smaller micro-batches.

    The results are the same. After a step, all later steps use the smaller micro-batches too. After a pass without gradients, all
    later ones do, and training keeps its micro-batches.
    """

    step: int  # of an evaluation: the step before it
    largest: tuple[int, ...]  # rows and tokens a row of the micro-batch that did not fit
    smaller: tuple[int, ...]  # rows and tokens a row of the largest micro-batch from now on
    verdict: str  # the verdict of the autopsy
    autopsy: str  # path of its file
    failed: FailedPass = "step"


@dataclass(frozen=True)
class Doubted:
    """Warn of something that goes wrong or probably will: before the first step, or when the best model cannot be loaded."""

    words: str


@dataclass(frozen=True)
class Waited:
    """Report that ranks wait for one that does not come, or that a rank is slower than the others."""

    step: int
    words: str


@dataclass(frozen=True)
class Healed:
    """Report that a restarted copy has the same state as the other copies again."""

    step: int


@dataclass(frozen=True)
class Evaluated:
    step: int
    tokens: int
    loss: float
    reward_accuracy: float | None = None  # as in StepDone
    reward_margin: float | None = None
    kl: float | None = None
    unit: Unit = "tokens"
    metrics: dict[str, float] = field(default_factory=dict)  # of the task, beside the loss


@dataclass(frozen=True)
class ReferenceStarted:
    """Report that the log-probabilities of all pairs by the model before the training are being computed."""

    num_pairs: int  # or rated completions
    predicted_seconds: float | None  # None: the plan has no prediction
    noun: str = "pairs"


@dataclass(frozen=True)
class Referenced:
    """Report that the log-probabilities of all pairs by the model before the training were computed."""

    num_pairs: int  # as in ReferenceStarted
    seconds: float
    noun: str = "pairs"


@dataclass(frozen=True)
class Saved:
    path: str
    step: int


@dataclass(frozen=True)
class Finished:
    step: int
    tokens: int
    seconds: float
    reason: str  # "finished", or the requested early end: "tokens", "seconds" or EARLY_STOPPING


Event = (
    Started | Doubted | StepDone | OutOfMemory | Waited | Healed | Evaluated | ReferenceStarted | Referenced | Saved | Finished
)
OnEvent = Callable[[Event], None]
_CLASSES = {kind.__name__: kind for kind in get_args(Event)}


def event_to_json(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def event_from_json(line: str) -> Event:
    fields = json.loads(line)
    event: Event = _CLASSES[fields.pop("event")](**fields)
    return event


class SentEvent(Value):
    """Carry an event from a child of a fork server to its parent."""

    line: str  # JSON

    @property
    def event(self) -> Event:
        return event_from_json(self.line)


def to_sent_event(event: Event) -> SentEvent:
    return SentEvent(line=event_to_json(event))
