"""muP: what is best for a narrow model is best for a wide one, and layers' outputs change alike at every width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_tune import CHEAP, home  # noqa: F401  home is a fixture
from transformers import GPT2Config, LlamaConfig, MixtralConfig, PretrainedConfig, PreTrainedModel
from typer.testing import CliRunner

from upshift.cli.main import app
from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.planning.plan import Plan
from upshift.planning.search.constraints import conflict
from upshift.training.arguments import Arguments
from upshift.training.mup import check_base, scale_initial_weights, scales_of_parameters
from upshift.training.optimizers.build import build_optimizer
from upshift.training.run import train
from upshift.tuning.mup_check import BOUND, Growth, check_transfer, measure_growth, write_narrow
from upshift.tuning.tune import tune

TOKENS, BATCH, LENGTH, STEPS = 64, 8, 16, 24
GRID = tuple(2.0**power for power in (-11, -9, -7, -5))  # learning rates


def llama(width: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_attention_heads=width // 16, num_key_value_heads=width // 16,
        num_hidden_layers=2, vocab_size=TOKENS, max_position_embeddings=64, architectures=["LlamaForCausalLM"], **more,
    )  # fmt: skip


def gpt2(width: int) -> GPT2Config:
    """Its matrices stand the other way round."""
    return GPT2Config(
        n_embd=width, n_head=width // 16, n_layer=2, vocab_size=TOKENS, n_positions=64, tie_word_embeddings=False,
        architectures=["GPT2LMHeadModel"], bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


KINDS = {"llama": (llama, "hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=4"),
         "gpt2": (gpt2, "n_embd=64,n_head=4")}  # fmt: skip


def built(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, (config.architectures or [""])[0])._from_config(config)
    return model.eval()  # without dropout


def plan_with(base: str, **more: Any) -> Plan:
    return Plan(device="cpu", host="", model="", sequence_length=LENGTH, per_device_train_batch_size=BATCH, mup_base=base, **more)


def sentences() -> torch.Tensor:
    """Each token is followed by one of three others."""
    chance = torch.Generator().manual_seed(1)
    follows = torch.randint(TOKENS, (TOKENS, 3), generator=chance)
    tokens = [torch.randint(TOKENS, (STEPS, BATCH), generator=chance)]
    for _ in range(LENGTH - 1):
        tokens.append(follows[tokens[-1], torch.randint(3, (STEPS, BATCH), generator=chance)])
    return torch.stack(tokens, dim=-1)


def loss_at(config: PretrainedConfig, rate: float, base: str) -> float:
    """Of the last batches of a short training."""
    model, losses = built(config), []
    if base:
        scale_initial_weights(model, base)
    optimizer = build_optimizer(model, plan_with(base), Arguments(max_steps=STEPS, learning_rate=rate))
    for batch in sentences():
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-6:]) / 6


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_best_rate_of_a_narrow_model_is_that_of_a_wide_one(kind: str) -> None:
    """Within a step of the grid; the wide model is better with it than the narrow one, and without muP it is worse by it."""
    config, base = KINDS[kind]
    narrow = [loss_at(config(64), rate, "") for rate in GRID]
    wide = [loss_at(config(256), rate, base) for rate in GRID]
    best = narrow.index(min(narrow))
    assert abs(best - wide.index(min(wide))) <= 1, (narrow, wide)
    assert wide[best] < narrow[best] * 1.01
    above = min(best + 1, len(GRID) - 1)  # where a rate is too high already, without muP it does more harm
    assert loss_at(config(256), GRID[above], "") > wide[above]


def test_rates_and_initial_weights_by_shape() -> None:
    """Hidden matrices, heads, tables and vectors; weight decay goes against the rate, the rate asked for stands first."""
    base = KINDS["llama"][1]
    wide, narrow, plain = built(llama(256)), dict(built(llama(64)).named_parameters()), dict(built(llama(256)).named_parameters())
    scale_initial_weights(wide, base)
    weights, found = dict(wide.named_parameters()), scales_of_parameters(wide, base)
    for name, rate, deviation in (
        ("model.layers.0.self_attn.k_proj.weight", 1 / 4, 1 / 2),
        ("model.layers.1.mlp.down_proj.weight", 1 / 4, 1 / 2),
        ("lm_head.weight", 1 / 4, 1 / 4),
        ("model.embed_tokens.weight", 1, 1),
        ("model.norm.weight", 1, 1),
    ):
        assert found[name].rate == rate, name
        if narrow[name].ndim == 2:
            assert float((weights[name].std() / narrow[name].std()).detach()) == pytest.approx(deviation, rel=0.05), name
    assert torch.equal(weights["model.norm.weight"], plain["model.norm.weight"])
    groups = build_optimizer(wide, plan_with(base), Arguments(max_steps=1, learning_rate=0.1, weight_decay=0.2)).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.1, 0.2), (0.1, 0.0), (0.025, 0.8)]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_outputs_change_alike_at_every_width(kind: str, tmp_path: Path) -> None:
    """The coordinate check at 32, 64 and 128: flat within its bound, and not without muP."""
    KINDS[kind][0](128).save_pretrained(tmp_path / "whole")
    narrow = write_narrow(find_model(str(tmp_path / "whole")), 32, tmp_path / "narrow")
    found = measure_growth(str(narrow), str(tmp_path / "whole"))
    assert found.widths == (32, 64, 128) and found.is_flat and found.without > BOUND, found


def test_a_search_on_a_narrow_copy_and_the_training_of_the_whole(home: Path, tmp_path: Path) -> None:  # noqa: F811
    whole = tmp_path / "whole"
    llama(64).save_pretrained(whole)
    config = json.loads((whole / "config.json").read_text()) | {"vocab_size": 320}
    (whole / "config.json").write_text(json.dumps(config))
    for path in (home / "llama").glob("token*"):
        (whole / path.name).write_bytes(path.read_bytes())
    (tmp_path / "space.yaml").write_text("learning_rate: [1.0e-2]\nadam_beta2: [0.95, 0.99]\n")
    given = ["--data", str(home / "data.jsonl"), "--from-config", "--sequence-length", "32", "--max-steps", "3"]
    given += [word for one in CHEAP for word in ("--set", one)]
    said = CliRunner().invoke(
        app,
        ["tune", str(whole), *given, "--space", str(tmp_path / "space.yaml"), "-o", str(tmp_path / "out"), "--trials", "1",
         "--mup-width", "32"],
    )  # fmt: skip
    words = " ".join(said.output.split())
    assert said.exit_code == 0 and "muP check at widths 32, 64: " in words, said.output[-2000:]
    assert f"--mup-base {tmp_path / 'out' / 'narrow'}" in words and "by upshift.train(..., arguments=)" in words
    curves = []
    for ranks in (1, 2):
        record = train(
            str(whole), str(home / "data.jsonl"), output=tmp_path / str(ranks), from_config=True, sequence_length=32,
            trial_seconds=0.0, mup_base=str(tmp_path / "out" / "narrow"), fixed=(*CHEAP, f"num_processes={ranks}"),
            arguments={"max_steps": 3, "learning_rate": 1e-2},
        )  # fmt: skip
        assert record is not None and record.plan["mup_base"].startswith("hidden_size=32,intermediate_size=64,")
        curves.append([loss for _, loss in record.details["loss_curve"]])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
HALF = "hidden_size=32,num_attention_heads=2,num_key_value_heads=2"


@pytest.mark.parametrize(
    ("config", "base", "words"),
    [
        (llama(64, tie_word_embeddings=True), HALF, "needs a head of its own"),
        (gpt2(64), "n_embd=32", "heads of 8 numbers, the model of 16"),
        (llama(64), "vocab_size=32", "another number of rows in model.embed_tokens.weight"),
        (llama(64), "num_hidden_layers=1", "has no model.layers.1"),
        (llama(64), "width=32", "'width' is no width of this model's config; it has "),
        (llama(64), "hidden_size", "write the widths of the base, such as hidden_size=64"),
        (MixtralConfig(**SIZES, intermediate_size=64, num_hidden_layers=1), HALF, "which side of .* is its input is not known"),
    ],
)  # fmt: skip
def test_bases_that_are_refused(config: PretrainedConfig, base: str, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=words):
        check_base(find_model(str(tmp_path)), base)


def test_what_is_refused_beside_mup(tmp_path: Path) -> None:
    llama(64).save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    for asked, words in (
        ({"mup_width": 24, "from_config": True}, "--mup-width 24 is not possible: .* to a hidden_size of 16, 32, 48"),
        ({"mup_width": 32}, "add --from-config"),
    ):
        with pytest.raises(RequestError, match=words):
            tune(model, __file__, space={"learning_rate": [1e-3]}, output=tmp_path / "out", **asked)
    assert "AdamW's updates, not of optim=muon" in str(conflict(plan_with("hidden_size=64", optim="muon"), clips_gradients=True))
    with pytest.raises(RequestError, match="differs in widths alone"):
        deep = llama(32)
        deep.rope_parameters = {"rope_type": "default", "rope_theta": 5.0}
        deep.save_pretrained(tmp_path / "deep")
        train(model, "none", output=tmp_path / "o", from_config=True, mup_base=str(tmp_path / "deep"))


def test_a_check_that_is_not_flat_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = Growth(widths=(32, 64), with_mup=2.5, without=3.0)
    monkeypatch.setattr("upshift.tuning.mup_check.check_widths", lambda narrow, whole: grown)

    class Study:
        user_attrs: dict[str, Any] = {}

    with pytest.raises(RequestError, match="differs 2.5 times .* more than 2 does not carry over"):
        check_transfer(Study(), "narrow", "whole")
