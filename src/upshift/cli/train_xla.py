"""Run ``upshift train --backend xla``: the same data, order and loss as the torch backend's, in TensorFlow under XLA."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

from upshift.cli import tables
from upshift.cli.options import LAYOUT_FLAGS, option
from upshift.cli.progress import activity
from upshift.cli.usage.help_page import Panel
from upshift.cli.usage.messages import check_choice
from upshift.errors import RequestError
from upshift.models.source import AdapterOptions
from upshift.training.arguments import Arguments, TrainRequest
from upshift.units import format_seconds

BACKENDS = ("torch", "xla")
Backend = Annotated[
    str,
    option(
        "--backend", text="What computes. xla uses TensorFlow, for TPUs", panel=Panel.SPECIAL, metavar="NAME", choices=BACKENDS
    ),
]  # fmt: skip
TORCH_ONLY = (  # fields of TrainRequest, and of its Arguments
    *AdapterOptions.model_fields, "plan_file", "allow", "overwrite", "mup_base", "heal", "find_learning_rate", "report_to",
    "logging_steps", "early_stopping_patience", "load_best", "metric_for_best_model", "neftune_noise_alpha", "objective",
    "trial_seconds",
)  # fmt: skip
NO_TRIALS = 0.0  # seconds to test plans: XLA has one plan, so that it tests none
FIELDS = ("precision", "optim", "momentum", "gradient_accumulation_steps")  # --set takes these here

RECENT_STEPS = 10  # the time left is estimated from the mean time of so many


def is_xla(backend: str) -> bool:
    """Return whether the backend is XLA. Raise RequestError for an unknown one."""
    return check_choice("--backend", backend, BACKENDS) == "xla"


def run(request: TrainRequest, *, as_json: bool) -> None:
    """Train in TensorFlow and print the results. The data are text, or TFRecord files of ``upshift data to-tfrecord``."""
    from upshift.xla.tensorflow import need_tensorflow

    _reject_torch_options(request)
    fields = _read_fields(request.fixed)
    need_tensorflow("--backend xla")
    from upshift.training.batches.sampler import count_steps
    from upshift.xla.data.tfrecord import has_records, read_index, record_batches
    from upshift.xla.training.train import train

    global_batch = request.global_batch
    seed = request.arguments.seed
    if has_records(request.data):
        _reject_data_options(request)
        num_sequences = read_index(request.data).num_examples
        steps = request.max_steps or count_steps(request.epochs, num_sequences=num_sequences, global_batch=global_batch)
        batches = record_batches(request.data, global_batch=global_batch, num_steps=steps, seed=seed)
        tokenizer = None
    else:
        batches, steps, tokenizer = _tokenized_batches(request)
    finished: list[Any] = []
    start = time.perf_counter()

    with activity("Building the model and compiling its first step") as current:

        def on_step(step: Any) -> None:
            finished.append(step)
            current.update(title="Training", text=_progress_text(step, finished[-RECENT_STEPS:], global_batch))
            _print_step(step, quiet=as_json)

        settings: dict[str, Any] = request.arguments_for(steps).model_dump() | fields
        trained = train(
            request.model, batches, output=request.output, resume=request.resume, from_config=request.from_config,
            on_step=on_step, **settings,
        )  # fmt: skip
    if tokenizer is not None:
        tokenizer.save_pretrained(trained.model_directory)
    _print_results(trained, finished, time.perf_counter() - start, as_json=as_json)


def _reject_torch_options(request: TrainRequest) -> None:
    defaults = {**Arguments.model_fields, **TrainRequest.model_fields}
    values = {**request.arguments.model_dump(), **dict(request)}
    for name in TORCH_ONLY:
        does_nothing = name == "trial_seconds" and values[name] == NO_TRIALS
        if values[name] != defaults[name].default and not does_nothing:
            refused = name.removesuffix("_file").replace("_", "-")
            raise RequestError(f"--{refused} is not for --backend xla; leave it out, or use --backend torch")


def _reject_data_options(request: TrainRequest) -> None:
    """Raise RequestError if an option says how to read rows, and the data are sequences already."""
    options = {"eval_data": request.eval_data, "sequence_length": request.sequence_length, **request.as_options.model_dump()}
    for name, value in options.items():
        if value is not None:
            raise RequestError(
                f"--{name.replace('_', '-')} {value} is not for TFRecord files, whose rows are tokenized; leave it out, or give "
                "it to upshift data to-tfrecord"
            )


def _read_fields(assignments: tuple[str, ...]) -> dict[str, str]:
    fields = dict(text.partition("=")[::2] for text in assignments)
    unknown = next((name for name in fields if name not in FIELDS), None)
    if unknown is not None:
        flag = next((name for name, layout in LAYOUT_FLAGS.items() if layout.field == unknown), None)
        refused = f"--set {unknown}" if flag is None else f"--{flag.replace('_', '-')} (--set {unknown})"
        raise RequestError(f"{refused} is not for --backend xla, whose --set knows {', '.join(FIELDS)}; leave it out")
    return fields


def _tokenized_batches(request: TrainRequest) -> tuple[Any, int, Any]:
    """Return (batches, steps, tokenizer): the sequences that the torch backend trains on, in its order."""
    from upshift.models.source import find_model
    from upshift.training.batches.layout import Layout
    from upshift.training.batches.sampler import BatchSource, count_steps, evaluation_batches
    from upshift.training.data.dataset import prepare_data
    from upshift.training.loop.state import fingerprint
    from upshift.xla.data.batches import Batches, plan_buckets

    global_batch = request.global_batch
    seed = request.arguments.seed
    data = prepare_data(
        find_model(request.model), request.data, eval_data=request.eval_data, sequence_length=request.sequence_length,
        options=request.as_options,
    )  # fmt: skip
    steps = request.max_steps or count_steps(request.epochs, num_sequences=len(data.training), global_batch=global_batch)
    layout = Layout(micro_batch=global_batch, pad_multiple=1)
    source = BatchSource(sequences=data.training, global_batch=global_batch, layout=layout, objective=data.objective, seed=seed)
    lengths = data.histogram
    held_out = data.evaluation
    longest = max(lengths.longest, 0 if held_out is None else int(held_out.lengths.max()))
    buckets = plan_buckets(lengths.lengths, lengths.counts, longest=longest, batch_size=global_batch, num_steps=steps)

    def start(step: int) -> Iterator[Any]:
        return (batch.micro_batches[0].arrays for batch in source.batches(source.position_of_step(step)))

    def evaluation() -> Iterator[Any]:
        assert held_out is not None  # without held-out data this function is not passed on
        batches = evaluation_batches(held_out, global_batch=global_batch, layout=layout, objective=data.objective)
        return (batch.micro_batches[0].arrays for batch in batches)

    batches = Batches(
        start=start, global_batch=global_batch, buckets=buckets, pad_token_id=data.objective.pad_token_id,
        evaluation=None if held_out is None else evaluation, identity=fingerprint(data.training),
    )  # fmt: skip
    return batches, steps, data.tokenizer


def _progress_text(step: Any, recent_steps: list[Any], global_batch: int) -> str:
    seconds = sum(recent.seconds for recent in recent_steps) / len(recent_steps)
    tokens = global_batch * sum(recent.width for recent in recent_steps) / len(recent_steps)
    speed = f"{tokens / seconds:,.0f} tokens/s with padding"
    remaining = f"{format_seconds((step.max_steps - step.step) * seconds)} left"
    return f"step {step.step}/{step.max_steps}, loss {step.loss:.3f}, {speed}, {remaining}"


def _print_step(step: Any, *, quiet: bool) -> None:
    """Print a line about a step, on a terminal only."""
    if not quiet and tables.err.is_terminal:
        programs = f", {step.num_traces} programs" if step.num_traces > 1 else ""
        held_out = "" if step.evaluation_loss is None else f", held-out loss {step.evaluation_loss:.4f}"
        position = f"step {step.step}/{step.max_steps} loss {step.loss:.4f}"
        text = f"{position}, {step.seconds:.2f} s at {step.width} tokens{programs}{held_out}"
        tables.dim(text, tables.err)


def _print_results(trained: Any, steps: list[Any], seconds: float, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(_record(trained, steps).to_json() + "\n")
        return
    widths = ", ".join(map(str, trained.widths))
    tables.out.print(f"{trained.devices}. Widths {widths}: {trained.padded_share:.0%} padding expected", highlight=False)
    loss = f"{trained.losses[-1]:.4f}" if trained.losses else "unknown"
    earlier = len(trained.losses) - len(steps)  # before a resume
    resumed = f", after {earlier} steps of earlier runs" if earlier else ""
    duration = f"{len(steps)} steps in {format_seconds(seconds)}{resumed}"
    tables.out.print(f"Loss {loss} after {duration}. Model saved in {trained.model_directory}", highlight=False)


def _record(trained: Any, steps: list[Any]) -> Any:
    """Return the record of a run. The first step of each width compiles a program: its time counts as one-time."""
    from upshift.benchmarking.environment import environment
    from upshift.hardware.detect import detect
    from upshift.record import Numbers, Record, Spread
    from upshift.units import FLOP_CONVENTION

    seen_widths: set[int] = set()
    warm_ms = []
    compile_seconds = 0.0
    for step in steps:
        if step.width in seen_widths:
            warm_ms.append(1000 * step.seconds)
        else:
            compile_seconds += step.seconds
        seen_widths.add(step.width)
    measured = Numbers(
        step_ms=Spread.of(warm_ms, num_warmup=len(seen_widths)) if warm_ms else None,
        loss=trained.losses[-1] if trained.losses else None, one_time_seconds=compile_seconds,
        evaluation_loss=trained.evaluations[-1][1] if trained.evaluations else None,
    )  # fmt: skip
    return Record(
        kind="train", name="train --backend xla", plan={"backend": "xla", "devices": trained.devices, "widths": trained.widths},
        predicted=None, measured=measured, flop_convention=f"model FLOPs: {FLOP_CONVENTION}", environment=environment(detect()),
        checkpoint=trained.model_directory,
        details={"losses": trained.losses, "evaluations": trained.evaluations, "num_traces": trained.num_traces},
    )  # fmt: skip
