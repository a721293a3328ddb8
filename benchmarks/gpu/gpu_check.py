"""Run every part of Upshift on the GPUs of this machine, print a verdict, and pack one file to send.

    make gpu    or    python benchmarks/gpu/gpu_check.py [--list] [--only PART,PART] [--output FOLDER] [--again] [--minutes 17]

Each part runs in a process of its own with a time limit. Its result is one row of OUTPUT/rows.jsonl, also if it crashes, hangs
or runs out of memory. A second run goes on where the first one ended: parts that have a result are not run again.
Exit code: 0 if no part failed, 1 if one did, 2 if the request was wrong or there is no GPU, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from gpu_archive import ARCHIVE, CONTENT, PARTIAL, hidden_texts, hide, write_archive
from gpu_parts import MINUTES, NAMES, Part, choose_parts
from gpu_process import run_part
from gpu_rows import (
    DONE,
    ROWS,
    Answer,
    PartRow,
    append_part_row,
    read_part_rows,
    start_progress,
    summary_line,
    verdict_table,
)  # fmt: skip

from upshift.benchmarking.environment import environment
from upshift.benchmarking.harness import format_table
from upshift.errors import RequestError
from upshift.hardware import detect

ROOT = Path(__file__).parents[2]
CASES = ROOT / "benchmarks" / "cases"
OUTPUT = Path("build/gpu_check")
OUR_FILES = (ROWS, "cache", "parts", "results", "work", ARCHIVE, PARTIAL)
TORCH_SECONDS = 120.0  # to import torch and count GPUs; a network disk may need a minute
ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "names": [torch.cuda.get_device_name(n) for n in range(count)],
    "free_bytes": [torch.cuda.mem_get_info(n)[0] for n in range(count)],
}))
"""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that torch sees. free_bytes: of the one that has least."""

    names: tuple[str, ...]
    free_bytes: int


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        """Print one line without the usage, and exit with code 2."""
        self.exit(2, f"gpu_check: {message}; see --help\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the parts and their time limits, and stop")
    parser.add_argument("--only", metavar="PART,PART", help="run these parts, and those that they need")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"folder of the results; default {OUTPUT}")
    parser.add_argument("--again", action="store_true", help="also run parts that have a result")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="all time limits together; default 17")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that the parts run, measures nothing")
    options = parser.parse_args(arguments)
    if not 0 < options.minutes < 24 * 60:
        parser.error(f"--minutes {options.minutes:g} must be above 0 and below 1440")
    return options


def find_gpus() -> Gpus:
    """Return the GPUs that torch sees. Raise RequestError if there are none."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise RequestError(f"torch did not say within {TORCH_SECONDS:.0f} s which GPUs there are; run nvidia-smi") from None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise RequestError(f"torch cannot be asked for GPUs: {last}; run  upshift doctor")
    answer = json.loads(asked.stdout.strip().splitlines()[-1])
    if not answer["names"]:
        built = f"for CUDA {answer['cuda']}" if answer["cuda"] else "without CUDA"
        raise RequestError(
            f"the GPU check needs an NVIDIA GPU; torch {answer['torch']}, built {built}, sees none; run  upshift doctor"
        )
    return Gpus(tuple(answer["names"]), min(answer["free_bytes"]))


