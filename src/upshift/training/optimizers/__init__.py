"""Make the plan's optimizer, on shards, in the backward pass or on the host, with its rounding and its schedule."""
