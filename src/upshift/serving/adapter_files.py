"""Check the folders of LoRA adapters before an engine starts, and find the model that each is for. Only JSON is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from upshift.errors import MissingExtra, RequestError
from upshift.loading.files.safetensors_header import read_header
from upshift.models.config import read_json
from upshift.models.source import ADAPTER_FILE, ADAPTER_WEIGHTS
from upshift.versions import installed_version

UNSERVED = {  # fields of peft's LoraConfig, and what each does; peft computes none of these beside other adapters
    "alora_invocation_tokens": "acts from some tokens on only",
    "arrow_config": "is chosen token by token",
    "layer_replication": "makes layers that the base model has not",
    "modules_to_save": "trains whole copies of modules",
    "target_parameters": "changes weights that are no layers of their own",
    "trainable_token_indices": "trains some rows of the embedding",
    "use_dora": "scales the rows of the base weights",
}
PLAIN_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")  # init_lora_weights that do not change the base model


class AdapterFolder(NamedTuple):
    """An adapter that can be served. ``base`` is the model that its config names."""

    folder: Path
    base: str


def read_adapter_folder(folder: Path) -> AdapterFolder:
    """Return the adapter in a folder. Raise RequestError if it is none, or one that is not served without merging."""
    if installed_version("peft") is None:
        raise MissingExtra(library="peft", extra="peft", purpose="upshift serve --adapter")
    if not (folder / ADAPTER_FILE).is_file():
        raise RequestError(f"{str(folder)!r} has no {ADAPTER_FILE}; give a folder that peft's save_pretrained wrote")
    settings = read_json(folder / ADAPTER_FILE)
    if settings.get("peft_type") != "LORA":
        raise RequestError(f"{folder} is an adapter of the kind {settings.get('peft_type')!r}; upshift serve takes LORA")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise RequestError(f"{folder} has no {ADAPTER_WEIGHTS}; save the adapter again with peft, as safetensors")
    read_header(folder / ADAPTER_WEIGHTS)
    merge_it = f"merge it: upshift merge {folder} --output DIR, then serve DIR"
    for name, reason in UNSERVED.items():
        if settings.get(name):
            raise RequestError(f"{folder} cannot be served as an adapter: {name} {reason}; {merge_it}")
    initialization = settings.get("init_lora_weights", True)
    if initialization not in PLAIN_INITIALIZATIONS:
        raise RequestError(
            f"{folder} began with init_lora_weights={initialization!r}, which changes the base model, too; save it with peft's "
            "path_initial_model_for_weight_conversion, and serve that"
        )
    return AdapterFolder(folder, str(settings.get("base_model_name_or_path") or ""))


def keep_adapters(folders: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the adapters whose folders can still be read, and the reasons why the others cannot, both by name.

    One adapter that was removed while its server ran must not keep the engine from starting again."""
    reasons: dict[str, str] = {}
    for name, folder in folders.items():
        try:
            read_adapter_folder(Path(folder))
        except RequestError as error:
            reasons[name] = str(error).replace(folder, name)  # a client may see it
    return {name: folder for name, folder in folders.items() if name not in reasons}, reasons


def find_base(name: str, adapter: AdapterFolder, models: Mapping[str, str]) -> str:
    """Return the name of the served model that an adapter is for. ``models`` are references by the names for clients.

    If one model is served, it is the base: its folder may have moved since the adapter was made. An engine that loads the adapter
    checks that it fits. Raise RequestError if several models are served, and the adapter's config names none of them."""
    if len(models) == 1:
        return next(iter(models))
    for model, reference in models.items():
        if reference == adapter.base or _is_same_folder(reference, adapter.base):
            return model
    raise RequestError(
        f"the adapter {name!r} in {adapter.folder} is for {adapter.base!r}, which is not served here; serve that model, or serve "
        f"one model alone ({', '.join(models)} are served)"
    )


def _is_same_folder(first: str, second: str) -> bool:
    return Path(first).is_dir() and Path(second).is_dir() and Path(first).samefile(second)


def assign_adapters(adapters: Mapping[str, Path], models: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the folders of adapters by the names of their models, then by their own names.

    Raise RequestError for a folder that is no adapter, for an adapter without its model, and for a name that a model has."""
    assigned: dict[str, dict[str, str]] = {}
    for name, folder in adapters.items():
        if name in models:
            raise RequestError(f"--adapter {name}={folder}: a model is called {name!r}; give the adapter another name")
        base = find_base(name, read_adapter_folder(folder), models)
        assigned.setdefault(base, {})[name] = str(folder.resolve())
    return assigned


def check_engine_of_adapters(engine: str | None, *, loads_later: bool, tensor_parallel: int = 1) -> None:
    """Raise RequestError if the user asks for an engine that computes no adapters.

    ``loads_later``: clients may load adapters while the server runs. ``tensor_parallel``: the devices among which transformers
    divides the model."""
    if tensor_parallel > 1:
        raise RequestError(
            f"--tensor-parallel {tensor_parallel} divides a model without adapters; merge the adapter into the model (upshift "
            f"merge), or use --engine vllm --engine-set tensor_parallel_size={tensor_parallel} with --adapter"
        )
    if engine == "vllm" and loads_later:
        raise RequestError(
            "--engine vllm computes the adapters that it starts with; name each by --adapter NAME=FOLDER, or leave out --engine"
        )
    if engine not in (None, "torch", "vllm"):
        raise RequestError(
            f"--engine {engine} computes no adapters, and the engines torch and vllm do; leave out --engine, or merge the "
            "adapter into the model (upshift merge)"
        )
