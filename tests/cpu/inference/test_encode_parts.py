"""Encoding without an engine: batches, pooling, what a model's files say, files of texts and rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upshift.errors import NothingFits, RequestError
from upshift.fork_server import ForkServer, fork_server
from upshift.hardware import describe, detect
from upshift.inference.encoding import raced_setup as contest_module
from upshift.inference.encoding.engines import openvino_engine
from upshift.inference.encoding.engines.base import EncoderBuild, batch_by_length, pad_batches
from upshift.inference.encoding.engines.openvino_engine import OpenVinoEngine
from upshift.inference.encoding.files import Rows, check_files, check_form, read_texts
from upshift.inference.encoding.list_rows import ListRows
from upshift.inference.encoding.model_config import EncodingConfig, read_encoding_config
from upshift.inference.encoding.run import TokenScores, example_batches, pool, score_tokens, token_counts
from upshift.inference.race import race as race_module
from upshift.inference.race import rows as rows_module
from upshift.inference.race.early_stopping import EarlyStopping
from upshift.inference.race.policy import FINAL_TURNS, RacePolicy
from upshift.inference.race.race import Race
from upshift.inference.race.types import (
    Contest,
    Limits,
    Quality,
    RaceRequest,
    RaceSeconds,
    Run,
    Skipped,
    pick_evenly_from_stream,
    read_quality,
)
from upshift.inference.registry import EngineName, EngineSetup, Precision
from upshift.inference.resumable_output import UnfinishedLines, count_lines, read_blocks
from upshift.models.source import ModelSource
from upshift.record import Spread

EMBEDDINGS = EncodingConfig(output="embeddings", said_by="a test")


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 2000))
def test_every_text_is_in_one_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = batch_by_length(lengths, budget)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= budget


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 600), st.integers(1, 60))
def test_no_batch_has_texts_on_both_sides_of_a_border(lengths: list[int], budget: int, border: int) -> None:
    batches = batch_by_length(lengths, budget, border=border)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len({lengths[place] > border for place in batch}) == 1
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= budget


def test_sorted_batches_pad_less_than_batches_as_they_come() -> None:
    tokens = [[1] * length for length in [200, 5, 7, 180, 6, 190, 5, 8]]
    sizes = [
        sum(batch.ids.size for batch in pad_batches(tokens, places, pad=0))
        for places in (batch_by_length(list(map(len, tokens)), 600), [[0, 1, 2], [3, 4, 5], [6, 7]])
    ]
    assert sizes[0] < sizes[1] / 1.5


def test_padding() -> None:
    (batch,) = pad_batches([[5, 6, 7], [8], []], [[1, 0, 2]], pad=9)
    assert batch.ids.tolist() == [[8, 9, 9], [5, 6, 7], [9, 9, 9]] and batch.mask.tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("pooling", "expected"), [("mean", [2.0, 1.0]), ("cls", [1.0, 0.0]), ("last", [3.0, 2.0]), ("max", [3.0, 2.0])]
)
def test_pooling_sees_no_padding(pooling: str, expected: list[float]) -> None:
    states = np.array([[[1.0, 0.0], [3.0, 2.0], [100.0, 100.0]]], dtype=np.float32)
    mask = np.array([[1, 1, 0]])
    recipe = EMBEDDINGS.changed(pooling=pooling)
    assert pool(states, mask, recipe)[0].tolist() == expected
    assert np.linalg.norm(pool(states, mask, recipe.changed(normalize=True))) == pytest.approx(1.0)
    assert not pool(states, np.zeros_like(mask), recipe.changed(normalize=True)).any()  # of a text without tokens


def sentence_transformers_directory(folder: Path, pooling: dict[str, object], *more: str) -> ModelSource:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), *((name, name) for name in more)]
    said = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(said))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    return ModelSource(reference="a model", directory=folder, config={"model_type": "bert"})


def test_a_sentence_transformers_directory_says_how_to_pool(tmp_path: Path) -> None:
    source = sentence_transformers_directory(tmp_path, {"pooling_mode_cls_token": True}, "Normalize")
    recipe = read_encoding_config(source)
    assert (recipe.pooling, recipe.normalize, recipe.max_length) == ("cls", True, 77)
    for pooling, name in (({"pooling_mode": "lasttoken"}, "last"), ({"pooling_mode": ["max"]}, "max"), ({}, "mean")):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        assert read_encoding_config(source).pooling == name


def test_a_default_prompt_is_said_by_its_name(tmp_path: Path) -> None:
    source = sentence_transformers_directory(tmp_path, {"pooling_mode": "mean", "include_prompt": False})
    said = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    assert read_encoding_config(source).prompt == ""
    for name, message in (("query", "leaves the tokens of the prompt 'query: ' out"), ("document", "has no prompt 'document'")):
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said | {"default_prompt_name": name}))
        with pytest.raises(RequestError, match=message):
            read_encoding_config(source)


@pytest.mark.parametrize(
    ("pooling", "more", "message"),
    [
        ({"pooling_mode_weightedmean_tokens": True}, [], "weightedmean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, [], "mean, max"),
        ({"pooling_mode": ["mean", "lasttoken"]}, [], "mean, lasttoken"), ({"pooling_mode": "weightedmean"}, [], "weightedmean"),
        ({"pooling_mode_mean_tokens": True}, ["LSTM"], "LSTM module"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, pooling: dict[str, object], more: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_encoding_config(sentence_transformers_directory(tmp_path, pooling, *more))


@pytest.mark.parametrize(("ending", "output"), [("Sequence", "class scores"), ("Token", "token scores")])
def test_a_classifier_gives_scores(tmp_path: Path, ending: str, output: str) -> None:
    config = {"model_type": "bert", "architectures": [f"BertFor{ending}Classification"]}
    assert read_encoding_config(ModelSource(reference="m", directory=tmp_path, config=config)).output == output


def test_scores_are_of_a_texts_own_tokens() -> None:
    """Not of two special ones before and one behind, nor of padding; texts that have no other tokens give none."""
    logits = np.log(np.arange(1.0, 21.0, dtype=np.float32)).reshape(2, 5, 2)
    recipe = EncodingConfig(output="token scores", special=(2, 1), said_by="a test")
    found = score_tokens(logits, np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]), recipe)
    assert found == pytest.approx(np.array([[5 / 11, 6 / 11], [7 / 15, 8 / 15], [15 / 31, 16 / 31]]), abs=1e-6)
    assert token_counts([5, 4, 3, 2], recipe).tolist() == [2, 1, 0, 0]
    assert score_tokens(logits, np.array([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]), recipe).shape == (0, 2)


TOKENS = [
    TokenScores(["a", "##b"], np.array([[0, 1], [1, 2]]), np.array([[0.25, 0.75], [0.9, 0.1]], dtype=np.float32)),
    TokenScores([], np.empty((0, 2), dtype=np.int64), np.empty((0, 2), dtype=np.float32)),
    TokenScores(["\u00fc\n"], np.array([[3, 5]]), np.array([[0.0, 1.0]], dtype=np.float32)),
]  # fmt: skip


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_token_rows_go_on_where_they_stopped(tmp_path: Path, name: str) -> None:
    first = ListRows(tmp_path / name, 3, "a setup", "token scores", ("O", "X"))
    first.add(TOKENS[:1])
    with (tmp_path / f"{name}.partial").open("a") as file:
        file.write('{"token": ["of a block that was not')
    first.close()
    again = ListRows(tmp_path / name, 3, "a setup", "token scores", ("O", "X"))
    assert again.done == 1 and not (tmp_path / name).exists()
    again.add(TOKENS[1:])
    again.finish()
    assert [file.name for file in tmp_path.iterdir()] == [name]
    if name.endswith("parquet"):
        rows = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed").read_table(tmp_path / name).to_pylist()
    else:
        rows = [json.loads(line) for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
    assert [row["token"] for row in rows] == [["a", "##b"], [], ["\u00fc\n"]]
    assert [row["label"] for row in rows] == [["X", "O"], [], ["X"]]
    assert [row["start"] for row in rows] == [[0, 1], [], [3]] and [row["end"] for row in rows] == [[1, 2], [], [5]]
    assert [row["score"] for row in rows] == [pytest.approx([0.75, 0.9]), [], [1.0]]


def test_each_output_has_its_files() -> None:
    check_form(Path("rows.parquet"), "embeddings"), check_form(Path("rows.parquet"), "token scores")
    for name, of, able in (("r.jsonl", "class scores", ".npy or .parquet"), ("r.npy", "token scores", ".parquet or .jsonl")):
        with pytest.raises(RequestError, match=f"no file for {of}.*ends with {able}"):
            check_form(Path(name), of)


def test_rows_go_on_where_they_stopped(tmp_path: Path) -> None:
    output = tmp_path / "rows.npy"
    first = Rows(output, 5, "a setup")
    first.add(np.ones((2, 3), dtype=np.float32))
    first.close()
    again = Rows(output, 5, "a setup")
    assert again.done == 2 and not output.exists()
    again.add(np.full((3, 3), 2.0, dtype=np.float32))
    again.finish()
    assert np.load(output)[:, 0].tolist() == [1, 1, 2, 2, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.npy"]


def test_a_calibration_serves_texts_of_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first texts ever seen, such as one word, are not those that all later texts are rounded by."""
    made: list[str] = []

    def make(path: Path, *_: object) -> None:
        made.append(path.stem)
        raise InterruptedError

    monkeypatch.setattr(openvino_engine, "make_model_file", make)
    setup = EngineSetup(engine="openvino", precision="int8", threads=1, batch=1)
    source = ModelSource(reference="m", directory=tmp_path, config={"model_type": "bert"})

    def file_of(lengths: list[int], precision: Precision = "int8") -> str:
        examples = example_batches([[1] * length for length in lengths], pad=0)
        with pytest.raises(InterruptedError):
            OpenVinoEngine(EncoderBuild(source, EMBEDDINGS, setup.changed(precision=precision), tmp_path, examples))
        return made.pop()

    few = file_of([4])
    assert few == file_of([3]) != file_of([4] * 100) != file_of([400] * 100)
    assert file_of([4] * 100) == file_of([4] * 128) == file_of([3] * 1000)  # no more than so many are calibrated on
    assert len({file_of(lengths, "int8-weights") for lengths in ([4], [4] * 100, [400])}) == 1
    assert len({few, file_of([4], "int8-weights"), file_of([4], "fp32")}) == 3


