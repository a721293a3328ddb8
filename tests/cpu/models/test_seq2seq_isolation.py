"""Encoder-decoders: micro-batches are allowed where they change no loss, and what a config lacks for a step is named at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command

from upshift.errors import RequestError
from upshift.models.ops.sequence_loss import turn_off_dropout
from upshift.models.profile_cache import check_token_ids, isolation_of
from upshift.models.source import ModelSource, find_model
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import why_not_isolated
from upshift.training.arguments import Arguments
from upshift.training.batches.layout import layout_for
from upshift.training.batches.model_objective import find_objective
from upshift.training.batches.sampler import BatchSource
from upshift.training.data.dataset import prepare_data
from upshift.training.data.tokens import Sequences
from upshift.training.job.job import Job, run_job
from upshift.training.prepare import compute_loss, load_or_build

SIZES = {"vocab_size": 96, "d_model": 32, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
T5 = SIZES | {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = SIZES | {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 2,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
# kind -> (config class, architecture, arguments, whether the loss splits)
KINDS: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, True),
    "t5, several ends of a text": ("T5Config", "T5ForConditionalGeneration", T5 | {"eos_token_id": [1, 2]}, True),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART, True),
    "switch: each text has the experts to itself": (
        "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration",
        T5 | {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4,
              "router_jitter_noise": 0.0}, True,
    ),
    "prophetnet: padding reaches the labels before it": (
        "ProphetNetConfig", "ProphetNetForConditionalGeneration",
        {"vocab_size": 96, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_encoder_layers": 2,
         "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "pad_token_id": 0,
         "max_position_embeddings": 64}, False,
    ),
    "nllb-moe: experts hold some tokens of a batch": (
        "NllbMoeConfig", "NllbMoeForConditionalGeneration", BART | MIXTURE | {"expert_capacity": 4}, False,
    ),
}  # fmt: skip
LENGTHS = (10, 16, 7, 20, 13, 5, 18, 9)


def source_of(folder: Path, config_class: str, architecture: str, arguments: dict[str, Any]) -> ModelSource:
    config = getattr(transformers, config_class)(**arguments, architectures=[architecture])
    config.save_pretrained(folder)
    return find_model(str(folder))


def plan_of(*, micro_batch: int) -> Plan:
    return Plan(
        device="cpu", host="", model="", sequence_length=32, per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=8 // micro_batch,
    )  # fmt: skip


def loss_as_planned(model: Any, source: ModelSource, *, micro_batch: int) -> float:
    """Return the loss of eight texts that training adds up from its micro-batches."""
    plan = plan_of(micro_batch=micro_batch)
    lengths = np.array(LENGTHS)
    tokens = np.random.default_rng(0).integers(3, 96, lengths.sum()).astype(np.int32)
    texts = Sequences(tokens=tokens, starts=np.cumsum(lengths) - lengths, lengths=lengths, sequence_length=32)
    objective = find_objective(source)
    batch = next(BatchSource(sequences=texts, global_batch=8, layout=layout_for(plan, objective), objective=objective).batches())
    assert all(part.can_be_split == objective.loss_splits for part in batch.micro_batches)
    losses = [float(compute_loss(model, plan, part).detach()) * part.num_label_tokens for part in batch.micro_batches]
    return sum(losses) / batch.num_label_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_no_loss_or_are_refused(kind: str, tmp_path: Path) -> None:
    *arguments, splits = KINDS[kind]
    source = source_of(tmp_path, *arguments)
    isolation = isolation_of(source)
    assert isolation.proven and isolation.loss_splits == splits and isolation.padding == "masked", isolation
    plan = plan_of(micro_batch=4)
    assert (why_not_isolated(isolation, plan) is None) == splits
    model = load_or_build(source, plan, from_config=True, seed=1)
    turn_off_dropout(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    whole = loss_as_planned(model, source, micro_batch=8)
    single = loss_as_planned(model, source, micro_batch=1)
    assert (single == pytest.approx(whole, rel=1e-5)) == splits


GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1}
LACKING: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", T5 | {"decoder_start_token_id": None}, ("decoder_start_token_id",)),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART | {"pad_token_id": None}, ("pad_token_id",)),
    "a classifier that looks for the last token": (
        "GPT2Config", "GPT2ForSequenceClassification", GPT2 | {"num_labels": 3}, ("pad_token_id",),
    ),
    "none: a causal model pads with any token": ("GPT2Config", "GPT2LMHeadModel", GPT2, ()),
}  # fmt: skip


@pytest.mark.parametrize("kind", LACKING)
def test_a_token_id_that_a_step_needs_is_named(kind: str, tmp_path: Path) -> None:
    config_class, architecture, arguments, missing = LACKING[kind]
    source = source_of(tmp_path / "without", config_class, architecture, arguments)
    isolation = isolation_of(source)
    assert isolation.missing_token_ids == missing
    if missing:
        with pytest.raises(RequestError, match=f"does not say {missing[0]}, .*config.json"):
            check_token_ids(source, isolation)
    filled = arguments | dict.fromkeys(missing, 0)
    assert not isolation_of(source_of(tmp_path / "with", config_class, architecture, filled)).missing_token_ids


def test_every_command_that_trains_names_it_in_one_line(upshift: Command, tmp_path: Path) -> None:
    source_of(tmp_path / "model", *LACKING["t5"][:3])
    data = tmp_path / "data.jsonl"
    data.write_text('{"input_ids": [3, 4, 5], "labels": [6, 7]}\n' * 8)
    for command in (("train", "--data", data, "--output", tmp_path / "out", "--from-config"), ("inspect",)):
        done = upshift(command[0], tmp_path / "model", *command[1:], "--sequence-length", 32)
        assert done.code == 2 and "does not say decoder_start_token_id" in done.err and "sizes" not in done.err
    assert not (tmp_path / "out").exists()


def test_a_decoder_that_does_not_read_the_labels_is_refused(tmp_path: Path) -> None:
    """FSMT makes its decoder's inputs from the source, and would learn to predict a label from the labels of other texts."""
    arguments = {
        "langs": ["en", "de"],
        "src_vocab_size": 96, "tgt_vocab_size": 96, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "max_position_embeddings": 64,
    }  # fmt: skip
    source = source_of(tmp_path, "FSMTConfig", "FSMTForConditionalGeneration", arguments)
    with pytest.raises(RequestError, match="FSMTForConditionalGeneration does not make the decoder's inputs from them"):
        find_objective(source)


