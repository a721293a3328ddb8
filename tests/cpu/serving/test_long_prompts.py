"""Long prompts are computed in chunks, between which the running requests get their next tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from test_serving_parts import PASS_SECONDS, TOKEN_SECONDS, Clock, Toy, answer, made, ticket

from upshift.errors import EngineEnded, EngineFailed
from upshift.inference.engine_errors import ComputationFailed, PromptsFailed
from upshift.inference.generation.batching import decode
from upshift.inference.generation.engines.base import ApartDecoder, DecoderBuild
from upshift.inference.generation.model import generation_task
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.registry import EngineSetup, build_engine
from upshift.inference.weights import find_weights
from upshift.serving.engine.adapters import AdapterDecoder
from upshift.serving.engine.admission import Ticket, TtftEstimator
from upshift.serving.engine.scheduler import LONE_CHUNK_TOKENS, Scheduler
from upshift.serving.engine.warmup import measure_passes
from upshift.serving.messages import Refused

CHUNK = 8


class Untimed(TtftEstimator):
    """Learns no times, by which chunks would become longer where steps take long."""

    def record_prompts(self, prompt_tokens: int, seconds: float, *, input_bytes: int = 0) -> None:
        pass

    def record_step(self, seconds: float) -> None:
        pass


class Recorded:
    """An engine that keeps a list of its passes: None for a step of the rows, or the number of a prompt pass's new tokens."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.passes: list[int | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        self.passes.append(None)
        logits: np.ndarray = self.engine.step(tokens)
        return logits

    def admit(self, prompts: Any, prefix: Any = None) -> np.ndarray:
        self.passes.append(sum(map(len, prompts)) - len(prompts) * (prefix.length if prefix else 0))
        logits: np.ndarray = self.engine.admit(prompts, *([prefix] if prefix else []))
        return logits

    def compute_chunks(self, prompts: Any, prefix: Any, next_width: Any) -> Any:
        widths = [0]
        for computed in self.engine.compute_chunks(prompts, prefix, lambda: widths.append(next_width()) or widths[-1]):
            self.passes.append(widths[-1])
            yield computed


def run_out(scheduler: Scheduler, is_over: Callable[[], bool] = lambda: False) -> None:
    """Run passes until there are no requests, or until ``is_over`` says so."""
    for _ in range(5000):
        if is_over() or not scheduler.is_busy:
            return
        scheduler.step()
    raise AssertionError("some requests never end")