LINES = [{"text": f"answer {number}"} for number in range(4)]


@pytest.mark.parametrize("lost", ["nothing", "a line", "half a line", "all lines", "blocks of zeros"])
def test_lines_that_a_power_cut_took_are_written_again(tmp_path: Path, lost: str) -> None:
    output = tmp_path / "answers.jsonl"
    first = UnfinishedLines(output, 4, "a setup")
    first.add(LINES[:2])
    first.add(LINES[2:3])
    first.close()
    content = first.partial.read_bytes()
    ends = {"nothing": 0, "a line": 21, "half a line": 7, "all lines": 62, "blocks of zeros": 21}
    remaining = content[: len(content) - ends[lost]]
    first.partial.write_bytes(remaining + bytes(21) if lost == "blocks of zeros" else remaining)
    again = UnfinishedLines(output, 4, "a setup")
    assert again.done == remaining.count(b"\n")
    again.add(LINES[again.done :])
    again.finish()
    assert [json.loads(line) for line in output.read_text().splitlines()] == LINES


def test_lines_are_on_the_disk_before_they_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    output = UnfinishedLines(tmp_path / "answers.jsonl", 4, "a setup")
    write_record, sync = output.record, os.fsync

    def record(rows: int) -> None:
        events.append(("record", rows))
        write_record(rows)

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        assert os.path.samestat(os.fstat(descriptor), output.partial.stat())
        events.append(("sync", output.partial.read_bytes().count(b"\n")))

    monkeypatch.setattr(output, "record", record)
    monkeypatch.setattr(os, "fsync", fsync)
    output.add(LINES[:2])
    output.add(LINES[2:])
    output.finish()
    assert events == [("sync", 2), ("record", 2), ("sync", 4), ("record", 4)]


