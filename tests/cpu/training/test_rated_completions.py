"""Learning from rated completions (KTO): losses of whole runs in several layouts, resumption, and the rows that are read."""

from __future__ import annotations

import io
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import byte_level_tokenizer, save_model, words, write_jsonl
from pair_runs import losses, pair_job, peak_of_step
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.cli import run_display, tables
from upshift.cli.data import app
from upshift.cli.main import app as upshift_app
from upshift.cli.train import parse, request_of
from upshift.errors import Interrupted, RequestError
from upshift.models.source import AdapterOptions, find_model
from upshift.planning.cost.time import largest_micro_batch
from upshift.planning.plan import Plan
from upshift.planning.trials.runner import TrialRequest, TrialResult
from upshift.planning.workload import Workload
from upshift.record import Record
from upshift.training import evaluate, prepare, run, trackers
from upshift.training import step as step_module
from upshift.training.arguments import Arguments
from upshift.training.batches.layout import Layout
from upshift.training.batches.objective import Objective
from upshift.training.batches.sampler import BatchSource, synthetic_batch
from upshift.training.data import data_files
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data, save_data
from upshift.training.data.tokens import find_partners
from upshift.training.distributed.mesh import init_mesh
from upshift.training.job.job import Job, run_job
from upshift.training.loop.events import Evaluated, Event, OutOfMemory, Referenced, StepDone
from upshift.training.loop.state import Run
from upshift.training.out_of_memory import Autopsy, halve, stand_in
from upshift.training.preferences import reference_model
from upshift.training.preferences.preference_loss import PreferenceLoss, RatingSettings, kl_term
from upshift.training.prepare import prepare_model
from upshift.training.step import TrainStep
from upshift.training.trials import worker

LENGTH = 48
KTO = DataOptions(objective="kto")
Rows = list[dict[str, Any]]
ROW = {"prompt": "roads", "completion": " rivers", "label": True}


