"""upshift.Trainer against transformers.Trainer: the tasks of transformers' example scripts, on tiny models and data."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import ParallelismConfig
from torch.nn.functional import cross_entropy
from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding, TrainingArguments

import upshift
from upshift.errors import JobFailed, RequestError
from upshift.training.hf_trainer import trainer as without_search
from upshift.training.hf_trainer.arguments import FIELDS, markdown, refuse_unsupported
from upshift.training.hf_trainer.planned_training import PlannedTraining
from upshift.training.out_of_memory import Autopsy

STEPS = 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path_factory.getbasetemp() / "trainer-cache"))


class Tokens:
    """What collators need of a tokenizer: padding."""

    def __new__(cls) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"w{number}": number + 3 for number in range(125)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
        )


def sentences(count: int, *, longest: int = 40, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 128, size=generator.integers(4, longest)).tolist() for _ in range(count)]


def no_dropout(config: Any) -> Any:
    for name in vars(config):
        if "dropout" in name or name.endswith("_pdrop") or name == "dropout_rate":
            setattr(config, name, 0.0)
    return config


@dataclasses.dataclass
class Task:
    model: Callable[[], torch.nn.Module]
    data: list[dict[str, Any]]
    collator: Any
    metrics: Callable[[Any], dict[str, float]] | None = None
    trainer: str = "Trainer"
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = prediction.label_ids
    chosen = logits.argmax(-1)
    return {"accuracy": float((chosen == labels)[labels != -100].mean())}


def build(config: Any, auto: str) -> Callable[[], torch.nn.Module]:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, auto).from_config(no_dropout(config))

    return model


def bert(**fields: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, **fields,
    )  # fmt: skip


def llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip


def causal_lm() -> Task:
    data = [{"input_ids": ids} for ids in sentences(64)]
    return Task(build(llama(), "AutoModelForCausalLM"), data, DataCollatorForLanguageModeling(Tokens(), mlm=False))


def masked_lm() -> Task:
    data = [{"input_ids": ids} for ids in sentences(64)]
    return Task(build(bert(), "AutoModelForMaskedLM"), data, DataCollatorForLanguageModeling(Tokens(), mlm=True))


def text_classification() -> Task:
    data = [{"input_ids": ids, "label": len(ids) % 3} for ids in sentences(64)]
    model = build(bert(num_labels=3), "AutoModelForSequenceClassification")
    return Task(model, data, DataCollatorWithPadding(Tokens()), accuracy)


def token_classification() -> Task:
    data = [{"input_ids": ids, "labels": [token % 5 for token in ids]} for ids in sentences(64)]
    collator = transformers.DataCollatorForTokenClassification(Tokens())
    return Task(build(bert(num_labels=5), "AutoModelForTokenClassification"), data, collator, accuracy)


def question_answering() -> Task:
    data = [{"input_ids": ids, "start_positions": 1, "end_positions": len(ids) - 1} for ids in sentences(64)]
    return Task(build(bert(), "AutoModelForQuestionAnswering"), data, DataCollatorWithPadding(Tokens()))


def summarization() -> Task:
    config = transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    data = [{"input_ids": ids, "labels": ids[: len(ids) // 2]} for ids in sentences(64)]
    model = build(config, "AutoModelForSeq2SeqLM")
    return Task(model, data, DataCollatorForSeq2Seq(Tokens(), model=model()), trainer="Seq2SeqTrainer")


def image_classification() -> Task:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=4,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    data = [{"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": number % 4} for number in range(64)]
    return Task(build(config, "AutoModelForImageClassification"), data, None, accuracy)


TASKS = [
    causal_lm, masked_lm, text_classification, token_classification, question_answering, summarization, image_classification,
]  # fmt: skip


def train(library: Any, task: Task, folder: Path, *, upshift_options: dict[str, Any] | None = None, **more: Any) -> Any:
    """(loss curve, the trainer's metrics, final weights)"""
    kinds = transformers.Seq2SeqTrainingArguments if task.trainer == "Seq2SeqTrainer" else TrainingArguments
    arguments = kinds(
        output_dir=str(folder),
        **{
            "max_steps": STEPS, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True,
            "disable_tqdm": True, "learning_rate": 1e-3, "seed": 7, **task.arguments, **more,
        },
    )  # fmt: skip
    options = (upshift_options or {}) if library is upshift else {}
    trainer = getattr(library, task.trainer)(
        model=task.model(), args=arguments, data_collator=task.collator, train_dataset=task.data,
        eval_dataset=task.data[:24], compute_metrics=task.metrics, **options,
    )  # fmt: skip
    result = trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()
    kept = {name: value for name, value in evaluated.items() if "loss" in name or "accuracy" in name}
    return losses, {"train_loss": result.training_loss, **kept}, trainer


def check_same(ours: Any, theirs: Any, *, tolerance: float = 1e-5) -> None:
    assert len(ours[0]) == len(theirs[0]) > 0
    np.testing.assert_allclose(ours[0], theirs[0], rtol=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        assert ours[1][name] == pytest.approx(value, rel=tolerance, abs=1e-6), name
    assert ours[0][-1] != ours[0][0]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_same_curve_and_metrics(task: Callable[[], Task], accumulation: int, tmp_path: Path) -> None:
    """The script runs unchanged, and in fp32 with the same seed the losses and final metrics are the same."""
    more = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4}
    theirs = train(transformers, task(), tmp_path / "theirs", **more)
    ours = train(upshift, task(), tmp_path / "ours", **more)
    check_same(ours, theirs)


CUT = ("precision=fp32", "per_device_train_batch_size=2", "torch_compile=off", "attention=sdpa")
MORE = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}


