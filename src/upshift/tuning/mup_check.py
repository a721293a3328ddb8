"""Write a narrow copy of a model for a search with muP, and check that muP carries the values over to the whole model.

The narrow copy has all widths of the config, known by name, multiplied by the same factor. The coordinate check takes a few
steps at growing widths, and measures how much the outputs of the layers change: with muP equally at every width, without it more
at larger widths, where a learning rate then does more harm (Yang et al., Tensor Programs V, 2022, arXiv:2203.03466, appendix
D.1). It runs in its own process.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from upshift.errors import JobFailed, RequestError
from upshift.fork_server import ChildExit, fork_server
from upshift.models.build import build_model, choose_class, find_stacks, sample_inputs
from upshift.models.describe import max_positions
from upshift.models.sequence_length import default_length
from upshift.models.source import ModelSource, find_model
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import base_text
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.mup import check_base, narrow_config, scale_initial_weights
from upshift.training.optimizers.build import build_optimizer
from upshift.tuning.study import MUP_CHECK
from upshift.value import Value

# Fields of transformers' configs. A config may use another name for one, which its attribute_map gives.
WIDTHS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "ffn_dim", "n_inner", "d_ff",
    "word_embed_proj_dim", "embedding_size", "moe_intermediate_size", "shared_expert_intermediate_size",
)  # fmt: skip
OF_TOKENIZER = (".json", ".txt", ".model", ".jinja")


def write_search_model(request: TrainRequest, width: int, folder: Path) -> Path:
    """Write the narrow model of a search. Raise RequestError unless its trainings start from random weights."""
    if request.lora_rank is not None or not request.from_config:
        raise RequestError("--mup-width searches for training from random weights: add --from-config, and no --lora-rank")
    return write_narrow(find_model(request.model), width, folder)


def write_narrow(source: ModelSource, width: int, folder: Path) -> Path:
    """Write the model's config at this width, and its tokenizer, as a directory for ``--mup-base``.

    Raise RequestError for an impossible width, and for a model that muP has no rule for."""
    config = source.hf_config
    fields = scaled_widths(config, width)
    check_base(source, base_text(fields))
    narrow = narrow_config(config, fields)
    if (folder / "config.json").exists() and find_model(str(folder)).config_identity != _saved_identity(narrow):
        raise RequestError(f"{folder} is another model than {source.reference} of --mup-width {width}; give another --output")
    folder.mkdir(parents=True, exist_ok=True)
    narrow.save_pretrained(folder)
    for path in [] if source.directory is None else source.directory.iterdir():
        if path.suffix in OF_TOKENIZER and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    return folder


def _saved_identity(config: PretrainedConfig) -> dict[str, Any]:
    """Return what identifies a config when it is saved. Saving leaves out defaults."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return find_model(folder).config_identity


def scaled_widths(config: PretrainedConfig, width: int) -> dict[str, int]:
    """Return the config's widths, all multiplied by the factor that makes its ``hidden_size`` equal ``width``."""
    hidden_size = getattr(config, "hidden_size", None)
    if not isinstance(hidden_size, int):
        raise RequestError("--mup-width: the model's config has no hidden_size; make a narrower config by hand, for --mup-base")
    widths = read_widths(config)
    factor = Fraction(width, hidden_size)
    if not 0 < factor < 1 or any((value * factor).denominator != 1 for value in widths.values()):
        possible = ", ".join(map(str, _possible_widths(hidden_size, list(widths.values())))) or "none"
        raise RequestError(
            f"--mup-width {width} is not possible: {', '.join(map(str, widths))} shrink together, to a hidden_size of {possible}"
        )
    return {name: int(value * factor) for name, value in widths.items()}


def _possible_widths(hidden_size: int, widths: list[int]) -> list[int]:
    return [width for width in range(1, hidden_size) if all(value * width % hidden_size == 0 for value in widths)]


def widths_to_check(narrow: str, whole: PretrainedConfig) -> list[dict[str, int]]:
    """Return the widths of the narrow model, and of models twice and four times as wide, up to the whole. At least two."""
    config = find_model(narrow).hf_config
    sizes = [times * config.hidden_size for times in (1, 2, 4) if times * config.hidden_size <= whole.hidden_size]
    if len(sizes) == 1:
        sizes.append(whole.hidden_size)
    return [scaled_widths(whole, size) if size < whole.hidden_size else read_widths(whole) for size in sizes]


def read_widths(config: PretrainedConfig) -> dict[str, int]:
    names = dict.fromkeys(config.attribute_map.get(name, name) for name in WIDTHS)
    return {name: value for name in names if isinstance(value := getattr(config, name, None), int)}


WORKER = "upshift.tuning.mup_check"
STEPS = 4
RATE = 0.003
BATCH = 4
LENGTH = 32
SEEDS = (0, 1)
BOUND = 2.0  # an output may change by at most twice, and at least half, as much as at the narrowest width
LIMIT_SECONDS = 3600.0


