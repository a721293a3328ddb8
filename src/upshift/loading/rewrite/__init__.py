"""Write a checkpoint anew: in other shards, in another dtype, or with an adapter merged."""