def both(task: Callable[[], Task], folder: Path, *fixed: str, allow: tuple[str, ...] = (), **more: Any) -> tuple[Any, Any]:
    """(ours by a plan with these fields, theirs)"""
    theirs = train(transformers, task(), folder / "theirs", **MORE, **more)
    options = {"fixed": fixed, "trial_seconds": 0, "allow": allow}
    return train(upshift, task(), folder / "ours", upshift_options=options, **MORE, **more), theirs


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_same_curve_when_the_batch_is_cut(task: Callable[[], Task], tmp_path: Path) -> None:
    """Sorted by length, trimmed, in smaller micro-batches than the user's: the same gradients."""
    ours, theirs = both(task, tmp_path, *CUT)
    assert ours[2].upshift_choice.plan.per_device_train_batch_size == 2
    check_same(ours, theirs)


@pytest.mark.parametrize("task", [causal_lm, masked_lm, summarization], ids=lambda task: task.__name__)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_same_curve_with_the_head_in_chunks(task: Callable[[], Task], smoothing: float, tmp_path: Path) -> None:
    ours, theirs = both(task, tmp_path, *CUT, "loss_chunk_tokens=512", label_smoothing_factor=smoothing)
    assert ours[2].upshift_choice.plan.loss_chunk_tokens == 512
    check_same(ours, theirs)


def test_same_curve_end_to_end_in_one_row(tmp_path: Path) -> None:
    fixed = ("precision=fp32", "torch_compile=off", "attention=block", "packing=True", "per_device_train_batch_size=4")
    ours, theirs = both(causal_lm, tmp_path, *fixed)
    assert ours[2].upshift_choice.plan.flattens
    check_same(ours, theirs)


def lora() -> Task:
    import peft

    task = causal_lm()

    def adapted() -> torch.nn.Module:
        torch.manual_seed(0)
        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(task.model(), adapter)

    return dataclasses.replace(task, model=adapted)


def test_same_curve_of_an_adapter(tmp_path: Path) -> None:
    ours, theirs = both(lora, tmp_path, *CUT)
    check_same(ours, theirs)
    assert sum(p.requires_grad for p in ours[2].model.parameters()) == 8


@pytest.mark.parametrize("optim", ["adafactor", "sgd"])
def test_an_optimizer_set_by_hand_is_kept(optim: str, tmp_path: Path) -> None:
    ours, theirs = both(causal_lm, tmp_path, *CUT, optim=optim)
    assert ours[2].upshift_choice.plan.optim == optim
    check_same(ours, theirs)


