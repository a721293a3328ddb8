"""The cells of model_matrix.py: each does one thing with a tiny model, and is held against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import every_tiny, inputs_of, save_tiny
from torch.utils._python_dispatch import TorchDispatchMode

import upshift
from upshift.errors import RequestError, UpshiftError
from upshift.hardware.spec import Host
from upshift.inference.encoding.engines.base import check_encodes
from upshift.inference.encoding.model_config import EncodingConfig, read_encoding_config
from upshift.inference.encoding.run import Encoding
from upshift.inference.encoding.text_tokenizer import must_be_alone
from upshift.inference.generation.engines.base import Decoder, DecoderBuild
from upshift.inference.generation.model import check_weights, generation_task, pads_safely
from upshift.inference.registry import EngineSetup, build_engine
from upshift.models.describe import attention_kernels
from upshift.models.inspect import inspect
from upshift.models.ops.block_attention import BLOCK_ATTENTION as BLOCK
from upshift.models.profile_cache import isolation_of
from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.planning.planner import Planning, plan_training
from upshift.planning.workload import LengthHistogram, Workload
from upshift.training.arguments import Arguments
from upshift.training.batches.layout import Layout, layout_for
from upshift.training.batches.model_objective import find_objective
from upshift.training.batches.sampler import BatchSource
from upshift.training.data.tokens import Sequences
from upshift.training.distributed.mesh import init_mesh
from upshift.training.prepare import configure_process, load_or_build, prepare_model
from upshift.training.step import TrainStep

TRAINED_LENGTH = 32  # tokens of a row
LENGTHS = (5, 9, 14, 7, 20, 11, 6, 17)  # of the sequences of a global batch
STEPS = 3
# A cell is one process, its models compile for longer than they run, and rounding would hide a wrong loss.
FIXED = ("num_processes=1", "torch_compile=off", "precision=fp32")
# Tracing block attention takes half of all cells' time, so plans are for this kernel, and train() runs them with both.
TRACED = "attention=sdpa"
LEARNING_RATE = 1e-3
NEW_TOKENS = 8
TEXTS = ([5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19])
# Of a difference over the largest number that is compared: kernels differ in the order in which they add.
EXACT, IN_FP32, UPDATED = 1e-6, 2e-4, 5e-3
IGNORED = -100


class Wrong(Exception):
    """Another result than transformers', in figures."""


class NoReference(Exception):
    """transformers alone does not do it."""


class TinyModel:
    """A model in a folder, and what several cells need of it."""

    def __init__(self, kind: str, model_type: str, architecture: str, folder: Path, host: Host) -> None:
        self.kind, self.architecture, self.folder, self.host = kind, architecture, folder, host
        self.config = _saved(kind, model_type, architecture, folder)

    def reference(self) -> Any:
        return getattr(transformers, self.architecture).from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def planning(self) -> Planning:
        return self._plan()

    def planned(self, *fixed: str) -> Plan:
        """Return the best plan with some choices of a user's. Raises RequestError where they are refused."""
        return self._plan(*fixed).ranking.candidates[0].plan

    def _plan(self, *fixed: str) -> Planning:
        lengths = LengthHistogram.of_documents(LENGTHS * STEPS, TRAINED_LENGTH)
        workload = Workload(sequence_length=TRAINED_LENGTH, global_batch=len(LENGTHS), lengths=lengths, total_steps=STEPS)
        fixed = (*FIXED, *((TRACED,) if "sdpa" in self.kernels else ()), *fixed)
        return plan_training(find_model(str(self.folder)), self.host, workload, fixed=fixed, described=True)

    @cached_property
    def kernels(self) -> tuple[str, ...]:
        return tuple(attention_kernels(self.reference()))


def _saved(kind: str, model_type: str, architecture: str, folder: Path) -> Any:
    """Save the first config of the type that transformers computes something with. Dropout is off: it draws other numbers each
    time."""
    problem: Exception | None = None
    for config in every_tiny(model_type, architecture):
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            for name, value in list(vars(part).items()) if part is not None else []:
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        try:
            saved = save_tiny(config, architecture, folder)
            model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                logits = model(**inputs_of(kind, saved)).logits
            if torch.isfinite(logits).all():
                return saved
        except Exception as error:  # any of 400 configs and models may refuse these sizes in its own way
            problem = problem or error
    raise problem or ValueError("its logits are not numbers")


