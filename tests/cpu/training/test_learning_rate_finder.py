"""A learning rate that is found: by the rule on made-up curves, and in a run, which is that of the same rate given by hand."""
# ruff: noqa: F811  fixtures of another file

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_models import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from segmenters import make_pictures, save_segmenter, write_masks
from test_train import GLOBAL_BATCH, LENGTH, curve, home, prepared  # noqa: F401  fixtures
from text_models import named, save_text_model

import upshift
from upshift.errors import JobFailed, RequestError
from upshift.record import Record
from upshift.training.arguments import Arguments, TrainRequest
from upshift.training.learning_rate_finder import (
    FEWEST_STEPS,
    FIRST_RATE,
    LAST_RATE,
    MOST_STEPS,
    STEPS_AFTER,
    FoundRate,
    check_finder,
    has_diverged,
    num_range_steps,
    pick_rate,
    rows_of_test,
)
from upshift.training.loop.events import StepDone
from upshift.training.optimizers.schedule import learning_rate_factor
from upshift.training.run import Watcher, run_training
from upshift.training.tasks.run import load_task_model

RATES = np.geomspace(FIRST_RATE, LAST_RATE, 71)  # ten a decade


def falling(first: float, last: float) -> np.ndarray:
    """Return losses that are 10 up to one rate, fall to 2 at another one, and rise beyond it."""
    logs = np.log(RATES)
    return np.interp(logs, [logs[0], np.log(first), np.log(last), logs[-1]], [10.0, 10.0, 2.0, 30.0])


@settings(max_examples=60, deadline=None)
@given(start=st.integers(5, 40), length=st.integers(12, 25))
def test_the_rate_lies_where_the_loss_falls(start: int, length: int) -> None:
    """The scale of the rates and the height of the losses change nothing else."""
    first, last = RATES[start], RATES[start + length]
    found = pick_rate(list(RATES), list(falling(first, last)))
    assert first < found < last
    assert pick_rate(list(RATES * 100), list(falling(first, last) + 3)) == pytest.approx(100 * found)


@pytest.mark.parametrize("losses", [[], [2.0] * 40, list(np.linspace(2.0, 9.0, 40))])
def test_a_loss_that_falls_nowhere_has_no_rate(losses: list[float]) -> None:
    with pytest.raises(JobFailed, match="falls at no learning rate"):
        pick_rate(list(RATES[: len(losses)]), losses)


@pytest.mark.parametrize("num_rates", [FEWEST_STEPS, MOST_STEPS])
def test_noise_is_not_taken_for_a_fall(num_rates: int) -> None:
    """The noise of a loss is 0.3. Without a fall, a rate is found in at most 10 % of the tests; with one of 1.0, in 95 %."""
    rates = list(np.geomspace(FIRST_RATE, LAST_RATE, num_rates))
    fall = np.interp(np.log(rates), np.log([FIRST_RATE, 1e-5, 3e-3, 3e-2, LAST_RATE]), [0.0, 0.0, -1.0, -0.5, 3.0])
    without, within = 0, 0
    for seed in range(200):
        noise = 2 + 0.3 * np.random.default_rng(seed).standard_normal(num_rates)
        with suppress(JobFailed):
            pick_rate(rates, list(noise))
            without += 1
        with suppress(JobFailed):
            within += 1e-5 < pick_rate(rates, list(noise + fall)) < 3e-3
    assert without <= 20 and within >= 190


def test_the_test_ends_where_the_loss_diverges() -> None:
    assert not has_diverged([5.0, 4.0, 6.0, 4.5]) and not has_diverged([0.7, 0.01, 0.2]) and not has_diverged([0.1, -0.5, -0.4])
    assert has_diverged([2.0] * 30 + [40.0] * 3) and has_diverged([2.0, float("nan")])


@pytest.mark.parametrize(("of_run", "steps"), [(1, FEWEST_STEPS), (300, 60), (100_000, MOST_STEPS)])
def test_rates_grow_evenly_from_the_first_to_the_last(of_run: int, steps: int) -> None:
    assert num_range_steps(of_run) == steps
    arguments = Arguments(max_steps=steps + STEPS_AFTER, learning_rate=LAST_RATE, range_test_from=FIRST_RATE, warmup_steps=9)
    rates = [LAST_RATE * learning_rate_factor(step, name="linear", arguments=arguments) for step in range(steps)]
    assert rates == pytest.approx(list(np.geomspace(FIRST_RATE, LAST_RATE, steps)))


def trained(home: Path, output: Path, found: list[FoundRate], arguments: dict[str, Any], **options: Any) -> Record:
    """Train in two ways or resume, with everything else equal."""
    fields = {
        "model": str(home / "llama"), "data": str(home / "data.jsonl"), "output": output, "from_config": True,
        "sequence_length": LENGTH, "global_batch": GLOBAL_BATCH, "trial_seconds": 0.0, "fixed": ("torch_compile=off",),
    }  # fmt: skip
    record = run_training(TrainRequest.of({**fields, **options}, arguments), Watcher(found_rate=found.append))
    assert record is not None
    return record


