"""Checkpoints: exact resume, Hugging Face directories, full disks, killed processes, damaged files, user's files."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    get_scheduler,
)

from upshift.errors import JobFailed, RequestError
from upshift.training.batches.sampler import Position
from upshift.training.checkpoint import directory as checkpoint_files
from upshift.training.checkpoint.async_save import BackgroundWriter
from upshift.training.checkpoint.checkpoint import (
    TrainState,
    capture_rng,
    check_output_directory,
    find_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    save_model,
)
from upshift.training.prepare import no_cache

GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=1)
assert GPT2.resid_pdrop > 0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.compiler.set_stance("default")


def gpt2(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2).to(dtype).train()


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_key_value_heads": 2, "vocab_size": 64, **changes}))


def adamw(model: Any, **options: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **(options or {"fused": True}))


def adafactor(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def adamw_8bit(model: Any) -> Any:
    torch.compiler.set_stance("force_eager")  # its compiled step takes 15 s to build
    return pytest.importorskip("torchao.optim").AdamW8bit(model.parameters(), lr=1e-2)


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def train_state(step: int) -> TrainState:
    return TrainState(
        step=step,
        position=Position(epoch=1, batch=step),
        seed=3,
        tokens_seen=32 * step,
        plan={"precision": "bf16"},
        loss_curve=tuple(0.1 * i for i in range(step)),
        versions={"torch": torch.__version__},
    )


def save(directory: Path, model: Any, optimizer: Any, step: int, **others: Any) -> Path:
    options = {"tokenizer": None, "scheduler_state": {}, "scaler_state": None, **others}
    return save_checkpoint(directory, model=model, optimizer=optimizer, state=train_state(step), **options)


class Run:
    """A model in training: everything that a fresh process would build anew."""

    def __init__(self, model: Any, make_optimizer: Callable[[Any], Any], *, autocast: bool = True) -> None:
        self.model, self.optimizer, self.autocast = model, make_optimizer(model), autocast
        self.scheduler = get_scheduler("cosine", self.optimizer, num_warmup_steps=2, num_training_steps=8)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.model(tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item() + random.random() + float(np.random.rand()))
        return losses


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def state_tensors(run: Run) -> list[torch.Tensor]:
    states = [run.optimizer.state[p] for group in run.optimizer.param_groups for p in group["params"]]
    ordered = (value for state in states for _, value in sorted(state.items()) if torch.is_tensor(value))
    plain = (value.dequantize() if type(value) is not torch.Tensor else value for value in ordered)
    return [*run.model.state_dict().values(), *plain]


@pytest.mark.parametrize(
    ("dtype", "make_optimizer"),
    [
        (torch.float32, adamw),
        (torch.float32, lambda model: adamw(model, foreach=True, amsgrad=True)),
        (torch.bfloat16, adamw),
        (torch.float32, adafactor),
        (torch.float32, adamw_8bit),
    ],
    ids=["adamw-fused", "adamw-foreach", "bf16-weights", "adafactor", "8bit"],
)
def test_resume_is_exact(tmp_path: Path, dtype: torch.dtype, make_optimizer: Callable[[Any], Any]) -> None:
    def start() -> Run:
        return Run(gpt2(dtype), make_optimizer, autocast=dtype is torch.float32)

    whole, first, second = start(), start(), start()
    seed_everything(1)
    expected = whole.train(range(6))
    seed_everything(1)
    losses = first.train(range(3))
    save(tmp_path, first.model, first.optimizer, 3, scheduler_state=first.scheduler.state_dict())
    seed_everything(99)
    second.model.load_state_dict({k: torch.zeros_like(v) for k, v in second.model.state_dict().items()})
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    state = load_checkpoint(newest, model=second.model, optimizer=second.optimizer, scheduler=second.scheduler)
    assert state == train_state(3)
    losses += second.train(range(3, 6))
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(whole), state_tensors(second), strict=True))


def test_saving_does_not_change_the_run(tmp_path: Path) -> None:
    plain, saving = Run(gpt2(), adamw), Run(gpt2(), adamw)
    seed_everything(1)
    expected = plain.train(range(2))
    seed_everything(1)
    losses = saving.train(range(1))
    save(tmp_path, saving.model, saving.optimizer, 1, tokenizer=tokenizer())
    assert losses + saving.train(range(1, 2)) == expected


def test_resume_with_another_implementation_of_the_optimizer(tmp_path: Path) -> None:
    run = Run(gpt2(), adamw)
    run.train(range(1))
    path = save(tmp_path, run.model, run.optimizer, 1)
    other = Run(gpt2(), lambda model: adamw(model, foreach=True))
    load_checkpoint(path, model=other.model, optimizer=other.optimizer)
    assert [(group["fused"], group["foreach"]) for group in other.optimizer.param_groups] == [(None, True)] * 2
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(run), state_tensors(other), strict=True))
    other.train(range(1, 2))


def test_state_of_several_ranks(tmp_path: Path) -> None:
    model = gpt2()
    rngs = []
    for rank in range(2):
        seed_everything(rank)
        rngs.append(capture_rng(model.device))
    path = save(tmp_path, model, adamw(model), 1, rngs=rngs)
    drawn = []
    for rank in (0, 1, 2, 2):
        load_checkpoint(path, model=model, optimizer=adamw(model), rank=rank)
        drawn.append(float(torch.rand(())))
    expected = [float(torch.rand((), generator=torch.Generator().manual_seed(rank))) for rank in range(2)]
    assert drawn[:2] == expected
    assert drawn[2] == drawn[3] not in expected


class LateWriter(BackgroundWriter):
    """Begins to write when the training is in a forward pass, which keeps no keys and values."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def start(self, work: Callable[[], None]) -> None:
        with no_cache(self._model):
            work()


