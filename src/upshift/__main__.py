"""Run the command line as ``python -m upshift``, for environments whose ``bin`` folder is not in PATH."""

from __future__ import annotations

from upshift.cli.main import main

if __name__ == "__main__":
    main()
