"""Pairs, sparse vectors, vectors for tokens, images and sounds, as their libraries compute them and by Upshift.

    python benchmarks/cases/encode_kinds.py [--quick] [--rounds 5] [--items 256] [--kinds pairs,sparse,tokens,images,sounds]

plain    transformers in fp32: the processor and the model, items in the order that they come in, 32 a batch (sounds: one)
library  sentence-transformers with its defaults: CrossEncoder, SparseEncoder, MultiVectorEncoder; it has no row of images, sounds
upshift  at quality exact; its race was run before, as in a user's second run

The models of texts have MiniLM's weights and random heads. Those of images and sounds have random weights at the sizes of
ViT-S/16 and Whisper tiny. Pictures are drawn, 256 pixels wide, and sounds are tones of 1 to 9 seconds. Contenders run
in turn, each in a fresh process, reading and tokenization included; what is timed is one pass over all items after one other.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from encode import docstrings, minilm

from upshift.benchmarking.case import Case, Times, command_line, print_progress
from upshift.benchmarking.claims import Claim, Source
from upshift.benchmarking.harness import format_table, interleave, run_fresh
from upshift.benchmarking.timing import time_with_load
from upshift.hardware import detect

CLAIMS = (
    Claim(
        name="pairs",
        text="pairs of texts are scored faster at quality exact",
        ours="upshift.CrossEncoder(exact)",
        baseline="sentence-transformers' CrossEncoder, its defaults",
        options="--rounds 3",
        of=Source(row="pairs, upshift", value="details.ratio"),
        over=Source(row="pairs, library", value="details.ratio"),
    ),
    Claim(
        name="images",
        text="images are encoded faster at quality exact",
        ours="upshift.MediaEncoder(exact)",
        baseline="transformers' processor and model, 32 images a batch",
        options="--rounds 3",
        of=Source(row="images, upshift", value="details.ratio"),
    ),
)
SUITE = "--rounds 1 --items 16 --kinds pairs,images"
ROOT = Path(__file__).parents[1]
KINDS = ("pairs", "sparse", "tokens", "images", "sounds")
BY_LIBRARY = ("pairs", "sparse", "tokens")
BATCH = 32
TIMEOUT_SECONDS = 1800.0
WIDTH = 256  # pixels
RATE = 16_000  # samples a second
SMALL_VISION = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}


def make_model(kind: str, folder: Path) -> Path:
    """Write the model of a kind, and return its folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "images":
        transformers.ViTModel(transformers.ViTConfig(**SMALL_VISION)).save_pretrained(folder)
        transformers.ViTImageProcessor().save_pretrained(folder)
    elif kind == "sounds":
        sizes = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_layers": 1}
        transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes)).save_pretrained(folder)
        transformers.WhisperFeatureExtractor().save_pretrained(folder)
    elif kind == "tokens":
        from sentence_transformers import MultiVectorEncoder

        MultiVectorEncoder(str(minilm()), device="cpu").save_pretrained(str(folder))
    else:
        classes = {"pairs": transformers.BertForSequenceClassification, "sparse": transformers.BertForMaskedLM}
        options = {"num_labels": 1} if kind == "pairs" else {}
        classes[kind].from_pretrained(minilm(), **options).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)
        if kind == "sparse":
            from sentence_transformers import SparseEncoder

            SparseEncoder(str(folder), device="cpu").save_pretrained(str(folder))
    return folder


def make_items(kind: str, count: int, seed: int, folder: Path) -> list[Any]:
    """Return texts, pairs of texts, or the paths of files that are written to ``folder``."""
    if kind == "pairs":
        texts = docstrings(count + 1, seed)
        return [(texts[0], text) for text in texts[1:]]
    if kind not in ("images", "sounds"):
        return docstrings(count, seed)
    folder.mkdir()
    chance = np.random.default_rng(seed)
    files = [str(folder / f"{number}{'.png' if kind == 'images' else '.wav'}") for number in range(count)]
    for file in files:
        if kind == "images":
            from PIL import Image

            shades = np.linspace(0, 255, WIDTH)[None, :, None] * chance.random((1, 1, 3))
            noise = chance.integers(0, 30, (int(chance.integers(200, 300)), WIDTH, 3))
            Image.fromarray((shades + noise).clip(0, 255).astype(np.uint8)).save(file)
        else:
            seconds = int(chance.integers(1, 10))
            tone = 20_000 * np.sin(np.arange(seconds * RATE) * chance.uniform(0.02, 0.2))
            with wave.open(file, "wb") as sound:
                sound.setnchannels(1)
                sound.setsampwidth(2)
                sound.setframerate(RATE)
                sound.writeframes(tone.astype("<i2").tobytes())
    return files


