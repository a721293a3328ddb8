"""Write a narrow copy of a model, on which a search finds values that muP carries to the model itself.

The widths of the config are known by name, and all of them shrink alike."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

from transformers import PretrainedConfig

from upshift.errors import RequestError
from upshift.models.source import ModelSource, find_model
from upshift.planning.mup import base_text
from upshift.training.mup import check_base, narrowed
from upshift.training.train_request import TrainRequest

# Of transformers' configs; each may have a name of its own for it, which its attribute_map says.
WIDTHS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "ffn_dim", "n_inner", "d_ff",
    "word_embed_proj_dim", "embedding_size", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
OF_TOKENIZER = (".json", ".txt", ".model", ".jinja")


def copy_to_search(request: TrainRequest, width: int, folder: Path) -> Path:
    """Call ``write_narrow`` for a search of this request's trainings. Raise RequestError if they keep weights."""
    if request.lora_rank is not None or not request.from_config:
        raise RequestError("--mup-width searches for training from random weights: add --from-config, and no --lora-rank")
    return write_narrow(find_model(request.model), width, folder)


def write_narrow(source: ModelSource, width: int, folder: Path) -> Path:
    """Write the model's config at this width, and its tokenizer: a directory for ``--mup-base``.

    Raise RequestError for a width that is not possible, or a model for which muP has no rule."""
    config = source.hf_config
    fields = fields_at(config, width)
    check_base(source, base_text(fields))
    if (folder / "config.json").exists() and own_widths(find_model(str(folder)).hf_config) != fields:
        raise RequestError(f"{folder} is another model than {source.reference} of --mup-width {width}; give another --output")
    folder.mkdir(parents=True, exist_ok=True)
    narrowed(config, fields).save_pretrained(folder)
    for path in [] if source.directory is None else source.directory.iterdir():
        if path.suffix in OF_TOKENIZER and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    return folder


def fields_at(config: PretrainedConfig, width: int) -> dict[str, int]:
    """Return the config's widths, all multiplied by the factor that makes its ``hidden_size`` this one."""
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(hidden, int):
        raise RequestError("--mup-width: the model's config has no hidden_size; make a narrower config by hand, for --mup-base")
    known = own_widths(config)
    share = Fraction(width, hidden)
    if not 0 < share < 1 or any((value * share).denominator != 1 for value in known.values()):
        raise RequestError(f"--mup-width {width} is not possible: {', '.join(map(str, known))} shrink together, to a hidden_size "
                           f"of {', '.join(map(str, _possible(hidden, list(known.values())))) or 'none'}")  # fmt: skip
    return {name: int(value * share) for name, value in known.items()}


def _possible(hidden: int, known: list[int]) -> list[int]:
    return [width for width in range(1, hidden) if all(value * width % hidden == 0 for value in known)]


def widths_between(narrow: str, whole: PretrainedConfig) -> list[dict[str, int]]:
    """Return the fields of the narrow model, and of models twice and four times as wide, up to the whole model. At least two."""
    config = find_model(narrow).hf_config
    sizes = [times * config.hidden_size for times in (1, 2, 4) if times * config.hidden_size <= whole.hidden_size]
    if len(sizes) == 1:
        sizes.append(whole.hidden_size)
    return [fields_at(whole, size) if size < whole.hidden_size else own_widths(whole) for size in sizes]


def own_widths(config: PretrainedConfig) -> dict[str, int]:
    names = dict.fromkeys(config.attribute_map.get(name, name) for name in WIDTHS)
    return {name: value for name in names if isinstance(value := getattr(config, name, None), int)}
