"""Learning from preferences (DPO): losses, rewards and resumptions of whole runs, and what is rejected before one starts."""

from __future__ import annotations

import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import byte_level_tokenizer, save_model, words, write_jsonl
from pair_runs import PAIRS_PER_STEP, losses, pair_job, peak_of_step
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, OPTConfig, Qwen3MoeConfig

from upshift.cli.train import parse, request_of
from upshift.errors import Interrupted, RequestError
from upshift.models.build import build_model, choose_class
from upshift.models.ops.sequence_loss import sequence_losses, turn_off_dropout, why_no_sequence_losses
from upshift.models.source import AdapterOptions, find_model
from upshift.planning.plan import Plan
from upshift.record import Record
from upshift.training.arguments import Arguments
from upshift.training.batches.collate import without_pairs
from upshift.training.batches.layout import Layout, lay_out
from upshift.training.batches.objective import Objective
from upshift.training.batches.sampler import BatchSource, synthetic_batch
from upshift.training.checkpoint.directory import REFERENCE_NAME
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import TrainingData, prepare_data
from upshift.training.distributed.mesh import init_mesh
from upshift.training.job.job import Job, run_job
from upshift.training.loop.events import Event, Referenced, ReferenceStarted, StepDone
from upshift.training.out_of_memory import halve, stand_in
from upshift.training.prepare import prepare_model
from upshift.training.run import PreparedRun, Watcher, run_training
from upshift.training.step import TrainStep

LENGTH = 48
DPO = DataOptions(objective="dpo")


