"""Writes the pages of docs that are made from code.

python docs/write_tables.py
"""

from pathlib import Path

from upshift.training.trainer.fields import markdown

if __name__ == "__main__":
    (Path(__file__).parent / "training_arguments.md").write_text(markdown(), encoding="utf-8")
