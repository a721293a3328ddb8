"""``upshift train --from-llama-factory``: a config becomes options and a description of data, and other keys are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from upshift.cli.main import app
from upshift.cli.train import expand, parse
from upshift.cli.usage.llama_factory_keys import OPTION_OF, OTHER_KEYS, PLANNED, REMARKS, WITHOUT_EFFECT
from upshift.cli.usage.run_file import file_parameters, key_of
from upshift.errors import RequestError
from upshift.training.data.rows.data_set import read_description

COMMAND: Any = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
INFORMATION: dict[str, Any] = {
    "rows": {"file_name": "rows.json"},
    "chats": {
        "file_name": "chats.jsonl", "formatting": "sharegpt", "split": "test",
        "columns": {"messages": "turns", "system": "about"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "me", "assistant_tag": "bot"},
    },
    "pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
    "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
    "hub": {"hf_hub_url": "org/data"},
    "media": {"file_name": "m.json", "columns": {"prompt": "q", "response": "a", "images": "pictures"}},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "model_name_or_path": "org/model", "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "rows",
    "template": "qwen", "cutoff_len": 512, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
    "num_train_epochs": 2, "save_steps": 100,
}  # fmt: skip
ROWS = {"instruction": "instruction", "input": "input", "output": "output"}
QWEN = "llama-factory/qwen"


def config_file(folder: Path, **keys: Any) -> str:
    (folder / "info").mkdir(exist_ok=True)
    (folder / "info" / "dataset_info.json").write_text(json.dumps(INFORMATION))
    path = folder / "factory.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "dataset_dir": str(folder / "info"), **keys}))
    return str(path)


def options(folder: Path, *words: str, **keys: Any) -> dict[str, Any]:
    """The options that differ from those of a plain command."""
    plain = parse(["MODEL", "--data", "DATA"])
    found = parse(["--from-llama-factory", config_file(folder, **keys), *words])
    return {name: value for name, value in found.items() if value != plain[name] and name != "from_llama_factory"}


def refusal(folder: Path, **keys: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(["--from-llama-factory", config_file(folder, **keys)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_small_config_becomes_options_and_a_description_of_its_data(tmp_path: Path) -> None:
    found = options(tmp_path)
    data = json.loads(found.pop("data"))
    assert data == [{"path": str(tmp_path / "info" / "rows.json"), "format": "alpaca", "columns": ROWS, "template": QWEN}]
    assert found == {"model": "org/model", "sequence_length": 512, "epochs": 2.0, "save_steps": 100}  # 8 is our default batch
    assert "--from-llama-factory" not in expand(["--from-llama-factory", config_file(tmp_path), "--seed", "5"])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dataset": "chats", "template": "zephyr", "default_system": "Be brief.", "max_samples": 5},
         {"path": "chats.jsonl", "split": "test[:5]", "format": "messages", "columns": {"messages": "turns", "system": "about"},
          "message_fields": {"role": "who", "content": "says"}, "roles": {"me": "user", "bot": "assistant"},
          "template": "llama-factory/zephyr", "system": "Be brief."}),
        ({"dataset": "pairs", "stage": "dpo", "pref_beta": 0.2, "pref_loss": "simpo", "simpo_gamma": 0.7},
         {"path": "pairs.json", "format": "preference", "columns": {"instruction": "q", "chosen": "good", "rejected": "bad"},
          "template": QWEN}),
        ({"template": "yi", "mask_history": True},
         {"path": "rows.json", "format": "alpaca", "columns": ROWS, "template": "llama-factory/yi", "learned_turns": "last"}),
        ({"template": "chatml"},
         {"path": "rows.json", "format": "alpaca", "columns": ROWS, "template": "llama-factory/chatml"}),
        ({"template": "qwen3", "enable_thinking": False, "train_on_prompt": True},
         {"path": "rows.json", "format": "alpaca", "columns": ROWS, "template": "llama-factory/qwen3", "thinks": False,
          "loss_on": "all"}),
    ],
    ids=str,
)  # fmt: skip
def test_data_sets_of_dataset_info_are_described(keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = options(tmp_path, **keys)
    assert json.loads(found["data"]) == [expected | {"path": str(tmp_path / "info" / expected["path"])}]
    assert read_description(found["data"]) is not None
    assert ("chat_template" in found) == (keys.get("template") == "chatml")
    assert found.get("objective") == ("dpo" if "stage" in keys else None)
    assert (found.get("dpo_loss"), found.get("simpo_gamma")) == (keys.get("pref_loss"), keys.get("simpo_gamma"))


def test_defaults_that_differ_become_options(tmp_path: Path) -> None:
    found = options(
        tmp_path, finetuning_type=None, cutoff_len=None, num_train_epochs=None, save_steps=None, stage="pt", dataset="texts",
        template=None, per_device_train_batch_size=None, gradient_accumulation_steps=None, report_to=["wandb"], bf16=True,
        lora_target="q_proj, v_proj", quantization_bit=4, eval_strategy="steps", eval_steps=7, val_size=40,
    )  # fmt: skip
    assert found == {
        "model": "org/model", "data": str(tmp_path / "info" / "texts.jsonl"), "text_column": "body", "sequence_length": 2048,
        "epochs": 3.0, "save_steps": 500, "eval_steps": 7, "eval_size": 40.0,
        "lora_rank": 8, "lora_target": "q_proj,v_proj", "load_in_4bit": True,
        "report_to": "wandb", "set_": ["precision=bf16"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"cutof_len": 5}, "cutof_len (unknown; did you mean cutoff_len"),
        ({"stage": "ppo"}, "stage ppo (use one of sft, pt, dpo, rm; upshift train has sft, dpo, kto and reward models)"),
        ({"stage": "kto"}, "upshift train has sft, dpo, kto and reward models, and reads rated rows"),
        ({"finetuning_type": "freeze"}, "finetuning_type freeze (use lora or full)"),
        ({"template": "qwenn"}, "template qwenn (use one of alpaca"),
        ({"dataset": "row"}, "dataset row (it is not in"),
        ({"dataset": "hub"}, "dataset hub (it is not a file; download it"),
        ({"dataset": "media"}, "dataset media (the column images is not read"),
        ({"dataset": "pairs"}, "dataset pairs (ranking True is not for stage sft)"),
        ({"dataset_dir": "nowhere"}, "dataset_dir (nowhere/dataset_info.json cannot be read"),
        ({"mix_strategy": "interleave_under"}, "mix_strategy interleave_under ("),
        ({"stage": "dpo", "dataset": "pairs", "pref_loss": "kto_pair"}, "pref_loss kto_pair (use one of sigmoid, hinge"),
        ({"quantization_bit": 8}, "quantization_bit 8 ("),
        ({"use_galore": True}, "use_galore (not known here)"),
        ({"trust_remote_code": True}, "trust_remote_code (code from a model's files is never run)"),
        ({"optim": "shampoo"}, "optim shampoo (use one of"),
        ({"pure_bf16": True, "report_to": "swanlab"}, "2 keys have no option of upshift train: "),
    ],
    ids=str,
)
def test_a_key_without_an_option_is_named_with_what_to_do(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refusal(tmp_path, **keys)


def test_a_typed_option_replaces_a_key(tmp_path: Path) -> None:
    found = options(tmp_path, "--data", "other.jsonl", "--learning-rate", "1e-3", learning_rate=1e-4)
    assert (found["data"], found["learning_rate"]) == ("other.jsonl", 1e-3)
    with pytest.raises(RequestError, match="--from-axolotl and --from-llama-factory both give options"):
        parse(["--from-llama-factory", config_file(tmp_path), "--from-axolotl", config_file(tmp_path)])
    with pytest.raises(RequestError, match="no config of LLaMA-Factory, because it has no key model_name_or_path"):
        (tmp_path / "other.yaml").write_text("base_model: org/model")
        parse(["--from-llama-factory", str(tmp_path / "other.yaml")])


def test_the_lists_of_keys_do_not_overlap_and_their_options_exist() -> None:
    lists = [set(OPTION_OF), set(PLANNED), set(WITHOUT_EFFECT), set(OTHER_KEYS)]
    assert sum(map(len, lists)) == len(set().union(*lists)) > 150
    assert REMARKS.keys() <= OTHER_KEYS
    page = (Path(__file__).parents[2] / "docs" / "from_llama_factory.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in page and f"`--{option}" in page.replace("`MODEL`", "`--model`") for key, option in OPTION_OF.items())
    assert set(OPTION_OF.values()) <= {key_of(parameter) for parameter in file_parameters(COMMAND)}
