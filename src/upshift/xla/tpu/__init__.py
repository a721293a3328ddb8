"""Programs for Cloud TPUs, compiled by Google's own compiler on a machine that has none."""
