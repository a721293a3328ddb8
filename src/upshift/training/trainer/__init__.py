"""``upshift.Trainer``: the arguments and behaviour of transformers.Trainer, steps by the plan."""
