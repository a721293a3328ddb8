"""Prepare data for programs of static shapes: TFRecord files, planned widths, batches."""
