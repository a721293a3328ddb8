"""Train for other tasks than text alone with transformers' Trainer and the model's own processor."""
