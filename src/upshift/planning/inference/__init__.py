"""Planning of inference: how to serve, or to encode with, a model on a host."""
