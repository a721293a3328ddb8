"""Learn from preferences: the losses of pairs and of rated answers, and the model before the training."""
