"""Measure for `upshift profile` where the steps of a run went, beside the planner's costs for them."""
