"""List the undocumented names of Optuna that Upshift uses."""

from __future__ import annotations

from upshift.internals.lookup import Internal

PRUNER = "The steps at which a pruner decides"
PRUNER_INSTEAD = "use --pruner none"
MIN_RESOURCE = Internal("optuna", "Pruner._min_resource", PRUNER, PRUNER_INSTEAD)
MAX_RESOURCE = Internal("optuna", "HyperbandPruner._max_resource", PRUNER, PRUNER_INSTEAD)
REDUCTION = Internal("optuna", "Pruner._reduction_factor", PRUNER, PRUNER_INSTEAD)
STOPPING_RATE = Internal("optuna", "SuccessiveHalvingPruner._min_early_stopping_rate", PRUNER, PRUNER_INSTEAD)
HEARTBEAT = Internal("optuna", "optuna.storages:_heartbeat.is_heartbeat_enabled", "A study that several processes share")
STUDY_STORAGE = Internal("optuna", "Study._storage", "A study that several processes share")
TRIAL_ID = Internal("optuna", "Trial._trial_id", "Trials in processes of their own")
CONTAINS = Internal("optuna", "Distribution._contains", "--warm-start", "leave out --warm-start")
