"""Words for texts that nobody wrote: what is expected, before anybody asks."""

WORDS = ("time", "model", "memory", "paper", "number", "light", "water", "question", "answer", "step", "layer", "place")