class CheckRequest(Value):
    """The narrow and the whole model."""

    narrow: str
    whole: str


class Growth(Value):
    """The ratio of the outputs' changes between the widest and the narrowest model, of the layer where it is largest."""

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


def check_transfer(study: Any, narrow: str, whole: str) -> Growth:
    """Return the check's result, which is measured once in a study. Raise RequestError if muP does not carry over."""
    stored = study.user_attrs.get(MUP_CHECK)
    growth = check_widths(narrow, whole) if stored is None else Growth.from_json(stored, origin="the study")
    if not growth.is_flat:
        raise RequestError(
            f"{growth.words()}; more than {BOUND:g} does not carry over: search at the model's own width, without --mup-width"
        )
    study.set_user_attr(MUP_CHECK, growth.to_json())
    return growth


def check_widths(narrow: str, whole: str) -> Growth:
    with fork_server(WORKER) as server:
        answers = list(server.ask(CheckRequest(narrow=narrow, whole=whole), Growth, limit_seconds=LIMIT_SECONDS))
    growth = next((answer for answer in answers if isinstance(answer, Growth)), None)
    if growth is None:
        ending = answers[-1]
        raise JobFailed(f"the check of muP ended: {ending.last_words if isinstance(ending, ChildExit) else ''}")
    return growth


def main(path: Path, answer: Callable[[Value], None]) -> None:
    request = CheckRequest.from_file(path)
    answer(measure_growth(request.narrow, request.whole))


def measure_growth(narrow: str, whole: str) -> Growth:
    """Return the growth with muP, whose base is the narrowest model, and without muP."""
    fields = widths_to_check(narrow, find_model(whole).hf_config)
    sizes = [next(iter(widths.values())) for widths in fields]
    with_mup = _largest_ratio(whole, fields, base=fields[0])
    without = _largest_ratio(whole, fields, base=None)
    return Growth(widths=tuple(sizes), with_mup=with_mup, without=without)


def _largest_ratio(reference: str, fields: list[dict[str, int]], *, base: dict[str, int] | None) -> float:
    narrowest = mean_changes(reference, fields[0], base)
    widest = mean_changes(reference, fields[-1], base)
    ratios = [wide / narrow for wide, narrow in zip(widest, narrowest, strict=True) if narrow > 0]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def mean_changes(reference: str, fields: dict[str, int], base: dict[str, int] | None) -> list[float]:
    """Return the mean absolute change by a few steps, of every layer's output and of the logits, averaged over seeds."""
    mup_base = "" if base is None or base == fields else base_text(base)
    changes_by_seed = [_output_changes(reference, fields, mup_base, seed) for seed in SEEDS]
    return [sum(changes) / len(changes) for changes in zip(*changes_by_seed, strict=True)]


def _output_changes(reference: str, fields: dict[str, int], base: str, seed: int) -> list[float]:
    source = find_model(reference)
    config = narrow_config(source.hf_config, fields)
    model_class, objective = choose_class(config, reference)
    torch.manual_seed(seed)
    model = build_model(config, model_class, dtype=torch.float32).eval()  # no dropout
    if base:
        scale_initial_weights(model, base)
    length = default_length(max_positions(model), LENGTH)
    inputs = sample_inputs(model, objective, batch=BATCH, sequence=length, masked=False)
    inputs = {name: _random_tokens(name, tensor, inputs, config.vocab_size) for name, tensor in inputs.items()}
    plan = Plan(device="cpu", host="", model="", sequence_length=length, per_device_train_batch_size=BATCH, mup_base=base)
    optimizer = build_optimizer(model, plan, Arguments(max_steps=STEPS, learning_rate=RATE))
    outputs_before = _layer_outputs(model, inputs)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    outputs_after = _layer_outputs(model, inputs)
    return [float((after - before).abs().mean()) for after, before in zip(outputs_after, outputs_before, strict=True)]


def _random_tokens(name: str, tensor: torch.Tensor, inputs: dict[str, Any], vocabulary: int) -> torch.Tensor:
    """Return random tokens for token ids, and for labels that are tokens; other tensors as they are."""
    tokens = torch.randint(vocabulary, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(0))
    return tokens if name in ("input_ids", "labels") and tensor.shape == tokens.shape else tensor


@torch.no_grad()
def _layer_outputs(model: PreTrainedModel, inputs: dict[str, Any]) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []

    def keep_output(module: nn.Module, inputs_of_layer: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output).clone())

    hooks = [layer.register_forward_hook(keep_output) for _, stack in find_stacks(model) for layer in stack]
    logits = model(**inputs).logits
    for hook in hooks:
        hook.remove()
    return [*outputs, logits]
