"""Pack the rows, the logs and the facts of a GPU check into one file to send, without paths, names or secrets of the user."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import tarfile
import tempfile
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

ARCHIVE = "upshift-gpu-check.tar.gz"
PACKED = ("rows.jsonl", "results/*.jsonl", "parts/*/log.txt", "parts/*/answer.json", "parts/*/*.xml", "parts/*/doctor.json")
MAX_LENGTH = 2_000_000  # characters of one file; of a longer one its end is packed
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
MIN_SECRET_LENGTH = 6  # a shorter value is a switch, and occurs in ordinary words


def write_archive(folder: Path, root: Path) -> Path:
    """Write the archive into the folder and return its path. ``root``: the clone of the repository, whose path is not packed."""
    hidden = hidden_texts(folder, root)
    path = folder / ARCHIVE
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, "w:gz") as archive:
        for pattern in PACKED:
            for file in sorted(folder.glob(pattern)):
                text = hide(file.read_text(encoding="utf-8", errors="replace"), hidden)
                _add(archive, str(file.relative_to(folder)), text[-MAX_LENGTH:])
        _add(archive, "packages.txt", "\n".join(installed_packages()) + "\n")
    partial.replace(path)
    return path


def hidden_texts(folder: Path, root: Path) -> dict[str, str]:
    """Return what stands for each text that no archive may have: paths, the host's name, values of secret variables."""
    secrets = [value for name, value in os.environ.items() if _is_secret(name, value)]
    hidden = {text: "[secret]" for value in secrets for text in (value, json.dumps(value)[1:-1])}
    places = {root: "[clone]", folder: "[output]", Path.home(): "[home]", Path(tempfile.gettempdir()): "[tmp]"}
    for place, word in places.items():
        for path in (place.absolute(), place.resolve()):
            if path != Path(path.anchor):
                hidden[str(path)] = word
    if len(platform.node()) >= MIN_SECRET_LENGTH:
        hidden[platform.node()] = "[host]"
    return hidden


def _is_secret(name: str, value: str) -> bool:
    return SECRET_NAME.search(name) is not None and len(value) >= MIN_SECRET_LENGTH


def hide(text: str, hidden: dict[str, str]) -> str:
    """Replace the texts. The longest are first, because a path may begin with another."""
    for words in sorted(hidden, key=len, reverse=True):
        text = text.replace(words, hidden[words])
    return text


def installed_packages() -> Iterable[str]:
    """Return name==version of each installed package, without the folder of one that is installed from a clone."""
    names = {f"{package.name}=={package.version}" for package in distributions() if package.name}
    return sorted(names, key=str.lower)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode("utf-8")
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