def plain(kind: str, folder: Path, items: list[Any]) -> Callable[[], object]:
    import torch
    import transformers

    classes = {"pairs": "SequenceClassification", "sparse": "MaskedLM"}
    auto = getattr(transformers, f"AutoModelFor{classes[kind]}" if kind in classes else "AutoModel")
    model = auto.from_pretrained(folder).eval()
    model = model.get_encoder() if kind == "sounds" else model
    if kind in ("images", "sounds"):
        return partial(_plain_files, kind, model, folder, items)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def encode() -> None:
        for start in range(0, len(items), BATCH):
            block = items[start : start + BATCH]
            texts = [list(part) for part in zip(*block, strict=True)] if kind == "pairs" else [block]
            batch = tokenizer(*texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
            with torch.inference_mode():
                output = model(**batch)[0]
                if kind == "sparse":
                    (output * batch["attention_mask"][:, :, None]).relu().log1p().amax(1)

    return encode


def _plain_files(kind: str, model: Any, folder: Path, files: list[str]) -> None:
    import torch
    import transformers

    processor = transformers.AutoImageProcessor if kind == "images" else transformers.AutoFeatureExtractor
    loaded = processor.from_pretrained(folder)
    size = BATCH if kind == "images" else 1
    for start in range(0, len(files), size):
        block = files[start : start + size]
        if kind == "images":
            from PIL import Image

            inputs = loaded(images=[Image.open(file).convert("RGB") for file in block], return_tensors="pt")
        else:
            with wave.open(block[0]) as sound:
                samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2") / np.float32(2**15)
            inputs = loaded(samples, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            model(**inputs)


def by_library(kind: str, folder: Path, items: list[Any]) -> Callable[[], object]:
    import sentence_transformers

    names = {"pairs": "CrossEncoder", "sparse": "SparseEncoder", "tokens": "MultiVectorEncoder"}
    model = getattr(sentence_transformers, names[kind])(str(folder), device="cpu")
    return partial(model.predict if kind == "pairs" else model.encode, items, batch_size=BATCH, show_progress_bar=False)


def by_upshift(kind: str, folder: Path, items: list[Any]) -> tuple[Callable[[], object], str]:
    import upshift

    if kind == "pairs":
        scorer = upshift.CrossEncoder(str(folder))
        scorer.predict(items)
        assert scorer.race is not None
        return partial(scorer.predict, items), scorer.race.chosen.label()
    encoder: Any = (upshift.MediaEncoder if kind in ("images", "sounds") else upshift.Encoder)(str(folder))
    encoder.encode(items)
    return partial(encoder.encode, items), encoder.race.chosen.label()


def run_one(request: dict[str, Any]) -> dict[str, Any]:
    kind, folder, items = request["kind"], Path(request["model"]), request["items"]
    what = "its defaults, fp32"
    if request["contender"] == "upshift":
        encode, what = by_upshift(kind, folder, items)
    else:
        encode = (plain if request["contender"] == "plain" else by_library)(kind, folder, items)
    encode()
    return {**time_with_load(encode), "what": what}


def _run_fresh(folder: Path, request: dict[str, Any], contender: str) -> dict[str, Any]:
    """Return the times of one contender, in a process of its own."""
    path = folder / "request.json"
    path.write_text(json.dumps({**request, "contender": contender}))
    env = {**os.environ, "USE_TF": "0", "UPSHIFT_CACHE": str(folder / "cache")}
    return run_fresh([sys.executable, __file__, "--request", str(path)], timeout_seconds=TIMEOUT_SECONDS, env=env)


def run(case: Case, kinds: list[str], *, count: int, rounds: int, seed: int) -> dict[str, Any]:
    ratios: dict[str, float] = {}
    cells: list[list[str]] = []
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="upshift-kinds-") as name:
            folder = Path(name)
            model = str(make_model(kind, folder / "model"))
            items = make_items(kind, count, seed, folder / "items")

            request = {"kind": kind, "model": model, "items": items}
            fresh = partial(_run_fresh, folder, request)
            names = ["plain", *(["library"] if kind in BY_LIBRARY else []), "upshift"]
            print_progress(f"{kind}, upshift: {fresh('upshift')['what']}")  # the race, which the rounds recall
            answers = interleave({one: partial(fresh, one) for one in names}, rounds=rounds)
        base = [answer["seconds"] for answer in answers["plain"]]
        for contender, found in answers.items():
            times = Times([answer["seconds"] for answer in found], base, "plain")
            rate = count / statistics.median(times.seconds)
            row = f"{kind}, {contender}"
            ratios[row] = case.add_times(row, times, plan={"what": found[-1]["what"]}, details={"per_second": rate, **found[-1]})
            others = statistics.median(answer["others"] for answer in found)
            cells.append([row, found[-1]["what"], f"{rate:,.1f}", f"{ratios[row]:.2f}", f"{others:.0%}"])
    print(format_table(("contender", "what", "items/s", "times plain", "others"), cells))
    return {"case": case.name, "ratios": ratios}


def main(arguments: list[str] | None = None) -> int:
    parser = command_line(__doc__ or "", results=ROOT / "results")
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick")
    parser.add_argument("--items", type=int, help="default 256; 8 with --quick")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--request", type=Path, help="one contender, in this process")
    options = parser.parse_args(arguments)
    if options.request:
        print(json.dumps(run_one(json.loads(options.request.read_text()))))
        return 0
    rounds = options.rounds or (1 if options.quick else 5)
    count = options.items or (8 if options.quick else 256)
    case = Case(Path(__file__).stem, options.results, detect(), options.quick, {"items": count, "rounds": rounds})
    print(json.dumps(run(case, options.kinds.split(","), count=count, rounds=rounds, seed=options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
