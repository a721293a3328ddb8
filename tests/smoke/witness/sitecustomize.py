"""Note who writes to standard error. Python imports this file at the start of each process that has its folder on PYTHONPATH.

Each text goes to its place as before, and as one JSON line with its author to the file that UPSHIFT_TEST_WITNESS names. The author
is the nearest caller that is neither of the standard library nor of what prints for others.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from typing import Any

STANDARD = sysconfig.get_path("stdlib")
PRINTERS = ("rich", "typer", "click", "tqdm", "colorlog")
NOTES = os.environ.get("UPSHIFT_TEST_WITNESS")


def is_author(file: str) -> bool:
    if "site-packages" in file:
        return file.split("site-packages")[1].split(os.sep)[1] not in PRINTERS
    return not file.startswith((STANDARD, "<frozen", "<string>")) and file != __file__


class Witness:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        frame = sys._getframe(1)
        while frame.f_back is not None and not is_author(frame.f_code.co_filename):
            frame = frame.f_back
        with open(str(NOTES), "a", encoding="utf-8") as notes:
            notes.write(json.dumps({"author": frame.f_code.co_filename, "text": text}) + "\n")
        return int(self._stream.write(text))

    def writelines(self, texts: Any) -> None:
        for text in texts:
            self.write(text)


if NOTES:
    sys.stderr = Witness(sys.stderr)