def test_a_run_with_a_found_rate_is_that_of_the_same_rate_given(home: Path, tmp_path: Path) -> None:
    """Runs of fewer than six steps are too short for their speed to be remembered, which might change the next plan."""
    found: list[FoundRate] = []
    record = trained(home, tmp_path / "found", found, {"max_steps": 4, "save_steps": 2}, find_learning_rate=True)
    (answer,) = found
    assert record.details["arguments"]["learning_rate"] == answer.learning_rate
    assert len(answer.rates) == len(answer.losses) <= FEWEST_STEPS and answer.rates[0] == pytest.approx(FIRST_RATE)
    assert answer.losses[0] == curve(record)[0][1]  # both begin with the same weights and batch
    by_hand = trained(home, tmp_path / "given", found, {"max_steps": 4, "save_steps": 2, "learning_rate": answer.learning_rate})
    assert curve(record) == curve(by_hand)
    assert {path.name for path in (tmp_path / "found").iterdir()} == {path.name for path in (tmp_path / "given").iterdir()}
    resumed = trained(home, tmp_path / "found", found, {"max_steps": 5, "save_steps": 2}, find_learning_rate=True, resume=True)
    assert len(found) == 1 and resumed.details["arguments"]["learning_rate"] == answer.learning_rate


def test_what_cannot_be_found_is_refused_by_name() -> None:
    for rate in (1e-3, 5e-5):  # the second one is the default
        with pytest.raises(RequestError, match=f"--learning-rate {rate:g} is given, and --find-learning-rate"):
            TrainRequest.of({"model": "m", "data": "d", "find_learning_rate": True}, {"learning_rate": rate})
    with pytest.raises(RequestError, match="range_test_from is not an argument of a run"):
        TrainRequest.of({"model": "m", "data": "d"}, {"range_test_from": 1e-7})
    with pytest.raises(RequestError, match="a launcher has started them; run it once without"):
        check_finder(is_launched=True)


def labels_of_pixels(folder: Path) -> tuple[Path, Path]:
    pytest.importorskip("PIL")
    rows = write_masks(folder / "pictures", make_pictures(folder / "pictures", *[(32, 32)] * 6))
    return save_segmenter(folder / "model", "segformer", "sky", "road", "car"), rows


def labels_of_texts(folder: Path) -> tuple[Path, Path]:
    model = save_text_model(folder / "model", "BertForSequenceClassification", **named("good", "bad"))
    texts = [f"bob lives in {city} {word}" for city in ("rome", "paris") for word in ("good", "bad", "good .")]
    return model, write_jsonl(folder / "rows.jsonl", [{"text": text, "label": text.split()[4]} for text in texts])


@pytest.mark.parametrize("make", [labels_of_pixels, labels_of_texts])
def test_a_task_with_a_found_rate_is_that_of_the_same_rate_given(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model, rows = make(tmp_path)
    found: list[FoundRate] = []
    rates: list[float] = []
    models: list[Any] = []

    def load_alone(*arguments: Any) -> Any:
        """Load a model, before which no earlier one is in memory."""
        assert not [earlier for earlier in models if earlier() is not None]
        loaded = load_task_model(*arguments)
        models.append(weakref.ref(loaded))
        return loaded

    def note_rate(event: Any) -> None:
        if isinstance(event, StepDone):
            rates.append(event.learning_rate)

    def trained_task(output: str, arguments: dict[str, Any], **options: Any) -> Record:
        watcher = Watcher(found_rate=found.append, event=note_rate)
        record = upshift.train(
            str(model), str(rows), output=tmp_path / output, arguments=arguments, global_batch=2, eval_size=2, trial_seconds=0,
            watcher=watcher, **options,
        )  # fmt: skip
        assert record is not None
        return record

    short = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "load_best": True}
    with monkeypatch.context() as patch:
        patch.setattr("upshift.training.tasks.run.load_task_model", load_alone)
        record = trained_task("found", short, find_learning_rate=True)
    assert len(models) == 2
    told = capfd.readouterr().err
    # The search tells nothing. The run tells it where it has no plan, or, on a fast machine, where it is too short for one.
    assert told.count("your own settings run") in ((1,) if make is labels_of_pixels else (0, 1))
    (answer,) = found
    assert record.details["arguments"]["learning_rate"] == answer.learning_rate
    assert len(answer.rates) == len(answer.losses) <= FEWEST_STEPS and answer.rates[0] == pytest.approx(FIRST_RATE)
    assert min(answer.losses) < answer.losses[0] == pytest.approx(curve(record)[0][1], rel=1e-5)
    by_hand = trained_task("given", short | {"learning_rate": answer.learning_rate})
    assert curve(record) == curve(by_hand) and record.details["evaluations"] == by_hand.details["evaluations"]
    rates.clear()
    resumed = trained_task("found", short | {"max_steps": 6}, find_learning_rate=True, resume=True)
    given_again = trained_task("given", short | {"max_steps": 6, "learning_rate": answer.learning_rate}, resume=True)
    assert len(found) == 1 and len(rates) == 4 and rates[:2] == rates[2:] and rates[1] > 0  # of steps 5 and 6
    assert curve(resumed) == curve(given_again) and len(curve(resumed)) == 6
    assert resumed.details["arguments"]["learning_rate"] == answer.learning_rate


def test_a_test_has_the_rows_that_it_computes(prepared: Any) -> None:
    """Two rows that belong together stay together, with their own tokens."""
    data = prepared("llama")
    data = replace(data, objective=data.objective.changed(has_pairs=True))
    few = rows_of_test(data, 3 * GLOBAL_BATCH, seed=1)
    assert len(few.training) == 3 * GLOBAL_BATCH < len(data.training) and few.evaluation is None

    def rows_of(sequences: Any) -> list[bytes]:
        spans = zip(sequences.starts, sequences.lengths, strict=True)
        return [sequences.tokens[start : start + length].tobytes() for start, length in spans]

    every, some = rows_of(data.training), rows_of(few.training)
    pairs = list(zip(every[::2], every[1::2], strict=False))
    assert all(pair in pairs for pair in zip(some[::2], some[1::2], strict=True))
    assert len(few.training.tokens) == int(few.training.lengths.sum())
