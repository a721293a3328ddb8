"""Pack the rows, the logs and the facts of a GPU check into one file to send, without paths, names or secrets of the user."""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

ARCHIVE = "upshift-gpu-check.tar.gz"
PARTIAL = f"{ARCHIVE}.partial"  # while it is written
CONTENT = (  # docs/gpu_check.md says the same
    "It holds the rows, the logs and the versions of packages, and no model and no data of yours. Paths of your clone, your home "
    "folder, the output, Python and the Hugging Face caches are replaced by words. So are the name of the machine, your login "
    "name, and the value of each environment variable whose name says that it is secret, such as HF_TOKEN. Names "
    "of fewer than 6 letters stay."
)
CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")
SYSTEM_PREFIXES = (Path("/usr"), Path("/usr/local"))  # the same on every machine, and in the paths of its libraries
PACKED = ("rows.jsonl", "results/*.jsonl", "parts/*/log.txt", "parts/*/answer.json", "parts/*/*.xml", "parts/*/doctor.json")
MAX_LENGTH = 2_000_000  # characters of one file; of a longer one its end is packed
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
MIN_SECRET_LENGTH = 6  # a shorter value is a switch, and occurs in ordinary words


def write_archive(folder: Path, root: Path) -> Path:
    """Write the archive into the folder and return its path. ``root``: the clone of the repository, whose path is not packed."""
    hidden = hidden_texts(folder, root)
    path = folder / ARCHIVE
    partial = folder / PARTIAL
    with tarfile.open(partial, "w:gz") as archive:
        for pattern in PACKED:
            for file in sorted(folder.glob(pattern)):
                text = hide(file.read_text(encoding="utf-8", errors="replace"), hidden)
                _add(archive, str(file.relative_to(folder)), text[-MAX_LENGTH:])
        _add(archive, "packages.txt", "\n".join(installed_packages()) + "\n")
    partial.replace(path)
    return path


def hidden_texts(folder: Path, root: Path) -> dict[str, str]:
    """Return what stands for each text that no archive may have: paths, names of host and user, values of secret variables."""
    secrets = [value for name, value in os.environ.items() if _is_secret(name, value)]
    hidden = {text: "[secret]" for value in secrets for text in (value, json.dumps(value)[1:-1])}
    caches = {Path(os.environ[name]): "[cache]" for name in CACHE_VARIABLES if os.environ.get(name)}
    pythons = {Path(prefix): "[python]" for prefix in (sys.prefix, sys.base_prefix) if Path(prefix) not in SYSTEM_PREFIXES}
    places = caches | pythons | {Path(tempfile.gettempdir()): "[tmp]", Path.home(): "[home]", folder: "[output]", root: "[clone]"}
    for place, word in places.items():
        for path in (place.absolute(), place.resolve()):
            if path != Path(path.anchor):
                hidden[str(path)] = word
    for name, word in ((platform.node(), "[host]"), (_login_name(), "[user]")):
        if len(name) >= MIN_SECRET_LENGTH:
            hidden[name] = word
    return hidden


def _login_name() -> str:
    """Return the login name, or an empty text if the system has none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return ""


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
