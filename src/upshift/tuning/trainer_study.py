"""Run the study of a ``hyperparameter_search``: Optuna proposes values, and a process for each trial answers."""

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
from upshift.tuning.backends import native_space, space_of
from upshift.tuning.jobs import Servers
from upshift.tuning.space import Space
from upshift.tuning.storage import persistent, without_warnings
from upshift.tuning.study import Asked, check_identity, run_study
from upshift.tuning.trainer_trial import RESULT, Recipe, Request

WORKER = "upshift.tuning.trainer_trial"
LONGEST_SECONDS = 1e9
OF_OPTIMIZE = ("timeout", "n_jobs", "gc_after_trial", "catch")
SAMPLERS: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
    "random": optuna.samplers.RandomSampler, "bayes": optuna.samplers.TPESampler, "grid": optuna.samplers.BruteForceSampler,
}  # fmt: skip


def search(
    trainer: Any, backend: str, *, space: Any, objective: Callable[[dict[str, float]], Any], trials: int,
    directions: Sequence[Any], hp_name: Callable[[Any], str] | None, options: dict[str, Any],
) -> BestRun | list[BestRun]:  # fmt: skip
    """Run the search and return the best trials.

    ``options``: of optuna.create_study, and timeout, n_jobs, gc_after_trial and catch of its optimize."""
    if backend == "wandb" and "wandb" not in trainer.args.report_to:
        raise RequestError("backend='wandb' makes each trial a run of wandb's; add report_to=['wandb'] to the arguments")
    running = {name: options.pop(name) for name in OF_OPTIMIZE if name in options}
    if backend == "wandb":
        space, options = _sweep(space, options)
    of_trial = native_space("optuna", space) or default_hp_space_optuna
    recipe = Recipe.of(trainer, of_trial, objective, hp_name)
    recipe.pickled()  # an object that cannot be pickled fails the call, and not each trial
    folder = Path(trainer.args.output_dir)
    named: dict[str, Any] = {"study_name": "hyperparameter_search", "load_if_exists": True} | options
    named["storage"] = persistent(options.get("storage"), folder)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with without_warnings():
        study = optuna.create_study(directions=list(directions), **named)
    catch = tuple(running.get("catch", ()))
    searched = space.model_dump() if isinstance(space, Space) else _drawn_by(of_trial, catch)
    _check_same(study, directions, {"hp_space": searched, "compute_objective": _words_of(objective)})
    with Servers(partial(fork_server, WORKER)) as servers:
        run_study(
            study, partial(_run, recipe, servers), trials=trials, jobs=running.get("n_jobs", 1), seconds=running.get("timeout"),
            catch=catch,
        )  # fmt: skip
    best = [
        BestRun(str(one.number), one.values if len(directions) > 1 else one.values[0], one.params) for one in study.best_trials
    ]
    return best if len(directions) > 1 else best[0]


def _check_same(study: optuna.Study, directions: Sequence[str], identity: dict[str, Any]) -> None:
    """Raise RequestError if a study that goes on had other directions or another identity. Optuna does not check this."""
    there = [one.name.lower() for one in study.directions]
    if there != list(directions):
        raise RequestError(
            f"the study {study.study_name!r} has direction {', '.join(there)}, not {', '.join(directions)}; use the same, or "
            "another study_name="
        )
    check_identity(study, identity, other="another study_name=")


def _drawn_by(hp_space: Callable[[Any], dict[str, Any]], catch: tuple[type[Exception], ...]) -> dict[str, str]:
    """Return the distributions that one draw meets. The draw is the same each time; other draws may meet other distributions."""
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    with suppress(optuna.TrialPruned, *catch):
        hp_space(trial)
    return {name: str(one) for name, one in trial.distributions.items()}


def _words_of(objective: Callable[..., Any]) -> str:
    """Return an objective's name and the strings in its code: they differ for two lambdas that read other metrics."""
    code = getattr(objective, "__code__", None)
    strings = [one for one in code.co_consts if isinstance(one, str) and one != objective.__doc__] if code else []
    return f"{getattr(objective, '__qualname__', type(objective).__qualname__)}({', '.join(strings)})"


def _sweep(given: Any, options: dict[str, Any]) -> tuple[Space, dict[str, Any]]:
    """Return (the space of a sweep, options with the sampler of its method).

    Sweeps are drawn here, which needs no server. Each trial is a run of wandb's, online or offline as WANDB_MODE says."""
    if isinstance(given, Space):
        return given, options
    config = (given or default_hp_space_wandb)(None)
    method = config.get("method", "random")
    if method not in SAMPLERS:
        raise RequestError(f"the sweep's method {method!r} is not one of {', '.join(SAMPLERS)}")
    return space_of(config), {"sampler": SAMPLERS[method]()} | options


def _run(recipe: Recipe, servers: Servers[ForkServer], asked: Asked) -> Sequence[float]:
    """Run a trial in a process of its own, which reports to the study itself.

    Values are drawn here, where the sampler lives on."""
    recipe.hp_space(asked.trial)
    with tempfile.TemporaryDirectory(prefix="upshift-trial-") as name, servers.one() as server:
        folder = Path(name)
        recipe.write(folder, asked.trial)
        *_, ended = server.ask(Request(folder=name), Request, limit_seconds=LONGEST_SECONDS)
        if not (folder / RESULT).exists():
            assert isinstance(ended, ChildExit)
            code = -ended.signal if ended.signal else ended.exit
            raise JobFailed(f"its process died (exit code {code}): {ended.last_words or 'without words'}")
        result = json.loads((folder / RESULT).read_bytes())
    if "values" in result:
        return [float(value) for value in result["values"]]
    if "pruned" in result:
        raise optuna.TrialPruned
    raise (NothingFits if "does_not_fit" in result else JobFailed)(result.get("does_not_fit") or result["error"])
