"""Save checkpoints of the Trainer while training goes on. A checkpoint is complete or absent.

`checkpoint-<step>` holds the files of transformers, so transformers can resume from it. Three files are different:
training_args.json replaces a pickle; optimizer_parameters.json has the names of the parameters that the optimizer updates; and
upshift_state.json, written last, lists all files. No file needs code to be unpickled.

BatchRng restores the random numbers of a batch that was made before the checkpoint and not yet trained on. The data loader of
accelerate is one batch ahead. At a checkpoint one batch therefore exists already, made with random numbers that were drawn
before the last step. A resumed run makes this batch again with the same numbers, and then goes on with the numbers of the
checkpoint. transformers restores the generators only after that batch and the next one. Random numbers that a data set itself
draws when it returns a sample are not restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, SaveStrategy

from upshift.errors import RequestError
from upshift.internals.transformers_names import ADAPTER_LOADED, PUSH_CHECKPOINT
from upshift.training.checkpoint.async_save import BackgroundWriter, copy_weights, has_room, with_copied_config
from upshift.training.checkpoint.directory import check_room, remove_leftovers, writing
from upshift.training.checkpoint.model import extra_bytes, model_bytes, write_tokenizer
from upshift.training.checkpoint.optimizer import optimizer_bytes
from upshift.training.checkpoint.rng import HostRng, host_rng, restore_host_rng
from upshift.training.distributed.mesh import rank_0_first
from upshift.training.hf_trainer.checkpoint_files import (
    TRAINER_STATE_NAME,
    check_optimizer,
    export_full_model,
    finish_checkpoint,
    has_own_format,
    write_arguments,
    write_model_files,
    write_shards,
    writing_model,
)
from upshift.training.hf_trainer.patching import LibraryTrainer, with_global
from upshift.training.hf_trainer.transformers_checkpoint import (
    SCALER_FILE,
    SCHEDULER_FILE,
    SavedRng,
    capture_rng,
    check_plain,
    copy_optimizer,
    rng_file,
    write_file,
    write_optimizer,
    write_state,
)
from upshift.training.optimizers.sharded import ShardedOptimizer


class BatchRng:
    """The random numbers of one data loader that makes its batches in this process."""

    def __init__(self) -> None:
        self._iterator: Any = None
        self._num_ahead = 0  # batches made and not yet trained on
        self._before_newest: HostRng | None = None  # the generators before the newest batch was made
        self._to_repeat: tuple[SavedRng, torch.device] | None = None
        self._was_repeated = False

    def watch(self, loader: Any) -> None:
        """Record the random numbers with which the loader makes each batch, unless other processes make the batches."""
        if loader.num_workers or isinstance(loader.dataset, IterableDataset):
            return
        collate = self._recorded(loader.collate_fn)
        # The loader of accelerate wraps another one, and passes its own collate_fn to the loader that skips batches.
        loader.collate_fn = collate
        getattr(loader, "base_dataloader", loader).collate_fn = collate

    def next_batches(self, iterator: Iterator[Any]) -> None:
        """Remember the iterator over the loader before batches are taken from it."""
        if iterator is not self._iterator:
            self._iterator = iterator
            self._num_ahead = 0

    def handed_out(self, num_batches: int) -> None:
        self._num_ahead -= num_batches

    @property
    def ahead(self) -> HostRng | None:
        """Return the generators before the batch was made that is not yet trained on.

        Return None if there is no such batch, or if other processes make the batches.
        """
        return self._before_newest if self._num_ahead == 1 else None

    def resume(self, state: SavedRng, device: torch.device) -> None:
        """Make the next batch with the random numbers of `state.before_batch`, and then set the generators to `state`."""
        self._to_repeat = (state, device) if state.before_batch is not None else None

    def resumed(self) -> bool:
        """Return whether the batch of `resume` was made and the generators were set. After this call no batch is repeated."""
        was_repeated = self._was_repeated
        self._to_repeat = None
        self._was_repeated = False
        return was_repeated

    def _recorded(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``collate`` with its random numbers recorded, or repeated for the first batch of a resumed run."""

        def collate_recorded(samples: Any) -> Any:
            self._num_ahead += 1
            if self._to_repeat is None:
                self._before_newest = host_rng()
                return collate(samples)
            state, device = self._to_repeat
            assert state.before_batch is not None
            self._to_repeat = None
            restore_host_rng(state.before_batch)
            self._before_newest = host_rng()
            batch = collate(samples)
            state.restore(device)
            self._was_repeated = True
            return batch

        return collate_recorded


