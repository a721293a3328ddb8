"""Write down the sounds of ``upshift generate --prompts``: a folder of sounds, or JSON lines that name them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from upshift.cli import tables
from upshift.errors import RequestError
from upshift.importing import importing
from upshift.inference.resumable_output import parse_object

BLOCK = 32  # sounds between two records of the progress
TAKEN = ("model", "prompts", "output", "max_new_tokens", "overwrite", "as_json")
UNSET: tuple[Any, ...] = (None, False, [], "plain", "exact", "race")  # the defaults of the other parameters
FLAGS = {"options": "--set", "form": "--format", "engine_settings": "--engine-set", "on_ray": "--ray"}


def holds_sounds(prompts: Path) -> bool:
    """Return whether the prompts are a folder, or JSON lines whose first line names a sound and no prompt."""
    if prompts.is_dir():
        return True
    if prompts.suffix != ".jsonl" or not prompts.is_file():
        return False
    with prompts.open(encoding="utf-8-sig", errors="replace") as file:
        record = parse_object(file.readline())
    return record is not None and "audio" in record and not {"prompt", "messages"} & set(record)


def refuse_options(given: Mapping[str, Any]) -> None:
    """Raise RequestError for an option that is set and that sounds do not have. ``given``: the command's parameters."""
    for name, value in given.items():
        if name not in TAKEN and value not in UNSET:
            flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise RequestError(f"{flag} is for prompts of text, and --prompts {given['prompts']} has sounds; leave it out")


def transcribe(
    model: str, prompts: Path, output: Path | None, *, max_new_tokens: int | None, overwrite: bool, as_json: bool
) -> None:
    """Write one JSON line for each sound. Refuse bad files before the model is loaded. Continue an interrupted run."""
    from upshift.inference.media.files import check_media, read_media
    from upshift.inference.resumable_output import UnfinishedLines, check_output, output_identity
    from upshift.inference.weights import files_identity, find_weights

    if output is None:
        raise RequestError(f"--prompts {prompts} has sounds, and no --output; add --output FILE.jsonl")
    check_output(output, (".jsonl",), prompts, overwrite=overwrite)
    items = read_media(prompts, option="--prompts")
    check_media(items)
    find_weights(model)
    with importing():
        from upshift.inference.media.speech import Transcriber

    with tables.step("Reading the model"):
        transcriber = Transcriber(model, max_new_tokens=max_new_tokens)
        transcriber.check(items)
    files = files_identity(Path(item.content) for item in items)
    inputs = prompts if prompts.is_file() else Path(items[0].content)
    identity = output_identity(inputs, transcriber.source, files, repr(max_new_tokens))
    start = time.perf_counter()
    seconds_of_sound = 0.0
    with closing(UnfinishedLines(output, len(items), identity)) as lines, tables.bar("Transcribing") as update:
        num_resumed = lines.done
        for begin in range(num_resumed, len(items), BLOCK):
            update(begin, len(items))
            block = items[begin : begin + BLOCK]
            transcripts = list(transcriber.transcribe(block))
            seconds_of_sound += sum(transcript.seconds for transcript in transcripts)
            lines.add(
                {"audio": item.content, "text": found.text, "tokens": len(found.tokens), "seconds": round(found.seconds, 3)}
                for item, found in zip(block, transcripts, strict=True)
            )
        lines.finish()
    seconds = time.perf_counter() - start
    num_now = len(items) - num_resumed
    if as_json:
        document = {"sounds": len(items), "transcribed": num_now, "seconds": seconds, "output": str(output)}
        sys.stdout.write(json.dumps(document) + "\n")
        return
    rate = f", {seconds_of_sound / seconds:,.1f} s of sound a second" if num_now else ""
    tables.out.print(f"{len(items):,} texts in {output} ({num_now:,} now{rate})", soft_wrap=True)
