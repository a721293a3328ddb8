"""Decide which files of a path are data, of what kind they are, and to which split each belongs.

The splits of a folder are those of `datasets.load_dataset(folder)`. The rules of `datasets/data_files.py` are repeated here,
because datasets may not be installed. A test compares the two.
"""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from upshift.errors import MissingExtra, RequestError
from upshift.loading.media_files import modality_of
from upshift.text import join_names
from upshift.training.data.rows.row_slice import pick_split

logger = logging.getLogger(__name__)

Kind = Literal["json", "csv", "parquet", "arrow", "text"]
RECORD_KINDS: dict[str, Kind] = {
    ".jsonl": "json", ".jsonlines": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip
PREFERENCE = (".parquet", ".arrow", ".jsonl", ".json", ".csv")  # if a folder has equally many files of several kinds
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
UNREADABLE = {  # suffix -> advice for such a file
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "unpack it"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "export the table as .csv"),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".pptx", ".odt", ".rtf", ".epub"), "convert it to text"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".wav", ".mp3", ".mp4"), "give text"),
    **dict.fromkeys((".pkl", ".pickle", ".npy", ".npz", ".pt", ".bin", ".h5", ".hdf5", ".tfrecord"), "write .jsonl or .parquet"),
}  # fmt: skip
# Texts with marks, which a user may not expect to be learned.
OTHER_SYNTAX = {".yaml", ".yml", ".xml", ".html", ".htm", ".psv", ".ini", ".toml"}
METADATA_FILES = {
    "README.md",
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dummy_data.zip",
    "dataset_dict.json",
    "id2label.json",
}
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
EVALUATION_SPLIT = "validation"
FOLDER_PATTERNS = ("{word}", "{word}{mark}.*", ".*{mark}{word}", ".*{mark}{word}{mark}.*")
NAME_PATTERNS = ("{word}{mark}.*", ".*{mark}{word}{mark}.*")
MAX_NAMES = 5  # names in one message


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files of the training split and of the evaluation split, in the order in which they are read."""

    kind: Kind
    training: tuple[Path, ...]
    evaluation: tuple[Path, ...] = ()


@cache
def say_once(text: str) -> None:
    """Warn the user once with this text, for example about data that is left out."""
    logger.warning("%s", text)


def find_data_files(
    path: Path,
    *,
    pattern: str | None,
    is_evaluation: bool = False,
    wanted_split: str | None = None,
    rows_name_media: bool = False,
) -> DataFiles:
    """Return the data files of a file or a folder. Raise RequestError for a path without data.

    ``pattern`` is a glob that selects the files of a folder; they are read as texts. ``is_evaluation``: as in ``read_corpus``.
    ``wanted_split``: the split that the user wants. None: the one for training, or for evaluation. ``rows_name_media``: images
    and sounds in the folder are no data of their own.
    """
    if not path.is_dir():
        if not path.is_file():
            raise RequestError(
                f"{path} is a pipe, a socket or a device; data is read more than once: write it to a file, and give the file"
            )
        kind = file_kind(path)
        refuse_unreadable(path)
        if data_suffix(path) in OTHER_SYNTAX:
            say_once(f"{path} is read as one plain text, with all marks of its syntax; to learn its contents give .jsonl or .csv")
        pick_split(["train"], wanted_split or "train", path)
        return DataFiles(kind=kind, training=(path,))
    files = _visible_files(path, pattern or "**/*")
    if rows_name_media:
        files = [file for file in files if modality_of(file) is None]
    if pattern is not None:
        return DataFiles(kind="text", training=tuple(files))
    declared = _declared_splits(path, files)
    counts = Counter(data_suffix(file) for file in files if file_kind(file) != "text" and file.name not in METADATA_FILES)
    if not counts:
        return _text_files(path, files, declared, is_evaluation=is_evaluation, wanted_split=wanted_split)
    most_frequent = max(counts, key=lambda suffix: (counts[suffix], *(suffix == other for other in PREFERENCE)))
    kind = RECORD_KINDS[most_frequent]
    members = [file for file in files if file_kind(file) == kind and file.name not in METADATA_FILES]
    splits = declared or split_files(path, members)
    return _make_data_files(path, files, splits, kind, is_evaluation=is_evaluation, wanted_split=wanted_split)


def find_split(names: Collection[str], *, is_evaluation: bool) -> str | None:
    """Return which of the splits is read: that of the training, or of the evaluation data. None: none of them is meant.

    Data that is given for evaluation may have one split of any name. With several, only one for validation is meant: to evaluate
    on a train split would find no overfitting.
    """
    if not is_evaluation:
        return "train" if "train" in names else None
    return find_validation_split(names) or (next(iter(names)) if len(names) == 1 else None)


def find_validation_split(names: Collection[str]) -> str | None:
    """Return which of the splits is for validation, or None."""
    return next((word for word in SPLIT_WORDS[EVALUATION_SPLIT] if word in names), None)


def file_kind(path: Path) -> Kind:
    return RECORD_KINDS.get(data_suffix(path), "text")


def data_suffix(path: Path) -> str:
    """Return the lower-case suffix of a file's content, without the suffix of a compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def refuse_unreadable(path: Path) -> None:
    """Raise RequestError, with advice, for a kind of file that cannot be read."""
    advice = UNREADABLE.get(data_suffix(path)) or UNREADABLE.get(path.suffix.lower())
    if advice is not None:
        raise RequestError(
            f"{path} is a {data_suffix(path)} file, which holds no text that can be trained on as it is; {advice}, "
            "or give .txt, .jsonl, .json, .csv, .tsv, .parquet or .arrow"
        )


