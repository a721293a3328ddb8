"""Write, check and read the files of a Trainer's checkpoint.

1. Arguments, manifests and the check that a checkpoint is complete and needs no code to be unpickled.
2. The weights, through the model's own methods, as in transformers.
3. Checkpoints and the final model of ranks that have shards of the model. Each rank writes and reads its own shards, which
replace the complete files of weights and optimizer state. Any number of ranks in any layout can resume from them, one
process included. All ranks call these functions together.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import sort_checkpoints

from upshift.errors import JobFailed, RequestError
from upshift.loading.files.checkpoint import find_safetensors
from upshift.loading.files.safetensors_header import StoredTensor, read_header
from upshift.models.build import build_model
from upshift.training.checkpoint.by_ranks import (
    describe_all_ranks,
    drop_tied_names,
    export_weights,
    make_shared_directory,
    restore_shards,
)
from upshift.training.checkpoint.directory import (
    CHECKPOINT,
    check_checkpoint,
    file_sizes,
    put_in_place,
    remove_checkpoint,
    step_of,
    writing,
)
from upshift.training.checkpoint.model import (
    checked_target,
    extra_bytes,
    has_adapter,
    never_saved_names,
    write_adapter,
    write_weights,
)
from upshift.training.checkpoint.optimizer import class_name, encode, plain_name, updated_parameter_names
from upshift.training.checkpoint.sharded import (
    Piece,
    is_sharded,
    read_pieces,
    shards_to_write,
    updated_names,
)
from upshift.training.checkpoint.state import STATE_NAME, SavedOptimizer, TrainerManifest
from upshift.training.distributed.mesh import Mesh, all_gather_objects, gather_errors, rank_0_first
from upshift.training.hf_trainer.transformers_checkpoint import (
    OPTIMIZER_FILE,
    PLAIN_STATE_FIX,
    SCHEDULER_FILE,
    optimizer_by_names,
)
from upshift.value import first_problem

logger = logging.getLogger(__name__)

ARGUMENTS_NAME = "training_args.json"
SHARDED_OPTIMIZER_NAME = "optimizer.json"  # in checkpoints of ranks that have shards
TRAINER_STATE_NAME = "trainer_state.json"
PICKLED_ADAPTER = "adapter_model.bin"
WEIGHT_FILES = frozenset(
    {
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "adapter_model.safetensors",
        PICKLED_ADAPTER,
    }
)
NOT_WRITTEN_KEY = "not_written"  # the key for arguments that JSON cannot hold


def write_arguments(directory: Path, arguments: Any) -> None:
    """Write TrainingArguments as JSON.

    Tokens are left out, as in transformers. The classes of values that JSON cannot hold are listed under "not_written".
    """
    written: dict[str, Any] = {}
    class_names: dict[str, str] = {}
    for name, value in arguments.to_dict().items():
        try:
            json.dumps(value)
            written[name] = value
        except (TypeError, ValueError):
            class_names[name] = f"{type(value).__module__}.{type(value).__qualname__}"
    (directory / ARGUMENTS_NAME).write_text(json.dumps({**written, NOT_WRITTEN_KEY: class_names}, indent=1), encoding="utf-8")


def read_saved_optimizer(directory: Path) -> SavedOptimizer | None:
    """Return the optimizer state of a sharded checkpoint, or None if the checkpoint has only a model."""
    path = directory / SHARDED_OPTIMIZER_NAME
    if not path.is_file():
        return None
    try:
        return SavedOptimizer.model_validate(json.loads(path.read_bytes()))
    except ValidationError as error:
        problem = first_problem(SavedOptimizer, error)
        raise RequestError(f"{path} is no state of this version ({problem}); resume from another checkpoint") from None


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise RequestError if it is known before the first step that the optimizer cannot be saved."""
    named = updated_parameter_names(optimizer, model).keys()
    optimizer_name = class_name(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        if not named >= set(group["params"]):
            raise RequestError(
                f"optimizer {optimizer_name} trains parameters that the model has not, so no checkpoint could name them; "
                "make it of model.parameters(), or set save_only_model=True or save_strategy='no'"
            )
        for key, value in group.items():
            try:
                encode([] if key == "params" else value)
            except TypeError as error:
                raise RequestError(
                    f"option {key} of group {number} of optimizer {optimizer_name}: {error}; {PLAIN_STATE_FIX}"
                ) from None


def check_resumable(directory: Path) -> None:
    """Raise RequestError if this is not a complete checkpoint of upshift.Trainer or transformers.Trainer. Read no tensors."""
    if is_upshift_checkpoint(directory):
        _check_upshift_checkpoint(directory)
        return
    if not (directory / TRAINER_STATE_NAME).is_file():  # transformers writes this file last
        raise RequestError(f"{directory} is no whole checkpoint, it has no {TRAINER_STATE_NAME}; resume from another checkpoint")
    weights = [path for path in directory.rglob("*") if path.name in WEIGHT_FILES]
    if not weights:
        raise RequestError(
            f"{directory} has no weights in {', '.join(sorted(WEIGHT_FILES))}; resume it with the launcher that wrote it, or "
            "resume from another checkpoint"
        )
    if any(path.suffix == ".safetensors" for path in weights):
        for path in directory.glob("*.safetensors"):
            read_header(path)
    if (directory / OPTIMIZER_FILE).is_file() != (directory / SCHEDULER_FILE).is_file():
        names = [OPTIMIZER_FILE, SCHEDULER_FILE]
        missing = next(name for name in names if not (directory / name).is_file())
        raise RequestError(f"{directory} is no whole checkpoint, it has no {missing}; resume from another checkpoint")


def is_upshift_checkpoint(directory: Path) -> bool:
    """Return whether Upshift wrote the checkpoint, and not transformers."""
    return (directory / STATE_NAME).is_file()


def _check_upshift_checkpoint(directory: Path) -> None:
    if not isinstance(check_checkpoint(directory), TrainerManifest):
        raise RequestError(
            f"{directory} is of upshift train; go on with  upshift train --resume, or start a new run from its weights with "
            f"from_pretrained({str(directory)!r})"
        )
    if not is_sharded(directory) and any(directory.glob("optimizer*.safetensors")):
        raise RequestError(
            f"{directory} was written by an earlier version of Upshift; finish the run with that version, or start a new one "
            f"from its weights with from_pretrained({str(directory)!r})"
        )


def check_adapters(directory: Path) -> None:
    """Raise RequestError if peft would have to unpickle the adapters of a checkpoint."""
    check_resumable(directory)
    pickled = sorted(path for path in directory.rglob("*") if path.name == PICKLED_ADAPTER)
    if pickled:
        raise RequestError(
            f"{pickled[0]} is pickled, and pickles of adapters are never loaded; save the adapter with "
            "safe_serialization=True, or resume from another checkpoint"
        )


def newest_resumable(directory: Path) -> Path:
    """Return the newest complete checkpoint. Raise RequestError if there is none."""
    checkpoints = [path for path in directory.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir()]
    problems = []
    for path in sorted(checkpoints, key=lambda path: (-(step_of(path) or 0), path.name)):
        try:
            check_resumable(path)
        except RequestError as error:
            problems.append(error)
            continue
        for problem in problems:
            logger.warning("skipped a damaged checkpoint: %s", problem)
        return path
    if problems:
        raise problems[0]
    raise RequestError(f"{directory} holds no checkpoint; give another output_dir, or start without resume_from_checkpoint")


def remove_old_checkpoints(directory: Path, *, newest: Path, best: str | None, limit: int | None) -> None:
    """Remove the oldest checkpoints until `limit` are left (None or 0: keep all). Never remove `newest` or `best`.

    The order of removal is that of transformers.
    """
    if not limit or limit < 0:
        return
    entries = [Path(path) for path in sort_checkpoints(str(directory), use_mtime=True)]
    checkpoints = [path for path in entries if CHECKPOINT.fullmatch(path.name)]
    protected = {newest} if best is None else {newest, Path(best)}
    removable = [path for path in checkpoints if path not in protected]
    num_excess = max(0, len(checkpoints) - max(limit, len(protected)))
    for path in removable[:num_excess]:
        remove_checkpoint(path)


@contextmanager
def writing_model(directory: Path) -> Iterator[None]:
    """Turn errors of writing into JobFailed while open."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise JobFailed(f"the model could not be written to {directory}: {reason}; free space there and save again") from error


def finish_checkpoint(run_dir: Path, *, final: Path, temporary: Path, best: str | None, limit: int | None) -> None:
    """Write the manifest, rename `temporary` to `final`, and remove old checkpoints."""
    manifest = TrainerManifest(files=file_sizes(temporary), trainer=transformers.__version__)
    manifest.write(temporary)
    put_in_place(temporary, final)
    remove_old_checkpoints(run_dir, newest=final, best=best, limit=limit)


def has_own_format(model: nn.Module) -> bool:
    """Return whether the model's class overrides the methods that save or load its weights."""
    base: Any = nn.Module
    methods = ["state_dict", "load_state_dict"]
    if isinstance(model, PreTrainedModel):
        base = PreTrainedModel
        methods.append("save_pretrained")
    return any(getattr(type(model), name, None) is not getattr(base, name, None) for name in methods)


def write_model_files(directory: Path, model: nn.Module, weights: dict[str, Tensor] | None, *, original_names: bool) -> None:
    """Write the model, as a Hugging Face directory if it is a model of transformers.

    ``weights`` is a copy of its state_dict. None: write the state_dict itself.
    """
    if isinstance(model, PreTrainedModel):
        if has_own_format(model):
            model.save_pretrained(directory, state_dict=weights, is_main_process=True)
        else:
            write_weights(directory, model, model.state_dict() if weights is None else weights, original_names=original_names)
        return
    state = model.state_dict() if weights is None else weights
    # A tensor with several names is written under one of them, as read_model expects.
    unique_names = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(state.items())}
    plain = {plain_name(name): state[name].contiguous() for name in unique_names.values()}
    save_file(plain, directory / "model.safetensors", {"format": "pt"})


