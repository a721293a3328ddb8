"""How many of vLLM's own tests of its OpenAI server does `upshift serve` pass, as far as they need only an address?

    python benchmarks/cases/serving_protocol.py [--quick] [--only NAME]

The cases are in serving_protocol_cases.py and serving_protocol_chats.py. A server with a tiny Llama answers them. Its chat
template writes calls as Hermes' does. The row has each case, whether it passed, and the reason if it did not. A case that
fails without a reason in REASONS ends the run with exit code 1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from upshift.benchmarking.case import Case, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.hardware import detect
from upshift.training.data.tokenizer import train_byte_level_bpe

CLAIMS = (
    Claim(
        name="passed",
        text="clients of vLLM's server can use ours",
        ours="upshift serve",
        baseline="vLLM's own tests",
        unit="of them",
        goal=0.9,
        of=Source(row="all", value="details.share"),
    ),
)
FIGURES = (
    Figure(name="pass", of=Source(row="all", value="details.passed")),
    Figure(name="fail", of=Source(row="all", value="details.failed")),
)
SUITE = "--only completion"
ROOT = Path(__file__).parents[1]
CASE_FILES = ("serving_protocol_cases.py", "serving_protocol_chats.py")
NAMED = "the server rejects and names what it does not know"
WHOLE_VOCABULARY = "it asks for the log-probabilities of the whole vocabulary; the limit is 20"
REASONS = {  # of the cases that fail
    "test_batch_completions": "it asks for use_beam_search, and a server does no beam search",
    "test_min_characters": "min_characters is not supported",
    "test_extra_fields_allowed": f"an unknown field of a message: {NAMED}",
    "test_custom_role": f"an unknown role: {NAMED}",
    "test_prompt_logprobs_all": WHOLE_VOCABULARY,
    "test_top_logprobs_all": WHOLE_VOCABULARY,
    "test_request_wrong_content_type": "a JSON body that is named a form: the server reads it, so that curl -d works",
}
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}{% endfor %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}{% if not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
START_SECONDS = 300.0


class Outcomes:
    """A plugin of pytest that keeps the outcome of each case."""

    def __init__(self) -> None:
        self.cases: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2]
        reason = None if report.passed else REASONS.get(name.partition("[")[0])
        self.cases.append({"case": name, "passed": report.passed, "reason": reason})


def save_model(folder: Path, seed: int) -> None:
    texts = ["you are a helpful assistant what is 1+1? Hello, my name is the quick brown fox"] * 40
    tokenizer = train_byte_level_bpe(texts, 320)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=2,
        max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield the URL of a server of the model ``tiny`` in a folder."""
    log = folder / "log"
    command = [sys.executable, "-m", "upshift.cli.main", "serve", "tiny", "--port", "0", "--engine", "torch"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder)
    try:
        deadline = time.monotonic() + START_SECONDS
        while (found := re.search(r"Serving at (http://\S+)", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {log.read_text()[-600:]}")
            time.sleep(0.2)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def run_cases(url: str, folder: Path, only: str) -> list[dict[str, Any]]:
    os.environ |= {"SERVING_PROTOCOL_URL": url, "SERVING_PROTOCOL_MODEL": str(folder)}
    outcomes = Outcomes()
    options = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore", "-c", os.devnull]
    files = [str(Path(__file__).with_name(name)) for name in CASE_FILES]
    pytest.main([*options, "--rootdir", str(Path(__file__).parent), *(["-k", only] if only else []), *files], [outcomes])
    return outcomes.cases


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--only", default="", help="the cases whose names have this")
    options = parser.parse_args(arguments)
    only = options.only or ("logprobs_chat" if options.quick else "")
    case = Case("serving_protocol", options.results, detect(), options.quick, {"seed": options.seed, "only": only})
    with tempfile.TemporaryDirectory(prefix="upshift-protocol-") as name:
        folder = Path(name)
        save_model(folder / "tiny", options.seed)
        print_progress("starting a server")
        with serving(folder) as url:
            cases = run_cases(url, folder / "tiny", only)
    passed = sum(one["passed"] for one in cases)
    details = {"passed": passed, "failed": len(cases) - passed, "share": passed / max(len(cases), 1), "cases": cases}
    case.add("all", plan={}, measured=None, details=details)
    unexplained = [one["case"] for one in cases if not one["passed"] and one["reason"] is None]
    print(json.dumps({"case": "serving_protocol", "passed": passed, "failed": len(cases) - passed, "unexplained": unexplained}))
    return 1 if unexplained or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