def test_a_step_that_runs_out_of_memory_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 3 no more than two rows fit at once: the same curve, an autopsy, and a corrected plan."""
    theirs = train(transformers, causal_lm(), tmp_path / "theirs", **MORE)
    original = upshift.Trainer.compute_loss
    calls: list[int] = []

    def refuse(self: Any, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        if model.training and self.state.global_step >= 2 and len(inputs["input_ids"]) > 2:
            calls.append(len(inputs["input_ids"]))
            raise torch.OutOfMemoryError("simulated")
        return original(self, model, inputs, *arguments, **named)

    monkeypatch.setattr(transformers.Trainer, "compute_loss", refuse)
    ours = train(upshift, causal_lm(), tmp_path / "ours", **MORE)
    check_same(ours, theirs)
    assert calls == [4]
    (line,) = (tmp_path / "ours" / "upshift_out_of_memory.jsonl").read_text().splitlines()
    autopsy = Autopsy.from_json(line)
    assert (autopsy.step, autopsy.words) == (3, "simulated") and autopsy.shape[0] == 4 and autopsy.smaller[0] == 2
    assert ours[2].upshift_choice.plan.per_device_train_batch_size == 2


@pytest.mark.parametrize("own", [None, "compute_loss", "compute_loss_func"])
def test_an_evaluation_that_runs_out_of_memory_is_done_again_with_smaller_batches(
    own: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No more than two rows fit at once. A loss of the script may compare rows, so it gets the batches that it asked for."""
    task = causal_lm()
    kind: Any = upshift.Trainer
    functions = {}
    if own == "compute_loss":
        kind = type("Own", (kind,), {"compute_loss": lambda self, *a, **named: upshift.Trainer.compute_loss(self, *a, **named)})
    elif own == "compute_loss_func":
        functions = {
            "compute_loss_func": lambda outputs, labels, **_: cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        }

    def trainer(rows: int) -> Any:
        arguments = TrainingArguments(
            str(tmp_path), per_device_eval_batch_size=rows, report_to="none", use_cpu=True, disable_tqdm=True
        )
        return kind(model=task.model(), args=arguments, data_collator=task.collator, eval_dataset=task.data, **functions)

    expected = trainer(2).evaluate()["eval_loss"]
    original = task.model().forward.__func__
    sizes: list[int] = []

    @wraps(original)
    def refuse(self: Any, input_ids: Any = None, **named: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("simulated")
        return original(self, input_ids=input_ids, **named)

    monkeypatch.setattr(type(task.model()), "forward", refuse)
    large = trainer(8)
    if own is not None:
        with pytest.raises(torch.OutOfMemoryError):
            large.evaluate()
        return
    assert large.evaluate()["eval_loss"] == expected
    assert (
        sizes[:3] == [8, 4, 2] and "with per_device_eval_batch_size=8; it runs again with 4, as do the next ones" in caplog.text
    )
    sizes.clear()
    assert large.predict(task.data).metrics["test_loss"] == expected and max(sizes) == 2


def test_a_poisoned_batch_moves_no_weight(tmp_path: Path) -> None:
    task = causal_lm()
    seen: list[dict[str, torch.Tensor]] = []

    class Poison(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step == 4:
                seen.append({name: value.clone() for name, value in model.state_dict().items()})
                model.lm_head.register_forward_hook(lambda module, inputs, output: output * float("nan"))

    trainer = upshift.Trainer(
        model=task.model(), args=TrainingArguments(str(tmp_path), max_steps=9, report_to="none", use_cpu=True, disable_tqdm=True),
        data_collator=task.collator, train_dataset=task.data, callbacks=[Poison()],
    )  # fmt: skip
    with pytest.raises(JobFailed, match="step 5: the loss became NaN; no weight has moved in it"):
        trainer.train()
    after = trainer.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in seen[0].items())


class Pairs(torch.nn.Module):
    """A contrastive loss: every row's depends on all rows of its batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(pixel_values)
        return {"loss": torch.nn.functional.cross_entropy(hidden @ pixel_values.T, torch.arange(len(hidden)))}


class Normalized(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.cross_entropy(self.norm(self.layer(pixel_values)), labels)}


@pytest.mark.parametrize(("kind", "why"), [(Pairs, "not made of the losses"), (Normalized, "norm computes over the rows")])
def test_a_loss_that_does_not_split_is_left_whole(kind: Any, why: str, tmp_path: Path) -> None:
    """Models that are not of transformers train too, by the user's own settings."""
    generator = torch.Generator().manual_seed(1)
    data = [{"pixel_values": torch.randn(8, generator=generator), "labels": number % 8} for number in range(32)]
    task = Task(kind, data, transformers.default_data_collator)
    ours, theirs = (train(library, task, tmp_path / library.__name__, **MORE) for library in (upshift, transformers))
    check_same(ours, theirs)
    assert why in ours[2].upshift_choice.reason


def test_the_users_own_loss_is_called(tmp_path: Path) -> None:
    """An overridden compute_loss, and a compute_loss_func, see logits and are measured like any loss."""

    def double(library: Any) -> Any:
        class Doubled(library.Trainer):  # type: ignore[misc, name-defined]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
                outputs = model(**inputs)
                loss = 2 * outputs.loss + 0 * outputs.logits.float().mean()
                return (loss, outputs) if return_outputs else loss

        return type("library", (), {"Trainer": Doubled})

    task = text_classification()
    theirs = train(double(transformers), task, tmp_path / "theirs", **MORE)
    ours = train(double(upshift), task, tmp_path / "ours", **MORE)
    check_same(ours, theirs)


def test_callbacks_stop_and_log_the_same(tmp_path: Path) -> None:
    task = dataclasses.replace(
        text_classification(),
        arguments={"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
                   "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "save_total_limit": 1},
    )  # fmt: skip
    logs = []
    for library in (upshift, transformers):
        arguments = TrainingArguments(
            str(tmp_path / library.__name__), max_steps=30, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1,
            learning_rate=1e-9, **task.arguments,
        )  # fmt: skip
        trainer = library.Trainer(
            model=task.model(), args=arguments, data_collator=task.collator, train_dataset=task.data,
            eval_dataset=task.data[:16], compute_metrics=accuracy,
        )  # fmt: skip
        trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=3))
        trainer.train()
        predicted = trainer.predict(task.data[:16])
        logs.append((trainer.state.global_step, [sorted(e) for e in trainer.state.log_history], predicted.predictions))
    assert logs[0][:2] == logs[1][:2] and logs[0][0] < 30
    np.testing.assert_allclose(logs[0][2], logs[1][2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("argument", "value"), [("parallelism_config", ParallelismConfig())], ids=("degrees",))
def test_what_cannot_be_honoured_is_named(argument: str, value: Any, tmp_path: Path) -> None:
    task = causal_lm()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **{argument: value})
    shown = " ".join(repr(value).split())[:160]
    with pytest.raises(RequestError, match=re.escape(f"{argument}={shown} cannot be honoured")):
        upshift.Trainer(model=task.model(), args=arguments, train_dataset=task.data)