def test_switch_transformers_trains_as_a_plain_loop(tmp_path: Path) -> None:
    """A batch is all of the data, so that the order of its texts is of no account."""
    source = source_of(tmp_path / "model", *KINDS["switch: each text has the experts to itself"][:3])
    generator = np.random.default_rng(0)
    sizes = ((9, 12), (20, 5), (14, 9), (7, 7))
    pairs = [[generator.integers(3, 96, length).tolist() for length in lengths] for lengths in sizes]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids, "labels": labels}) + "\n" for ids, labels in pairs))
    torch.manual_seed(0)
    config = source.hf_config
    config.dropout_rate = 0.0
    model: Any = transformers.SwitchTransformersForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "model")
    plan = plan_of(micro_batch=2).changed(gradient_accumulation_steps=2, optim="adamw_torch", attention="eager")
    arguments = Arguments(max_steps=3, learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0)
    job = Job(
        model_reference=source.reference, plan=plan, arguments=arguments, data="", global_batch=4, output=str(tmp_path / "out")
    )
    record = run_job(job, prepare_data(source, data, eval_data=data, sequence_length=32))
    ours = [loss for _, loss in record.details["loss_curve"]]
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2, weight_decay=0.0)
    theirs = []
    num_labels = sum(len(labels) for _, labels in pairs)
    for _ in range(3):
        losses = [model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss for ids, labels in pairs]
        loss: Any = sum(loss * len(labels) for loss, (_, labels) in zip(losses, pairs, strict=True)) / num_labels
        loss.backward()
        theirs.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert theirs[-1] < theirs[0] - 0.1 and ours == pytest.approx(theirs, rel=1e-5)
