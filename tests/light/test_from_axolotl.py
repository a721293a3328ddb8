"""``upshift train --from-axolotl``: a config becomes options, each printed, and every key without one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from upshift.cli.main import app
from upshift.cli.train import expand, parse
from upshift.cli.usage.axolotl_keys import OPTION_OF, OTHER_KEYS, PLANNED, REMARKS, WITHOUT_EFFECT
from upshift.cli.usage.run_file import file_parameters, key_of
from upshift.errors import RequestError
from upshift.training.data.rows.data_set import read_description

COMMAND: Any = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
CONFIG: dict[str, Any] = {
    "base_model": "org/model", "datasets": [{"path": "chats.jsonl", "type": "chat_template"}], "learning_rate": "2e-4",
    "adapter": None, "lora_r": None, "strict": False, "relora": False, "wandb_project": None,
}  # fmt: skip


def config_file(folder: Path, **keys: Any) -> str:
    path = folder / "axolotl.yaml"
    path.write_text(yaml.safe_dump(CONFIG | keys))
    return str(path)


def options(folder: Path, *words: str, **keys: Any) -> dict[str, Any]:
    """The options that differ from those of a plain command."""
    plain = parse(["MODEL", "--data", "DATA"])
    found = parse(["--from-axolotl", config_file(folder, **keys), *words])
    return {name: value for name, value in found.items() if value != plain[name] and name != "from_axolotl"}


def refusal(folder: Path, *words: str, **keys: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(["--from-axolotl", config_file(folder, **keys), *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


PLAIN = {
    "model": "org/model", "data": "chats.jsonl", "data_format": "messages", "learning_rate": 2e-4, "global_batch": 1,
    "lr_scheduler_type": "cosine", "warmup_ratio": 0.03, "long_rows": "drop", "loss_on": "assistant-content",
}  # fmt: skip


def test_a_small_config_becomes_options_and_so_do_defaults_that_differ(tmp_path: Path) -> None:
    assert options(tmp_path) == PLAIN


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"micro_batch_size": 3, "gradient_accumulation_steps": 4}, {"global_batch": 12}),
        ({"num_epochs": 3, "max_steps": None, "seed": 7}, {"epochs": 3.0, "seed": 7}),
        ({"sequence_len": 512, "excess_length_strategy": "truncate"}, {"sequence_length": 512, "long_rows": "cut"}),
        ({"train_on_inputs": True, "train_on_eos": None}, {"loss_on": "content"}),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, {"warmup_steps": 10, "warmup_ratio": None}),
        ({"bf16": True, "tf32": True, "flash_attention": True}, {"set_": ["precision=bf16"]}),
        ({"bf16": "auto", "fp16": False}, {}),
        ({"fp8": True, "optimizer": "adamw_bnb_8bit"},
         {"set_": ["optim=adamw_bnb_8bit", "precision=fp8"], "allow": "8bit-optimizer,fp8"}),
        ({"wandb_project": "mine", "use_mlflow": True}, {"report_to": "wandb,mlflow"}),
        ({"eval_steps": 5, "save_steps": 6, "load_best_model_at_end": True, "early_stopping_patience": 2},
         {"eval_steps": 5, "save_steps": 6, "load_best": True, "early_stopping_patience": 2}),
        ({"adapter": "lora", "lora_r": 4, "lora_target_modules": r"layers.\d{1,2}.(up|down)_proj"},
         {"lora_rank": 4, "lora_target": r"layers.\d{1,2}.(up|down)_proj"}),
        ({"val_set_size": 0.05}, {"eval_size": 0.05}),
        ({"num_epochs": 2, "val_set_size": 0.1, "evals_per_epoch": 4, "saves_per_epoch": 1, "save_steps": None},
         {"epochs": 2.0, "eval_size": 0.1, "eval_steps": 0.125, "save_steps": 0.5}),
        ({"evals_per_epoch": 4, "saves_per_epoch": 1, "save_total_limit": 3}, {"save_total_limit": 3}),  # as in Axolotl
        ({"save_steps": 0.1}, {"save_steps": 0.1}),
        ({"val_set_size": 0}, {"eval_size": 0.0}),
        ({"val_set_size": 0.05, "test_datasets": [{"path": "held-out.jsonl", "type": "chat_template"}]},
         {"eval_data": "held-out.jsonl"}),
        ({"chat_template": "chatml"}, {"chat_template": "chatml"}),
        ({"chat_template": "jinja", "chat_template_jinja": "{{ messages }}\n"}, {"chat_template": "{{ messages }}\n"}),
        ({"chat_template": "tokenizer_default_fallback_chatml"}, {}),
        ({"chat_template": "qwen_25"}, {"chat_template": "qwen_25"}),
        ({"datasets": [{"path": "chats.jsonl", "type": "chat_template", "roles_to_train": ["gpt"], "train_on_eos": "turn"}]}, {}),
        ({"datasets": [{"path": "chats.jsonl", "type": "chat_template", "chat_template": "chatml"}]},
         {"chat_template": "chatml"}),
        ({"test_datasets": [{"path": "held-out.jsonl", "type": "chat_template"}]}, {"eval_data": "held-out.jsonl"}),
        ({"special_tokens": {"pad_token": "<pad>", "eos_token": None}, "chat_template": "tokenizer_default"}, {}),
        ({"rl": "dpo", "rl_beta": 0.3, "datasets": [{"path": "p.jsonl", "type": "chat_template.argilla_chat"}]},
         {"objective": "dpo", "dpo_beta": 0.3, "data": '[{"path": "p.jsonl", "format": "preference", "answer_ends": "eos"}]',
          "data_format": None, "long_rows": None, "loss_on": None}),
        ({"rl": "ipo", "datasets": [{"path": "p.jsonl", "type": "chat_template.argilla_chat"}]},
         {"objective": "dpo", "dpo_loss": "ipo", "data": '[{"path": "p.jsonl", "format": "preference", "answer_ends": "eos"}]',
          "data_format": None, "long_rows": None, "loss_on": None}),
        ({"rl": "dpo", "dpo_loss_type": ["sigmoid", "robust", "sft"], "dpo_loss_weights": [0.8, 0.2, 1.0],
          "dpo_label_smoothing": 0.1, "datasets": [{"path": "p.jsonl", "type": "chat_template.argilla_chat"}]},
         {"objective": "dpo", "dpo_loss": "sigmoid=0.8,robust=0.2,sft", "dpo_label_smoothing": 0.1,
          "data": '[{"path": "p.jsonl", "format": "preference", "answer_ends": "eos"}]',
          "data_format": None, "long_rows": None, "loss_on": None}),
        ({"datasets": [{"path": "json", "data_files": "t.jsonl", "type": "completion", "field": "body"}]},
         {"data": "t.jsonl", "text_column": "body", "data_format": None, "long_rows": None, "loss_on": None}),
        ({"datasets": [{"path": "c.jsonl", "type": "chat_template", "field_messages": "conversations"}]},
         {"data": "c.jsonl", "data_format": "conversations"}),
        ({"datasets": [{"path": "ids.parquet", "type": None}]},
         {"data": "ids.parquet", "data_format": "input_ids", "long_rows": None, "loss_on": None}),
    ],
    ids=str,
)  # fmt: skip
def test_keys_become_the_options_of_the_same_meaning(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    keys.pop("train_on_eos", None)
    found = options(tmp_path, **keys)
    assert found == {name: value for name, value in (PLAIN | expected).items() if value is not None}


@pytest.mark.parametrize(
    ("data_sets", "expected"),
    [
        ([{"path": "c.jsonl", "type": "chat_template", "split": "train[:10%]"}],
         {"data": "c.jsonl", "data_format": "messages", "split": "train[:10%]", "loss_on": "assistant-content"}),
        ([{"path": "s.jsonl", "type": "input_output"}], {"data": "s.jsonl", "data_format": "segments"}),
        ([{"path": "a.jsonl", "type": "alpaca"}], [{"path": "a.jsonl", "template": "axolotl/alpaca"}]),
        ([{"path": "a.jsonl", "type": "alpaca:chat"}, {"path": "b", "type": "alpaca_chat.load_qa", "split": "test"}],
         [{"path": "a.jsonl", "template": "axolotl/alpaca:chat"},
          {"path": "b", "split": "test", "template": "axolotl/alpaca_chat.load_qa"}]),
        ([{"path": "c", "type": "chat_template", "field_messages": "turns",
           "message_property_mappings": {"role": "who", "content": "says"}, "roles": {"assistant": ["bot"]}}],
         [{"path": "c", "format": "messages", "columns": {"messages": "turns", "tools": "tools"},
           "message_fields": {"role": "who", "content": "says"}, "roles": {"bot": "assistant"}, "loss_on": "assistant-content"}]),
        ([{"path": "c", "type": "chat_template", "roles_to_train": ["human", "gpt"], "train_on_eos": "last"}],
         [{"path": "c", "format": "messages", "loss_on": "assistant-content", "learned_roles": ["user", "assistant"],
           "learned_ends": "last"}]),
        ([{"path": "q", "type": {"field_instruction": "q", "format": "{instruction}? {input} ", "system_prompt": "Be brief."}}],
         [{"path": "q", "prompt": {
             "instruction": "{q}", "input": "{input}", "output": "{output}", "with_input": "{instruction}? {input} ",
             "without_input": "{instruction} ", "system": "{system}", "system_column": "system",
             "default_system": "Be brief."}}]),
    ],
    ids=str,
)  # fmt: skip
def test_data_sets_become_options_or_a_description(data_sets: list[Any], expected: Any, tmp_path: Path) -> None:
    found = options(tmp_path, datasets=data_sets)
    if isinstance(expected, dict):
        assert {name: found.get(name) for name in expected} == expected
    else:
        assert json.loads(found["data"]) == expected and not {"data_format", "split", "loss_on"} & found.keys()
        described = read_description(found["data"])
        assert described is not None and [data_set.path for data_set in described.data_sets] == [e["path"] for e in data_sets]
    assert found["long_rows"] == "drop"


def test_tokens_that_end_turns_and_pairs_with_a_prompt_become_descriptions(tmp_path: Path) -> None:
    chats = [{"path": "c", "type": "chat_template"}, {"path": "d", "type": "chat_template"}]
    found = json.loads(options(tmp_path, datasets=chats, eot_tokens=["<|eot_id|>"])["data"])
    assert [entry["turn_ends"] for entry in found] == [["<|eot_id|>"]] * 2
    pairs = [{"path": "p", "type": "chat_template.default", "field_messages": "talk", "field_chosen": "good"}]
    found = options(tmp_path, datasets=pairs, rl="dpo")
    assert found["objective"] == "dpo" and json.loads(found["data"]) == [
        {"path": "p", "format": "preference", "answer_ends": "eos",
         "columns": {"messages": "talk", "chosen": "good", "rejected": "rejected"},
         "message_fields": {"role": "role", "content": "content"}, "roles": {}}
    ]  # fmt: skip
    for kind, name in (("chatml.intel", "chatml.intel"), ("llama3", "llama3.default")):
        found = options(tmp_path, datasets=[{"path": "p", "type": kind}], rl="dpo")
        assert json.loads(found["data"]) == [{"path": "p", "format": "preference", "template": f"axolotl/{name}"}]
    texts = options(tmp_path, datasets=[{"path": "p", "type": "passthrough"}], rl="dpo")
    assert texts["data"] == "p" and texts["data_format"] == "preference"
    texts = options(tmp_path, datasets=[{"path": "p", "type": "passthrough"}], rl="dpo", chat_template="chatml")
    (entry,) = json.loads(texts["data"])  # it stays text: the template is only saved
    assert entry == {"path": "p", "format": "preference", "template": "axolotl/passthrough.default"}


def test_evaluation_data_of_the_same_rows_is_a_path(tmp_path: Path) -> None:
    chats = {"path": "c.jsonl", "type": "chat_template"}
    assert options(tmp_path, datasets=[chats], test_datasets=[chats | {"path": "e.jsonl"}])["eval_data"] == "e.jsonl"
    found = options(tmp_path, datasets=[chats], test_datasets=[{"path": "e.jsonl", "type": "alpaca"}])
    assert json.loads(found["eval_data"]) == [{"path": "e.jsonl", "template": "axolotl/alpaca"}]


def test_an_adapter_is_the_one_of_the_config(tmp_path: Path) -> None:
    keys = {"adapter": "qlora", "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    keys |= {"lora_modules_to_save": ["lm_head"], "peft_use_dora": True, "load_in_4bit": True}
    assert options(tmp_path, **keys) == PLAIN | {
        "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target": "q_proj,v_proj",
        "lora_modules_to_save": "lm_head", "lora_dora": True, "load_in_4bit": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sample_packin": True}, "sample_packin (unknown; did you mean sample_packing"),
        ({"sample_packin": False}, "sample_packin (unknown"),
        ({"datasets": "a.jsonl"}, "datasets (it must be a list of data sets)"),
        ({"datasets": [{"path": "a", "type": "sharegpt"}]}, "datasets.type sharegpt (use chat_template"),
        ({"datasets": [{"path": "a", "type": {"format": "x", "formt": "y"}}]}, "datasets.type.formt (unknown; did you mean"),
        ({"datasets": [{"path": "a", "type": {"field_output": "out.put"}}]}, "datasets.type.field_output out.put (rename"),
        ({"datasets": [{"path": "a", "type": "alpaca", "shards": 4}]}, "datasets.shards ("),
        ({"datasets": [{"path": "a", "type": "chat_template", "roles_to_train": []}]}, "datasets.roles_to_train (give a list"),
        ({"datasets": [{"path": "a", "type": "chat_template", "train_on_eos": "first"}]}, "train_on_eos first (use turn, all"),
        ({"datasets": [{"path": "a", "type": "chat_template", "train_on_eot": "all"}]}, "datasets.train_on_eot all (give"),
        ({"evals_per_epoch": "often"}, "evals_per_epoch often (add --eval-steps N)"),
        ({"save_steps": "often"}, "save_steps often (add --save-steps N, a number of steps)"),
        ({"lr_scheduler": "rex"}, "lr_scheduler rex ("),
        ({"adam_beta2": 0.95}, "adam_beta2 0.95 ("),
        ({"optimizer": "shampoo"}, "optimizer shampoo (use one of adamw_torch_fused"),
        ({"adapter": "lora", "lora_r": 8}, "lora_target_modules (it is missing"),
        ({"load_in_4bit": True}, "load_in_4bit (weights in 4 bits need adapter: qlora)"),
        ({"rl": "kto"}, "rl kto (upshift train has sft, dpo, kto and reward models, and reads rated rows with prompt"),
        (
            {"rl": "dpo", "datasets": [{"path": "a", "type": "zephyr.nectar"}]},
            "datasets.type zephyr.nectar (for pairs use chat_t",
        ),
        ({"rl": "dpo", "datasets": [{"path": "a", "type": "alpaca"}]}, "datasets.type alpaca (for pairs use chat_template.def"),
        ({"rl": "simpo"}, "rl simpo (upshift train has sft, dpo, kto and reward models)"),
        ({"loss_watchdog_threshold": 5.0}, "loss_watchdog_threshold (a run stops by itself"),
        ({"val_set_size": "few"}, "val_set_size few (give a share below 1, or a number)"),
        ({"chat_template": "qwen3"}, "Axolotl's file qwen3.jinja with --chat-template FILE, or one of alpaca, aya"),
        ({"chat_template": "jinja"}, "chat_template jinja ("),
        (
            {"chat_template": "chatml", "datasets": [{"path": "a", "type": "chat_template", "chat_template": "llama3"}]},
            "chat_template chatml and llama3 (a run has one chat template)",
        ),
        ({"special_tokens": {"eos_token": "<end>"}}, "special_tokens ("),
        ({"plugins": ["mine.Plugin"]}, "plugins mine.Plugin ("),
        ({"trust_remote_code": True}, "trust_remote_code (code from a model's files is never run)"),
        ({"relora": True, "hub_model_id": "me/mine"}, "2 keys have no option of upshift train: "),
    ],
    ids=str,
)
def test_a_key_without_an_option_is_named_with_what_to_do(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, **keys)


def test_a_typed_option_replaces_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = options(tmp_path, "--eval-steps", "9", "--learning-rate", "1e-3", evals_per_epoch=4)
    assert found == PLAIN | {"eval_steps": 9, "learning_rate": 1e-3}
    printed = capsys.readouterr().err
    assert "evals_per_epoch: --eval-steps replaces it" in printed
    assert "--learning-rate 2e-4  (learning_rate, replaced by the command line)" in printed
    without_warmup = {name: value for name, value in PLAIN.items() if name != "warmup_ratio"}
    for warmup in ({}, {"warmup_ratio": 0.1}, {"warmup_steps": 7}):
        assert options(tmp_path, "--warmup-steps", "5", **warmup) == without_warmup | {"warmup_steps": 5}
        assert options(tmp_path, "--warmup-ratio", "0.2", **warmup) == PLAIN | {"warmup_ratio": 0.2}
    alpaca = [{"path": "a.jsonl", "type": "alpaca"}]
    assert options(tmp_path, "--data-format", "alpaca", datasets=alpaca)["data_format"] == "alpaca"


def test_each_option_is_printed_and_the_file_of_init_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"bf16": True, "sequence_len": 64, "flash_attention": True, "val_set_size": 0.1}
    expected = options(tmp_path, **keys)
    capsys.readouterr()
    with pytest.raises(typer.Exit):
        parse(["--from-axolotl", config_file(tmp_path, **keys), "--init", str(tmp_path / "run.yaml")])
    lines = capsys.readouterr().err.splitlines()
    assert "  MODEL org/model  (base_model)" in lines and "  --set precision=bf16  (bf16)" in lines
    assert "  the plan chooses: optimizer, flash_attention" in lines
    plain = parse(["MODEL", "--data", "DATA"])
    of_file = parse(["--config", str(tmp_path / "run.yaml")])
    assert {name: value for name, value in of_file.items() if value != plain[name] and name != "config"} == expected
    words = expand(["--from-axolotl", config_file(tmp_path, **keys), "--seed", "5"])
    assert "--from-axolotl" not in words and parse(words)["seed"] == 5 and parse(words)["sequence_length"] == 64


def test_a_wrong_value_names_the_config(tmp_path: Path) -> None:
    message = refusal(tmp_path, num_epochs="many")
    assert "axolotl.yaml" in message and "epochs" in message and "many" in message
    for text in ("- a list", "learning_rate: 1", "a: [", ""):
        (tmp_path / "axolotl.yaml").write_text(text)
        with pytest.raises(RequestError, match="axolotl"):
            parse(["--from-axolotl", str(tmp_path / "axolotl.yaml")])
    with pytest.raises(RequestError, match="does not exist|cannot be read"):
        parse(["--from-axolotl", str(tmp_path / "none.yaml")])
    with pytest.raises(RequestError, match="--from-axolotl and --config both"):
        parse(["--from-axolotl", config_file(tmp_path), "--config", config_file(tmp_path)])


def test_the_lists_of_keys_do_not_overlap_and_their_options_exist() -> None:
    lists = [set(OPTION_OF), set(PLANNED), set(WITHOUT_EFFECT), set(OTHER_KEYS)]
    assert sum(map(len, lists)) == len(set().union(*lists)) > 250
    assert REMARKS.keys() <= OTHER_KEYS
    page = (Path(__file__).parents[2] / "docs" / "from_axolotl.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in page and f"`--{option}" in page.replace("`MODEL`", "`--model`") for key, option in OPTION_OF.items())
    assert set(OPTION_OF.values()) <= {key_of(parameter) for parameter in file_parameters(COMMAND)}
