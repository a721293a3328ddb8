"""Run one trial of a ``hyperparameter_search`` in a child of the fork server.

It makes the Trainer anew, which then trains with the trial as transformers does."""

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
from optuna.pruners import BasePruner
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import HPSearchBackend, IntervalStrategy, SaveStrategy

import upshift.training.hf_trainer.trainer  # noqa: F401  imports most modules that a trial needs before the fork
from upshift.errors import NothingFits, RequestError
from upshift.internals.optuna_names import TRIAL_ID
from upshift.tuning.study import crosses_decision_step, decision_steps
from upshift.value import Value

RECIPE = "recipe"
PATH = "path.json"
RESULT = "result.json"
DEFAULT_CALLBACKS = (DefaultFlowCallback, ProgressCallback, PrinterCallback)  # every Trainer adds them
BY_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")  # schedules that read evaluations
INTEGRATIONS = "transformers.integrations"  # callbacks of report_to=


class Request(Value):
    """The folder with the files of a trial."""

    folder: str


@dataclass(frozen=True)
class TrainerRecipe:
    """The arguments that make the Trainer of a trial.

    They are pickled from one process of the user to another, and never read from a file of somebody else."""

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
    def of(cls, trainer: Any, hp_space: Any, objective: Any, hp_name: Any) -> TrainerRecipe:
        """Return the recipe of an existing Trainer. Callbacks that a new Trainer adds itself are left out."""
        arguments, keywords = trainer._upshift_made_with
        callbacks = trainer.callback_handler.callbacks
        user_callbacks = []
        for callback in callbacks:
            is_integration = type(callback).__module__.startswith(INTEGRATIONS)
            if not isinstance(callback, DEFAULT_CALLBACKS) and not is_integration:
                user_callbacks.append(callback)
        callback_kinds = [type(callback) for callback in callbacks]
        return cls(type(trainer), arguments, keywords, trainer.args, user_callbacks, callback_kinds, hp_space, objective, hp_name)

    def pickled(self, *study_parts: Any) -> bytes:
        """Return the recipe as bytes. Raise RequestError if a part of it cannot go to another process."""
        import cloudpickle  # type: ignore[import-untyped]

        try:
            data: bytes = cloudpickle.dumps((self, *study_parts))
        except Exception as error:  # an object of the user may raise anything when it is pickled
            raise RequestError(
                f"a trial runs in a process of its own, and something of this Trainer cannot go there: {error}; make it inside "
                "model_init, or at the top of a module"
            ) from None
        return data

    def write(self, folder: Path, trial: Any) -> None:
        """Write the recipe with the study's sampler and pruner, which the storage does not hold."""
        study = trial.study
        (folder / PATH).write_text(json.dumps(sys.path))  # so that the trial finds the user's modules
        study_parts = (study.study_name, trial.storage, study.sampler, study.pruner, TRIAL_ID.of(trial))
        (folder / RECIPE).write_bytes(self.pickled(*study_parts))

    def make(self) -> Any:
        """Return a new Trainer."""
        keywords = dict(self.named)
        arguments = list(self.arguments)
        if len(arguments) > 1:
            arguments[1] = self.training_arguments
        else:
            keywords["args"] = self.training_arguments
        trainer = self.kind(*arguments, **{**keywords, "callbacks": None})
        handler = trainer.callback_handler
        retained = [callback for callback in handler.callbacks if type(callback) in self.callback_kinds]
        handler.callbacks = [*retained, *self.callbacks]
        trainer.hp_space = self.hp_space
        trainer.compute_objective = self.objective
        trainer.hp_name = self.hp_name
        trainer.hp_search_backend = HPSearchBackend.OPTUNA
        trainer.objective = None
        return trainer


class EvaluateAtDecisions(TrainerCallback):
    """A callback that skips evaluations, except where the study's pruner decides, and the last one.

    It skips none if the choice of the best checkpoint, or the schedule, reads evaluations.

    ``pruner``: None for several objectives, of which Optuna prunes no trial."""

    def __init__(self, pruner: BasePruner | None) -> None:
        self._pruner = pruner
        self._skips = False
        self._decision_steps: tuple[int, ...] = ()
        self._previous_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Find the decision steps: the trial's values are set only now, and the steps of a run of epochs are counted."""
        chooses_checkpoint = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        is_read = chooses_checkpoint or args.lr_scheduler_type in BY_EVALUATIONS
        self._skips = args.eval_strategy == IntervalStrategy.STEPS and not is_read
        self._decision_steps = () if self._pruner is None else decision_steps(self._pruner, state.max_steps)
        self._previous_step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        step = state.global_step
        if self._skips and control.should_evaluate:
            is_last = step + state.eval_steps > state.max_steps
            is_decision = crosses_decision_step(self._decision_steps, previous_step=self._previous_step, step=step)
            control.should_evaluate = is_last or is_decision
            self._previous_step = step


def skip_unread_evaluations(trainer: Any, study: optuna.Study) -> None:
    """Add ``EvaluateAtDecisions`` if no callback of the user, or of a tracker, reads evaluations."""
    if all(isinstance(callback, DEFAULT_CALLBACKS) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(EvaluateAtDecisions(study.pruner if len(study.directions) == 1 else None))


def main(path: Path, answer: Callable[[Value], None]) -> None:
    """Run the trial that the request at ``path`` names, and write its result to its folder."""
    atexit._clear()  # the server's exit handlers must not run in this child
    folder = Path(Request.from_file(path).folder)
    sys.path[:] = json.loads((folder / PATH).read_bytes())
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    recipe, study_name, storage, sampler, pruner, trial_id = pickle.loads((folder / RECIPE).read_bytes())
    sampler.reseed_rng()  # each trial has a copy of the sampler, and model_init may draw from it
    trial = optuna.Trial(optuna.load_study(study_name=study_name, storage=storage, sampler=sampler, pruner=pruner), trial_id)
    (folder / RESULT).write_text(json.dumps(_result(recipe, trial)))
    atexit._run_exitfuncs()  # libraries of the user need their exit handlers: wandb ends its run there


def _result(recipe: TrainerRecipe, trial: Any) -> dict[str, Any]:
    try:
        trainer = recipe.make()
        skip_unread_evaluations(trainer, trial.study)
        return {"values": _values(trainer, trial)}
    except optuna.TrialPruned:
        return {"pruned": True}
    except NothingFits as error:
        return {"does_not_fit": str(error)}
    except Exception as error:  # the reason of a failure is the trial's result
        traceback.print_exc()
        return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def _values(trainer: Any, trial: Any) -> list[float]:
    trainer.train(trial=trial)
    if trainer.objective is None:  # it was never evaluated
        trainer.objective = trainer.compute_objective(trainer.evaluate())
    value = trainer.objective
    return [float(item) for item in (value if isinstance(value, list | tuple) else [value])]
