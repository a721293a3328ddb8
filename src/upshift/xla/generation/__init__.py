"""Generate text by programs that XLA compiles whole: prompts to tokens, with nothing of Python between two tokens."""
