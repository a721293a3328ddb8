"""Add ``hyperparameter_search`` to ``upshift.Trainer``, with the signature of transformers.

Each trial runs in its own process, in a study that outlives this process. The trial's process makes the Trainer again, from
the same arguments, and trains with the trial as transformers does. Ray runs trials in processes of its own. Ranks of a launcher
search together, as in transformers.

With Ray's population-based training, a trial goes on from the checkpoint of another one. The checkpoint holds hyper-parameters,
too; those of the trial replace them.
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


class PopulationMixin(LibraryTrainer):
    """A mix-in before the Trainer: a trial that loads a checkpoint keeps its own hyper-parameters."""

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        group_values = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.hp_search_backend == HPSearchBackend.RAY:
            keep_hyperparameters(self.optimizer, self.lr_scheduler, group_values)


def keep_hyperparameters(optimizer: Any, scheduler: Any, group_values: list[dict[str, Any]]) -> None:
    """Set the trial's learning rate, weight decay and so on, at the checkpoint's position in the schedule."""
    for group, values in zip(optimizer.param_groups, group_values, strict=True):
        progress = group["lr"] / group["initial_lr"]
        group.update(values, lr=progress * values["initial_lr"])
    scheduler.base_lrs = [values["initial_lr"] for values in group_values]
    LAST_RATE.put(scheduler, [group["lr"] for group in optimizer.param_groups])


RETIRED = "SigOpt, which older guides name, was retired and transformers has dropped it; use backend='optuna', same hp_space"
LIBRARIES = {"optuna": "optuna", "ray": "ray", "wandb": "wandb"}


class SearchMixin(LibraryTrainer):
    """A mix-in before the Trainer. It stores the Trainer's arguments, so that a trial can make another one."""

    _upshift_made_with: tuple[tuple[Any, ...], dict[str, Any]]

    if not TYPE_CHECKING:  # a type checker must see the arguments of Trainer.__init__

        def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
            trainer = super().__new__(cls)
            trainer._upshift_made_with = (arguments, keywords)
            return trainer

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

        ``hp_space`` may also be a space of Upshift: a YAML file, a mapping or a ``Space``. ``directions`` replaces ``direction``
        if there are several objectives. With ``optuna`` and ``wandb``, ``storage`` is by default SQLite in the output directory,
        and an existing study of the name ``study_name`` goes on, up to ``n_trials`` in all.

        Raise RequestError for wrong arguments. A trial that fails is a row of the study with its reason."""
        name = _backend_name(backend)
        if self.model_init is None:
            raise RequestError("hyperparameter_search needs model_init= in place of model=: each trial begins with a new model")
        study_directions = list(directions or ([direction] if isinstance(direction, str) else direction))
        _check_directions(study_directions)
        objective = compute_objective or default_compute_objective
        space = _read_search_space(hp_space)
        if name == "ray" or self.args.world_size > 1:
            from upshift.tuning.backends import native_space

            return super().hyperparameter_search(
                hp_space=native_space(name, space),
                compute_objective=objective,
                n_trials=n_trials,
                direction=study_directions if len(study_directions) > 1 else study_directions[0],
                backend=name,
                hp_name=hp_name,
                **kwargs,
            )
        from upshift.tuning.trainer_study import search

        return search(
            self,
            name,
            space=space,
            objective=objective,
            trials=n_trials,
            directions=study_directions,
            hp_name=hp_name,
            options=kwargs,
        )


class Trainer(SearchMixin, PopulationMixin, without_search.Trainer):
    """The Trainer of upshift.training with hyper-parameter search."""


class Seq2SeqTrainer(SearchMixin, PopulationMixin, without_search.Seq2SeqTrainer):
    """The Seq2SeqTrainer of upshift.training with hyper-parameter search."""


def _backend_name(backend: str | HPSearchBackend | None) -> str:
    """Return the backend's name. Raise RequestError for an unknown one, MissingExtra for one that is not installed."""
    if isinstance(backend, HPSearchBackend):
        backend = backend.value
    name = SEARCH_BACKEND.get()() if backend is None else str(backend)
    if name == "sigopt":
        raise RequestError(RETIRED)
    if name not in LIBRARIES:
        raise RequestError(f"backend {name!r} is not one of {', '.join(LIBRARIES)}")
    for library in dict.fromkeys((LIBRARIES[name], "optuna" if name == "wandb" else LIBRARIES[name])):
        if installed_version(library) is None:
            extra = name if name != "optuna" else "tune"
            raise MissingExtra(library=library, extra=extra, purpose=f"backend={name!r}")
    return name


def _check_directions(directions: list[str]) -> None:
    unknown = [direction for direction in directions if direction not in ("minimize", "maximize")]
    if unknown or not directions:
        raise RequestError(f"direction {(unknown or [''])[0]!r} is not minimize or maximize")


def _read_search_space(space: Any) -> Any:
    """Return a callable as it is, or a ``Space`` from a mapping or a file. Any names may be searched: fields of
    TrainingArguments, here."""
    if isinstance(space, dict):
        return make_space(space, names=None)
    return read_space(Path(space), names=None) if isinstance(space, str | Path) else space
