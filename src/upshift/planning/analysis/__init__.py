"""Explain a plan: its bottleneck, what another choice would change, the largest size that fits."""
