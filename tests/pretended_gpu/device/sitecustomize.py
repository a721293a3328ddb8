"""Bring the pretended GPU, and the record of which functions ran, into every Python process whose environment asks for it."""

import os

if os.environ.get("FUNCTIONS_THAT_RAN"):
    import record_functions

    record_functions.install()

if os.environ.get("PRETENDED_GPUS"):
    from upshift.importing import importing

    with importing():
        import pretended_cuda

    pretended_cuda.install()
