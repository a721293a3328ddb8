"""Compile programs for Cloud TPUs with Google's own compiler, on a machine without a TPU."""
