"""Define the bodies of requests and answers that are not those of OpenAI's completions and embeddings."""
