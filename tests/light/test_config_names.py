"""What a model is, is read in one place: no file outside models/ reads these names of configs itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "upshift"
NAMES = {
    "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "attention_chunk_size", "max_position_embeddings",
    "n_positions", "num_experts_per_tok", "num_local_experts", "top_k_experts", "moe_topk",
}  # fmt: skip
BY_GETATTR = NAMES | {"pad_token_id"}  # an attribute of tokenizers and of our own values, too
ALLOWED = {  # place: why
    ("loading/placement/modules.py", "sliding_window"): "of a layer of a cache, which is no config",
    ("tuning/mup_check.py", "num_attention_heads"): "a list of widths that are written, not read",
    ("tuning/mup_check.py", "num_key_value_heads"): "a list of widths that are written, not read",
    ("training/prepare.py", "pad_token_id"): "of a reward model that is saved from parts: copied, and decides nothing",
    ("loading/rewrite/merge.py", "pad_token_id"): "of a reward adapter's base: written where the tokenizer has one",
}


def names_read(tree: ast.AST) -> Iterator[str]:
    """Names that are attributes, or words alone, as getattr takes them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield node.attr
        elif isinstance(node, ast.Constant) and node.value in NAMES:
            yield str(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            yield from (part.value for part in node.args[1:2] if isinstance(part, ast.Constant) and part.value == "pad_token_id")


@cache
def readers(folder: Path) -> set[tuple[str, str]]:
    files = [path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] != "models"]
    return {
        (path.relative_to(folder).as_posix(), name)
        for path in files
        for name in names_read(ast.parse(path.read_text(encoding="utf-8")))
    }


def test_configs_are_read_in_models_alone() -> None:
    assert readers(SOURCE) - ALLOWED.keys() == set()


def test_every_exception_is_needed() -> None:
    assert ALLOWED.keys() - readers(SOURCE) == set()


def test_a_reader_is_seen(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for path in (tmp_path / "models" / "one.py", tmp_path / "other.py"):
        path.write_text("a = config.head_dim\nb = getattr(config, 'sliding_window', None)\nc = getattr(x, 'pad_token_id', 0)\n")
    assert readers(tmp_path) == {("other.py", "head_dim"), ("other.py", "sliding_window"), ("other.py", "pad_token_id")}