@pytest.mark.parametrize("file", ["rows.npy.progress.json", "rows.npy.partial"])
def test_an_unfinished_output_that_is_damaged_is_named_with_what_to_remove(tmp_path: Path, file: str) -> None:
    first = Rows(tmp_path / "rows.npy", 5, "a setup")
    first.add(np.ones((2, 3), dtype=np.float32))
    first.close()
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:-8])
    with pytest.raises(RequestError, match=f"{file}.*remove it.*the output begins anew"):
        Rows(tmp_path / "rows.npy", 5, "a setup")
    for path in tmp_path.glob("rows.npy.p*"):
        path.unlink()
    Rows(tmp_path / "rows.npy", 5, "a setup").close()


def test_rows_of_another_setup_are_not_gone_on_with(tmp_path: Path) -> None:
    first = Rows(tmp_path / "rows.npy", 5, "a setup")
    first.add(np.ones((2, 3), dtype=np.float32))
    first.close()
    with pytest.raises(RequestError, match="another input, model or setup"):
        Rows(tmp_path / "rows.npy", 5, "another setup")


def test_texts_of_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(10)))
    assert count_lines(lines) == 10
    assert [text for block in read_blocks(read_texts(lines), size=2, skip=7) for text in block] == ["text 7", "text 8", "text 9"]
    assert pick_evenly_from_stream(read_texts(lines), 10, 3) == ["text 0", "text 3", "text 6"]
    assert pick_evenly_from_stream(read_texts(lines), 10, 6)[-1] == "text 8"  # from first to last, not the first six
    plain = tmp_path / "texts.txt"
    plain.write_bytes(b"one\rstill one\r\n\nlast")
    assert count_lines(plain) == 3 and list(read_texts(plain)) == ["one\rstill one", "", "last"]
    lines.write_text('{"text": "one"}\n{"body": "two"}\n')
    with pytest.raises(RequestError, match="line 2 is no JSON object"):
        list(read_texts(lines))


