"""Run ``upshift train``: plan, prove, train and save."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from upshift.cli import tables, train_xla
from upshift.cli.options import (
    Allow,
    Data,
    Epochs,
    EvalSizeOption,
    FromConfig,
    GlobalBatch,
    Json,
    MaxGradNorm,
    Model,
    ObjectiveOption,
    Overwrite,
    SequenceLength,
    Set,
    check_file,
    option,
    output_folder,
    parameter_of,
    split_names,
    with_adapter_options,
    with_layout_flags,
    with_options_as,
    with_row_options,
)
from upshift.cli.progress import importing_libraries
from upshift.cli.run_display import RunDisplay
from upshift.cli.usage.commands import FOREIGN_READERS, HelpCommand
from upshift.cli.usage.foreign_config import expand_foreign
from upshift.cli.usage.help_page import Panel
from upshift.cli.usage.messages import ABOVE_ZERO, check_choice
from upshift.cli.usage.run_file import expand_file
from upshift.models.source import AdapterOptions
from upshift.record import Record
from upshift.settings import read_ranks
from upshift.training.arguments import (
    BETA,
    DEFAULT_OUTPUT,
    LEARNING_RATE,
    LOSS,
    SEEDS,
    SIMPO_GAMMA,
    TRIAL_SECONDS,
    Arguments,
    KtoLoss,
    LearningRateSchedule,
    Tracker,
    TrainRequest,
)
from upshift.training.preferences.loss_names import NAMES, SMOOTHED, read_losses

EvalData = Annotated[
    str | None,
    option(
        "--eval-data", text="The evaluation data, of the same forms as --data.", panel=Panel.MODEL, metavar="PATH",
        default="the validation split of --data, or its last documents",
    ),
]  # fmt: skip
Output = Annotated[Path, output_folder("The folder for the trained model and its checkpoints.")]
MaxSteps = Annotated[
    int | None,
    option(
        "--max-steps", text="The number of optimizer steps. Replaces --epochs.", panel=Panel.TRAINING, metavar="N",
        default="as many as --epochs needs", least=1,
    ),
]  # fmt: skip
LearningRate = Annotated[
    float | None,
    option(
        "--learning-rate", text="The highest learning rate.", panel=Panel.TRAINING, metavar="X", least=ABOVE_ZERO,
        default=f"{LEARNING_RATE:g}",
    ),
]  # fmt: skip
FindLearningRate = Annotated[
    bool,
    option(
        "--find-learning-rate", panel=Panel.TRAINING,
        text="Try rising learning rates in 40 to 100 steps before the run, and take a tenth of the best.",
    ),
]  # fmt: skip
WarmupSteps = Annotated[
    int,
    option(
        "--warmup-steps", text="Optimizer steps in which the learning rate rises from 0.", panel=Panel.OPTIMIZATION, metavar="N",
        least=0,
    ),
]  # fmt: skip
WarmupRatio = Annotated[
    float | None,
    option(
        "--warmup-ratio", text="The share of the optimizer steps in which the learning rate rises from 0, such as 0.03.",
        panel=Panel.OPTIMIZATION, metavar="X", default="--warmup-steps says it", least=0.0, most=1.0,
    ),
]  # fmt: skip
WeightDecay = Annotated[
    float, option("--weight-decay", text="The weight decay of AdamW.", panel=Panel.OPTIMIZATION, metavar="X", least=0.0)
]
Schedule = Annotated[
    str,
    option(
        "--lr-scheduler-type", text="How the learning rate changes", panel=Panel.OPTIMIZATION, metavar="NAME",
        choices=get_args(LearningRateSchedule),
    ),
]  # fmt: skip
Seed = Annotated[
    int,
    option(
        "--seed", text="The seed of the order of the data, of dropout and of random weights.", panel=Panel.OPTIMIZATION,
        metavar="N", least=0, most=SEEDS - 1,
    ),
]  # fmt: skip
DpoBeta = Annotated[
    float,
    option(
        "--dpo-beta", text="With --objective dpo: a larger value keeps the model closer to what it was.",
        panel=Panel.OPTIMIZATION, metavar="X", least=ABOVE_ZERO,
    ),
]  # fmt: skip


def _check_dpo_loss(text: str) -> str:
    read_losses(text)
    return text


DpoLoss = Annotated[
    str,
    option(
        "--dpo-loss", panel=Panel.OPTIMIZATION, metavar="NAME,NAME", check=_check_dpo_loss,
        text=f"With --objective dpo, one loss or a sum such as sigmoid=0.8,sft=0.2: {', '.join(NAMES)}.",
    ),
]  # fmt: skip
DpoLabelSmoothing = Annotated[
    float,
    option(
        "--dpo-label-smoothing", text=f"The share of wrong pairs. For {', '.join(SMOOTHED)}.", panel=Panel.OPTIMIZATION,
        metavar="X", least=0.0,
    ),
]  # fmt: skip
SimpoGamma = Annotated[
    float,
    option(
        "--simpo-gamma", text="With --dpo-loss simpo: by how much the better reward shall be larger.", panel=Panel.OPTIMIZATION,
        metavar="X", least=0.0,
    ),
]  # fmt: skip
KtoLossOption = Annotated[
    str,
    option(
        "--kto-loss", text="What --objective kto compares rewards with (kto: the KL term; apo_zero_unpaired: 0)",
        panel=Panel.OPTIMIZATION, metavar="NAME", choices=get_args(KtoLoss),
    ),
]  # fmt: skip
KtoBeta = Annotated[
    float,
    option(
        "--kto-beta", text="With --objective kto: a larger value keeps the model closer to what it was.",
        panel=Panel.OPTIMIZATION, metavar="X", least=ABOVE_ZERO,
    ),
]  # fmt: skip
DesirableWeight = Annotated[
    float,
    option(
        "--desirable-weight", text="With --objective kto: the weight of the loss of good completions.",
        panel=Panel.OPTIMIZATION, metavar="X", least=0.0,
    ),
]  # fmt: skip
UndesirableWeight = Annotated[
    float,
    option(
        "--undesirable-weight", text="With --objective kto: the weight of the loss of bad completions.",
        panel=Panel.OPTIMIZATION, metavar="X", least=0.0,
    ),
]  # fmt: skip
CenterRewardsCoefficient = Annotated[
    float,
    option(
        "--center-rewards-coefficient", panel=Panel.OPTIMIZATION, metavar="X", least=0.0,
        text="With --objective reward: a larger value keeps the rewards closer to 0, such as 0.01.",
    ),
]  # fmt: skip
MupBase = Annotated[
    str | None,
    option(
        "--mup-base", panel=Panel.OPTIMIZATION, metavar="MODEL", default="no muP",
        text="muP: a narrower model whose learning rate shall hold for this model. Needs --from-config.",
    ),
]  # fmt: skip
LoggingSteps = Annotated[
    int,
    option(
        "--logging-steps", panel=Panel.TRAINING, metavar="N", least=0,
        text="Print a line with the loss and the speed every N optimizer steps. 0 prints none.",
    ),
]  # fmt: skip
EarlyStoppingPatience = Annotated[
    int | None,
    option(
        "--early-stopping-patience", panel=Panel.CHECKPOINTS, metavar="N", least=1, default="no early end",
        text="End the run after N evaluations that are not better than the best. Needs --eval-steps.",
    ),
]  # fmt: skip
LoadBest = Annotated[
    bool,
    option(
        "--load-best", panel=Panel.CHECKPOINTS,
        text="The final model is that of the best evaluation. Its checkpoint stays. Needs --eval-steps.",
    ),
]  # fmt: skip
MetricForBestModel = Annotated[
    str,
    option(
        "--metric-for-best-model", panel=Panel.CHECKPOINTS, metavar="NAME", default=f"{LOSS}, the lowest held-out loss",
        text="The metric of the best evaluation, such as accuracy, f1 or wer. A task prints its metrics with the held-out loss.",
    ),
]  # fmt: skip
EvalSteps = Annotated[
    float,
    option(
        "--eval-steps", panel=Panel.CHECKPOINTS, metavar="N", least=0,
        text="Evaluate after every N optimizer steps. Below 1: a share of the run, such as 0.1. 0 evaluates only at the end.",
    ),
]  # fmt: skip
SaveSteps = Annotated[
    float,
    option(
        "--save-steps", panel=Panel.CHECKPOINTS, metavar="N", least=0,
        text="Save a checkpoint after every N optimizer steps. Below 1: a share of the run. 0 saves only at the end and after an "
        "interruption.",
    ),
]  # fmt: skip
SaveTotalLimit = Annotated[
    int,
    option(
        "--save-total-limit", text="How many of the newest checkpoints to keep.", panel=Panel.CHECKPOINTS, metavar="N", least=2
    ),
]  # fmt: skip
NeftuneNoiseAlpha = Annotated[
    float | None,
    option(
        "--neftune-noise-alpha", panel=Panel.OPTIMIZATION, metavar="X", default="no noise", least=ABOVE_ZERO,
        text="Add noise of this size to the input embeddings, such as 5 (NEFTune). Turns packing off.",
    ),
]  # fmt: skip


NO_TRACKER = "none"  # as transformers names it


def _check_trackers(text: str) -> str:
    if text == NO_TRACKER:
        return ""
    for name in split_names(text, "--report-to"):
        check_choice("--report-to", name, get_args(Tracker))
    return text


ReportTo = Annotated[
    str,
    option(
        "--report-to", text=f"Send the numbers of the run to {', '.join(get_args(Tracker))}.",
        panel=Panel.OUTPUT, metavar="NAME,NAME", default="none", check=_check_trackers,
    ),
]  # fmt: skip
PlanFile = Annotated[
    Path | None,
    option(
        "--plan", text="Use the plan in this file, which upshift plan --json wrote. Runs no trials.", panel=Panel.PLAN,
        metavar="PATH", default="search for one",
    ),
]  # fmt: skip
Config = Annotated[
    Path | None,
    option(
        "--config", panel=Panel.OUTPUT, metavar="PATH", default="no file",
        text="Read options from this YAML file (names without --). An option of the command line replaces one of the file.",
    ),
]  # fmt: skip
FromAxolotl = Annotated[
    Path | None,
    option(
        "--from-axolotl", panel=Panel.OUTPUT, metavar="PATH", default="no file",
        text="Read the options from an Axolotl config, and print them.",
    ),
]  # fmt: skip
FromLlamaFactory = Annotated[
    Path | None,
    option(
        "--from-llama-factory", panel=Panel.OUTPUT, metavar="PATH", default="no file",
        text="Read the options from a LLaMA-Factory config, and print them.",
    ),
]  # fmt: skip
Init = Annotated[
    Path | None,
    option(
        "--init", panel=Panel.OUTPUT, metavar="PATH", default="no file",
        text="Write a new file for --config, with all options or with those that were read, and end.",
    ),
]  # fmt: skip
TrialSeconds = Annotated[
    float,
    option(
        "--trial-seconds", text="The time to test plans before the run, in seconds. 0 tests none.", panel=Panel.PLAN,
        metavar="SECONDS", least=0.0,
    ),
]  # fmt: skip
Resume = Annotated[bool, option("--resume", text="Continue from the newest checkpoint in the output folder.", panel=Panel.OUTPUT)]
Heal = Annotated[
    bool,
    option(
        "--heal", text="Each process trains a whole copy. If one is killed, it starts again, and the others go on.",
        panel=Panel.PROCESSES,
    ),
]  # fmt: skip


PREFERENCE_OPTIONS = (
    parameter_of("dpo_beta", DpoBeta, BETA),
    parameter_of("dpo_loss", DpoLoss, "sigmoid"),
    parameter_of("dpo_label_smoothing", DpoLabelSmoothing, 0.0),
    parameter_of("simpo_gamma", SimpoGamma, SIMPO_GAMMA),
    parameter_of("kto_beta", KtoBeta, BETA),
    parameter_of("kto_loss", KtoLossOption, "kto"),
    parameter_of("desirable_weight", DesirableWeight, 1.0),
    parameter_of("undesirable_weight", UndesirableWeight, 1.0),
    parameter_of("center_rewards_coefficient", CenterRewardsCoefficient, 0.0),
)


@with_layout_flags
@with_adapter_options
@with_options_as("preferences", PREFERENCE_OPTIONS)
@with_row_options
def command(
    model: Model,
    data: Data,
    adapter: AdapterOptions,
    preferences: dict[str, Any],
    row_options: dict[str, Any],
    eval_data: EvalData = None,
    output: Output = DEFAULT_OUTPUT,
    objective: ObjectiveOption = None,
    sequence_length: SequenceLength = None,
    global_batch: GlobalBatch = 8,
    max_steps: MaxSteps = None,
    epochs: Epochs = 1.0,
    learning_rate: LearningRate = None,
    find_learning_rate: FindLearningRate = False,
    warmup_steps: WarmupSteps = 0,
    warmup_ratio: WarmupRatio = None,
    weight_decay: WeightDecay = 0.0,
    max_grad_norm: MaxGradNorm = 1.0,
    lr_scheduler_type: Schedule = "linear",
    neftune_noise_alpha: NeftuneNoiseAlpha = None,
    seed: Seed = 42,
    logging_steps: LoggingSteps = 0,
    eval_steps: EvalSteps = 0,
    early_stopping_patience: EarlyStoppingPatience = None,
    load_best: LoadBest = False,
    metric_for_best_model: MetricForBestModel = LOSS,
    save_steps: SaveSteps = 0,
    save_total_limit: SaveTotalLimit = 2,
    from_config: FromConfig = False,
    mup_base: MupBase = None,
    eval_size: EvalSizeOption = None,
    plan: PlanFile = None,
    set_: Set = None,
    allow: Allow = "",
    trial_seconds: TrialSeconds = TRIAL_SECONDS,
    overwrite: Overwrite = False,
    resume: Resume = False,
    report_to: ReportTo = "",
    heal: Heal = False,
    as_json: Json = False,
    backend: train_xla.Backend = "torch",
    config: Config = None,  # HelpCommand reads and writes these files, before it calls this function
    init: Init = None,
    from_axolotl: FromAxolotl = None,
    from_llama_factory: FromLlamaFactory = None,
) -> None:
    """Train or fine-tune a model with the fastest plan that fits. Ctrl-C saves a checkpoint, and --resume continues from it."""
    request = request_of(locals() | adapter.model_dump() | preferences | row_options)
    request.check_rank()
    _run(request, backend, as_json=as_json)


def _run(request: TrainRequest, backend: str, *, as_json: bool) -> None:
    if request.plan_file is not None:
        check_file("--plan", request.plan_file)
    if train_xla.is_xla(backend):
        train_xla.run(request, as_json=as_json)
        return
    _check_inputs(request)
    with importing_libraries():
        from upshift.training.run import run_training

    with RunDisplay(quiet=as_json or not _is_first_rank(), title=tables.adapter_line(request)) as display:
        record = run_training(request, display.watcher)
    if record is not None:
        _print_record(record, as_json=as_json)


def _check_inputs(request: TrainRequest) -> None:
    """Raise RequestError for a model, data or an output folder that cannot be used.

    The run checks the same. This check comes first because the run imports torch, which takes seconds. If a launcher started
    several ranks, only the run checks, and the first rank prints the error for all."""
    if read_ranks() is not None:
        return
    from upshift.training.checkpoint.directory import check_empty
    from upshift.training.data.corpus import check_paths

    request.source()
    for data in (request.data, request.eval_data):
        if data is not None:
            check_paths(data)
    if not (request.overwrite or request.resume):
        check_empty(request.output)


NAME = "upshift train"


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse the words that follow ``upshift train``. Return the options by name. Raise RequestError for wrong ones."""
    parsed: dict[str, Any] = _context_of(words).params
    return parsed