def test_a_config_written_during_a_forward_pass_keeps_the_cache(tmp_path: Path) -> None:
    """A run that resumes loads it, and its final model would then write texts without a cache."""
    model = gpt2()
    assert model.config.use_cache
    path = save(tmp_path, model, adamw(model), 1, writer=LateWriter(model))
    assert json.loads((path / "config.json").read_text())["use_cache"]
    assert model.config.use_cache


def test_scaler_and_infinite_scheduler_values_come_back(tmp_path: Path) -> None:
    model = gpt2()
    restored: dict[str, Any] = {}
    target = SimpleNamespace(load_state_dict=restored.update)
    scheduler, scaler = {"best": float("inf"), "last_epoch": 3}, {"scale": 65536.0, "_growth_tracker": 2}
    path = save(tmp_path, model, adamw(model), 1, scheduler_state=scheduler, scaler_state=scaler)
    load_checkpoint(path, model=model, optimizer=adamw(model), scheduler=target, scaler=target)
    assert restored == {**scheduler, **scaler}


@pytest.mark.parametrize("kind", ["gpt2-tied", "llama-untied", "t5-tied", "mixtral"])
def test_a_checkpoint_is_a_hugging_face_directory(tmp_path: Path, kind: str) -> None:
    def build() -> Any:
        if kind == "gpt2-tied":
            return gpt2()
        if kind == "llama-untied":
            return llama(tie_word_embeddings=False)
        sizes = {"num_hidden_layers": 1, "vocab_size": 64}
        if kind == "t5-tied":
            return T5ForConditionalGeneration(T5Config(d_model=32, d_ff=48, d_kv=8, num_layers=1, num_heads=2, vocab_size=64))
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        return MixtralForCausalLM(MixtralConfig(hidden_size=32, intermediate_size=48, **sizes, **heads))

    model, fresh = build(), build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    path = save(tmp_path, model, adamw(model), 1, tokenizer=tokenizer())
    load_checkpoint(path, model=fresh, optimizer=adamw(fresh))
    save_model(tmp_path / "final", model, tokenizer())
    for other in (fresh, type(model).from_pretrained(path), type(model).from_pretrained(tmp_path / "final")):
        pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
        assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
        ties = [len({tensor.data_ptr() for tensor in m.state_dict().values()}) for m in (model, other)]
        assert ties[0] == ties[1]
    assert AutoTokenizer.from_pretrained(path)("a b")["input_ids"] == [1, 2]