def text_pairs(number: int, *, longest: int = 12, seed: int = 1) -> list[dict[str, str]]:
    draws = random.Random(seed)
    rows = []
    for _ in range(number):
        answers = [" " + words(draws, draws.randint(1, longest)) for _ in range(2)]
        rows.append({"prompt": words(draws, draws.randint(1, 6)), "chosen": answers[0], "rejected": answers[1] + " roads"})
    return rows


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, and pairs to train on and to hold out."""
    folder = tmp_path_factory.mktemp("preferences")
    save_model(folder / "model", byte_level_tokenizer())
    write_jsonl(folder / "pairs" / "train.jsonl", text_pairs(41))
    write_jsonl(folder / "pairs" / "validation.jsonl", text_pairs(6, seed=2))
    return folder


@pytest.fixture(scope="module")
def data(home: Path) -> TrainingData:
    return prepare_data(find_model(str(home / "model")), home / "pairs", sequence_length=LENGTH, options=DPO)


def a_job(
    home: Path, output: Path, *, plan: dict[str, Any] | None = None, arguments: dict[str, Any] | None = None, **fields: Any
) -> Job:
    settings = {"max_steps": 11, "learning_rate": 3e-3, "max_grad_norm": 0.5, "dpo_beta": 0.2} | (arguments or {})
    return pair_job(
        home / "model", home / "pairs", output, length=LENGTH, options=DPO, settings=settings, plan=plan or {}, **fields
    )


@pytest.fixture(scope="module")
def plain(home: Path, data: TrainingData, tmp_path_factory: pytest.TempPathFactory) -> Record:
    return run_job(a_job(home, tmp_path_factory.mktemp("plain") / "out"), data)


def test_the_first_loss_is_that_of_an_unchanged_model_and_later_ones_are_lower(plain: Record) -> None:
    first, *_, last = losses(plain)
    assert first == pytest.approx(math.log(2), abs=1e-6) and last < 0.6
    step, accuracy, margin = plain.details["rewards"][-1]
    assert step == 11 and accuracy == 1.0 and margin > 0.1  # the last batch has one pair
    assert plain.details["global_batch"] == PAIRS_PER_STEP and plain.details["objective"] == "dpo"
    ((step, accuracy, _),) = plain.details["evaluation_rewards"]
    assert step == 11 and accuracy * 6 == pytest.approx(round(accuracy * 6))


def test_losses_follow_from_their_definition(home: Path, data: TrainingData) -> None:
    """The first two steps by torch alone, one sequence at a time, without padding."""
    model_class, _ = choose_class(find_model(str(home / "model")).hf_config, "model")
    model = model_class.from_pretrained(home / "model").eval()
    source = BatchSource(
        sequences=data.training, global_batch=8, layout=Layout(micro_batch=2, rows_together=2), objective=data.objective, seed=42
    )
    reference = model_class.from_pretrained(home / "model").eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)

    def log_probability(network: Any, member: int) -> torch.Tensor:
        sequences = data.training
        assert sequences.labels is not None
        span = slice(int(sequences.starts[member]), int(sequences.starts[member] + sequences.lengths[member]))
        ids = torch.from_numpy(sequences.tokens[span].astype(np.int64))
        learned = torch.from_numpy(sequences.labels[span] != -100)[1:]
        scores = torch.log_softmax(network(input_ids=ids[None]).logits[0, :-1], dim=-1)
        return scores.gather(1, ids[1:, None])[learned].sum()

    expected = []
    for members in (source.sequence_ids(source.position_of_step(step)).reshape(-1, 2).tolist() for step in range(2)):
        total = torch.zeros(())
        for chosen, rejected in members:
            with torch.no_grad():
                before = log_probability(reference, chosen) - log_probability(reference, rejected)
            margin = log_probability(model, chosen) - log_probability(model, rejected) - before
            total = total - torch.nn.functional.logsigmoid(0.2 * margin) / len(members)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(total.detach()))
    constant = {"lr_scheduler_type": "constant", "max_steps": 2}
    record = run_job(a_job(home, Path(home) / "definition", arguments=constant), data)
    assert losses(record) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 1e-5),
        ({"loss_chunk_tokens": 16, "activation_checkpointing": 2}, 1e-5),
        ({"activation_checkpointing": 2, "recompute_granularity": "selective"}, 1e-5),
        ({"precision": "bf16"}, 2e-2),
        ({"precision": "bf16", "loss_chunk_tokens": 16}, 2e-2),
    ],
    ids=str,
)
def test_no_plan_changes_the_losses(
    plan: dict[str, Any], tolerance: float, home: Path, data: TrainingData, plain: Record, tmp_path: Path
) -> None:
    record = run_job(a_job(home, tmp_path / "out", plan=plan), data)
    assert losses(record) == pytest.approx(losses(plain), abs=tolerance)
    if tolerance < 1e-3:
        assert np.allclose(record.details["rewards"], plain.details["rewards"], atol=1e-4)
        assert np.allclose(record.details["evaluation_rewards"], plain.details["evaluation_rewards"], atol=1e-4)


@pytest.mark.parametrize(
    ("layout", "loss"), [({}, "sigmoid"), ({"fully_shard": "weights", "shard_size": 2}, "discopop,ipo,orpo,sft=0.5")],
    ids=["data parallel", "fsdp"],
)  # fmt: skip
def test_ranks_train_as_one_process(
    layout: dict[str, Any], loss: str, home: Path, data: TrainingData, plain: Record, tmp_path: Path
) -> None:
    """The last batch has one pair, so one of the ranks has none. A mean over tokens is that of all pairs of a step."""
    plan = {"num_processes": 2, "gradient_accumulation_steps": 1, "layout": layout}
    arguments = {"dpo_loss": loss}
    record = run_job(a_job(home, tmp_path / "out", plan=plan, arguments=arguments), data)
    if loss != "sigmoid":
        plain = run_job(a_job(home, tmp_path / "alone", arguments=arguments), data)
    assert losses(record) == pytest.approx(losses(plain), abs=1e-5)
    assert np.allclose(record.details["rewards"], plain.details["rewards"], atol=1e-4)
    assert np.allclose(record.details["evaluation_rewards"], plain.details["evaluation_rewards"], atol=1e-4)


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_a_resumed_run_has_the_same_reference(lora_rank: int | None, home: Path, data: TrainingData, tmp_path: Path) -> None:
    whole = run_job(a_job(home, tmp_path / "whole", adapter=AdapterOptions(lora_rank=lora_rank)), data)
    assert losses(whole)[0] == pytest.approx(math.log(2), abs=1e-6) and losses(whole)[-1] < 0.69

    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    output = tmp_path / "two"
    with pytest.raises(Interrupted, match="checkpoint-5"):
        run_job(a_job(home, output, adapter=AdapterOptions(lora_rank=lora_rank)), data, on_event=stop)
    kept = (output / REFERENCE_NAME).read_bytes()
    (output / REFERENCE_NAME).write_bytes(kept[: len(kept) // 2])
    with pytest.raises(RequestError, match="cannot be read"):
        run_job(a_job(home, output, adapter=AdapterOptions(lora_rank=lora_rank), resume=True), data)
    (output / REFERENCE_NAME).write_bytes(kept)
    others: list[dict[str, Any]] = [{"dpo_beta": 0.3}, {"dpo_loss": "robust"}, {"dpo_label_smoothing": 0.1}, {"simpo_gamma": 1.0}]
    for other in others:
        with pytest.raises(RequestError, match=next(iter(other))):
            run_job(a_job(home, output, adapter=AdapterOptions(lora_rank=lora_rank), resume=True, arguments=other), data)
    events: list[Event] = []
    job = a_job(home, output, adapter=AdapterOptions(lora_rank=lora_rank), resume=True)
    resumed = run_job(job, data, on_event=events.append)
    assert not any(isinstance(event, ReferenceStarted | Referenced) for event in events)
    assert losses(resumed) == losses(whole) and resumed.details["reference_seconds"] == 0.0


@pytest.mark.parametrize(
    "plan",
    [{"packing": True}, {"per_device_train_batch_size": 1}, {"torch_compile": "model"}]
    + [{"num_processes": 2, "layout": {name: 2}} for name in ("tensor_parallel", "context_parallel", "pipeline_parallel")],
    ids=str,
)
def test_a_plan_that_cannot_compare_is_rejected_by_name(
    plan: dict[str, Any], home: Path, data: TrainingData, tmp_path: Path
) -> None:
    name = next(iter(plan.get("layout", plan)))
    with pytest.raises(RequestError, match=name) as caught:
        run_job(a_job(home, tmp_path / "out", plan=plan), data)
    assert "\n" not in str(caught.value) and "--objective dpo" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [2, 4, 6])
def test_the_sequences_of_a_pair_stay_together(world_size: int, micro_batch: int) -> None:
    lengths = [random.Random(number).randint(2, 30) for number in range(26)]
    ranks = lay_out(lengths, Layout(micro_batch=micro_batch, world_size=world_size, rows_together=2), sequence_length=32)
    groups = [group for groups in ranks for group in groups]
    assert len({len(groups) for groups in ranks}) == 1
    assert sorted(index for group in groups for (index,) in group.rows) == list(range(26))
    for group in groups:
        members = [index for (index,) in group.rows]
        assert len(members) <= micro_batch and members[1::2] == [index + 1 for index in members[0::2]]
        assert all(index % 2 == 0 for index in members[0::2]) and all(lengths[index] <= group.width for index in members)


def test_halves_of_a_micro_batch_hold_whole_pairs(data: TrainingData) -> None:
    layout = Layout(micro_batch=6, rows_together=2)
    source = BatchSource(sequences=data.training, global_batch=6, layout=layout, objective=data.objective)
    (whole,) = next(source.batches()).micro_batches
    halves = halve(whole)
    assert halves is not None and [half.shape[0] for half in halves] == [4, 2]
    assert sum(half.num_label_tokens for half in halves) == whole.num_label_tokens == 3
    assert halve(halves[1]) is None
    assert stand_in(whole).shape[0] == 2 and stand_in(whole).num_label_tokens == 0


SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
MIXTURE: dict[str, Any] = {
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts": 4,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, intermediate_size=48, attention_dropout=0.5),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "opt": OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5),
    "mixture": Qwen3MoeConfig(**SMALL, **MIXTURE, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_dropout_is_off_and_the_losses_of_sequences_are_the_models_own(name: str) -> None:
    config = CONFIGS[name]
    model_class, _ = choose_class(config, name)
    assert why_no_sequence_losses(config, model_class) is None
    model = build_model(config, model_class, dtype=torch.float32).train()
    ids = torch.randint(1, 96, (2, 10))
    inputs = {"input_ids": ids, "labels": torch.where(torch.arange(10) < 4, -100, ids)}
    if name != "mixture":
        assert not torch.equal(sequence_losses(model, inputs), sequence_losses(model, inputs))
    turn_off_dropout(model)
    assert torch.equal(sequence_losses(model, inputs), sequence_losses(model, inputs))
    assert float(sequence_losses(model, inputs).sum()) / 12 == pytest.approx(float(model(**inputs).loss), rel=1e-5)


def test_a_model_that_adds_another_loss_is_not_taken() -> None:
    """Router losses are of all tokens of a batch, so they belong to no answer."""
    config = Qwen3MoeConfig(**SMALL, **MIXTURE, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=1.0)
    model_class, _ = choose_class(config, "mixture")
    assert why_no_sequence_losses(config, model_class) == "its loss is not the log-probability of its labels alone"


@pytest.mark.parametrize("chunk_tokens", [0, 64])
@pytest.mark.parametrize("recomputed", [0, 2])
def test_a_step_of_pairs_needs_the_memory_of_any_other_step(chunk_tokens: int, recomputed: int) -> None:
    """So the memory that is predicted for a plan holds for pairs, too: it counts the model's own loss."""
    torch.manual_seed(0)
    plan = Plan(
        device="cpu", host="test", model="test", sequence_length=32, per_device_train_batch_size=16,
        gradient_accumulation_steps=2, loss_chunk_tokens=chunk_tokens, activation_checkpointing=recomputed,
    )  # fmt: skip
    config = LlamaConfig(vocab_size=4000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    mesh = init_mesh(plan)
    model = prepare_model(LlamaForCausalLM(config).train(), plan, mesh)
    step = TrainStep(model, mesh, Arguments(max_steps=10))
    layout = Layout(micro_batch=16, rows_together=2)
    pairs = synthetic_batch(layout, sequence_length=32, vocab_size=4000, objective=Objective(has_pairs=True))
    assert pairs.shape == (16, 32) and pairs.num_label_tokens == 8
    peaks = []
    for micro_batch in (pairs, without_pairs(pairs)):
        peaks.append(peak_of_step(step, model, micro_batch))
    print(chunk_tokens, recomputed, peaks)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


PAGE = Path(__file__).parents[3] / "docs" / "preferences.md"


def test_the_command_of_the_page_runs_and_needs_the_memory_that_it_predicts(tmp_path: Path) -> None:
    """With the rows of the page, several times, and a model whose peak is the loss."""
    command, rows = (PAGE.read_text(encoding="utf-8").split("```")[number] for number in (1, 3))
    lines = rows.removeprefix("json\n").splitlines(keepends=True)
    (tmp_path / "pairs.jsonl").write_text("".join(lines) * 21)
    tokenizer = byte_level_tokenizer()
    config = LlamaConfig(
        vocab_size=4000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    places = {"MODEL": tmp_path / "model", "pairs.jsonl": tmp_path / "pairs.jsonl", "trained": tmp_path / "trained"}
    words_of_command = [str(places.get(word, word)) for word in command.split()]
    assert words_of_command[:2] == ["upshift", "train"]
    cheap = "--sequence-length 32 --trial-seconds 0 --set torch_compile=off --set precision=fp32 --set attention=sdpa --nproc 1"
    request = request_of(parse([*words_of_command[2:], *cheap.split()]))
    planned: list[PreparedRun] = []
    record = run_training(request, Watcher(ready=planned.append))
    assert record is not None and planned[0].request.arguments.learning_rate == 1e-6
    assert planned[0].plan.global_batch == 2 * request.global_batch == 16 and not planned[0].plan.packing
    assert planned[0].plan.per_device_train_batch_size % 2 == 0
    assert record.details["steps"] == 6 and losses(record)[0] == pytest.approx(math.log(2), abs=1e-6)
    error = record.prediction_error("peak_gib")
    print(f"predicted over measured peak: {error:+.1%}, {planned[0].plan.label()}")
    assert error == pytest.approx(0.0, abs=0.1)
    assert (tmp_path / "trained" / "model.safetensors").exists()
