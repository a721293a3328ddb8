"""`upshift profile`: where the steps of a run went, against what the planner says they cost."""
