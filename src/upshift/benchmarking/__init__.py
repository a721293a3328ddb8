"""Measuring: the clock and the memory meters that trials and benchmarks share, and the page that shows results."""
