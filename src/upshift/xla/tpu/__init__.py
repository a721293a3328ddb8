"""Compile programs for Cloud TPUs by Google's own compiler on a machine that has none."""