def read_model(directory: Path, model: nn.Module) -> None:
    """Load the weights with the model's load_state_dict. Raise RequestError if they belong to another model."""
    stored = find_safetensors(directory).tensors
    names = {plain_name(name): name for name in model.state_dict()}
    if not has_own_format(model):
        _check_stored(directory, stored, model)
    weights: dict[str, Tensor] = {}
    for file in sorted({tensor.file for tensor in stored.values()}):
        weights |= {names.get(name, name): tensor for name, tensor in load_file(file).items()}
    model.load_state_dict(weights, strict=False)


def _check_stored(directory: Path, stored: Mapping[str, StoredTensor], model: nn.Module) -> None:
    targets = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    for stored_tensor in stored.values():
        checked_target(stored_tensor, targets, directory)
    missing = missing_names(stored, model)
    if missing:
        raise RequestError(f"{directory} has no weight {missing[0]}; resume with the model that the run was started with")


def missing_names(stored: Any, model: nn.Module) -> list[str]:
    """Return the names of the model's weights that are neither stored nor tied to a stored weight."""
    targets = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    stored_keys = {(tensor.data_ptr(), tensor.shape) for name, tensor in targets.items() if name in stored}
    never_saved = never_saved_names(model)
    return [
        name
        for name, tensor in targets.items()
        if name not in stored and (tensor.data_ptr(), tensor.shape) not in stored_keys and name not in never_saved
    ]