def expand(words: Sequence[str]) -> list[str]:
    """Return the words that follow ``upshift train``, with the options of the files that it names in them.

    Another host, which runs the command, need not have the file. ``words``: those that ``parse`` takes."""
    command_parser = _parser()
    context = command_parser.context_class(command_parser, info_name=NAME)
    expanded = list(words)
    for parameter, read in FOREIGN_READERS.items():
        expanded = expand_foreign(context.command, context, expanded, parameter=parameter, read=read)
    return expand_file(context.command, context, expanded)


def _context_of(words: Sequence[str]) -> Any:
    """Return typer's context of ``upshift train`` with these words. Raise RequestError for wrong ones."""
    return _parser().make_context(NAME, list(words))


def _parser() -> Any:
    """Return typer's parser of ``upshift train``."""
    app = typer.Typer(add_completion=False)
    app.command("train", cls=HelpCommand)(command)
    return typer.main.get_command(app)


def request_of(options: dict[str, Any]) -> TrainRequest:
    """Return the request of a training run. ``options``: all options of the command, by name."""
    fields = {name: options[name] for name in TrainRequest.model_fields if name in options}
    fields |= {"plan_file": options["plan"], "fixed": tuple(options["set_"] or ()), "allow": split_names(options["allow"])}
    fields |= {"report_to": split_names(options["report_to"], "--report-to")}
    arguments = {name: options[name] for name in Arguments.model_fields if name in options}
    if arguments["learning_rate"] is None:
        del arguments["learning_rate"]
    return TrainRequest.of(fields, arguments)