def rated_rows(number: int, *, seed: int = 1) -> Rows:
    draws = random.Random(seed)
    labels = [draws.random() < 0.6 for _ in range(number)]
    return [
        {
            "prompt": words(draws, draws.randint(1, 6)),
            "completion": " " + words(draws, draws.randint(1, 9)) + " roads" * label,
            "label": label,
        }
        for label in labels
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, and completions to train on and to hold out."""
    folder = tmp_path_factory.mktemp("ratings")
    save_model(folder / "model", byte_level_tokenizer())
    write_jsonl(folder / "rows" / "train.jsonl", rated_rows(29))
    write_jsonl(folder / "rows" / "validation.jsonl", rated_rows(6, seed=2))
    return folder


@pytest.fixture(scope="module")
def data(home: Path) -> TrainingData:
    return prepare_data(find_model(str(home / "model")), home / "rows", sequence_length=LENGTH, options=KTO)


def a_job(home: Path, output: Path, *, plan: dict[str, Any] | None = None, **fields: Any) -> Job:
    """Eight steps of four completions, the last one of a single one."""
    settings = {"max_steps": 8, "learning_rate": 3e-3, "kto_beta": 0.4, "desirable_weight": 1.25} | fields.pop("arguments", {})
    return pair_job(
        home / "model", home / "rows", output, length=LENGTH, options=KTO, settings=settings, plan=plan or {}, **fields
    )


@pytest.fixture(scope="module")
def plain(home: Path, data: TrainingData, tmp_path_factory: pytest.TempPathFactory) -> Record:
    return run_job(a_job(home, tmp_path_factory.mktemp("plain") / "out"), data)


def check_same(record: Record, plain: Record) -> None:
    assert losses(record) == pytest.approx(losses(plain), abs=1e-5)
    for name in ("kl_terms", "rewards", "evaluation_rewards", "evaluations"):
        numbers, expected = (np.array(one.details[name], float) for one in (record, plain))
        assert len(expected) and np.allclose(numbers, expected, atol=1e-4, equal_nan=True)


def test_a_run_starts_without_a_kl_term_and_says_what_it_learned(plain: Record) -> None:
    assert plain.details["objective"] == "kto" and plain.details["global_batch"] == 4
    (first_step, first_kl), *others = plain.details["kl_terms"]
    assert (first_step, first_kl) == (1, pytest.approx(0.0, abs=1e-5)) and max(kl for _, kl in others) > 0.05
    assert min(kl for _, kl in others) >= 0.0
    assert plain.details["evaluation_rewards"][-1][2] > 0.0  # good completions end with one word, bad ones do not


@pytest.mark.parametrize(
    "plan",
    [
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"loss_chunk_tokens": 16, "activation_checkpointing": 2},
    ],
    ids=str,
)
def test_no_plan_changes_the_losses(plan: dict[str, Any], home: Path, data: TrainingData, plain: Record, tmp_path: Path) -> None:
    check_same(run_job(a_job(home, tmp_path / "out", plan=plan), data), plain)


@pytest.mark.parametrize("layout", [{}, {"fully_shard": "weights", "shard_size": 2}], ids=["data parallel", "fsdp"])
def test_ranks_train_as_one_process(
    layout: dict[str, Any], home: Path, data: TrainingData, plain: Record, tmp_path: Path
) -> None:
    """The last batch has one completion, so one of the ranks has none."""
    plan = {"num_processes": 2, "gradient_accumulation_steps": 1, "layout": layout}
    check_same(run_job(a_job(home, tmp_path / "out", plan=plan), data), plain)


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_resumed_run_goes_on_as_one_that_never_ended(
    lora_rank: int | None, home: Path, data: TrainingData, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"adapter": AdapterOptions(lora_rank=lora_rank)}
    whole = run_job(a_job(home, tmp_path / "whole", **fields), data)

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="checkpoint-4"):
        run_job(a_job(home, tmp_path / "two", **fields), data, on_event=stop)
    for other in ({"desirable_weight": 2.0}, {"kto_loss": "apo_zero_unpaired"}):
        with pytest.raises(RequestError, match=next(iter(other))):
            run_job(a_job(home, tmp_path / "two", resume=True, arguments=other, **fields), data)
    events: list[Event] = []
    resumed = run_job(a_job(home, tmp_path / "two", resume=True, **fields), data, on_event=events.append)
    assert not any(isinstance(event, Referenced) for event in events)
    assert losses(resumed) == losses(whole)
    assert all(resumed.details[name] == whole.details[name] for name in ("kl_terms", "rewards", "evaluation_rewards"))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_only_a_loss_with_a_kl_term_reports_one(loss: str, home: Path, data: TrainingData, tmp_path: Path) -> None:
    """It is in the events, what is printed of them, the run file, the logged steps, the trackers and the record."""
    events: list[Event] = []
    arguments = {"max_steps": 2, "logging_steps": 1, "eval_steps": 2, "save_steps": 2, "kto_loss": loss}
    record = run_job(a_job(home, tmp_path / "out", arguments=arguments), data, on_event=events.append)
    steps = [event for event in events if isinstance(event, StepDone)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    numbers = [step.kl for step in steps] + [step.logged_kl for step in steps] + [done.kl for done in evaluations]
    written = Run.read(tmp_path / "out")
    numbers += [logged.kl for logged in written.logged_steps]
    assert len(numbers) == 7 and {number is None for number in numbers} == {loss != "kto"}
    rows = 2 if loss == "kto" else 0
    assert len(written.kl_terms) == len(record.details.get("kl_terms", ())) == rows
    done, step = evaluations[0], steps[0]
    assert ("KL" in run_display._held_out_text(done)) == (loss == "kto")
    assert ("kl" in trackers._reward_logs(step.reward_accuracy, step.reward_margin, step.kl)) == (loss == "kto")
    assert done.reward_accuracy is not None and all(step.reward_accuracy is not None for step in steps)


@pytest.mark.parametrize(
    ("failed", "module", "name", "step"),
    [
        ("reference", reference_model, "compute_log_probabilities", 1),
        ("KL pass", evaluate, "sum_log_ratios", 1),
        ("evaluation", evaluate, "compute_loss", 2),
        ("step", step_module, "compute_loss", 1),
    ],
)
def test_out_of_memory_is_reported_of_the_pass_in_which_it_happened(
    failed: str, module: Any, name: str, step: int, home: Path, data: TrainingData, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The allocator refuses four rows at once. Gradients exist in a step alone."""
    compute = getattr(module, name)

    def refuse(model: Any, plan: Plan, micro_batch: Any, *others: Any) -> Any:
        if micro_batch.shape[0] > 2:
            raise torch.OutOfMemoryError("simulated")
        return compute(model, plan, micro_batch, *others)

    monkeypatch.setattr(module, name, refuse)
    events: list[Event] = []
    run_job(a_job(home, tmp_path / "out", arguments={"max_steps": 2, "eval_steps": 2}), data, on_event=events.append)
    (told,) = [event for event in events if isinstance(event, OutOfMemory)]
    assert (told.failed, told.step, told.largest[0], told.smaller[0]) == (failed, step, 4, 2)
    autopsy = Autopsy.from_json(Path(told.autopsy).read_text())
    assert (autopsy.failed, autopsy.step) == (failed, step)
    (gradients,) = [part.measured_gib for part in autopsy.parts if part.part == "gradients"]
    assert (gradients > 0) == (failed == "step")
    text = run_display._out_of_memory_text(told)
    assert ("training keeps its micro-batches" in text) == (failed != "step") == ("the same gradients" not in text)
    subjects = {"KL pass": "the KL pass of step 1", "evaluation": "the held-out data after step 2", "step": "step 1"}
    assert text.startswith(subjects.get(failed, "the pass of the model before the training") + " ran out of memory")


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_the_reference_leaves_out_the_mismatched_answers_that_nothing_is_compared_with(
    loss: str, home: Path, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = reference_model.compute_log_probabilities
    rows: list[int] = []

    def counted(model: Any, plan: Plan, micro_batch: Any) -> Any:
        rows.append(micro_batch.shape[0])
        return compute(model, plan, micro_batch)

    monkeypatch.setattr(reference_model, "compute_log_probabilities", counted)
    run_job(a_job(home, tmp_path / loss, arguments={"max_steps": 2, "kto_loss": loss}), data)
    assert data.evaluation is not None
    share = 1 if loss == "kto" else 2
    assert sum(rows) == (len(data.training) + len(data.evaluation)) // share
    with np.load(tmp_path / loss / "upshift_reference.npz") as parts:
        assert (parts["training"][0::2] < 0).all() and (parts["training"][1::2] < 0).all() == (loss == "kto")


class TrialAsked(Exception):
    """Ends a run where its trials would begin."""


def test_a_trial_computes_the_kl_pass_only_if_the_run_does(
    home: Path, data: TrainingData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[TrialRequest] = []

    def keep(planning: Any, path: Path, trial: TrialRequest, **_: Any) -> None:
        requests.append(trial)
        raise TrialAsked

    monkeypatch.setattr(run, "try_plans", keep)
    fixed = ("precision=fp32", "torch_compile=off", "num_processes=1", "per_device_train_batch_size=4")
    with pytest.raises(TrialAsked):
        run.train(
            home / "model", home / "rows", output=tmp_path / "out", objective="kto", sequence_length=LENGTH, global_batch=4,
            fixed=fixed, trial_seconds=5.0, arguments={"max_steps": 2, "kto_loss": "apo_zero_unpaired"},
        )  # fmt: skip
    computed: list[int] = []
    sum_log_ratios = prepare.sum_log_ratios

    def count(model: Any, plan: Plan, micro_batch: Any) -> torch.Tensor:
        computed.append(len(micro_batch.ratings))
        return sum_log_ratios(model, plan, micro_batch)

    for module in (step_module, evaluate):
        monkeypatch.setattr(module, "sum_log_ratios", count)
    (tmp_path / "stored").mkdir()
    save_data(data, tmp_path / "stored")
    without = requests[0].changed(seconds=0.1, data=str(tmp_path / "stored"))
    for request in (without, without.changed(has_kl_pass=True)):
        assert not computed
        path = tmp_path / "request.json"
        path.write_text(request.to_json())
        answers: list[TrialResult] = []
        worker.main(path, answers.append)
        assert answers[-1].failure is None and answers[-1].tokens_per_second
    assert computed


def test_other_ratings_are_other_data(home: Path, data: TrainingData, tmp_path: Path) -> None:
    run_job(a_job(home, tmp_path / "out", arguments={"max_steps": 1, "save_steps": 1}), data)
    rows = [row | {"label": not row["label"]} for row in rated_rows(29)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    other = prepare_data(find_model(str(home / "model")), tmp_path / "rows.jsonl", sequence_length=LENGTH, options=KTO)
    with pytest.raises(RequestError, match="differs from the run"):
        run_job(a_job(home, tmp_path / "out", arguments={"max_steps": 2}, resume=True), other)


def test_the_loss_follows_from_its_definition() -> None:
    """By hand, from numbers: two good completions and a bad one, whose KL term is the mean of two ranks' sums."""
    loss = PreferenceLoss(ratings=RatingSettings(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0))
    loss.kl = kl_term(torch.tensor([3.0, 2.0]), num_processes=1)
    values = torch.tensor([-4.0, -7.0, -2.0], requires_grad=True)
    mean = loss.mean_loss_of_ratings(values, torch.tensor([-6.0, -6.0, -5.0]), torch.tensor([True, True, False]))

    def sigmoid(number: float) -> float:
        return 1.0 / (1.0 + float(np.exp(-number)))

    expected = [
        2.0 * (1 - sigmoid(0.5 * (2.0 - 1.5))),
        2.0 * (1 - sigmoid(0.5 * (-1.0 - 1.5))),
        3.0 * (1 - sigmoid(0.5 * (1.5 - 3.0))),
    ]
    assert float(mean.detach()) == pytest.approx(sum(expected) / 3, abs=1e-6)
    mean.backward()
    assert values.grad is not None and [float(number) > 0 for number in values.grad] == [False, False, True]
    rewards = loss.read(device="cpu", num_processes=1)
    assert rewards is not None and rewards.kl == pytest.approx(1.5) and rewards.accuracy == pytest.approx(1 / 3)
    assert (rewards.chosen, rewards.rejected, rewards.margin) == pytest.approx((0.25, 1.5, -1.25))
    assert float(kl_term(torch.tensor([-3.0, 2.0]), num_processes=1)) == 0.0


def test_a_batch_without_bad_completions_has_no_margin() -> None:
    loss = PreferenceLoss()
    loss.mean_loss_of_ratings(torch.zeros(2), torch.zeros(2), torch.tensor([True, True]))
    rewards = loss.read(device="cpu", num_processes=1)
    assert rewards is not None and rewards.margin is None and rewards.rejected is None and rewards.chosen == 0.0


@pytest.mark.parametrize("prompts", [[0, 0, 1, 1, 2, 2], [0] * 9 + [1], list(range(7)), [0, 0, 0], [5]], ids=str)
def test_partners_answer_another_prompt_where_there_is_one(prompts: list[int]) -> None:
    partners = find_partners(np.array(prompts))
    assert sorted(set(partners.tolist()) - set(range(len(prompts)))) == []
    if len(set(prompts)) > 1:
        assert all(prompts[partner] != prompt for prompt, partner in zip(prompts, partners.tolist(), strict=True))
    if len(set(prompts)) == len(prompts):  # then each completion is used once
        assert sorted(partners.tolist()) == list(range(len(prompts)))


def test_micro_batches_are_halved_between_completions(data: TrainingData) -> None:
    layout = Layout(micro_batch=6, rows_together=2)
    source = BatchSource(sequences=data.training, global_batch=6, layout=layout, objective=data.objective)
    (whole,) = next(source.batches()).micro_batches
    halves = halve(whole)
    assert halves is not None and whole.ratings is not None
    assert [half.ratings.tolist() for half in halves if half.ratings is not None] == [
        whole.ratings[:2].tolist(),
        whole.ratings[2:].tolist(),
    ]
    assert stand_in(whole).ratings is not None and stand_in(whole).num_label_tokens == 0


def prepared(home: Path, rows: Rows, folder: Path, **options: Any) -> TrainingData:
    path = write_jsonl(folder / "rows.jsonl", rows)
    return prepare_data(find_model(str(home / "model")), path, sequence_length=LENGTH, options=KTO.changed(**options))


@pytest.mark.parametrize(
    ("rows", "words_of_error"),
    [
        ([ROW, ROW | {"label": "yes"}], [":2: ", '"yes"', "write true"]),
        ([ROW, ROW | {"label": None}], [":2: ", "null", "write true"]),
        ([ROW, ROW | {"label": 0.5}], [":2: ", "0.5", "write true"]),
        ([{"prompt": "a", "completion": " b"}], ["'label'", "prompt, completion and label, or chosen and rejected"]),
        ([{"text": "a"}], ["'prompt'", "leave --objective out"]),
        ([ROW | {"chosen": "a", "rejected": "b"}], ["--data-format unpaired-preference or --data-format preference"]),
    ],
    ids=["yes", "null", "half", "no label", "texts", "both"],
)  # fmt: skip
def test_rows_that_say_no_rating_are_rejected_by_place(rows: Rows, words_of_error: list[str], home: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        prepared(home, rows, tmp_path)
    assert all(part in str(caught.value) for part in ["rows.jsonl", *words_of_error]) and "\n" not in str(caught.value)


@pytest.mark.parametrize("is_held_out", [False, True])
@pytest.mark.parametrize("row", [{"prompt": "a", "chosen": " b", "rejected": " b"}, ROW | {"completion": ""}], ids=str)
def test_rows_of_which_nothing_is_learned_are_an_error_in_words(
    row: dict[str, Any], is_held_out: bool, home: Path, tmp_path: Path
) -> None:
    """All rows of the data, or of the held-out data."""
    other = {"rejected": " c"} if "rejected" in row else {"completion": " c"}
    good: Rows = [row | other | {"prompt": f"roads {number}"} for number in range(3)]
    path = write_jsonl(tmp_path / "rows.jsonl", good if is_held_out else [row])
    evaluation = write_jsonl(tmp_path / "held-out.jsonl", [row]) if is_held_out else None
    with pytest.raises(RequestError, match=f"{evaluation or path} has no sequence of two or more tokens with something to learn"):
        prepare_data(find_model(str(home / "model")), path, eval_data=evaluation, sequence_length=LENGTH, options=KTO)


def test_numbers_and_texts_of_tables_rate_as_true_and_false(home: Path, tmp_path: Path) -> None:
    labels = [True, 1, 1.0, "true", "True", "1", False, 0, 0.0, "false", "FALSE", "0"]
    ratings = []
    for label in labels:
        data = prepared(home, [ROW | {"label": label}], tmp_path, eval_size=0)
        assert data.training.ratings is not None
        ratings += data.training.ratings[0::2].tolist()
    assert ratings == [True] * 6 + [False] * 6


def test_the_user_is_told_what_was_understood(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(data_files.logger, "warning", lambda message, *args: told.append(message % args if args else message))
    pairs: Rows = [{"prompt": f"roads {number}", "chosen": " rivers", "rejected": " trees"} for number in range(9)]
    data = prepared(home, pairs, tmp_path)
    assert any("each for itself: chosen ones are good, rejected ones bad" in line for line in told)
    assert data.evaluation is not None and len(data.evaluation) == 4 and len(data.training) == 32  # whole pairs are held out
    told.clear()
    prepared(home, [ROW | {"prompt": f"roads {number}"} for number in range(9)], tmp_path)
    assert any("all 8 completions to train on are good; without bad ones" in line for line in told)
    with pytest.raises(RequestError, match="--objective kto"):
        prepared(home, rated_rows(4), tmp_path, objective=None)


def test_a_plan_has_the_pass_of_the_kl_term_alone_where_the_loss_has_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for loss in ("kto", "apo_zero_unpaired"):
        options = ["--objective", "kto", "--kto-loss", loss, "--on", "h100", "--sequence-length", "64", "--json"]
        upshift_app(["plan", str(home / "model"), *options], standalone_mode=False)
        found = json.loads(capsys.readouterr().out)
        assert found["workload"]["has_kl_pass"] == (loss == "kto")
        seconds.append(found["plans"][0]["predicted"]["step_ms"]["p50"])
    assert seconds[0] > 1.2 * seconds[1]
    with pytest.raises(RequestError, match="--kto-loss apo_zero_unpaired is for --objective kto"):
        upshift_app(["plan", str(home / "model"), "--kto-loss", "apo_zero_unpaired"], standalone_mode=False)


def test_both_sequences_are_shown_and_only_one_is_counted(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [ROW, {"prompt": "trees", "completion": " north", "label": False}])
    printed = io.StringIO()
    monkeypatch.setattr(tables, "out", tables.new_console(file=printed, width=200))
    options = ["--objective", "kto", "--eval-size", "0"]
    app(["show", str(home / "model"), "--data", str(path), *options], standalone_mode=False)
    text = printed.getvalue()
    mismatched = "completion 1, for the KL term: its prompt with the completion of another row"
    assert f"completion 1, good\n<s>roads[[ rivers</s>]]\n{mismatched}\n<s>roads[[ north</s>]]\n" in text
    assert "completion 2, bad\n<s>trees[[ north</s>]]\n" in text and "2 rated completions to train on" in text


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--kto-beta 0.2", "--kto-beta 0.2 is for --objective kto"),
        ("--objective dpo --undesirable-weight 2", "--undesirable-weight 2 is for --objective kto"),
        ("--objective kto --dpo-beta 0.2", "--dpo-beta 0.2 is for --objective dpo"),
        ("--objective kto --desirable-weight 0 --undesirable-weight 0", "both 0"),
    ],
)
def test_options_of_another_objective_are_rejected(options: str, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        request_of(parse(["model", "--data", "rows.jsonl", *options.split()]))
    assert part in str(caught.value)


@pytest.mark.parametrize("chunk_tokens", [0, 64])
def test_a_step_needs_the_memory_of_its_rated_completions_alone(chunk_tokens: int) -> None:
    """Mismatched ones have only a forward pass, before. So a plan's memory counts every second row."""
    torch.manual_seed(0)
    plan = Plan(
        device="cpu", host="test", model="test", sequence_length=32, per_device_train_batch_size=16,
        gradient_accumulation_steps=2, loss_chunk_tokens=chunk_tokens,
    )  # fmt: skip
    config = LlamaConfig(vocab_size=4000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    mesh = init_mesh(plan)
    model = prepare_model(LlamaForCausalLM(config).train(), plan, mesh)
    step = TrainStep(model, mesh, Arguments(max_steps=10))
    rated = synthetic_batch(
        Layout(micro_batch=16, rows_together=2), sequence_length=32, vocab_size=4000,
        objective=Objective(has_pairs=True, has_ratings=True),
    )  # fmt: skip
    plain = synthetic_batch(Layout(micro_batch=8), sequence_length=32, vocab_size=4000)
    peaks = []
    for micro_batch in (rated, plain):
        peaks.append(peak_of_step(step, model, micro_batch))
    print(chunk_tokens, peaks)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    fields: dict[str, Any] = {"sequence_length": 32, "global_batch": 32, "rows_together": 2}
    shapes = [largest_micro_batch(plan, Workload(**fields, has_ratings=has_ratings)) for has_ratings in (True, False)]
    assert shapes == [plain.shape, rated.shape]