def test_no_pickle_and_plain_names_when_compiled_and_recomputed(tmp_path: Path) -> None:
    model = llama()
    names = set(model.state_dict())
    model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    wrapped = llama()
    wrapped.model.layers[0] = torch.compile(wrapped.model.layers[0], backend="eager")
    for number, each in enumerate((model, wrapped)):
        optimizer = adamw(each)
        each(torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
        path = save(tmp_path / str(number), each, optimizer, 1)
        saved = json.loads((path / "upshift_state.json").read_text())
        assert {name for group in saved["optimizer"]["groups"] for name in group["parameters"]} <= names
        assert set(AutoModelForCausalLM.from_pretrained(path).state_dict()) == names
        load_checkpoint(path, model=each, optimizer=optimizer)
        for file in path.iterdir():
            assert file.suffix in (".json", ".safetensors"), file.name
            assert file.stat().st_mode == (path / "config.json").stat().st_mode


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    model = gpt2()
    path = save(tmp_path, model, adamw(model), 1)
    with pytest.raises(RequestError, match="trained with AdamW, this run uses Adafactor"):
        load_checkpoint(path, model=model, optimizer=adafactor(model))
    with pytest.raises(RequestError, match="other parameter groups"):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    half = gpt2(torch.bfloat16)
    with pytest.raises(RequestError, match="float32, the model as .*bfloat16"):
        load_checkpoint(path, model=half, optimizer=adamw(half))
    other = llama()
    with pytest.raises(RequestError, match="which the model has not"):
        load_checkpoint(path, model=other, optimizer=adamw(other))


class OddTensor(torch.Tensor):
    pass


def test_state_that_cannot_be_saved_names_the_optimizer(tmp_path: Path) -> None:
    model = gpt2()
    optimizer = adamw(model)
    save(tmp_path, model, optimizer, 1)
    optimizer.state[next(model.parameters())]["odd"] = torch.zeros(2).as_subclass(OddTensor)
    with pytest.raises(RequestError, match="AdamW.*OddTensor"):
        save(tmp_path, model, optimizer, 2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "latest"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    model = gpt2()
    optimizer = adamw(model)
    for step in (1, 2, 10, 11):
        save(tmp_path, model, optimizer, step)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-11", "latest"]
    assert (tmp_path / "latest").read_text() == "checkpoint-11\n"
    save(tmp_path, model, optimizer, 11)
    save(tmp_path, model, optimizer, 12, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-11", "checkpoint-12", "latest"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "upshift_state.json", "config.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "missing", "grown"])
def test_a_damaged_newest_falls_back(tmp_path: Path, name: str, damage: str, caplog: Any) -> None:
    source = _two_checkpoints(tmp_path)
    file = source / "checkpoint-2" / name
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size - 7)
    else:
        file.write_bytes(file.read_bytes() + b"x")
    assert newest_checkpoint(source) == source / "checkpoint-1"
    assert "checkpoint-2" in caplog.text
    model = gpt2()
    with pytest.raises(RequestError, match="resume from another checkpoint"):
        load_checkpoint(source / "checkpoint-2", model=model, optimizer=adamw(model))
    save(source, model, adamw(model), 2)
    assert newest_checkpoint(source) == source / "checkpoint-2"
    assert sorted(os.listdir(source)) == ["checkpoint-1", "checkpoint-2", "latest"]


_template: list[Path] = []


def _two_checkpoints(tmp_path: Path) -> Path:
    if not _template:
        directory = tmp_path.parent / "two_checkpoints"
        model = gpt2()
        for step in (1, 2):
            save(directory, model, adamw(model), step)
        _template.append(directory)
    shutil.copytree(_template[0], tmp_path / "run")
    return tmp_path / "run"


