"""Text from prompts: a loop of our own over what an engine does, with transformers' sampling."""