@pytest.mark.parametrize("name", ["Trainer", "Seq2SeqTrainer"])
def test_type_checkers_are_told_the_arguments_of_transformers(name: str) -> None:
    library = list(inspect.signature(getattr(transformers, name).__init__).parameters)
    classes = [node for node in ast.parse(inspect.getsource(without_search)).body if isinstance(node, ast.ClassDef)]
    (declared,) = (
        node.args
        for owner in classes
        for node in ast.walk(owner)
        if owner.name == name and isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    planned = inspect.signature(PlannedTraining.__init__).parameters.values()
    assert [argument.arg for argument in declared.args] == library
    assert [argument.arg for argument in declared.kwonlyargs] == [p.name for p in planned if p.kind == p.KEYWORD_ONLY]


def test_every_argument_is_in_the_table() -> None:
    """docs/training_arguments.md says of every field of the installed transformers what becomes of it."""
    core = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert core <= FIELDS.keys()
    page = Path(__file__).parents[3] / "docs" / "training_arguments.md"
    assert page.read_text(encoding="utf-8") == markdown()
    refuse_unsupported(TrainingArguments("unused", use_cpu=True))  # defaults are nobody's wish


OTHER_VALUES: dict[str, Any] = {
    "eval_strategy": "steps", "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}, "max_steps": 3,
    "logging_strategy": "no", "save_strategy": "no", "save_steps": 7, "eval_steps": 7, "logging_steps": 7, "optim": "sgd",
    "report_to": "tensorboard", "hub_strategy": "end", "log_level": "error", "log_level_replica": "error",
    "debug": "underflow_overflow",
    "accelerator_config": {"even_batches": False}, "train_sampling_strategy": "sequential", "include_for_metrics": ["inputs"],
    "warmup_steps": 3, "torch_compile_backend": None, "torch_compile_mode": None, "deepspeed": None, "fsdp": "full_shard",
    "label_names": ["labels"], "metric_for_best_model": "loss", "dataloader_prefetch_factor": 3, "ddp_backend": None,
    "parallelism_config": ParallelismConfig(), "resume_from_checkpoint": "there", "local_rank": None, "bf16": True,
}  # fmt: skip


def _another(field: dataclasses.Field[Any]) -> Any:
    """A value that is not the default."""
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if field.name in OTHER_VALUES:
        return OTHER_VALUES[field.name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if isinstance(default, dict) or "dict" in str(field.type):
        return {"key": "value"}
    if "bool" in str(field.type):
        return True
    if "str" in str(field.type):
        return "text"
    return 2 if "int" in str(field.type) or "float" in str(field.type) else None


def test_a_field_that_is_not_in_the_table_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field of the installed transformers, as if it were new; a refused one is refused in any case."""
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)  # values arrive as they are given
    plain = TrainingArguments(str(tmp_path))
    walked = 0
    for field in dataclasses.fields(TrainingArguments):
        value = _another(field)
        if not field.init or field.name in ("output_dir", "use_cpu") or value is None:
            continue
        walked += 1
        arguments = dataclasses.replace(plain, **{field.name: value})
        if FIELDS[field.name].treatment == "refused":
            with pytest.raises(RequestError, match=f"{field.name}=.* cannot be honoured"):
                refuse_unsupported(arguments)
            continue
        refuse_unsupported(arguments)
        with monkeypatch.context() as patch:
            patch.delitem(FIELDS, field.name)
            with pytest.raises(RequestError, match=f"{field.name}=.* is an argument that this version of Upshift does not know"):
                refuse_unsupported(arguments)
            refuse_unsupported(plain)
    assert walked > 100


@pytest.mark.parametrize("value", [0, 0.0, "x", ["x"], {"x": 1}, True])
def test_a_new_field_of_a_newer_transformers_is_refused(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = dataclasses.make_dataclass("Newer", [("novelty", Any, None)], bases=(TrainingArguments,))
    monkeypatch.setattr(sys.modules["transformers"], "TrainingArguments", newer)  # a lazy module, which is there anew
    refuse_unsupported(newer(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(
        RequestError, match=re.escape(f"novelty={value!r} is an argument that this version of Upshift does not know")
    ):
        refuse_unsupported(newer(output_dir=str(tmp_path), use_cpu=True, novelty=value))


def test_data_that_can_be_read_once_is_not_used_up(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __init__(self, rows: list[Any]) -> None:
            self.rows, self.read = rows, iter(rows)

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return next(self.read)

    task = causal_lm()
    arguments = TrainingArguments(str(tmp_path), max_steps=8, report_to="none", use_cpu=True, disable_tqdm=True)
    trainer = upshift.Trainer(model=task.model(), args=arguments, data_collator=task.collator, train_dataset=Stream(task.data))
    assert trainer.train().global_step == 8  # 64 rows are 8 batches of 8
    assert "read once" in trainer.upshift_choice.reason