def _mount(path: Path, size: str) -> str | None:
    """Why no tmpfs could be mounted; None when it was."""
    path.mkdir()
    if shutil.which("mount") is None:
        return "there is no mount command"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    reason = _mount(path, "4m")
    if reason is not None:
        pytest.skip(f"a small disk cannot be mounted here: {reason}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def _leave_free(disk: Path, num_bytes: int) -> None:
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    with filler.open("wb") as file:
        file.write(b"x" * max(0, shutil.disk_usage(disk).free - num_bytes))


def test_too_little_room_is_seen_before_writing(small_disk: Path) -> None:
    model = gpt2()
    optimizer = adamw(model)
    save(small_disk, model, optimizer, 1)
    _leave_free(small_disk, 200_000)
    with pytest.raises(JobFailed, match=r"checkpoint-2 needs 1\.\d+ MiB and .* has 1\d\d KiB free; checkpoint-1 is still"):
        save(small_disk, model, optimizer, 2)
    with pytest.raises(JobFailed, match="the final model needs .*checkpoint-1 is still loadable"):
        save_model(small_disk, model, None)
    assert sorted(os.listdir(small_disk)) == ["checkpoint-1", "filler", "latest"]


def test_a_full_disk_while_writing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(gpt2(), adamw)
    run.train(range(1))
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    usage = os.statvfs
    save(small_disk, run.model, run.optimizer, 1, tokenizer=tokenizer())
    size = sum(checkpoint_files.file_sizes(small_disk / "checkpoint-1").values())
    failures = []
    for share in (0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
        filler = small_disk / "filler"
        filler.unlink(missing_ok=True)
        free = usage(small_disk).f_bavail * usage(small_disk).f_frsize
        filler.write_bytes(b"x" * (free - int(size * share)))
        with pytest.raises(JobFailed, match="checkpoint-2 could not be written .*checkpoint-1 is still loadable") as error:
            save(small_disk, run.model, run.optimizer, 2, tokenizer=tokenizer())
        failures.append(str(error.value))
        assert "\n" not in failures[-1]
        assert sorted(os.listdir(small_disk)) == ["checkpoint-1", "filler", "latest"]
        with pytest.raises(JobFailed, match="the final model could not be written .*checkpoint-1 is still loadable"):
            filler.write_bytes(b"x" * (free - int(size * share / 4)))
            save_model(small_disk, run.model, tokenizer())
        assert sorted(os.listdir(small_disk)) == ["checkpoint-1", "filler", "latest"]
    assert any("the disk is full" in failure for failure in failures)
    assert any("No space left on device" in failure for failure in failures)
    fresh = Run(gpt2(), adamw)
    newest = newest_checkpoint(small_disk)
    assert newest is not None
    load_checkpoint(newest, model=fresh.model, optimizer=fresh.optimizer)
    (small_disk / "filler").unlink()
    save(small_disk, run.model, run.optimizer, 2, tokenizer=tokenizer())


def _save_forever(directory: Path, model: Any, optimizer: Any, first: int) -> None:
    step = first
    while True:
        # Every other step is saved twice: the second takes the place of a whole checkpoint.
        save(directory, model, optimizer, step // 2)
        step += 1


def test_a_process_killed_while_saving_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    run, fresh = Run(gpt2(), adamw), Run(gpt2(), adamw)
    run.train(range(1))
    save(tmp_path, run.model, run.optimizer, 1)
    fork = multiprocessing.get_context("fork")
    delays = random.Random(5)
    half_written, step = 0, 1
    for attempt in range(24):
        child = fork.Process(target=_save_forever, args=(tmp_path, run.model, run.optimizer, 2 * step + 1))
        child.start()
        deadline = time.monotonic() + 20
        while attempt % 4 == 0 and not (tmp_path / f"checkpoint-{step + 1}").is_dir() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delays.uniform(0.01, 0.2))
        assert child.pid is not None and child.is_alive()
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        half_written += any(path.name.endswith((".tmp", ".replaced")) for path in tmp_path.iterdir())
        found = find_checkpoints(tmp_path)
        assert found.newest is not None and found.damaged == ()
        state = load_checkpoint(found.newest, model=fresh.model, optimizer=fresh.optimizer)
        assert state.step >= step
        step = state.step
    assert half_written > 0
    assert step > 6
    assert all(torch.equal(a, b) for a, b in zip(state_tensors(run), state_tensors(fresh), strict=True))
    save(tmp_path, run.model, run.optimizer, step + 1)
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("crash_at", range(1, 7))
def test_a_crash_at_each_rename_leaves_a_loadable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    """The only checkpoint is replaced by one of the same step; the process stops dead before its n-th change."""

    class Killed(BaseException):
        pass

    directory = tmp_path / "run"
    model = gpt2()
    save(directory, model, adamw(model), 1)
    changes = 0

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes >= crash_at:
                raise Killed
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", guarded(Path.rename))
        patch.setattr(Path, "replace", guarded(Path.replace))
        patch.setattr(checkpoint_files.shutil, "rmtree", guarded(shutil.rmtree))
        with pytest.raises(Killed):
            save(directory, model, adamw(model), 1)
            raise Killed
    newest = newest_checkpoint(directory)
    assert newest is not None
    load_checkpoint(newest, model=model, optimizer=adamw(model))
    save(directory, model, adamw(model), 2)
    assert newest_checkpoint(directory) == directory / "checkpoint-2"
    assert not [path for path in directory.iterdir() if path.name.endswith(".tmp")]


def test_save_model_replaces_only_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    save(tmp_path, model, adamw(model), 1)
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr("upshift.training.checkpoint.model.MAX_SHARD_SIZE", "20KB")
    save_model(tmp_path, model, tokenizer())
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.undo()
    save_model(tmp_path, model, None)
    files = {"checkpoint-1", "latest", "notes.txt", "config.json", "generation_config.json", "upshift_model.json"}
    assert set(os.listdir(tmp_path)) == files | {"model.safetensors"}
    (tmp_path / "upshift_model.json").unlink()
    with pytest.raises(RequestError, match="is not from Upshift and stays"):
        save_model(tmp_path, model, None)
    assert set(os.listdir(tmp_path)) == (files | {"model.safetensors"}) - {"upshift_model.json"}


class TestOutputDirectory:
    def test_new_or_empty(self, tmp_path: Path) -> None:
        for resume in (False, True):
            check_output_directory(tmp_path / "a" / "b", overwrite=False, resume=resume)
        assert (tmp_path / "a" / "b").is_dir()

    def test_not_empty_names_both_ways_on(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint-3").mkdir()
        with pytest.raises(RequestError, match="--resume.*--overwrite"):
            check_output_directory(tmp_path, overwrite=False, resume=False)
        with pytest.raises(RequestError, match="exclude each other"):
            check_output_directory(tmp_path, overwrite=True, resume=True)

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "inside"):
            with pytest.raises(RequestError, match="give"):
                check_output_directory(path, overwrite=True, resume=False)

    def test_overwrite_deletes_all_that_upshift_wrote(self, tmp_path: Path) -> None:
        directory = _two_checkpoints(tmp_path)
        save_model(directory, gpt2(), tokenizer())
        (directory / "checkpoint-3.tmp").mkdir()
        (directory / "record.json").touch()
        with pytest.raises(RequestError, match="record.json"):
            check_output_directory(directory, overwrite=True, resume=False)
        assert len(find_checkpoints(directory).newest.name) > 0  # type: ignore[union-attr]
        check_output_directory(directory, overwrite=True, resume=False, own_files=["record.json"])
        assert os.listdir(directory) == []

    @pytest.mark.parametrize("foreign", ["notes.txt", "checkpoint-7/model.bin", "latest", "config.json", "data/x"])
    def test_overwrite_never_deletes_a_users_file(self, tmp_path: Path, foreign: str) -> None:
        directory = _two_checkpoints(tmp_path)
        (directory / foreign).parent.mkdir(exist_ok=True)
        (directory / foreign).write_text("mine")
        before = sorted(directory.rglob("*"))
        with pytest.raises(RequestError, match=f"holds {foreign.split('/')[0]}, which Upshift did not write"):
            check_output_directory(directory, overwrite=True, resume=False)
        assert sorted(directory.rglob("*")) == before

    def test_overwrite_spares_a_users_model(self, tmp_path: Path) -> None:
        gpt2().save_pretrained(tmp_path)
        with pytest.raises(RequestError, match="which Upshift did not write"):
            check_output_directory(tmp_path, overwrite=True, resume=False)
        assert (tmp_path / "model.safetensors").is_file()

    def test_a_link_to_a_checkpoint_is_the_users(self, tmp_path: Path) -> None:
        directory = _two_checkpoints(tmp_path)
        (directory / "checkpoint-9").symlink_to(directory / "checkpoint-2")
        with pytest.raises(RequestError, match="checkpoint-9, which Upshift did not write"):
            check_output_directory(directory, overwrite=True, resume=False)

    def test_resume(self, tmp_path: Path) -> None:
        directory = _two_checkpoints(tmp_path)
        (directory / "notes.txt").touch()
        check_output_directory(directory, overwrite=False, resume=True)
        (tmp_path / "killed").mkdir()
        (tmp_path / "killed" / "checkpoint-1.tmp").mkdir()
        check_output_directory(tmp_path / "killed", overwrite=False, resume=True)
        with pytest.raises(RequestError, match="has no checkpoint to resume from"):
            check_output_directory(tmp_path, overwrite=False, resume=True)
