"""Weights on disk and in memory: what a checkpoint holds, read, written and placed without a second copy."""
