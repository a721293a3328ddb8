"""Train on images and sounds with transformers' Trainer and the model's own processor, by the plan of ``upshift.Trainer``."""
