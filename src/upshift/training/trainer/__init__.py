"""transformers.Trainer with Upshift's training, evaluation and checkpoints."""