def cells(model: TinyModel) -> dict[str, Callable[[], str]]:
    """Each returns a figure or nothing; raises RequestError (refused), Wrong, NoReference, or whatever it breaks with."""
    return {
        "inspect": lambda: f"{inspect(str(model.folder), sequence_length=TRAINED_LENGTH).parameters['total']:,} parameters",
        "load": lambda: load(model),
        "plan": lambda: f"{len(model.planning.ranking.candidates):,} plans",
        "train plain": lambda: train(model, model.planning.default.plan),
        "train as planned": lambda: train_by_each_kernel(model, model.planning.ranking.candidates[0].plan),
        "recompute": lambda: train(model, _recomputed(model)),
        "packed": lambda: train_by_each_kernel(model, model.planned("packing=True")),
        "encode": lambda: encode(model),
        "generate": lambda: generate(model),
    }


def load(model: TinyModel) -> str:
    ours, theirs, inputs = upshift.load_model(str(model.folder)), model.reference(), inputs_of(model.kind, model.config)
    if type(ours) is not type(theirs):
        raise Wrong(f"{type(ours).__name__} in place of {type(theirs).__name__}")
    with torch.no_grad():
        return _compared(ours(**inputs).logits, theirs(**inputs).logits, EXACT)


def _recomputed(model: TinyModel) -> Plan:
    return model.planned(f"activation_checkpointing={model.planning.profile.num_layers}")


def train(model: TinyModel, plan: Plan) -> str:
    """The losses of a few steps of a plan against those of a plain loop that runs each sequence alone."""
    sequences = _sequences()
    draws = draws_in_training(model.reference(), _alone(model, sequences, 0))
    found, ids = _losses(model, plan, sequences, draws=draws)
    expected = _plain_losses(model, sequences, ids, draws=draws)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        limit = IN_FP32 if step == 0 else UPDATED
        if not abs(ours - theirs) <= limit * max(1.0, abs(theirs)):
            raise Wrong(f"step {step + 1}: loss {ours:.5f}, each sequence alone {theirs:.5f} ({plan.label()})")
    noise = "; without the random numbers that it draws in training" if draws else ""
    return f"{max(abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)):.1e} ({plan.label()}{noise})"


def draws_in_training(model: Any, inputs: dict[str, torch.Tensor]) -> bool:
    """Return whether a model without dropout draws random numbers in training, as routers do that sample experts.

    Two losses of the same inputs may then differ. Such a model's plans are compared WithoutNoise: a difference there is an
    error."""
    with torch.no_grad(), WithoutNoise() as noise:
        model.train()(**inputs)
    return noise.draws


class WithoutNoise(TorchDispatchMode):
    """Put the mean of its distribution in the place of every random number, so that a model in training computes the same
    twice."""

    draws = False  # whether a random number was replaced

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, torch.Tensor):
            name = func.overloadpacket.__name__
            self.draws = True
            if name in ("uniform", "uniform_"):
                low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :])
                return result.fill_((low + high) / 2)
            if name in ("exponential", "exponential_"):
                return result.fill_(1 / (args[1] if len(args) > 1 else 1.0))
            if name in ("rand", "rand_like"):
                return result.fill_(0.5)
            if name in ("randn", "randn_like"):
                return result.zero_()
            raise NoReference(f"the mean of {name} is not known here")
        return result


def train_by_each_kernel(model: TinyModel, plan: Plan) -> str:
    """Train as planned, and with block attention, where the model has it and packs with it if the plan does."""
    by_plan = train(model, plan)
    isolation = isolation_of(find_model(str(model.folder)))
    if BLOCK not in model.kernels or plan.packing and isolation.why_not_packed(BLOCK) is not None:
        return by_plan
    return f"{by_plan}, {train(model, plan.changed(attention=BLOCK))}"


