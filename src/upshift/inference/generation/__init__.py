"""Generate text from prompts: a decoding loop over an engine, with transformers' sampling."""
