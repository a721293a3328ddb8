"""Searching hyper-parameters: one space, every backend, no trial wasted."""
