"""Generate text with programs that XLA compiles as a whole, from prompts to tokens. No Python runs between two tokens."""
