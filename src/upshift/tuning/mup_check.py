"""Check muP by coordinates: take a few steps at growing widths, and measure how much the outputs of the layers change.

By muP's rule the change is the same at every width. Without muP it grows with the width, and so does the harm of a learning
rate. Yang et al., Tensor Programs V, 2022 (arXiv:2203.03466), appendix D.1. It is measured in a process of its own.

Write a narrow copy of a model, on which a search finds values that muP carries to the model itself.

The widths of the config are known by name, and all of them shrink alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import JobFailed, RequestError
from upshift.fork_server import Ending, fork_server
from upshift.models.build import build_model, choose_class, find_stacks, sample_inputs
from upshift.models.describe import max_positions
from upshift.models.sequence_length import default_length
from upshift.models.source import ModelSource, find_model
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import base_text
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.mup import check_base, narrow_config, scale_initial_weights
from upshift.training.optimizers.build import build_optimizer
from upshift.value import Value

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
    narrow_config(config, fields).save_pretrained(folder)
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


WORKER = "upshift.tuning.mup_check"
STEPS, RATE, BATCH, LENGTH, SEEDS = 4, 0.003, 4, 32, (0, 1)
BOUND = 2.0  # no output changes by more than twice, or by less than half, of what it does at the narrowest
LIMIT_SECONDS = 3600.0
CHECKED = "mup"  # among a study's attributes


class Asked(Value):
    narrow: str
    whole: str


class Growth(Value):
    """The ratio of changes of outputs at the widest and at the narrowest model, for the layer where this is worst."""

    widths: tuple[int, ...]
    with_mup: float
    without: float = Field(description="the same learning rate for every parameter, initial weights as the model draws them")

    @property
    def is_flat(self) -> bool:
        return self.with_mup <= BOUND

    def words(self) -> str:
        widths = ", ".join(map(str, self.widths))
        return (
            f"muP check at widths {widths}: what {STEPS} steps change of a layer's outputs differs {self.with_mup:.2g} times at "
            f"most, without muP {self.without:.2g} times"
        )


def checked(study: Any, narrow: str, whole: str) -> Growth:
    """Return the check's result, measured once in a study. Raise RequestError if muP does not carry over."""
    known = study.user_attrs.get(CHECKED)
    found = check_widths(narrow, whole) if known is None else Growth.from_json(known, origin="the study")
    if not found.is_flat:
        raise RequestError(
            f"{found.words()}; more than {BOUND:g} does not carry over: search at the model's own width, without --mup-width"
        )
    study.set_user_attr(CHECKED, found.to_json())
    return found


def check_widths(narrow: str, whole: str) -> Growth:
    with fork_server(WORKER) as server:
        answers = list(server.ask(Asked(narrow=narrow, whole=whole), Growth, limit_seconds=LIMIT_SECONDS))
    found = next((one for one in answers if isinstance(one, Growth)), None)
    if found is None:
        ended = answers[-1]
        raise JobFailed(f"the check of muP ended: {ended.last_words if isinstance(ended, Ending) else ''}")
    return found


def main(path: Path, answer: Callable[[Value], None]) -> None:
    asked = Asked.from_file(path)
    answer(measure(asked.narrow, asked.whole))


def measure(narrow: str, whole: str) -> Growth:
    fields = widths_between(narrow, find_model(whole).hf_config)
    sizes = [next(iter(one.values())) for one in fields]
    worst = {}
    for base in (fields[0], None):
        narrowest, widest = (changes_at(whole, one, base) for one in (fields[0], fields[-1]))
        ratios = [ours / theirs for ours, theirs in zip(widest, narrowest, strict=True) if theirs > 0]
        worst[base is None] = max(max(ratio, 1 / ratio) for ratio in ratios)
    return Growth(widths=tuple(sizes), with_mup=worst[False], without=worst[True])


def changes_at(reference: str, fields: dict[str, int], base: dict[str, int] | None) -> list[float]:
    """Return, for every layer and the logits, the mean size of the change by a few steps, averaged over seeds."""
    found = [_changes(reference, fields, base_text(base) if base not in (None, fields) else "", seed) for seed in SEEDS]
    return [sum(ones) / len(ones) for ones in zip(*found, strict=True)]


def _changes(reference: str, fields: dict[str, int], base: str, seed: int) -> list[float]:
    source = find_model(reference)
    config = narrow_config(source.hf_config, fields)
    model_class, objective = choose_class(config, reference)
    torch.manual_seed(seed)
    model = build_model(config, model_class, dtype=torch.float32).eval()  # no dropout
    if base:
        scale_initial_weights(model, base)
    length = default_length(max_positions(model), LENGTH)
    inputs = sample_inputs(model, objective, batch=BATCH, sequence=length, masked=False)
    inputs = {name: _random(name, tensor, inputs, config.vocab_size) for name, tensor in inputs.items()}
    plan = Plan(device="cpu", host="", model="", sequence_length=length, per_device_train_batch_size=BATCH, mup_base=base)
    optimizer = build_optimizer(model, plan, Arguments(max_steps=STEPS, learning_rate=RATE))
    before = _outputs(model, inputs)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    return [float((new - old).abs().mean()) for new, old in zip(_outputs(model, inputs), before, strict=True)]


def _random(name: str, tensor: torch.Tensor, inputs: dict[str, Any], vocabulary: int) -> torch.Tensor:
    """Return random tokens in place of zeros for token ids, and for labels that are tokens."""
    tokens = torch.randint(vocabulary, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    return tokens if name in ("input_ids", "labels") and tensor.shape == tokens.shape else tensor


@torch.no_grad()
def _outputs(model: PreTrainedModel, inputs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).clone())

    hooks = [layer.register_forward_hook(keep) for _, stack in find_stacks(model) for layer in stack]
    logits = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    return [*found, logits]
