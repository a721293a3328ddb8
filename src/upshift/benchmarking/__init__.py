"""Measure: the clock and the memory meters that trials and benchmarks share, comparisons, and the numbers in documents."""
