"""Provide ``upshift.Trainer``: the arguments and behaviour of transformers.Trainer, with steps computed by the plan."""