def read_published_format(directory: Path, model: nn.Module) -> bool:
    """Load weights under the names of the published format, which checkpoints of transformers have.

    Return False if the names are the model's own, so that nothing has to be translated. Raise RequestError if the weights do
    not fit this model.
    """
    if not isinstance(model, PreTrainedModel) or has_own_format(model) or not any(directory.glob("*.safetensors")):
        return False
    stored = find_safetensors(directory).tensors
    missing = missing_names(stored, model)
    foreign = sorted(stored.keys() - {plain_name(name) for name in model.state_dict()})
    if not missing and not foreign:
        return False
    model_class: Any = type(model)
    loaded, report = model_class.from_pretrained(
        directory, config=model.config, dtype=next(model.parameters()).dtype, output_loading_info=True
    )
    problems = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    if problems:
        raise RequestError(f"{directory} and the model differ in weight {problems[0]}; resume with the model of that run")
    names = {plain_name(name): name for name in model.state_dict()}
    model.load_state_dict({names[name]: tensor for name, tensor in loaded.state_dict().items()})
    return True


def write_shards(
    temporary: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokenizer: Any | None,
    write_rank_files: Callable[[], None],
    seal: Callable[[], None],
    mesh: Mesh,
) -> None:
    """Write a sharded checkpoint. Call ``write_rank_files`` on all ranks, and then ``seal`` on rank 0.

    Raise JobFailed on all ranks if one of them cannot write.
    """
    plan = mesh.plan
    name = temporary.stem
    shards = shards_to_write(model, optimizer, plan, mesh.rank)
    saved_optimizer = describe_all_ranks(model, optimizer, mesh)
    make_shared_directory(temporary, sum(all_gather_objects(shards.num_bytes, plan)) + extra_bytes(tokenizer), name, mesh)
    with gather_errors(plan), writing(temporary.parent, name=name, temporary=None):
        shards.write(temporary)
    write_rank_files()
    with rank_0_first(plan), writing(temporary.parent, name=name, temporary=temporary):
        if mesh.rank == 0:
            config_holder: Any = getattr(model, "config", model)
            config_holder.save_pretrained(temporary)
            (temporary / SHARDED_OPTIMIZER_NAME).write_text(json.dumps(saved_optimizer.model_dump()), encoding="utf-8")
            seal()


