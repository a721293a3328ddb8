"""Define Job: everything that a process needs to run one training, except the tokens. It is written and read as JSON."""

from __future__ import annotations

from pydantic import Field

from upshift.models.source import AdapterOptions, ModelSource, find_model_to_train
from upshift.planning.plan import Plan
from upshift.record import Numbers
from upshift.training.arguments import Arguments
from upshift.training.data.data_options import DataOptions
from upshift.value import Value


class Job(Value):
    model_reference: str
    from_config: bool = Field(False, description="random weights instead of the model's own")
    adapter: AdapterOptions = Field(AdapterOptions(), description="a new adapter around the model; without a rank there is none")
    plan: Plan
    whole_plan: Plan | None = Field(None, description="of several copies that each have a job: that of all")
    arguments: Arguments
    data: str = Field(description="path, as the user gave it")
    data_options: DataOptions = DataOptions()
    global_batch: int = Field(gt=0, description="sequences per optimizer step")
    output: str
    overwrite: bool = False
    heal: bool = Field(False, description="each process is a whole copy that the others heal when it comes back")
    resume: bool = Field(False, description="continue from the output's newest checkpoint; start where there is none")
    checkpoint: str | None = Field(None, description="the whole one that a resumed job goes on from, once it is chosen")
    predicted: Numbers | None = None
    baseline: Numbers | None = None
    baseline_name: str | None = None
    model_flops_per_token: float | None = None
    stop_after_tokens: int | None = Field(None, gt=0, description="end early; the schedule stays that of max_steps")
    stop_after_seconds: float | None = Field(None, gt=0, description="of optimizer steps, in this process; end early")
    evaluate_at_tokens: tuple[int, ...] = Field((), description="evaluate as soon as that many tokens were seen")
    evaluate_at_steps: tuple[int, ...] = Field((), description="beside eval_steps of the arguments, and the end")

    @property
    def recorded_plan(self) -> Plan:
        """Return the plan for the records of the run."""
        return self.whole_plan or self.plan

    def source(self) -> ModelSource:
        return find_model_to_train(self.model_reference, self.adapter, has_reward_head=self.data_options.has_reward_head)
