"""Writes the pages of docs that are made from code, and the numbers that are read from the rows of benchmarks.

python docs/write_tables.py
"""

from pathlib import Path

import typer

from upshift.benchmarking.claims import find_cases
from upshift.benchmarking.documents import renew_documents
from upshift.cli.main import app
from upshift.cli.usage.command_reference import reference_page
from upshift.training.hf_trainer.arguments import markdown

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    (ROOT / "docs" / "commands.md").write_text(reference_page(typer.main.get_command(app)), encoding="utf-8")
    (ROOT / "docs" / "training_arguments.md").write_text(markdown(), encoding="utf-8")
    renew_documents(ROOT, find_cases(ROOT / "benchmarks" / "cases"))
