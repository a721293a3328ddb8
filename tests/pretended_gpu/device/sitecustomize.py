"""Bring the pretended GPU into every Python process whose environment asks for it."""

import os

if os.environ.get("PRETENDED_GPUS"):
    from upshift.importing import importing

    with importing():
        import pretended_cuda

    pretended_cuda.install()