def _is_first_rank() -> bool:
    """Return True in the first of the ranks that a launcher started, and in a process that no launcher started."""
    ranks = read_ranks()
    return ranks is None or ranks.rank == 0


def _rewards_line(accuracy: float, margin: float | None, *, objective: str) -> str:
    """Return the line about the rewards of the held-out data."""
    if objective != "kto":
        return (
            f"Held-out pairs: the chosen answer has the larger reward in {accuracy:.0%}; "
            f"its reward is larger by {margin:.3f} on average"
        )
    difference = "" if margin is None else f"; the rewards of good ones are larger by {margin:.3f} on average"
    return f"Held-out completions: {accuracy:.0%} have a reward on the right side of the KL term{difference}"


def _print_record(record: Record, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(record.to_json() + "\n")
    elif record.measured is not None:
        if record.predicted is not None:
            tables.out.print(tables.prediction_table(record.predicted, record.measured))
        step = record.details["model_step"]
        for rewarded_step, accuracy, margin in record.details.get("evaluation_rewards", ()):
            if rewarded_step == step:
                tables.out.print(_rewards_line(accuracy, margin, objective=record.details["objective"]), highlight=False)
        best = "" if step == record.details["steps"] else f" of the best evaluation, after step {step}"
        loss = tables.number(record.measured.evaluation_loss, 4)
        metrics = "".join(f", {name} {value:.4f}" for name, value in record.details.get("metrics", {}).items())
        tables.out.print(f"Held-out loss {loss}{metrics}{best}. Model saved in {record.checkpoint}")
