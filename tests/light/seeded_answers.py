"""Print what planning answers to every question, for a model made by hand: a process of test_hash_seeds.py."""

from __future__ import annotations

import sys
from pathlib import Path

from made_profile import HIDDEN, LAYERS, make_profile
from made_up_plans import made_up_planning

from upshift.hardware import describe
from upshift.models.profile import CachedLayers
from upshift.planning.analysis.bottleneck import Measured, find_changes, sum_by_kind
from upshift.planning.analysis.what_if import explain_choice, shadow_prices
from upshift.planning.inference.plan import InferenceWorkload
from upshift.planning.inference.planner import plan_profile
from upshift.planning.search.layouts import check_layout
from upshift.reports.plan.page import write_plan_page


def main(page: Path) -> None:
    """Write the plan's page to ``page``, and everything else to standard output: an answer a line."""
    planning = made_up_planning(on="2xa100-40gb", global_batch=4)
    print(planning.document())
    print(planning.ranking.rejected)
    print(explain_choice(planning, "tensor_parallel=2", fixed=(), trace=lambda *_: planning.profile))
    print(shadow_prices(planning, fixed=("precision=bf16",)))
    doubled = {kind: 2.0 * seconds for kind, seconds in sum_by_kind(planning.default.time.terms).items()}
    print(find_changes(Measured(planning.host, planning.profile, planning.workload, planning.default, doubled)))
    write_plan_page(page, planning, model="made up")
    try:
        check_layout({"tensor_parallel": 3}, planning.host, planning.profile, planning.workload)
    except ValueError as error:
        print(error)
    profile = make_profile()
    cache = (CachedLayers(count=LAYERS, per_token=2 * HIDDEN, per_sequence=0, heads=16),)
    generating = profile.changed(declares=profile.declares.changed(can_generate=True), cache=cache)
    prompts = InferenceWorkload(prompt_length=512, output_length=256)
    print(plan_profile(generating, describe("8xh100"), prompts, fixed=()).document())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
