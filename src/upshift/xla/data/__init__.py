"""Data for programs of static shapes: TFRecord files, planned widths, batches."""
