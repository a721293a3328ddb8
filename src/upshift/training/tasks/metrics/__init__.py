"""Measure a model on the rows that are held out, by the metrics that users of its task compare."""