def open_data(path: Path) -> BinaryIO:
    """Open a file to read its bytes, decompressed according to its suffix."""
    suffix = path.suffix.lower()
    if suffix in (".zst", ".lz4"):
        try:
            import pyarrow
        except ImportError:
            raise MissingExtra(library="pyarrow", extra="data", purpose=f"reading {suffix} files") from None
        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd" if suffix == ".zst" else "lz4")
        return cast(BinaryIO, io.BufferedReader(stream))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(suffix, open)(path, "rb"))


def split_files(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each split, by the shards in data/, else by folder names, else by file names."""
    names = {file: file.relative_to(folder).as_posix() for file in files}
    shards: dict[str, list[Path]] = {}
    for file, name in names.items():
        shard = re.fullmatch(r"data/([^/]*)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*", name)
        if shard is not None:
            shards.setdefault(shard[1], []).append(file)
    if shards:
        return shards
    for patterns, matches in ((FOLDER_PATTERNS, _is_in_folder_named), (NAME_PATTERNS, _is_named)):
        splits: dict[str, list[Path]] = {}
        for split, words in SPLIT_WORDS.items():
            regexes = [pattern.format(word=word, mark="[-._ 0-9]") for word in words for pattern in patterns]
            members = (file for regex in regexes for file, name in names.items() if matches(name, regex))
            splits[split] = list(dict.fromkeys(members))  # in the order of the patterns, as datasets reads them
        if any(splits.values()):
            return {split: members for split, members in splits.items() if members}
    return {"train": list(files)}


def _is_in_folder_named(name: str, pattern: str) -> bool:
    return any(re.fullmatch(pattern, folder) for folder in name.split("/")[:-1])


def _is_named(name: str, pattern: str) -> bool:
    return re.fullmatch(pattern, name.rsplit("/", 1)[-1]) is not None


def _visible_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match, sorted, without hidden files and folders and those that begin with two underscores.

    As in datasets, links to folders are not followed, because one may lead back to its own folder. The user is told about them.
    """
    try:
        matches = sorted((path.relative_to(folder).as_posix(), path) for path in folder.glob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise RequestError(f"pattern {pattern!r} is not a glob ({error}); use for example '**/*.txt'") from None

    def is_hidden(name: str) -> bool:
        parts = name.split("/")
        return any(part.startswith(".") for part in parts) or any(part.startswith("__") for part in parts[:-1])

    visible = [path for name, path in matches if not is_hidden(name)]
    links = [path for path in visible if path.is_symlink() and not path.is_file()]
    _report_left_out(folder, links, "links to folders, or to nothing, are not followed")
    special = [path for path in visible if path.exists() and not (path.is_file() or path.is_dir())]
    _report_left_out(folder, special, "pipes, sockets and devices are not read")
    return [path for path in visible if path.is_file()]


def _text_files(
    folder: Path,
    files: Sequence[Path],
    declared: dict[str, list[Path]] | None,
    *,
    is_evaluation: bool,
    wanted_split: str | None,
) -> DataFiles:
    """Return the text files of a folder.

    A folder of .txt files may have splits. In a folder of other texts, such as code, each file is a document of the training.
    """
    suffixes = {file: {data_suffix(file), file.suffix.lower()} for file in files}
    readable = [file for file in files if file_kind(file) == "text" and not suffixes[file] & UNREADABLE.keys()]
    data = [file for file in readable if file.name not in METADATA_FILES]
    if data and all(data_suffix(file) == ".txt" for file in data):
        splits = declared or split_files(folder, data)
        return _make_data_files(folder, files, splits, "text", is_evaluation=is_evaluation, wanted_split=wanted_split)
    pick_split(["train"], wanted_split or "train", folder)
    _report_left_out(folder, [file for file in files if file not in set(readable)], "no text")
    return DataFiles(kind="text", training=tuple(readable))


def _make_data_files(
    folder: Path,
    files: Sequence[Path],
    splits: dict[str, list[Path]],
    kind: Kind,
    *,
    is_evaluation: bool,
    wanted_split: str | None,
) -> DataFiles:
    """Return the files of the split to read and, for training data, of the evaluation split. Tell the user about the others."""
    split = find_split(splits, is_evaluation=is_evaluation)
    if wanted_split is not None:
        split = pick_split(list(splits), wanted_split, folder)
    if split is None and is_evaluation:
        raise RequestError(
            f"{folder} has no split 'validation' to evaluate on; its {kind} files are of {', '.join(splits)}; give one file, or "
            "the folder of one split"
        )
    if split is None:
        others = [file for file in files if file_kind(file) not in (kind, "text") and file.name not in METADATA_FILES]
        other_kinds = f" ({list_names(folder, others)} is of another kind than these)" if others else ""
        raise RequestError(
            f"{folder} has no split 'train'; its {kind} files are of {', '.join(splits)}{other_kinds}; name the files to train "
            "on train*, with one kind of file in the folder, or give one file or the folder of one split"
        )
    evaluation_split = None if is_evaluation or split == EVALUATION_SPLIT else EVALUATION_SPLIT
    for name, members in splits.items():
        if name not in (split, evaluation_split):
            _report_left_out(folder, members, f"split {name} is left alone")
    used = {file for members in splits.values() for file in members}
    _report_left_out(folder, [file for file in files if file not in used], "not of the data's kind or of no split")
    evaluation = () if evaluation_split is None else splits.get(evaluation_split, ())
    return DataFiles(kind=kind, training=tuple(splits[split]), evaluation=tuple(evaluation))


def _report_left_out(folder: Path, files: Sequence[Path], reason: str) -> None:
    if files:
        say_once(f"{folder}: not trained on: {list_names(folder, files)} ({reason})")


def list_names(folder: Path, files: Sequence[Path]) -> str:
    """Return the names of files within a folder, at most MAX_NAMES of them, for a message."""
    return first_names([file.relative_to(folder).as_posix() for file in files])


def first_names(names: Sequence[str]) -> str:
    """Return at most MAX_NAMES names, and how many more there are, for a message."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return join_names(names[:MAX_NAMES]) + more


def _declared_splits(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]] | None:
    """Return the splits that the head of the folder's README.md declares in the Hub's format, or None."""
    readme = folder / "README.md"
    if not readme.is_file():
        return None
    head = re.match(r"\s*---[ \t]*\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    if head is None:
        return None
    import yaml

    try:
        fields = yaml.safe_load(head[1])
    except yaml.YAMLError as error:
        raise RequestError(
            f"the head of {readme} is not YAML ({str(error).splitlines()[0]}); mend it or remove the file"
        ) from None
    configs = fields.get("configs") if isinstance(fields, dict) else None
    if not configs:
        return None
    try:
        config = _default_config(readme, configs)
        if "data_files" not in config:
            return None
        patterns = _split_patterns(config["data_files"])
        base = folder / config.get("data_dir", "")
        matches = {split: _find_matches(base, globs) for split, globs in patterns.items()}
    except (TypeError, KeyError, AttributeError):
        raise RequestError(f"`configs` in {readme} is not as the Hub writes it; mend it, or remove the file") from None
    splits = {split: [file for file in files if file in members] for split, members in matches.items()}
    empty = next((split for split, members in splits.items() if not members), None)
    if empty is not None:
        raise RequestError(f"{readme} names files for split {empty} that are not in the folder; mend it, or remove the file")
    return splits


def _default_config(readme: Path, configs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the only or the default one of several data sets. Raise RequestError if there is no default."""
    if len(configs) == 1:
        return configs[0]
    for config in configs:
        if config.get("default") or config["config_name"] == "default":
            return config
    names = ", ".join(config["config_name"] for config in configs)
    raise RequestError(f"{readme} names several data sets ({names}); give the files or the folder of one")


def _split_patterns(data_files: Any) -> dict[str, list[str]]:
    """Return the globs of each split."""

    def as_list(value: Any) -> list[str]:
        return [value] if isinstance(value, str) else list(value)

    if isinstance(data_files, dict):
        return {split: as_list(paths) for split, paths in data_files.items()}
    if isinstance(data_files, list) and all(isinstance(entry, dict) for entry in data_files):
        return {entry["split"]: as_list(entry["path"]) for entry in data_files}
    return {"train": as_list(data_files)}


def _find_matches(base: Path, patterns: Sequence[str]) -> set[Path]:
    """Return the files that match one of the globs. A ``**`` at the end stands for files at any depth."""
    globs = [f"{pattern}/*" if pattern.endswith("**") else pattern for pattern in patterns]
    return {file for pattern in globs for file in base.glob(pattern)}