def longest_wait(passes: list[int | None], rows_from: int) -> int:
    """Return the most tokens of prompts between two steps, from a pass on."""
    parts = [list(part) for is_step, part in itertools.groupby(passes[rows_from:], lambda one: one is None) if not is_step]
    return max((sum(one or 0 for one in part) for part in parts), default=0)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=8), rows=st.integers(2, 5),
    shared=st.integers(0, 40), every=st.integers(1, 4),
)  # fmt: skip
def test_a_running_request_waits_for_no_more_than_a_chunk(
    lengths: list[tuple[int, int]], rows: int, shared: int, every: int
) -> None:
    """One request runs all the time. The others come while it does, and some share a beginning, which is cached."""
    clock = Clock()
    scheduler = made(clock, rows=rows, chunks=True, chunk_tokens=CHUNK)
    scheduler.estimator = Untimed(token_seconds=0.0, step_seconds=0.0, output_length=8)
    engine = Recorded(scheduler.engine)
    scheduler.engine = engine  # type: ignore[assignment]
    running = ticket(99, clock, prompt=1, new=2000)
    scheduler.add(running)
    said = {99: [token for _, token in scheduler.step()]}
    coming = []
    for number, (prompt, new) in enumerate(lengths):
        tokens = [3] * shared + [(number + place) % 16 for place in range(prompt)]
        coming.append(Ticket(number, GeneratedSequence(0, tokens, GenerationOptions(max_new_tokens=new), None), clock()))
    for number in range(2000):  # passes: all end long before
        if number % every == 0 and number // every < len(coming):
            assert scheduler.add(coming[number // every]) is None
        for one, token in scheduler.step():
            said.setdefault(one.id, []).append(token)
        if number // every > len(coming) and all(one.sequence.ending for one in coming):
            break
    else:
        raise AssertionError("some requests never end")
    assert longest_wait(engine.passes, 1) <= CHUNK
    for one in coming:
        assert said[one.id] == answer(one.sequence.prompt, one.sequence.options.new_tokens)
    assert said[99] == answer(running.sequence.prompt, len(said[99]))


@given(
    before=st.lists(st.tuples(st.integers(1, 70), st.booleans(), st.integers(0, 4)), max_size=9),
    own=st.tuples(st.integers(1, 70), st.booleans()), running=st.integers(0, 2), rows=st.sampled_from([3, 16]),
)  # fmt: skip
@example(before=[(70, False, 3)], own=(9, False), running=1, rows=16)
@example(before=[(70, False, 2), (30, False, 0)], own=(1, False), running=1, rows=16)
@example(before=[(70, False, 2), *[(2, False, 0)] * 8], own=(2, False), running=1, rows=16)
@example(before=[(70, True, 2)], own=(1, True), running=1, rows=16)
def test_the_first_token_comes_no_later_than_estimated(
    before: list[tuple[int, bool, int]], own: tuple[int, bool], running: int, rows: int
) -> None:
    """Behind prompts of any lengths, some of which share a beginning, while others run and a prompt is computed in chunks.

    All answers have the same length, which the estimator knows."""
    clock = Clock()
    scheduler = made(clock, rows=rows, chunks=True, chunk_tokens=CHUNK)
    scheduler.estimator = Untimed(token_seconds=TOKEN_SECONDS, step_seconds=PASS_SECONDS, output_length=20)

    def add(number: int, prompt: int, shared: bool) -> Ticket:
        tokens = [3] * (40 if shared and rows > 3 else 0) + [(number + place) % 16 for place in range(prompt)]
        one = Ticket(number, GeneratedSequence(0, tokens, GenerationOptions(max_new_tokens=20), None), clock())
        assert scheduler.add(one) is None
        return one

    for number in range(running):
        add(100 + number, 1, False)
        scheduler.step()
    for number, (prompt, shared, steps) in enumerate(before):
        add(number, prompt, shared)
        for _ in range(steps):
            scheduler.step()
    start = clock()
    last = add(9, *own)
    for _ in range(1000):
        scheduler.step()
        if last.sequence.tokens:
            break
    assert last.sequence.tokens and clock() - start <= last.expected_seconds + 1e-9


def test_the_second_request_about_a_document_is_not_refused_for_its_length() -> None:
    """It waits for the prompt that is computed in chunks, and needs few tokens more."""
    clock = Clock()
    scheduler = made(clock, rows=4, chunks=True, chunk_tokens=CHUNK, max_ttft=2.0)
    document = [3] * 2500
    tickets = []
    for number in range(2):
        sequence = GeneratedSequence(0, [*document, number], GenerationOptions(max_new_tokens=4), None)
        tickets.append(Ticket(number, sequence, clock()))
        assert scheduler.add(tickets[-1]) is None
        scheduler.step()
        scheduler.step()
    assert scheduler.apart == tickets[:1] and tickets[1].uncached_tokens == 1
    run_out(scheduler)
    assert tickets[1].cached_tokens == 2500


def test_a_lone_prompt_has_wide_chunks_until_another_request_comes() -> None:
    clock = Clock()
    scheduler = made(clock, rows=4, chunks=True, chunk_tokens=CHUNK)
    scheduler.estimator = Untimed(token_seconds=0.0, step_seconds=0.0, output_length=8)
    engine = Recorded(scheduler.engine)
    scheduler.engine = engine  # type: ignore[assignment]
    long = ticket(0, clock, prompt=2 * LONE_CHUNK_TOKENS + 3 * CHUNK)
    scheduler.add(long)
    scheduler.step()
    scheduler.step()
    scheduler.add(ticket(1, clock, prompt=2, new=90))
    run_out(scheduler, lambda: bool(long.sequence.tokens))
    assert engine.passes == [LONE_CHUNK_TOKENS, LONE_CHUNK_TOKENS, 2, None, CHUNK, None, CHUNK, None, CHUNK]


@pytest.mark.parametrize("chunks", [False, True])
def test_steps_delay_the_prompts_of_engines_with_chunks_alone(chunks: bool) -> None:
    clock = Clock()
    scheduler = made(clock, rows=4, chunks=chunks, chunk_tokens=CHUNK)
    scheduler.estimator = Untimed(token_seconds=TOKEN_SECONDS, step_seconds=PASS_SECONDS, output_length=8)
    scheduler.add(ticket(0, clock, new=90))
    for _ in range(3):
        scheduler.step()
    start = clock()
    long = ticket(1, clock, prompt=100)
    scheduler.add(long)
    run_out(scheduler, lambda: bool(long.sequence.tokens))
    assert clock() - start <= long.expected_seconds <= clock() - start + 2 * PASS_SECONDS


def test_a_place_is_free_after_the_chunks_of_a_prompt() -> None:
    """The client is told to come back when the prompt apart is computed, too."""
    clock = Clock()
    scheduler = made(clock, rows=2, chunks=True, chunk_tokens=CHUNK, max_waiting=1)
    waits = []
    for number, prompt in enumerate((4, 1000, 4, 4)):
        refused = scheduler.add(ticket(number, clock, prompt=prompt, new=50))
        waits.append(refused.retry_after if refused else None)
        if number < 2:
            scheduler.step()
            scheduler.step()
    assert scheduler.apart and waits[:3] == [None] * 3 and waits[3] is not None and waits[3] > 0.9


def test_a_long_prompt_whose_client_leaves_is_given_up() -> None:
    clock = Clock()
    scheduler = made(clock, chunks=True, chunk_tokens=CHUNK, rows=2)
    engine = Recorded(scheduler.engine)
    scheduler.engine = engine  # type: ignore[assignment]
    long, short = ticket(0, clock, prompt=100), ticket(1, clock)
    for one in (long, short):
        scheduler.add(one)
    for _ in range(4):
        scheduler.step()
    assert scheduler.apart == [long] and short.sequence.tokens, "a short one goes before the next chunk"
    scheduler.cancel(0)
    run_out(scheduler)
    assert short.sequence.tokens == answer(short.sequence.prompt, 4)
    assert not long.sequence.tokens and sum(one or 0 for one in engine.passes) < 50


def test_a_prompt_that_fails_between_its_chunks_fails_alone() -> None:
    class Full(Toy):
        def compute_chunks(self, prompts: Any, prefix: Any, next_width: Any) -> Any:
            yield None
            raise MemoryError("no room for it")

    clock = Clock()
    scheduler = made(clock, rows=3, chunk_tokens=CHUNK)
    scheduler.engine = Full(clock, chunks=True)
    tickets = [ticket(number, clock, prompt=prompt) for number, prompt in enumerate((3, 40, 4))]
    for one in tickets:
        scheduler.add(one)
        scheduler.step()
    run_out(scheduler)
    assert [(one.id, Refused.from_error(1, error).failure) for one, error in scheduler.failed] == [(1, "MemoryError")]
    assert all(one.sequence.tokens == answer(one.sequence.prompt, 4) for one in (tickets[0], tickets[2]))


@pytest.mark.parametrize("kind", [EngineEnded, EngineFailed])
def test_an_engine_that_ends_in_a_chunk_ends_the_server_of_its_requests(kind: type[EngineEnded]) -> None:
    """Only if it failed at the prompts themselves, their requests fail with it. Else another engine takes them."""

    class Ending(Toy):
        def compute_chunks(self, prompts: Any, prefix: Any, next_width: Any) -> Any:
            yield None
            raise kind("rank 1 has ended")

    clock = Clock()
    scheduler = made(clock, rows=3, chunk_tokens=CHUNK)
    scheduler.engine = Ending(clock, chunks=True)
    for number, prompt in enumerate((3, 40)):
        scheduler.add(ticket(number, clock, prompt=prompt))
        scheduler.step()
    with pytest.raises(kind, match="rank 1 has ended"):
        run_out(scheduler)
    assert [one.id for one, _ in scheduler.failed] == ([1] if kind is EngineFailed else [])


class Broken(Toy):
    """An engine whose library raises an error at prompts of five tokens, and from ``broken_from`` on at all prompts."""

    error: type[Exception] = RuntimeError
    broken_from = 10**9

    def admit(self, prompts: Any, prefix: Any = None) -> np.ndarray:
        self.broken_from -= 1
        if self.broken_from < 0 or any(len(prompt) == 5 for prompt in prompts):
            raise self.error(RuntimeError("bad kernel"))
        return super().admit(prompts, *([prefix] if prefix else []))


def broken_scheduler(error: type[Exception], lengths: tuple[int, ...]) -> tuple[Scheduler, list[Ticket]]:
    clock = Clock()
    scheduler = made(clock, rows=3, chunk_tokens=CHUNK)
    engine = Broken(clock)
    engine.error = error
    scheduler.engine = engine
    tickets = [ticket(number, clock, prompt=length) for number, length in enumerate(lengths)]
    return scheduler, tickets


def test_prompts_at_which_a_library_fails_fail_alone() -> None:
    """Other rows go on only if the engine says that they are as they were. Without others, the engine begins anew."""
    for error in (PromptsFailed, RuntimeError):
        scheduler, tickets = broken_scheduler(error, (5, 3, 5, 2))
        for one in (tickets[0], tickets[1]):
            scheduler.add(one)
            scheduler.step()
        assert [one.id for one, _ in scheduler.failed] == [0]
        scheduler.add(tickets[2])
        if error is RuntimeError:
            with pytest.raises(EngineFailed, match="RuntimeError: bad kernel"):
                scheduler.step()
            continue
        scheduler.step()
        scheduler.add(tickets[3])
        run_out(scheduler)
        assert [one.id for one, _ in scheduler.failed] == [0, 2]
        assert all(one.sequence.tokens == answer(one.sequence.prompt, 4) for one in (tickets[1], tickets[3]))
        refused = Refused.from_error(0, scheduler.failed[0][1])
        assert (refused.status, refused.failure) == (500, "RuntimeError") and "alone: RuntimeError: bad kernel" in refused.why


def test_a_library_that_fails_at_prompts_of_a_file_is_one_line() -> None:
    engine: Any = Broken(Clock())
    options = GenerationOptions(max_new_tokens=2)
    with pytest.raises(ComputationFailed, match="failed while it computed: RuntimeError: bad kernel; choose another one"):
        list(decode(engine, [GeneratedSequence(0, [1, 2, 3, 4, 5], options, None)], rows=1))


def test_an_engine_that_fails_in_the_warm_up_does_not_start() -> None:
    scheduler, _ = broken_scheduler(RuntimeError, ())
    with pytest.raises(ComputationFailed, match="RuntimeError: bad kernel"):
        measure_passes(scheduler, [[1, 2, 3, 4, 5]], None, 1)


def test_an_engine_that_fails_at_everything_starts_again() -> None:
    """Each of the requests at which it failed has been told, and no other one."""
    scheduler, tickets = broken_scheduler(RuntimeError, (3, 2, 4))
    scheduler.engine.broken_from = 0  # type: ignore[attr-defined]
    for one in tickets[:3]:
        scheduler.add(one)
        if one.id < 2:
            scheduler.step()
    with pytest.raises(EngineFailed, match="3 passes failed in a row, the last one with: .*bad kernel"):
        scheduler.step()
    assert [one.id for one, _ in scheduler.failed] == [0, 1, 2] and not scheduler.live


SIZES: dict[str, Any] = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                         "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GATED = {**SIZES, "intermediate_size": 16, "num_key_value_heads": 1}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # engine, class, config
    "whole attention": ("torch", "LlamaForCausalLM", GATED),
    "sliding windows": ("torch", "MistralForCausalLM", {**GATED, "sliding_window": 12}),
    "sliding windows in OpenVINO": ("openvino", "MistralForCausalLM", {**GATED, "sliding_window": 12}),
    "windows and whole attention": ("torch", "Gemma3ForCausalLM", {**GATED, "sliding_window": 12, "head_dim": 8}),
    "absolute positions": ("torch", "GPT2LMHeadModel", SIZES),
    "ALiBi": ("torch", "BloomForCausalLM", SIZES),
    "factors by the length": ("torch", "Phi3ForCausalLM", {**GATED, "rope_parameters": LONGROPE,
                                                           "original_max_position_embeddings": 40}),
    "recurrent states": ("torch", "MambaForCausalLM", {**SIZES, "state_size": 4}),
    "adapters": ("torch", "LlamaForCausalLM", GATED),
}  # fmt: skip


def build(folder: Path, kind: str) -> Any:
    engine, class_name, config = KINDS[kind]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**config))
    for weight in model.parameters():  # so that the attention decides on tokens
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    source = find_weights(str(folder))
    setup = EngineSetup(engine=engine, precision="fp32", threads=1, batch=4)  # type: ignore[arg-type]
    return build_engine(generation_task(source), engine, DecoderBuild(source, setup, folder / "files"))  # type: ignore[arg-type]


