"""Find the names of classes that ``datasets`` stores beside a table: a column of numbers with the feature ClassLabel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from upshift.training.data.data_files import Kind

ClassNames = Mapping[str, tuple[str, ...]]  # the names of a column's numbers, by the column; "objects.category" is in a struct
FEATURES_KEY = b"huggingface"  # of the metadata of a Parquet or Arrow file


def class_names_of_saved(folder: Path) -> ClassNames:
    """Return the names of the classes of a split that ``save_to_disk`` wrote."""
    try:
        features = json.loads((folder / "dataset_info.json").read_bytes()).get("features")
    except (OSError, ValueError):  # the reader of the rows says what is wrong with the folder
        return {}
    return names_of_features(features)


def class_names_of_file(file: Path, kind: Kind) -> ClassNames:
    """Return the names of the classes of a table. Only Parquet and Arrow files have some."""
    if kind not in ("parquet", "arrow"):
        return {}
    try:
        metadata = _schema_of(file, kind).metadata or {}
        return names_of_features(json.loads(metadata.get(FEATURES_KEY, b"{}")).get("info", {}).get("features"))
    except (OSError, ValueError, AttributeError):  # the reader of the rows says what is wrong with the file
        return {}


def _schema_of(file: Path, kind: Kind) -> Any:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        return pyarrow.parquet.read_schema(file)
    try:
        return pyarrow.ipc.open_file(str(file)).schema
    except pyarrow.ArrowInvalid:  # datasets writes a stream
        return pyarrow.ipc.open_stream(str(file)).schema


def names_of_features(features: Any, column: str = "") -> dict[str, tuple[str, ...]]:
    """Return the names of the classes in features as ``datasets`` writes them: also of lists, and of structs in lists."""
    if isinstance(features, list) and features:
        return names_of_features(features[0], column)
    if not isinstance(features, dict):
        return {}
    kind = features.get("_type")
    if kind == "ClassLabel":
        return {column: tuple(map(str, features.get("names") or ()))}
    if isinstance(kind, str):
        return names_of_features(features.get("feature"), column)
    names: dict[str, tuple[str, ...]] = {}
    for name, feature in features.items():
        names |= names_of_features(feature, f"{column}.{name}" if column else name)
    return names
