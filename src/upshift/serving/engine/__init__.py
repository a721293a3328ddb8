"""Run one engine of the server, in a process of its own: scheduling, generating, embedding."""
