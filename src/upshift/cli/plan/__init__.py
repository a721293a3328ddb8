"""Run ``upshift plan`` for training and for inference, and answer the questions beside the ranking."""
