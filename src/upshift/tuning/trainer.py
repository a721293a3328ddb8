"""Add ``hyperparameter_search`` to ``upshift.Trainer``, with transformers' own signature.

Each trial runs in a process of its own, in a study that outlives this process. A trial's process builds the Trainer again,
from the arguments that this one was made with, and trains as transformers does with a trial. Ray runs trials in processes of
its own. Ranks that a launcher started search together, as in transformers.

Support population-based training, which Ray's scheduler of that name directs.

A trial goes on from another one's checkpoint with hyper-parameters of its own. A checkpoint holds the hyper-parameters that it
was trained with; here the trial's win.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import BestRun, HPSearchBackend, default_compute_objective

from upshift.errors import MissingExtra, RequestError
from upshift.internals.torch_names import LAST_RATE
from upshift.internals.transformers_names import SEARCH_BACKEND
from upshift.training.hf_trainer import trainer as without_search
from upshift.training.hf_trainer.patching import LibraryTrainer
from upshift.tuning.space import Space, make_space, read_space
from upshift.versions import installed_version


class OfPopulation(LibraryTrainer):
    """A class that is mixed in before the Trainer."""

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        own = [{name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.hp_search_backend == HPSearchBackend.RAY:
            keep_own(self.optimizer, self.lr_scheduler, own)


def keep_own(optimizer: Any, scheduler: Any, own: list[dict[str, Any]]) -> None:
    """Keep the trial's learning rate, weight decay and the rest, at the checkpoint's place in the schedule."""
    for group, values in zip(optimizer.param_groups, own, strict=True):
        share = group["lr"] / group["initial_lr"]
        group.update(values, lr=share * values["initial_lr"])
    scheduler.base_lrs = [values["initial_lr"] for values in own]
    LAST_RATE.put(scheduler, [group["lr"] for group in optimizer.param_groups])


RETIRED = "SigOpt, which older guides name, was retired and transformers has dropped it; use backend='optuna', same hp_space"
LIBRARIES = {"optuna": "optuna", "ray": "ray", "wandb": "wandb"}


class Searched(LibraryTrainer):
    """A class that is mixed in before the Trainer. It keeps the arguments of the Trainer, so that a trial can make another."""

    _upshift_made_with: tuple[tuple[Any, ...], dict[str, Any]]

    if not TYPE_CHECKING:  # a type checker is to read the arguments of Trainer.__init__, and not these

        def __new__(cls, *arguments: Any, **named: Any) -> Any:
            made = super().__new__(cls)
            made._upshift_made_with = (arguments, named)
            return made

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | Space | dict[str, Any] | str | Path | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | Sequence[str] = "minimize",
        backend: str | HPSearchBackend | None = None,
        hp_name: Callable[[Any], str] | None = None,
        *,
        directions: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """Search hyper-parameters as transformers does.

        ``hp_space`` may also be a space of ours: a YAML file, a mapping or a ``Space``. ``directions`` is ``direction`` of
        several objectives. With ``optuna`` and ``wandb``, ``storage`` is by default SQLite in the output directory, and
        ``study_name`` may name an existing study: it goes on, up to ``n_trials`` in all.

        Raise RequestError for wrong arguments. A trial that fails is a row of the study with its reason."""
        name = _backend(backend)
        if self.model_init is None:
            raise RequestError("hyperparameter_search needs model_init= in place of model=: each trial begins with a new model")
        wanted = list(directions or ([direction] if isinstance(direction, str) else direction))
        _check_directions(wanted)
        objective = compute_objective or default_compute_objective
        space = _space(hp_space)
        if name == "ray" or self.args.world_size > 1:
            from upshift.tuning.backends import native_space

            return super().hyperparameter_search(
                hp_space=native_space(name, space), compute_objective=objective, n_trials=n_trials,
                direction=wanted if len(wanted) > 1 else wanted[0], backend=name, hp_name=hp_name, **kwargs,
            )  # fmt: skip
        from upshift.tuning.trainer_study import search

        return search(
            self, name, space=space, objective=objective, trials=n_trials, directions=wanted, hp_name=hp_name, options=kwargs
        )


class Trainer(Searched, OfPopulation, without_search.Trainer):
    """The Trainer of upshift.training with hyper-parameter search."""


class Seq2SeqTrainer(Searched, OfPopulation, without_search.Seq2SeqTrainer):
    """The Seq2SeqTrainer of upshift.training with hyper-parameter search."""


def _backend(asked: str | HPSearchBackend | None) -> str:
    """Return the backend's name. Raise RequestError for an unknown one, MissingExtra for one that is not installed."""
    name = SEARCH_BACKEND.get()() if asked is None else str(asked.value if isinstance(asked, HPSearchBackend) else asked)
    if name == "sigopt":
        raise RequestError(RETIRED)
    if name not in LIBRARIES:
        raise RequestError(f"backend {name!r} is not one of {', '.join(LIBRARIES)}")
    for library in dict.fromkeys((LIBRARIES[name], "optuna" if name == "wandb" else LIBRARIES[name])):
        if installed_version(library) is None:
            extra = name if name != "optuna" else "tune"
            raise MissingExtra(library=library, extra=extra, purpose=f"backend={name!r}")
    return name


def _check_directions(wanted: list[str]) -> None:
    wrong = [one for one in wanted if one not in ("minimize", "maximize")]
    if wrong or not wanted:
        raise RequestError(f"direction {(wrong or [''])[0]!r} is not minimize or maximize")


def _space(given: Any) -> Any:
    """Return a callable as it is, or a space of ours with any names: they are fields of TrainingArguments."""
    if isinstance(given, dict):
        return make_space(given, names=None)
    return read_space(Path(given), names=None) if isinstance(given, str | Path) else given
