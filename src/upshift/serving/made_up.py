"""Hold words for made-up texts, which stand for the expected ones before any request comes."""

WORDS = ("time", "model", "memory", "paper", "number", "light", "water", "question", "answer", "step", "layer", "place")
