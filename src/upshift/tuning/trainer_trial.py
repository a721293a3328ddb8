"""Run one trial of a ``hyperparameter_search``, in a child of the fork server.

The Trainer is made again and trains as transformers does with a trial."""

from __future__ import annotations

import atexit
import json
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import HPSearchBackend, IntervalStrategy, SaveStrategy

import upshift.training.hf_trainer.trainer  # noqa: F401  most of what a trial needs is imported before the fork
from upshift.errors import NothingFits, RequestError
from upshift.internals.optuna_names import TRIAL_ID
from upshift.tuning.study import decides, rungs
from upshift.value import Value

RECIPE = "recipe"
PATH = "path.json"
RESULT = "result.json"
MADE_BY_ITSELF = (DefaultFlowCallback, ProgressCallback, PrinterCallback)
BY_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")  # schedules
INTEGRATIONS = "transformers.integrations"  # callbacks of report_to=


class Request(Value):
    folder: str


@dataclass(frozen=True)
class Recipe:
    """The parts that make the Trainer of a trial.

    They go from one process of the user's to the next, never from a file of others."""

    kind: type
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    training_arguments: Any
    callbacks: list[Any]
    callback_kinds: list[type]
    hp_space: Callable[[Any], dict[str, Any]]
    objective: Callable[[dict[str, float]], Any]
    hp_name: Callable[[Any], str] | None

    @classmethod
    def of(cls, trainer: Any, hp_space: Any, objective: Any, hp_name: Any) -> Recipe:
        arguments, named = trainer._upshift_made_with
        there = trainer.callback_handler.callbacks
        own = [one for one in there if not isinstance(one, MADE_BY_ITSELF) and not type(one).__module__.startswith(INTEGRATIONS)]
        kinds = [type(one) for one in there]
        return cls(type(trainer), arguments, named, trainer.args, own, kinds, hp_space, objective, hp_name)

    def pickled(self, *more: Any) -> bytes:
        """Return the recipe as bytes. Raise RequestError if a part of it cannot go to another process."""
        import cloudpickle  # type: ignore[import-untyped]

        try:
            raw: bytes = cloudpickle.dumps((self, *more))
        except Exception as error:  # whatever an object of the user's raises when it is pickled
            raise RequestError(
                f"a trial runs in a process of its own, and something of this Trainer cannot go there: {error}; make it inside "
                "model_init, or at the top of a module"
            ) from None
        return raw

    def write(self, folder: Path, trial: Any) -> None:
        """Write the recipe with the study's sampler and pruner, because no storage keeps them."""
        study = trial.study
        (folder / PATH).write_text(json.dumps(sys.path))  # modules of the user's are found as here
        more = (study.study_name, trial.storage, study.sampler, study.pruner, TRIAL_ID.of(trial))
        (folder / RECIPE).write_bytes(self.pickled(*more))

    def make(self) -> Any:
        """Return a new Trainer."""
        named = dict(self.named)
        arguments = list(self.arguments)
        if len(arguments) > 1:
            arguments[1] = self.training_arguments
        else:
            named["args"] = self.training_arguments
        trainer = self.kind(*arguments, **{**named, "callbacks": None})
        kept = [one for one in trainer.callback_handler.callbacks if type(one) in self.callback_kinds]
        trainer.callback_handler.callbacks = [*kept, *self.callbacks]
        trainer.hp_space = self.hp_space
        trainer.compute_objective = self.objective
        trainer.hp_name = self.hp_name
        trainer.hp_search_backend = HPSearchBackend.OPTUNA
        trainer.objective = None
        return trainer


class AtRungs(TrainerCallback):
    """A callback that evaluates where the study's pruner decides, and at the last evaluation of the schedule."""

    def __init__(self, found: tuple[int, ...]) -> None:
        self._rungs = found
        self._before = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        step = state.global_step
        if control.should_evaluate:
            is_last = step + state.eval_steps > state.max_steps
            control.should_evaluate = is_last or decides(self._rungs, before=self._before, step=step)
            self._before = step


def only_at_rungs(trainer: Any, study: optuna.Study) -> None:
    """Add ``AtRungs`` if nothing but the study reads evaluations.

    No callback, no report, no choice of the best checkpoint and no schedule may need them."""
    args = trainer.args
    read = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST or args.lr_scheduler_type in BY_EVALUATIONS
    alone = all(isinstance(one, MADE_BY_ITSELF) for one in trainer.callback_handler.callbacks)
    if args.eval_strategy == IntervalStrategy.STEPS and alone and not read:
        trainer.add_callback(AtRungs(() if len(study.directions) > 1 else rungs(study.pruner, args.max_steps)))


def main(path: Path, answer: Callable[[Value], None]) -> None:
    atexit._clear()  # exit handlers of the server do not run in this child
    folder = Path(Request.from_file(path).folder)
    sys.path[:] = json.loads((folder / PATH).read_bytes())
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    recipe, study_name, storage, sampler, pruner, trial_id = pickle.loads((folder / RECIPE).read_bytes())
    sampler.reseed_rng()  # each trial has a copy of the sampler, and model_init may draw from it
    trial = optuna.Trial(optuna.load_study(study_name=study_name, storage=storage, sampler=sampler, pruner=pruner), trial_id)
    (folder / RESULT).write_text(json.dumps(_result(recipe, trial)))
    atexit._run_exitfuncs()  # exit handlers of the user's libraries: wandb ends its run there


def _result(recipe: Recipe, trial: Any) -> dict[str, Any]:
    try:
        trainer = recipe.make()
        only_at_rungs(trainer, trial.study)
        return {"values": _values(trainer, trial)}
    except optuna.TrialPruned:
        return {"pruned": True}
    except NothingFits as error:
        return {"does_not_fit": str(error)}
    except Exception as error:  # the reason of a failure is a result of the trial, too
        traceback.print_exc()
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def _values(trainer: Any, trial: Any) -> list[float]:
    trainer.train(trial=trial)
    if trainer.objective is None:  # it was never evaluated
        trainer.objective = trainer.compute_objective(trainer.evaluate())
    value = trainer.objective
    return [float(one) for one in (value if isinstance(value, list | tuple) else [value])]
