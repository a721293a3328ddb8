"""Compute parts of a model with less memory or time: attention, the loss, activation checkpointing."""