SAVING_METHODS = ("save_model", "_save", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")
KNOWN_PACKAGES = ("upshift", "transformers")  # packages whose methods save nothing besides the files of a checkpoint


class CheckpointSaving(LibraryTrainer):
    """A mix-in of transformers' Trainer classes that saves checkpoints. ``CheckpointResuming`` inherits from it.

    Training waits while weights and optimizer state are copied to host memory. A thread writes the copies, one checkpoint at a
    time. An error of the thread is raised at the next step, or at the end of training. Training waits for the finished files if

    - a callback has its own on_save, or push_to_hub is set, because these read the files of the checkpoint;
    - a subclass overrides a saving method, because it may read values that training changes meanwhile;
    - save_only_model is set, because the files are for other programs;
    - enable_jit_checkpoint is set, because it marks unfinished checkpoints itself;
    - host memory has no room for the copies beside the memory that training has needed so far.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._upshift_writer = BackgroundWriter()
        self._upshift_batch_rng = BatchRng()
        self._upshift_unfinished_checkpoint: Path | None = None  # while it is being written

    def _save_checkpoint(self: Any, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint.

        Raise JobFailed if this checkpoint or the one before it cannot be written. The message names the checkpoint that can
        still be loaded.
        """
        self._upshift_writer.wait()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        final = run_dir / f"checkpoint-{self.state.global_step}"
        temporary = final.with_name(f"{final.name}.tmp")
        self._upshift_note_best(run_dir)
        if self._upshift_has_shards():
            self._upshift_save_shards(run_dir, temporary, final)
            return
        finish = self._upshift_finisher(run_dir, temporary, final)
        with writing(run_dir, name=final.name, temporary=temporary):
            num_bytes = self._upshift_checkpoint_bytes()
            if self.args.should_save:
                run_dir.mkdir(parents=True, exist_ok=True)
                remove_leftovers(run_dir)
                check_room(run_dir, name=final.name, need=num_bytes + extra_bytes(self._upshift_tokenizer()))
                temporary.mkdir()
            if self._upshift_must_wait_for_files() or not has_room(num_bytes):
                self._upshift_save_now(temporary, finish)
            else:
                self._upshift_save_in_background(temporary, finish, run_dir)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _upshift_finisher(self: Any, run_dir: Path, temporary: Path, final: Path) -> Callable[[], None]:
        """Return a function that completes the checkpoint which is the best model so far, as the state is now."""
        return partial(
            finish_checkpoint,
            run_dir,
            final=final,
            temporary=temporary,
            best=self.state.best_model_checkpoint,
            limit=self.args.save_total_limit,
        )

    def _upshift_has_shards(self: Any) -> bool:
        """Return whether this rank has only shards of the model or of the optimizer state."""
        mesh = getattr(self, "_upshift_mesh", None)
        return mesh is not None and (mesh.plan.layout.exchanges or isinstance(self._upshift_plain_optimizer(), ShardedOptimizer))

    def _upshift_save_shards(self: Any, run_dir: Path, temporary: Path, final: Path) -> None:
        """Save the shards of all ranks while training waits."""
        finish = self._upshift_finisher(run_dir, temporary, final)

        def seal() -> None:
            self._upshift_write_extras(temporary)
            write_state(temporary / SCHEDULER_FILE, self.lr_scheduler)
            self._save_scaler(str(temporary))
            self._upshift_save_trainer_state(temporary)
            finish()

        write_shards(
            temporary,
            model=self._upshift_plain_model(),
            optimizer=self._upshift_plain_optimizer(),
            tokenizer=self._upshift_tokenizer(),
            write_rank_files=partial(self._save_rng_state, str(temporary)),
            seal=seal,
            mesh=self._upshift_mesh,
        )

    def _upshift_save_now(self: Any, temporary: Path, finish: Callable[[], None]) -> None:
        self._upshift_unfinished_checkpoint = temporary
        self.save_model(str(temporary), _internal_call=True)
        self._upshift_unfinished_checkpoint = None
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(temporary))
            self._save_scaler(str(temporary))
            self._save_rng_state(str(temporary))
        if self.args.should_save:
            self._upshift_save_trainer_state(temporary)
            finish()

    def _upshift_save_in_background(self: Any, temporary: Path, finish: Any, run_dir: Path) -> None:
        self._save_rng_state(str(temporary))
        if not self.args.should_save:
            return
        model = self._upshift_plain_model()
        weights = copy_weights(model) if self._upshift_saves_full_model() else None
        written = model if weights is None else with_copied_config(model)
        if weights is None:
            self._upshift_write_model(temporary, None, original_names=False)  # adapters are small
        optimizer = copy_optimizer(self._upshift_plain_optimizer(), model, to_host=True)
        self._upshift_write_extras(temporary)
        write_state(temporary / SCHEDULER_FILE, self.lr_scheduler)
        self._save_scaler(str(temporary))
        self._upshift_save_trainer_state(temporary)

        def write() -> None:
            with writing(run_dir, name=temporary.stem, temporary=temporary):
                if weights is not None:
                    write_model_files(temporary, written, weights, original_names=False)
                write_optimizer(temporary, optimizer)
                finish()

        self._upshift_writer.start(write)

    def _upshift_must_wait_for_files(self: Any) -> bool:
        """Return whether training must wait until the files are written. The class's docstring lists the reasons."""
        has_on_save = any(type(callback).on_save is not TrainerCallback.on_save for callback in self.callback_handler.callbacks)
        packages = (getattr(type(self), name).__module__.split(".")[0] for name in SAVING_METHODS)
        is_overridden = any(package not in KNOWN_PACKAGES for package in packages)
        is_requested = self.args.push_to_hub or self.args.save_only_model or self.args.enable_jit_checkpoint
        return bool(has_on_save or is_overridden or is_requested or has_own_format(self._upshift_plain_model()))

    def _upshift_checkpoint_bytes(self: Any) -> int:
        model = self._upshift_plain_model()
        if self._upshift_saves_full_model():
            num_bytes = model_bytes(model)
        else:
            num_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        if self.args.save_only_model:
            return num_bytes
        return num_bytes + optimizer_bytes(self._upshift_plain_optimizer())

    def _upshift_note_best(self: Any, run_dir: Path) -> None:
        if self.state.best_global_step and self.args.save_strategy != SaveStrategy.NO:
            best = run_dir / f"checkpoint-{self.state.best_global_step}"
            if self.state.best_global_step == self.state.global_step or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _upshift_save_trainer_state(self: Any, directory: Path) -> None:
        """Write the state file of transformers, with the states of callbacks in the form of transformers."""
        states = self.state.stateful_callbacks
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                if isinstance(states[name], list):
                    states[name].append(callback.state())
                else:
                    states[name] = callback.state()
        self.state.save_to_json(str(directory / TRAINER_STATE_NAME))

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        if self.args.should_save:
            optimizer = copy_optimizer(self._upshift_plain_optimizer(), self._upshift_plain_model(), to_host=False)
            write_optimizer(Path(output_dir), optimizer)
            write_state(Path(output_dir) / SCHEDULER_FILE, self.lr_scheduler)

    def _save_scaler(self: Any, output_dir: str) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and self.args.should_save:
            write_state(Path(output_dir) / SCALER_FILE, scaler)

    def _save_rng_state(self: Any, output_dir: str) -> None:
        """Write the random numbers of all processes. All processes call this method together."""
        state = capture_rng(self.args.device, self._upshift_batch_rng.ahead)
        states: list[Any] = [state]
        if self.args.world_size > 1:
            states = [None] * self.args.world_size
            dist.all_gather_object(states, state)
        if self.args.should_save:
            for rank, rank_state in enumerate(states):
                write_file(rng_file(Path(output_dir), rank, self.args.world_size), rank_state)

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as transformers.Trainer.save_model does, after any checkpoint that is still being written."""
        self._upshift_writer.wait()
        if not self._upshift_has_shards():
            super().save_model(output_dir, _internal_call=_internal_call)
            return
        directory = Path(output_dir or self.args.output_dir)
        tokenizer = self._upshift_tokenizer()
        export_full_model(
            directory,
            model=self._upshift_plain_model(),
            model_class=self._upshift_model_class,
            tokenizer=tokenizer,
            mesh=self._upshift_mesh,
        )
        with rank_0_first(self._upshift_mesh.plan), writing_model(directory):
            if self.args.should_save:
                self._upshift_write_extras(directory)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the weights as safetensors, the configuration, the processing class and training_args.json.

        Raise JobFailed if a write fails.
        """
        if not self.args.should_save:
            return
        directory = Path(output_dir if output_dir is not None else self.args.output_dir)
        if directory == self._upshift_unfinished_checkpoint:
            self._upshift_write_model(directory, state_dict, original_names=False)
            self._upshift_write_extras(directory)
            return
        with writing_model(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._upshift_write_model(directory, state_dict, original_names=True)
            self._upshift_write_extras(directory)

    def _upshift_write_model(self: Any, directory: Path, weights: dict[str, Any] | None, *, original_names: bool) -> None:
        model = self._upshift_plain_model()
        if self._upshift_saves_full_model():
            write_model_files(directory, model, weights, original_names=original_names)
        else:
            model.save_pretrained(directory, state_dict=weights)

    def _upshift_write_extras(self: Any, directory: Path) -> None:
        if self._upshift_tokenizer() is not None:
            write_tokenizer(directory, self._upshift_tokenizer())
        write_arguments(directory, self.args)

    def _push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        """Push a checkpoint. Write its arguments as JSON, where transformers would write a pickle."""
        writer = SimpleNamespace(save=lambda arguments, path: write_arguments(Path(path).parent, arguments))
        with_global(PUSH_CHECKPOINT.of(Trainer), "torch", writer)(self, checkpoint_folder)

    def _prepare_for_training(self: Any, *args: Any, **options: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **options)  # type: ignore[no-untyped-call]
        if self.args.save_strategy != SaveStrategy.NO:
            self._upshift_check_savable()
        return prepared

    def _upshift_check_savable(self: Any) -> None:
        """Raise RequestError if it is known before the first step that a checkpoint cannot be saved."""
        if self._upshift_has_shards():
            if self.args.save_only_model:
                raise RequestError("save_only_model has whole models, and ranks have parts here; leave it out, or use save_model")
            if self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
                strategy = self.args.hub_strategy.value
                raise RequestError(f"hub_strategy={strategy!r} pushes whole models, and ranks have parts here; set it to 'end'")
        if not self.args.save_only_model:
            if not isinstance(self._upshift_plain_optimizer(), ShardedOptimizer):
                check_optimizer(self._upshift_plain_optimizer(), self._upshift_plain_model())
            check_plain(self.lr_scheduler)

    def _maybe_log_save_evaluate(self: Any, *args: Any, **options: Any) -> None:
        self._upshift_writer.check()
        super()._maybe_log_save_evaluate(*args, **options)

    def _finalize_training(self: Any, *args: Any, **options: Any) -> Any:
        self._upshift_writer.wait()
        return super()._finalize_training(*args, **options)  # type: ignore[no-untyped-call]

    def _upshift_tokenizer(self: Any) -> Any:
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _upshift_plain_model(self: Any) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return model

    def _upshift_plain_optimizer(self: Any) -> torch.optim.Optimizer:
        """Return the optimizer without accelerate's wrapper."""
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer

    def _upshift_saves_full_model(self: Any) -> bool:
        """Return whether a checkpoint has the full model. If the model has adapters, a checkpoint has only these."""
        model = self._upshift_plain_model()
        return not hasattr(model, "peft_config") and not ADAPTER_LOADED.read(model, False)
