"""Train some steps of two micro-batches on a pretended GPU. Print how often the host waits for it in the last one, as JSON."""

import json
import sys

import parallel_runs
import pretended_cuda
from parallel_runs import Case

STEPS = 3


def main(precisions: list[str]) -> None:
    from upshift.training import step as step_module

    waits: dict[str, dict[str, int]] = {}
    plain_step = step_module.TrainStep.step

    def counted_step(self, *arguments, **options):  # type: ignore[no-untyped-def]
        pretended_cuda.clear_counters()
        result = plain_step(self, *arguments, **options)
        waits[self.plan.precision] = dict(pretended_cuda.host_waits())
        return result

    step_module.TrainStep.step = counted_step
    for precision in precisions:
        parallel_runs.train(Case(device="cuda", steps=STEPS, layers=4, micro_batch=4, plan={"precision": precision}))
    print(json.dumps(waits))


if __name__ == "__main__":
    main(sys.argv[1:])
