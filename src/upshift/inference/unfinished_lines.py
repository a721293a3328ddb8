"""Write an output's JSON lines to disk block by block, so that a stopped run can continue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from upshift.inference.unfinished import Unfinished


class UnfinishedLines(Unfinished):
    """An unfinished output of JSON lines. ``done`` is the number of lines, those of an earlier run included."""

    def __init__(self, output: Path, total: int, made_of: str) -> None:
        super().__init__(output, total, made_of)
        self.done = self.noted()
        with self.writing(), self.partial.open("rb+" if self.done else "wb+") as file:
            for _ in range(self.done):
                file.readline()
            file.truncate()  # lines of a block that was not noted

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        found = [json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
        with self.writing():
            with self.partial.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(found)
            self.note(self.done + len(found))
        self.done += len(found)
