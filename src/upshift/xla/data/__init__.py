"""Prepare data for programs with static shapes: TFRecord files, planned widths, batches."""
