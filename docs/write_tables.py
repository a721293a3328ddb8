"""Writes the pages of docs that are made from code, and the numbers that are read from the rows of benchmarks.

python docs/write_tables.py
"""

from pathlib import Path

from upshift.benchmarking.claims import find_cases
from upshift.benchmarking.documents import renew_documents
from upshift.training.hf_trainer.arguments import markdown

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    (ROOT / "docs" / "training_arguments.md").write_text(markdown(), encoding="utf-8")
    renew_documents(ROOT, find_cases(ROOT / "benchmarks" / "cases"))
