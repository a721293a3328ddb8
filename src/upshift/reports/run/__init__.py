"""The page of one run: the plan, why it was chosen, and what the run measured."""
