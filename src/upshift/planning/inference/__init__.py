"""Plan inference: how to serve a model on a host, or to encode with it."""