def test_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    texts, output = tmp_path / "texts.txt", tmp_path / "rows.npy"
    texts.write_text("a text")
    output.write_bytes(b"the user's")
    with pytest.raises(RequestError, match="exists; give another name, or --overwrite"):
        check_files(texts, output)
    check_files(texts, output, overwrite=True)


@pytest.mark.parametrize(
    ("name", "content", "output", "message"),
    [
        ("no.txt", None, "rows.npy", "does not exist"), ("texts.csv", "a", "rows.npy", "must end with .txt or .jsonl"),
        ("texts.txt", "", "rows.npy", "is empty"), ("texts.txt", "a", "rows.csv", "must end with .npy or .parquet"),
        ("texts.txt", "a", "nowhere/rows.npy", "nowhere does not exist"),
    ],
)  # fmt: skip
def test_wrong_files_are_named(tmp_path: Path, name: str, content: str | None, output: str, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=message):
        check_files(tmp_path / name, tmp_path / output)


def test_quality() -> None:
    setup = EngineSetup(engine="torch", precision="fp32", threads=1, batch=1024)
    run = Run(setup=setup, seconds=Spread.of([1.0]), per_second=1.0, largest_difference=2e-4, worst_cosine=0.9991)
    assert not run.meets(read_quality("exact")) and run.meets(read_quality("0.999")) and not run.meets(read_quality("0.9999"))
    for wrong in ("good", "0", "1.5"):
        with pytest.raises(RequestError, match="use exact, or a cosine"):
            read_quality(wrong)


