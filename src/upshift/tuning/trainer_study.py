"""Run the study of a ``hyperparameter_search``: Optuna proposes values, and each trial runs in its own process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from transformers.trainer_utils import BestRun, default_hp_space_optuna, default_hp_space_wandb

from upshift.errors import JobFailed, NothingFits, RequestError
from upshift.fork_server import ChildExit, ForkServer, fork_server
from upshift.tuning.backends import check_sweep, native_space, space_of_sweep
from upshift.tuning.jobs import ServerPool
from upshift.tuning.space import Space
from upshift.tuning.storage import ignore_experimental_warnings, open_storage
from upshift.tuning.study import StudyTrial, check_identity, has_other_identity, may_replace, run_study
from upshift.tuning.trainer_trial import RESULT, Request, TrainerRecipe

WORKER = "upshift.tuning.trainer_trial"
LONGEST_SECONDS = 1e9
OPTIMIZE_OPTIONS = ("timeout", "n_jobs", "gc_after_trial", "catch")
SAMPLERS: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
    "random": optuna.samplers.RandomSampler,
    "bayes": optuna.samplers.TPESampler,
    "grid": optuna.samplers.BruteForceSampler,
}


def search(
    trainer: Any,
    backend: str,
    *,
    space: Any,
    objective: Callable[[dict[str, float]], Any],
    trials: int,
    directions: Sequence[Any],
    hp_name: Callable[[Any], str] | None,
    options: dict[str, Any],
) -> BestRun | list[BestRun]:
    """Run the search and return the best trial, or of several objectives the best trials.

    ``options``: arguments of optuna.create_study, and timeout, n_jobs, gc_after_trial and catch of ``Study.optimize``."""
    if backend == "wandb" and "wandb" not in trainer.args.report_to:
        raise RequestError("backend='wandb' makes each trial a run of wandb's; add report_to=['wandb'] to the arguments")
    optimize_options = {name: options.pop(name) for name in OPTIMIZE_OPTIONS if name in options}
    if backend == "wandb":
        space, options = _read_sweep(space, options, directions)
    draw_space = native_space("optuna", space) or default_hp_space_optuna
    recipe = TrainerRecipe.of(trainer, draw_space, objective, hp_name)
    recipe.pickled()  # an object that cannot be pickled fails the call, and not each trial
    folder = Path(trainer.args.output_dir)
    study_options: dict[str, Any] = {"study_name": "hyperparameter_search", "load_if_exists": True} | options
    study_options["storage"] = open_storage(options.get("storage"), folder)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    catch = tuple(optimize_options.get("catch", ()))
    space_identity = space.model_dump() if isinstance(space, Space) else _drawn_distributions(draw_space, catch)
    identity = {"hp_space": space_identity, "compute_objective": _describe_objective(objective)}
    with ignore_experimental_warnings():
        study = optuna.create_study(directions=list(directions), **study_options)
        is_other = has_other_identity(study, identity) or _directions_of(study) != list(directions)
        if is_other and study_options["load_if_exists"] and may_replace(study):  # its script was wrong, and was corrected
            optuna.delete_study(study_name=study.study_name, storage=study_options["storage"])
            study = optuna.create_study(directions=list(directions), **study_options)
    _check_same_study(study, directions, identity)
    with ServerPool(partial(fork_server, WORKER)) as servers:
        run_study(
            study,
            partial(_run_trial, recipe, servers),
            trials=trials,
            jobs=optimize_options.get("n_jobs", 1),
            seconds=optimize_options.get("timeout"),
            catch=catch,
        )
    best = [
        BestRun(str(trial.number), trial.values if len(directions) > 1 else trial.values[0], trial.params)
        for trial in study.best_trials
    ]
    return best if len(directions) > 1 else best[0]


def _directions_of(study: optuna.Study) -> list[str]:
    return [direction.name.lower() for direction in study.directions]


def _check_same_study(study: optuna.Study, directions: Sequence[str], identity: dict[str, Any]) -> None:
    """Raise RequestError if a study that goes on has other directions or another identity. Optuna does not check this."""
    study_directions = _directions_of(study)
    if study_directions != list(directions):
        raise RequestError(
            f"the study {study.study_name!r} has direction {', '.join(study_directions)}, not {', '.join(directions)}; "
            "use the same, or another study_name="
        )
    check_identity(study, identity, alternative="another study_name=")


def _drawn_distributions(hp_space: Callable[[Any], dict[str, Any]], catch: tuple[type[Exception], ...]) -> dict[str, str]:
    """Return the distributions that one draw of the space uses, always the same draw. Other draws may use others."""
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    with suppress(optuna.TrialPruned, *catch):
        hp_space(trial)
    return {name: str(distribution) for name, distribution in trial.distributions.items()}


def _describe_objective(objective: Callable[..., Any]) -> str:
    """Return an objective's name and the strings in its code, which tell apart two lambdas that read different metrics."""
    code = getattr(objective, "__code__", None)
    strings = (
        [constant for constant in code.co_consts if isinstance(constant, str) and constant != objective.__doc__] if code else []
    )
    return f"{getattr(objective, '__qualname__', type(objective).__qualname__)}({', '.join(strings)})"


def _read_sweep(space: Any, options: dict[str, Any], directions: Sequence[str]) -> tuple[Space, dict[str, Any]]:
    """Return (the space of a sweep, options with the sampler of its method).

    The values are drawn here, without a server of wandb. Each trial is a run of wandb, online or offline by WANDB_MODE."""
    if isinstance(space, Space):
        return space, options
    config = (space or default_hp_space_wandb)(None)
    if space is not None:  # the goal of transformers' own sweep is always minimize
        check_sweep(config, directions)
    method = config.get("method", "random")
    if method not in SAMPLERS:
        raise RequestError(f"the sweep's method {method!r} is not one of {', '.join(SAMPLERS)}")
    return space_of_sweep(config), {"sampler": SAMPLERS[method]()} | options


def _run_trial(recipe: TrainerRecipe, servers: ServerPool[ForkServer], study_trial: StudyTrial) -> Sequence[float]:
    """Run a trial in its own process, which reports to the study itself.

    The values are drawn here, so that the sampler keeps its state."""
    recipe.hp_space(study_trial.trial)
    with tempfile.TemporaryDirectory(prefix="upshift-trial-") as folder_name, servers.lease() as server:
        folder = Path(folder_name)
        recipe.write(folder, study_trial.trial)
        *_, ending = server.ask(Request(folder=folder_name), Request, limit_seconds=LONGEST_SECONDS)
        if not (folder / RESULT).exists():
            assert isinstance(ending, ChildExit)
            exit_code = -ending.signal if ending.signal else ending.exit
            raise JobFailed(f"its process died (exit code {exit_code}): {ending.last_words or 'without words'}")
        result = json.loads((folder / RESULT).read_bytes())
    if "values" in result:
        return [float(value) for value in result["values"]]
    if "pruned" in result:
        raise optuna.TrialPruned
    if "does_not_fit" in result:
        raise NothingFits(result["does_not_fit"] or result["error"])
    raise JobFailed(result["error"])
