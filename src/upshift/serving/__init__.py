"""Serve models over HTTP: engines in processes of their own, admission that keeps a promise, OpenAI's requests and
answers."""