def run(decoder: Any, prompts: list[list[int]], chunk: int, assign: Any) -> tuple[dict[int, list[int]], list[int | None]]:
    """Return the tokens of prompts that come one after the other while others run, and the passes of the engine."""
    estimator = Untimed(token_seconds=0.0, step_seconds=0.0, output_length=8)
    recorded: Any = Recorded(decoder)
    recorded = decoder if isinstance(decoder, ApartDecoder) and not decoder.chunks else recorded
    scheduler = Scheduler(recorded, rows=4, cache_tokens=4000, estimator=estimator, chunk_tokens=chunk)
    if assign is not None:
        scheduler.assign_adapters = assign
    tickets = []
    for number, prompt in enumerate(prompts):
        options = GenerationOptions(max_new_tokens=12 + number)
        tickets.append(Ticket(number, GeneratedSequence(0, prompt, options, None), 0.0, is_conversation=True))
        tickets[-1].adapter = None if assign is None or number % 3 == 0 else f"adapter_{number % 3}"
        scheduler.add(tickets[-1])
        scheduler.step()
        scheduler.step()
    run_out(scheduler)
    assert not scheduler.failed
    return {one.id: one.sequence.tokens for one in tickets}, getattr(recorded, "passes", [])


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_change_no_token(kind: str, tmp_path: Path) -> None:
    """Beside running rows, after cached beginnings, with rows of different adapters, and with several prompts in a chunk."""
    pytest.importorskip("openvino" if "OpenVINO" in kind else "torch")
    decoder = build(tmp_path / "model", kind)
    assign = None
    if kind == "adapters":
        decoder = AdapterDecoder(decoder, find_weights(str(tmp_path / "model")))
        for seed in (1, 2):
            torch.manual_seed(seed)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
            for name, weight in adapted.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(weight, std=0.5)
            adapted.save_pretrained(tmp_path / str(seed))
            decoder.load(str(seed), tmp_path / str(seed))
        assign = decoder.assign
    draws = np.random.default_rng(3)
    begin = draws.integers(3, 60, 34).tolist()
    prompts = [draws.integers(3, 60, size).tolist() for size in (3, 70, 5, 37, 4, 4)]
    prompts += [[*begin, *draws.integers(3, 60, size).tolist()] for size in (30, 20, 1)]
    whole, _ = run(decoder, prompts, 4096, assign)
    parts, passes = run(decoder, prompts, CHUNK, assign)
    assert parts == whole and len({tuple(tokens) for tokens in whole.values()}) > 3
    if decoder.chunks and kind != "factors by the length":
        assert longest_wait(passes, 1) <= CHUNK
    if kind == "recurrent states":
        assert isinstance(decoder, ApartDecoder) and not decoder.chunks