@pytest.mark.parametrize(
    ("ends", "said"),
    [("raise ValueError('no  such\\nkernel')", "ValueError: no such kernel"), ("os._exit(7)", "ended with exit 7")],
)
def test_a_setup_that_fails_takes_only_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, said: str
) -> None:
    """An error is one setup's; the end of the process is that of all that did not run. Libraries that print are not heard."""
    (tmp_path / "of_a_test").mkdir()
    (tmp_path / "of_a_test" / "contest.py").write_text(
        "import os\n"
        "from upshift.inference.race.types import Run\n"
        "from upshift.inference.race.early_stopping import serve_race\n"
        "def run(entrants, setup, standing):\n"
        "    print('a library says hello', flush=True)\n"
        "    if setup.precision == 'tf32':\n"
        "        " + ends + "\n"
        "    return [Run(setup=setup, per_second=1.0)]\n"
        "def main(path, answer):\n"
        "    serve_race(path, answer, run)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    setups = tuple(EngineSetup(engine="torch", precision=one, threads=1, batch=1) for one in ("fp32", "tf32", "bf16"))
    source = ModelSource(reference="m", directory=None, config={"model_type": "bert"})
    contest = Contest(task="encode", source=source, asked="{}", pad=0, batches=(1,), hint="latency")
    entrants = RaceRequest(contest=contest, setups=setups, sample=tmp_path / "s.json", reference=tmp_path / "r.npy")
    with fork_server("of_a_test.contest") as server:
        first, second, third = race_module.stream_runs(server, entrants)
    assert first.per_second == 1.0 and said in (second.failure or "")
    assert (third.per_second == 1.0) is (ends != "os._exit(7)")


def test_what_is_chosen_holds_all_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contestants that are made up: each batch twice as fast, and twice as slow for who waits, as the one before."""
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(race_module, "is_available", lambda setup: setup.engine != "onnxruntime")
    monkeypatch.setattr(race_module, "check_room", lambda *room: None)

    def ran(server: ForkServer, entrants: RaceRequest) -> Iterator[Run]:
        for setup in entrants.setups:
            if setup.engine == "nothing":
                yield Run(setup=setup, per_second=1e6)
                continue
            exact = setup.precision == "fp32"
            for power, batch in enumerate(entrants.contest.batches):
                speed, wait = (2.0**power * (1.0 if exact else 1.5), 0.01 * 2**power)
                one = Run(setup=setup.changed(batch=batch), seconds=Spread.of([1.0]), per_second=speed, first_seconds=wait)
                yield one.changed(largest_difference=0.0 if exact else 0.1, worst_cosine=1.0 if exact else 0.97)

    monkeypatch.setattr(race_module, "stream_runs", ran)
    source = ModelSource(reference="m", directory=tmp_path, config={"model_type": "bert"})
    contest = Contest(task="encode", source=source, asked="{}", pad=0, batches=(1, 2, 4), hint="latency")

    def chosen(quality: Quality, **limits: float) -> tuple[bool, str, int]:
        forecast = lambda: lambda setup: {"fp32": 7.0}.get(setup.precision, 5.0)  # noqa: E731
        policy = RacePolicy(quality, Limits(**limits), 1.0)
        race = race_module.race(contest, describe("epyc-7763"), [[1, 2]], policy, forecast=forecast)
        assert race.expected == {"onnxruntime": 7.0} and race.ceiling == 1e6
        assert [run.setup.batch for run in race.best() if run.setup != race.chosen] == [4] * (len(race.best()) - 1)
        return race.recalled, race.chosen.precision, race.chosen.batch

    assert chosen(0.9) == (False, "tf32", 4) and chosen(0.9, ttft_ms=25.0) == (True, "tf32", 2)
    assert chosen("exact", ttft_ms=10.0) == (False, "fp32", 1)
    with pytest.raises(NothingFits, match="the nearest is .* with a batch of 1: 10.0 ms"):
        chosen(0.9, ttft_ms=9.0)


def test_a_final_decides_between_those_that_are_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the race openvino is in front, with either batch; whenever they run again ctranslate2 is."""
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(race_module, "is_available", lambda setup: setup.engine in ("torch", "openvino", "ctranslate2"))
    monkeypatch.setattr(race_module, "check_room", lambda *room: None)
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    raced = {("openvino", 256): 100.0, ("openvino", 512): 99.0, ("ctranslate2", 512): 98.0}
    finals: list[str] = []

    def ran(server: ForkServer, entrants: RaceRequest) -> Iterator[Run]:
        for setup in entrants.setups:
            again = len(entrants.contest.batches) == 1
            finals.extend([setup.engine] if again else [])
            for batch in entrants.contest.batches:
                rate = raced.get((setup.engine, batch), 10.0)
                rate = {"openvino": 90.0, "ctranslate2": 95.0}[setup.engine] if again else rate
                one = Run(setup=setup.changed(batch=batch), seconds=Spread.of([0.1]), per_second=rate, load_seconds=0.1)
                yield one.changed(largest_difference=0.0, worst_cosine=1.0)

    monkeypatch.setattr(race_module, "stream_runs", ran)
    source = ModelSource(reference="m", directory=tmp_path, config={"model_type": "bert"})
    contest = Contest(task="encode", source=source, asked="{}", pad=0, batches=(256, 512), hint="throughput")

    def race(amount: float, quality: Quality = "exact") -> Race:
        policy = RacePolicy(quality, Limits(), amount)
        return race_module.race(contest, detect(), [[1, 2]], policy, forecast=lambda: lambda setup: 1.0)

    few = race(999.0, 0.9)
    assert (few.chosen.engine, few.chosen.batch, few.final, finals) == ("openvino", 256, (), [])
    many = race(1000.0)
    assert (many.chosen.engine, many.chosen.batch) == ("ctranslate2", 512) and finals == ["openvino", "ctranslate2"] * FINAL_TURNS
    shown = {run.setup.engine: run.per_second for run in many.best()}
    assert shown["ctranslate2"] == 95.0 and shown["openvino"] == 90.0
    assert race(1000.0).recalled and race(1000.0).chosen == many.chosen


def test_a_short_run_does_not_wait_for_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes transformers 10 us, no engine can do faster with a race. Later calls would use the result, and race."""
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(race_module, "is_available", lambda setup: setup.engine in ("torch", "openvino"))
    monkeypatch.setattr(race_module, "check_room", lambda *room: None)
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))

    def ran(server: ForkServer, request: RaceRequest) -> Iterator[Run | Skipped]:
        for setup in request.setups:
            if request.before and request.seconds <= 0.0:
                yield Skipped(setup=setup, reason="time")
                continue
            rate = 20.0 if setup.engine == "openvino" else 10.0
            run = Run(setup=setup.changed(batch=256), seconds=Spread.of([0.1]), per_second=rate, load_seconds=0.1)
            yield run.changed(largest_difference=0.0, worst_cosine=1.0)

    monkeypatch.setattr(race_module, "stream_runs", ran)
    source = ModelSource(reference="m", directory=tmp_path, config={"model_type": "bert"})
    contest = Contest(task="encode", source=source, asked="{}", pad=0, batches=(256,), hint="throughput")

    def race(amount: float, seconds: RaceSeconds, engine: EngineName | None = None) -> Race:
        policy = RacePolicy("exact", Limits(), amount, engine=engine, seconds=seconds)
        return race_module.race(contest, detect(), [[1, 2]], policy, forecast=lambda: lambda setup: 1.0)

    short = race(1e-4, "run")
    assert short.chosen.engine == "torch" and {skip.reason for skip in short.left_out} == {"time"} and not short.recalled
    assert race(1e-4, "run").recalled
    assert race(1e-4, None).chosen.engine == "openvino"  # in Python
    assert race(1e-4, "run").chosen.engine == "openvino"  # what is known already costs nothing
    assert race(1e-4, "run", engine="openvino").chosen.engine == "openvino"
    assert race(1e4, "run").chosen.engine == "openvino"


def test_what_compiles_runs_where_it_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expected to be twice as fast as 1 text a second and 1.6 times, after compiling for 30 s: it saves 75 s of 200, 0.4 of 1."""
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(race_module, "is_available", lambda setup: setup.engine in ("torch", "torch-compiled", "openvino"))
    monkeypatch.setattr(race_module, "check_room", lambda *room: None)
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    speeds = {"torch": 1.0, "openvino": 1.0, "torch-compiled": 1.6, "nothing": 9.0}

    def ran(server: ForkServer, entrants: RaceRequest) -> Iterator[Run]:
        for setup in entrants.setups:
            one = Run(setup=setup, seconds=Spread.of([1.0]), per_second=speeds[setup.engine], load_seconds=30.0)
            yield one.changed(largest_difference=0.0, worst_cosine=1.0)

    monkeypatch.setattr(race_module, "stream_runs", ran)
    source = ModelSource(reference="m", directory=tmp_path, config={"model_type": "bert"})
    contest = Contest(task="generate", source=source, asked="{}", pad=0, batches=(1,), hint="latency")

    def raced(amount: float, engine: EngineName | None = None) -> tuple[Race, bool, EngineName]:
        forecast = lambda: lambda setup: 2.0 if setup.engine == "torch-compiled" else 1.0  # noqa: E731
        policy = RacePolicy("exact", Limits(), amount, engine=engine)
        race = race_module.race(contest, detect(), [[1]], policy, forecast=forecast)
        return race, "torch-compiled" in {run.setup.engine for run in race.runs}, race.chosen.engine

    short, entered, chosen = raced(1.0)
    assert (entered, chosen) == (False, "torch")
    assert [(out.setup.label(), out.rate) for out in short.left_out] == [("torch-compiled fp32", 2.0)]
    assert raced(79.0)[0].recalled  # half of it is 39.5 s
    assert raced(200.0)[1:] == (True, "torch-compiled")
    recalled, entered, chosen = raced(10.0)  # what ran is remembered, and would compile for longer than all else takes
    assert recalled.recalled and entered and chosen == "torch"
    named, *found = raced(1.0, "torch-compiled")
    assert found == [True, "torch-compiled"]
    speeds["openvino"] = 2.0
    for race in (recalled, named):
        race.file.unlink()  # type: ignore[union-attr]
    assert raced(1e6)[1:] == (False, "openvino")
    assert "nothing" not in {run.setup.engine for run in recalled.runs} and recalled.ceiling == 9.0
    monkeypatch.setattr(race_module, "is_available", lambda setup: setup.engine in ("torch", "torch-compiled"))
    assert raced(500.0)[0].runs == () and raced(500.0)[0].chosen.engine == "torch"  # alone, and too little for a forecast
    assert raced(2000.0)[1:] == (True, "torch-compiled")


RACED = """
import json
from upshift.inference.race.types import Run
from upshift.inference.race.early_stopping import serve_race
from upshift.record import Spread
COSINES = {"fp32": 1.0, "int8-weights": 0.9995, "int8": 0.998, "int4-weights": 0.97, "int4": 0.96}
RATES = {"llamacpp": 1.0, "torch": 2.0, "openvino": 4.0}
def run(entrants, setup, standing):
    one = Run(setup=setup, largest_difference=0.0, worst_cosine=COSINES[setup.precision], seconds=Spread.of([1.0]))
    one = one.changed(per_second=RATES[setup.engine])
    return [one.changed(stopped=standing.stop(one, 1.0))]
def main(path, answer):
    serve_race(path, answer, run)
"""


def test_what_cannot_win_does_not_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits lose 0.0005 of the cosine, so that 4 lose at least 16 times as much: 0.008. A race without time runs its reference
    alone; one with other bounds goes by what it left out."""
    (tmp_path / "of_a_race").mkdir()
    (tmp_path / "of_a_race" / "raced_setup.py").write_text(RACED)
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(race_module.PACKAGES, "generate", "of_a_race")
    monkeypatch.setattr(race_module, "is_available", lambda setup: True)
    monkeypatch.setattr(race_module, "check_room", lambda *room: None)
    made = [EngineSetup(engine="torch", precision="fp32", threads=1, batch=1)]
    precisions: tuple[Precision, ...] = ("fp32", "int8-weights", "int8", "int4-weights", "int4")
    made += [made[0].changed(engine="openvino", precision=precision) for precision in precisions]
    made.append(made[0].changed(engine="llamacpp"))
    monkeypatch.setattr(race_module, "contestants", lambda *asked, **more: made)
    source = ModelSource(reference="m", directory=tmp_path, config={"model_type": "llama"})
    contest = Contest(task="generate", source=source, asked="{}", pad=0, batches=(1,), hint="latency")

    def raced(quality: Quality, seconds: float | None = None, **limits: float) -> Race:
        policy = RacePolicy(quality, Limits(**limits), 1.0, seconds=seconds)
        return race_module.race(contest, detect(), [[1]], policy, forecast=lambda: lambda setup: 1.0)

    late = raced(0.999, 1e-6)
    assert [run.setup.engine for run in late.runs] == ["torch"] and late.chosen == made[0]
    assert [(out.setup, out.reason) for out in late.left_out] == [(setup, "time") for setup in made[1:]]
    assert raced(0.999, 1e-6).recalled
    found = raced(0.999)  # with more time
    assert not found.recalled and found.chosen.engine == "openvino" and 0.0 < found.seconds < found.allowed == 90.0
    assert {run.setup.label(): run.stopped for run in found.runs} == {
        "torch fp32": None, "openvino fp32": None, "openvino int8-weights": None, "openvino int8": "quality",
        "llamacpp fp32": "behind",
    }  # fmt: skip
    assert [(out.setup.label(), out.reason) for out in found.left_out] == [
        ("openvino int4-weights", "quality"), ("openvino int4", "quality"),
    ]  # fmt: skip
    assert found.left_out[0].cosine == pytest.approx(0.992) and found.left_out[0].by == found.runs[2].setup
    assert raced(0.9991).recalled  # stricter
    assert not raced(0.9991, ttft_ms=1e6).recalled  # what is slower could hold a limit
    looser = raced(0.99)
    assert not looser.recalled and {run.stopped for run in looser.runs if run.setup.precision == "int4-weights"} == {"quality"}
    assert raced(0.99).recalled and raced(0.999).recalled


@pytest.mark.parametrize("later", [0.001, 0.2])
def test_who_makes_kernels_in_the_first_pass_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: float
) -> None:
    """``later``: seconds of each pass behind the first, which takes 0.2. Another engine takes 0.05."""
    now = [0.0]

    class Warming:
        def __init__(self, *_: object, **__: object) -> None:
            self.setup, self.passes = some, 0

        def rows(self, ids: list[list[int]]) -> np.ndarray:
            self.passes += len(ids) == 40  # not the few that it is tried with
            now[0] += 0.2 if self.passes == 1 else later
            return np.ones((len(ids), 2), dtype=np.float32)

    some = EngineSetup(engine="openvino", precision="int8", threads=1, batch=64)
    monkeypatch.setattr(contest_module, "Encoding", Warming)
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(rows_module, "time", clock)
    (tmp_path / "sample.json").write_text(json.dumps([[1, 2]] * 40))
    source = ModelSource(reference="m", directory=tmp_path, config={"model_type": "bert"})
    contest = Contest(task="encode", source=source, asked=EMBEDDINGS.to_json(), pad=0, batches=(64,), hint="throughput")
    other = Run(
        setup=some.changed(engine="torch"), per_second=40 / 0.05, seconds=Spread.of([0.05]), largest_difference=0.0,
        worst_cosine=1.0,
    )  # fmt: skip
    entrants = RaceRequest(
        contest=contest, setups=(some,), sample=tmp_path / "sample.json", reference=tmp_path / "reference.npy", quality=0.99,
        before=(other,),
    )  # fmt: skip
    (found,) = contest_module.run_setup(entrants, some, EarlyStopping(entrants))
    assert found.stopped == (None if later < 0.05 else "behind")
    assert ((found.per_second or 0.0) > 40 / 0.05) == (later < 0.05)


SIGNALLED = """
import os, signal
import openvino
from upshift.inference.openvino_runtime import core, keep_signal_stack
core()
with keep_signal_stack():
    one, other = openvino.Core(), openvino.Core()
    one.get_property("CPU", "FULL_DEVICE_NAME"), other.get_property("CPU", "FULL_DEVICE_NAME")
    del one
    del other
signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGINT)
"""


def test_signals_are_handled_after_cores_of_openvino_went() -> None:
    """Without ``keep_signal_stack`` it ends with SIGSEGV (OpenVINO 2026.4)."""
    pytest.importorskip("openvino", reason="openvino is not installed")
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
