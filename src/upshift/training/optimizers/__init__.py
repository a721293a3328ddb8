"""Make the plan's optimizer: build it, combine it, round it, or run it in the backward pass or on the host."""