def check_output(folder: Path) -> None:
    """Raise RequestError if the folder cannot be written or made, or holds files that are not of a GPU check."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise RequestError(f"--output {folder} cannot be written: {place} is no folder that can be; give another")
    others = sorted(path.name for path in folder.iterdir() if path.name not in OUR_FILES) if folder.is_dir() else []
    if others:
        raise RequestError(f"--output {folder} holds other files, such as {others[0]}; give a new or an empty folder")


def check_earlier_rows(rows: Sequence[PartRow], fingerprint: str, options: argparse.Namespace) -> None:
    """Raise RequestError if the rows of the folder are of another machine or of other sizes."""
    for row in rows:
        if row.environment.host_fingerprint != fingerprint:
            where = f"another machine ({row.environment.host})"
        elif row.quick != options.quick:
            where = "a run with --quick" if row.quick else "a run without --quick"
        else:
            continue
        raise RequestError(f"--output {options.output} holds results of {where}; give another folder")


def show_list(parts: Sequence[Part], minutes: float) -> None:
    cells = [[part.name, f"{part.seconds * minutes / MINUTES:.0f}", str(part.gpus), part.shows] for part in parts]
    header = ("part", "limit s", "GPUs", "what it shows")
    widths = [max(len(row[column]) for row in (header, *cells)) for column in range(3)]
    for row in (header, *cells):
        numbers = "  ".join(row[column].rjust(widths[column]) for column in (1, 2))
        print(f"{row[0].ljust(widths[0])}  {numbers}  {row[3]}")


class Check:
    """A run of parts whose rows are in one folder."""

    def __init__(self, options: argparse.Namespace, gpus: Gpus) -> None:
        self.options = options
        self.gpus = gpus
        self.folder: Path = options.output.absolute()
        self.environment = environment(detect())
        self.rows = read_part_rows(self.folder)
        check_earlier_rows(list(self.rows.values()), self.environment.host_fingerprint, options)
        # Free memory decides the sizes, and it differs from run to run. Parts of one folder are compared, so all have one size.
        self.free_bytes = next((row.free_bytes for row in self.rows.values() if row.free_bytes), gpus.free_bytes)
        self.hidden = hidden_texts(self.folder, ROOT)

    def run(self, parts: Sequence[Part]) -> None:
        for part in parts:
            earlier = self.rows.get(part.name)
            if earlier is not None and earlier.status in DONE and not self.options.again:
                print(f"{part.name}: has a result ({earlier.status}); --again repeats it")
                continue
            start = time.monotonic()
            answer = self.why_skipped(part) or self.run_part(part)
            self.keep(part, answer, time.monotonic() - start)

    def why_skipped(self, part: Part) -> Answer | None:
        if len(self.gpus.names) < part.gpus:
            return Answer(reason=f"needs {part.gpus} GPUs, and there is {len(self.gpus.names)}", skipped=True)
        for name in part.needs:
            row = self.rows.get(name)
            if row is None or row.status not in DONE:
                status = row.status if row else "not run"
                return Answer(reason=f"uses the results of {name}, which is {status}", skipped=True)
        return None

    def run_part(self, part: Part) -> Answer:
        limit = part.seconds * self.options.minutes / MINUTES
        print(start_progress(part.name, limit), flush=True)
        request = {
            "part": part.name, "function": part.function, "folder": str(self.folder), "quick": self.options.quick,
            "names": self.gpus.names if part.all_gpus else self.gpus.names[:1], "free_bytes": self.free_bytes,
        }  # fmt: skip
        paths = [str(Path(__file__).parent), str(CASES), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        variables = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "UPSHIFT_CACHE": str(self.folder / "cache"),
        }  # fmt: skip
        if not part.all_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        answer = run_part(request, limit_seconds=limit, folder=self.folder / "parts" / part.name, variables=variables)
        if answer.failed and answer.details.get("timed_out"):
            more = f"--minutes {2 * self.options.minutes:g} gives it twice the time"
            return answer.changed(reason=f"{answer.reason}; {more}")
        return answer

    def keep(self, part: Part, answer: Answer, seconds: float) -> None:
        row = PartRow(
            part=part.name, status=answer.status, seconds=round(seconds, 2), unit=answer.unit, predicted=answer.predicted,
            measured=answer.measured, reason=hide(answer.reason, self.hidden), quick=self.options.quick,
            free_bytes=self.free_bytes, environment=self.environment, details=answer.details,
        )  # fmt: skip
        self.rows[part.name] = row
        append_part_row(self.folder, row)
        print(f"{part.name}: {row.status}: {row.reason}", flush=True)

    def report(self) -> int:
        """Print the verdict, write the archive, and return the exit code."""
        rows = [self.rows[name] for name in NAMES if name in self.rows]
        print(f"\n{', '.join(sorted(set(self.gpus.names)))}, {len(self.gpus.names)} in all\n")
        print(verdict_table(rows))
        speeds = speed_table(self.rows)
        if speeds:
            print(f"\n{speeds}")
        print(f"\n{summary_line(rows)}")
        archive = write_archive(self.folder, ROOT)
        print(f"Send {archive}: attach it to a new issue of Upshift's repository, titled GPU check: {self.gpus.names[0]}.")
        print(CONTENT)
        return 1 if any(row.status == "failed" for row in rows) else 0


def speed_table(rows: dict[str, PartRow]) -> str:
    """Return the speed of the planned training of the small model over that of transformers.Trainer, or "" without both."""
    planned = rows.get("train")
    if planned is None or not planned.measured:
        return ""
    cells = []
    for name in ("trainer-plain", "trainer-careful", "trainer-liger"):
        row = rows.get(name)
        if row is not None and row.measured:
            cells.append([name, f"{row.measured:,.0f}", f"{planned.measured / row.measured:.2f}"])
    if not cells:
        return ""
    return format_table(("Trainer", "tokens/s", "train is so many times as fast"), cells)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        parts = choose_parts(options.only)
        if options.list:
            show_list(parts, options.minutes)
            return 0
        check_output(options.output)
        gpus = find_gpus()
        options.output.mkdir(parents=True, exist_ok=True)
        check = Check(options, gpus)
    except RequestError as error:
        sys.stderr.write(f"gpu_check: {error}\n")
        return error.exit_code
    try:
        check.run(parts)
    except KeyboardInterrupt:
        check.report()
        sys.stderr.write("gpu_check: interrupted; the same command goes on from here\n")
        return 130
    return check.report()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a part that runs is ended, too
    sys.exit(main())
