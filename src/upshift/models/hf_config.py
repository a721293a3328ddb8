# needs torch
"""Turn the JSON config of a model into the config class of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig

from upshift.errors import RequestError
from upshift.models.config import config_text
from upshift.text import one_line


def parse_config(config: dict[str, Any], reference: str) -> PretrainedConfig:
    """Return the config as transformers' AutoConfig reads it.

    Raise RequestError for an architecture that the installed transformers does not know, and for values that its config class
    rejects."""
    model_type = config["model_type"]
    _check_model_type(config, reference)
    with tempfile.TemporaryDirectory(prefix="upshift-config-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(config_text(config), encoding="utf-8")
        try:
            parsed: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # config classes raise errors of many kinds
            raise RequestError(f"the config of {reference!r} is not valid for {model_type}: {one_line(error)}") from error
    parsed.name_or_path = str(config.get("_name_or_path") or "")
    return parsed


def _check_model_type(config: dict[str, Any], reference: str) -> None:
    model_type = config["model_type"]
    if model_type in transformers.CONFIG_MAPPING:
        return
    if config.get("auto_map"):
        code_files = ", ".join(sorted({str(name).rpartition("--")[2] for name in config["auto_map"].values()}))
        raise RequestError(
            f"{reference!r} (model_type {model_type!r}) is computed by Python code beside its weights ({code_files}), which "
            "Upshift does not run; use a model whose code is in transformers"
        )
    raise RequestError(
        f"model_type {model_type!r} of {reference!r} is unknown to transformers {transformers.__version__}; "
        "use a model that it supports, or upgrade transformers"
    )
