"""Encode images and sounds, and texts beside them, with models of transformers."""