def _sequences() -> Sequences:
    generator = np.random.default_rng(1)
    lengths = np.array(LENGTHS * STEPS, dtype=np.int64)
    tokens = generator.integers(5, 90, int(lengths.sum()), dtype=np.int64)
    return Sequences(tokens=tokens, starts=np.cumsum(lengths) - lengths, lengths=lengths, sequence_length=TRAINED_LENGTH)


def _losses(model: TinyModel, plan: Plan, sequences: Sequences, *, draws: bool) -> tuple[list[float], list[list[int]]]:
    source = find_model(str(model.folder))
    configure_process(plan)
    torch.set_num_threads(1)
    place = init_mesh(plan)
    ready = prepare_model(load_or_build(source, plan, from_config=False, seed=0), plan, place)
    objective = find_objective(source)
    arguments = Arguments(max_steps=1000, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=0.0)
    batches = BatchSource(
        sequences=sequences, global_batch=len(LENGTHS), layout=layout_for(plan, objective), objective=objective
    ).batches()
    stepper, losses, seen = TrainStep(ready, place, arguments), [], []
    ready.train()
    with WithoutNoise() if draws else nullcontext():
        for _ in range(STEPS):
            batch = next(batches)
            losses.append(stepper.step(batch).loss)
            numbers = np.concatenate([part.sequence_ids.ravel() for part in batch.micro_batches])
            seen.append(sorted(numbers.tolist()))
    return losses, seen


def _plain_losses(model: TinyModel, sequences: Sequences, seen: list[list[int]], *, draws: bool) -> list[float]:
    reference = model.reference().train()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for numbers in seen:
        rows = [_alone(model, sequences, number) for number in numbers]
        is_causal = model.kind == "causal"
        counts = [int((row["labels"] != IGNORED).sum()) - (is_causal and _is_shifted_by_the_model(row)) for row in rows]
        total = 0.0
        for row, count in zip(rows, counts, strict=True):
            if not count:  # no word of a short row was masked: its mean is not a number, and it teaches nothing
                continue
            try:
                with WithoutNoise() if draws else nullcontext():
                    loss = reference(**row).loss
            except Exception as error:  # each model has its own kinds
                raise NoReference(f"{type(error).__name__}: {error}") from error
            if not torch.isfinite(loss):
                raise NoReference("the loss is not a number")
            (loss * count / sum(counts)).backward()
            total += loss.item() * count / sum(counts)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _alone(model: TinyModel, sequences: Sequences, number: int) -> dict[str, torch.Tensor]:
    """One sequence as transformers is given it. What is masked, and where an encoder's text ends, is the objective's own."""
    start, length = sequences.starts[number], sequences.lengths[number]
    tokens = torch.from_numpy(sequences.tokens[start : start + length].astype(np.int64))[None]
    source = find_model(str(model.folder))
    if model.kind == "causal":
        labels = tokens if isolation_of(source).loss_shifts else torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    objective = find_objective(source)
    layout = Layout(micro_batch=1, pad_multiple=1)
    batches = BatchSource(sequences=sequences, global_batch=1, layout=layout, objective=objective).batches()
    for batch in islice(batches, len(sequences)):
        (one,) = batch.micro_batches
        if number in one.sequence_ids:
            return {name: torch.from_numpy(array) for name, array in one.arrays.items()}
    raise NoReference(f"sequence {number} is in no batch")


def _is_shifted_by_the_model(row: dict[str, torch.Tensor]) -> bool:
    """Whether a row has the label of each place at that place. The first one then does not count."""
    return bool(row["labels"][0, -1] != IGNORED)