def read_into_shards(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint that one process, or transformers, wrote into the shards of this rank.

    Raise RequestError if it does not match this run.
    """
    names = updated_names(model, optimizer)
    groups = tuple(tuple(names[tensor] for tensor in group["params"]) for group in optimizer.param_groups)
    saved, tensors = optimizer_by_names(directory, groups, class_name(optimizer))
    with tempfile.TemporaryDirectory(prefix="upshift-resume-") as folder:
        file = Path(folder) / "optimizer.safetensors"
        save_file(tensors, file)
        stored = read_pieces(directory)
        stored["optimizer"] = {tensor.name: [(Piece(shape=tensor.shape), tensor)] for tensor in read_header(file).tensors}
        restore_shards(directory, saved, model, optimizer, stored=stored)


def read_shards(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimizer state from a checkpoint of any layout into the shards of this rank.

    Raise RequestError if they do not match this run.
    """
    saved = read_saved_optimizer(directory)
    assert saved is not None  # the caller has checked that the file exists
    restore_shards(directory, saved, model, optimizer)


def export_full_model(directory: Path, *, model: nn.Module, model_class: Any, tokenizer: Any | None, mesh: Mesh) -> None:
    """Write the full model from rank 0, in the format of one process.

    ``model_class`` is the class of the model before fully_shard replaced it.
    """

    def save(weights: dict[str, Tensor]) -> None:
        weights = drop_tied_names(weights, model)
        if has_adapter(model):
            write_adapter(directory, model, weights)
            return
        write_model_files(directory, _without_weights(model, model_class), weights, original_names=True)

    export_weights(directory, model=model, tokenizer=tokenizer, save=save, mesh=mesh)


def _without_weights(model: Any, model_class: Any) -> Any:
    """Return a model of the same configuration without weights."""
    with torch.device("meta"):
        empty_model: Any = build_model(model.config, model_class, dtype=next(model.parameters()).dtype)
    empty_model.generation_config = getattr(model, "generation_config", None)
    return empty_model