def encode(model: TinyModel) -> str:
    """Vectors of texts that are batched, where they may be, against those of each text alone, by transformers."""
    source = find_model(str(model.folder))
    recipe: EncodingConfig = read_encoding_config(source)
    check_encodes(source, recipe)
    if recipe.output != "embeddings":
        raise NoReference(f"it gives {recipe.output}")
    reference = model.reference()
    inside = reference.get_encoder() if reference.config.is_encoder_decoder else reference.base_model
    expected = []
    for text in TEXTS:
        ids = torch.tensor([text])
        try:
            with torch.no_grad():
                states = inside(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
        except Exception as error:  # as above
            raise NoReference(f"{type(error).__name__}: {error}") from error
        expected.append(states[0].mean(0))
    setup = EngineSetup(engine="torch", precision="fp32", threads=1, batch=1 if must_be_alone(source, recipe) else 64)
    found = Encoding(source, recipe, setup, [list(text) for text in TEXTS], pad=0).rows([list(text) for text in TEXTS])
    return _compared(torch.from_numpy(found), torch.stack(expected), IN_FP32)


def generate(model: TinyModel) -> str:
    """Tokens of prompts that are generated together, where they may be, against greedy generate() of each alone."""
    source = find_model(str(model.folder))
    task = generation_task(source)
    check_weights(source)
    rows = len(TEXTS) if pads_safely(source) else 1  # as Generator has it
    setup = EngineSetup(engine="torch", precision="fp32", threads=1, batch=rows)
    decoder = build_engine(task, "torch", DecoderBuild(source, setup, model.folder / "engine"))
    worst = 0.0
    expected = [_generated(model, list(text)) for text in TEXTS]
    for first in range(0, len(TEXTS), rows):
        found = _followed(decoder, TEXTS[first : first + rows])
        for place in range(found.shape[1]):
            worst = max(worst, _difference(found[:, place], expected[first + place], f"prompt {first + place + 1}"))
    return f"{worst:.1e}"


def _followed(decoder: Decoder, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the logits [tokens, N, V] of greedy generation."""
    decoder.keep([])
    logits = [decoder.admit([list(text) for text in texts])]
    while len(logits) < NEW_TOKENS:
        logits.append(decoder.step(logits[-1].argmax(1)))
    return np.stack(logits)


def _difference(found: np.ndarray, expected: tuple[list[int], list[np.ndarray]], name: str) -> float:
    """Return the largest difference of logits [tokens, V], of the largest of them. Raise Wrong beyond the limit."""
    worst = 0.0
    for step, (token, scores) in enumerate(zip(*expected, strict=True)):
        difference = float(np.abs(found[step] - scores).max() / max(1.0, float(np.abs(scores).max())))
        worst = max(worst, difference)
        if difference > IN_FP32:
            raise Wrong(f"{name}, token {step + 1}: logits differ by {difference:.1e} of the largest")
        if found[step].argmax() != token:
            break  # two that are alike: what follows is another text
    return worst


def _generated(model: TinyModel, text: list[int]) -> tuple[list[int], list[np.ndarray]]:
    ids = torch.tensor([text])
    reference = model.reference()
    reference.generation_config.eos_token_id = None
    reference.generation_config.use_cache = True  # transformers' default; the tiny config's is for tracing
    try:
        answer = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, num_beams=1,
            return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
    except Exception as error:  # as above
        raise NoReference(f"{type(error).__name__}: {error}") from error
    tokens = answer.sequences[0, -len(answer.logits) :].tolist()
    return tokens, [step[0].float().numpy() for step in answer.logits]


def _compared(found: torch.Tensor, expected: torch.Tensor, limit: float) -> str:
    if not torch.isfinite(expected).all():
        raise NoReference("its numbers are not finite")
    if found.shape != expected.shape:
        raise Wrong(f"the shape {list(found.shape)} in place of {list(expected.shape)}")
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= limit * max(1.0, largest):
        raise Wrong(f"differs by {difference:.1e}, the largest number being {largest:.1e}")
    return f"{difference:.1e}"


def outcome_of(run: Callable[[], str]) -> tuple[str, str]:
    """(ok, refused, WRONG or none; the figure, or the words). A cell that breaks is wrong."""
    try:
        return "ok", run()
    except NoReference as error:
        return "none", _one_line(error)
    except (RequestError, UpshiftError) as error:
        return "refused", _one_line(error)
    except Wrong as error:
        return "WRONG", _one_line(error)
    except Exception as error:  # nobody is to meet a traceback
        return "WRONG", f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
