"""Generate text in an engine's process: race the engines, measure what the server can promise, then answer requests."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshift.benchmarking.meters import resident_bytes
from upshift.errors import EngineEnded, RequestError
from upshift.inference.generation.engines.vllm_engine import check_request
from upshift.inference.generation.generator import Generator
from upshift.inference.generation.grammar import Grammar, Grammars, TokenGuide
from upshift.inference.generation.media import ProcessedPrompts, has_media
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.sequence import GeneratedSequence
from upshift.inference.race.race import Race
from upshift.inference.tokenizer import panics_as_errors
from upshift.inference.workers.own_processes import own_bytes, watch_processes
from upshift.loading.placement.memory_limits import read_max_memory
from upshift.models.generation_config import LENGTHS
from upshift.models.sequence_length import prompt_and_answer_lengths
from upshift.serving.adapter_files import keep_adapters
from upshift.serving.engine.admission import RequestQueue, Ticket, TtftEstimator
from upshift.serving.engine.answer_pieces import NewToken, OpenRequest, TextStream, make_pieces
from upshift.serving.engine.chat_template import use_template
from upshift.serving.engine.picture_support import PictureReader
from upshift.serving.engine.reasoning import ReasoningGuide, ReasoningStream
from upshift.serving.engine.scheduler import Scheduler
from upshift.serving.engine.text_scheduler import TextScheduler, measure_texts
from upshift.serving.engine.tokenization import (
    PromptReader,
    PromptThread,
    ReadPrompt,
    check_token_ids,
    cut_prompt,
    is_chat,
    is_token_ids,
    start_prompt_thread,
    takes_long,
    token_replies,
)
from upshift.serving.engine.tool_calls import CallStream, grammar_of_call, schemas_of_tools
from upshift.serving.engine.warmup import PassTimes, expected_prompts, measure_passes, rows_that_fit
from upshift.serving.messages import (
    EXPECTED_TOKENS,
    RACING,
    Cancel,
    ContextTooLong,
    DescribeTokenizer,
    Detokenize,
    Done,
    Embed,
    EngineRequest,
    Generate,
    Heartbeat,
    LoadAdapter,
    Ready,
    Refused,
    Request,
    Tokenize,
    UnloadAdapter,
)
from upshift.training.held_memory import trim_heap
from upshift.value import Value

if TYPE_CHECKING:
    from upshift.serving.engine.adapters import AdapterDecoder  # imports peft, which may be missing

HEARTBEAT_SECONDS = 1.0
SEND_SECONDS = 1 / 60  # between messages: a screen shows no more pictures, and a message takes 0.3 ms of a core
TRIM_BYTES = 16 * 2**20  # of growth after which an idle engine returns free memory, which takes some milliseconds
DEFAULT_ANSWER_TOKENS = 1024  # if neither the request nor the model's positions limit the answer to fewer


def serve_texts(request: EngineRequest, inbox: queue.Queue[Any], send: Callable[[list[Value]], None]) -> None:
    """Answer the requests of the inbox until it gives None.

    A second thread turns tokens into text and sends them while the next pass computes. The first and the last token of
    a text are sent at once. Other tokens are sent together with those that follow within SEND_SECONDS."""
    worker = GenerationWorker(request)
    send([worker.prepare()])
    worker.watch(inbox)
    try:
        answer_requests(worker, inbox, send)
    finally:
        send([*worker.take_failures()])  # with which the engine ended


def answer_requests(worker: GenerationWorker, inbox: queue.Queue[Any], send: Callable[[list[Value]], None]) -> None:
    """Answer the requests of the inbox with a worker that is ready, until it gives None."""
    last_heartbeat = last_sent = time.monotonic()
    new_tokens: list[NewToken] = []
    with ThreadPoolExecutor(1, "tell") as sender:
        sending: Future[None] | None = None
        while True:
            messages: list[Value] = []
            if not worker.is_busy:
                worker.trim_heap()
                sender.submit(send, [worker.heartbeat()]).result()
                message = inbox.get()
                if message is None:
                    return
                messages += worker.answer(message)
            while not inbox.empty():
                message = inbox.get_nowait()
                if message is None:
                    return
                messages += worker.answer(message)
            new_tokens += worker.run_pass()
            messages += worker.take_failures()
            now = time.monotonic()
            if now - last_heartbeat > HEARTBEAT_SECONDS:
                messages.append(worker.heartbeat())
                last_heartbeat = now
            if not messages and now - last_sent < SEND_SECONDS and not any(token.is_urgent for token in new_tokens):
                continue
            if sending is not None:
                sending.result()
            sending = sender.submit(lambda messages, tokens: send([*messages, *make_pieces(tokens)]), messages, new_tokens)
            new_tokens = []
            last_sent = now


class GenerationWorker:
    """The generator of an engine's process, with its scheduler and the open requests."""

    def __init__(self, request: EngineRequest) -> None:
        adapters, self._lost_adapters = keep_adapters(request.adapters) if request.is_restart else (request.adapters, {})
        self.request = request = request.changed(adapters=adapters)
        start = time.perf_counter()
        memory = read_max_memory(list(request.max_memory) or None)
        self.generator = Generator(
            request.model,
            quality=request.quality,
            engine=request.engine or ("torch" if request.takes_adapters else None),
            max_ttft_ms=request.max_ttft_ms,
            max_tpot_ms=request.max_tpot_ms,
            max_memory=memory,
            race_seconds=request.race_seconds,
            engine_python=request.engine_python,
            engine_arguments=request.engine_arguments,
            serves=True,
            tensor_parallel=request.tensor_parallel,
            adapters=list(request.adapters.values()),
        )
        self._template = use_template(self.generator.prompts, request.chat_template)
        eos_ids = self._options({}).eos_token_id  # first, because wrong options end the start
        self.prompt_length, self.output_length = prompt_and_answer_lengths(
            self.generator.source,
            request.prompt_length,
            request.output_length,
            defaults=EXPECTED_TOKENS,
            options=("--prompt-length", "--output-length"),
        )
        self._adapters: AdapterDecoder | None = None
        self._check_adapters()
        self.seconds = {"reading": time.perf_counter() - start}
        self._open_requests: dict[int, OpenRequest] = {}  # by id
        self._trimmed_bytes = 0  # that were resident after the heap was trimmed
        self._stream_prompts = deepcopy(self.generator.prompts)  # a tokenizer must not be used by two threads at once
        self._reader = PromptReader(self.generator.prompts, allow_special=request.allow_special)
        self._tools = self._reader.template
        self._pictures = PictureReader(self.generator, self._tools, request.image_folder)
        self._prompt_thread: PromptThread | None = None
        self._processed = ProcessedPrompts()
        self._grammars = Grammars(self.generator.prompts.tokenizer, self.generator.vocabulary, eos_ids)

    def prepare(self) -> Ready:
        """Race the engines, load the winner and measure its passes. Return the report for the server."""
        start = time.perf_counter()
        prompts = expected_prompts(self.generator, self.request, self.prompt_length, self.output_length)
        options = self._options({"max_new_tokens": self.output_length})
        race = self.generator.prepare(prompts, options)
        self.seconds[RACING] = time.perf_counter() - start
        cache_tokens = self._cache_tokens()
        rows = rows_that_fit(min(race.chosen.batch, self.request.concurrency), cache_tokens, prompts)
        start = time.perf_counter()
        times = self._measure(race, prompts, rows, cache_tokens)
        self._pictures.prove(self.scheduler.engine)
        self.seconds["proving"] = time.perf_counter() - start
        self.scheduler.estimator = TtftEstimator(
            token_seconds=times.prompt_token,
            step_seconds=times.step,
            output_length=self.output_length,
            learned=self.request.learned,
        )
        max_ttft_ms = self.request.max_ttft_ms
        self.scheduler.max_ttft = None if max_ttft_ms is None else max_ttft_ms / 1e3
        prompt_length = sum(map(len, prompts)) / len(prompts)
        # A first token takes no step of its own, unless it comes from a pass that also steps the other rows.
        steps = self.output_length - (not self._mixes)
        batch_seconds = rows * prompt_length * times.prompt_token + times.step * steps
        return Ready(
            task="generate",
            setup=race.chosen.label(),
            rows=rows,
            cache_tokens=self.scheduler.cache_tokens,
            positions=self.generator.longest,
            resident_bytes=self._resident_bytes(),
            chats=bool(self.generator.prompts.tokenizer.chat_template),
            replaces_template=self._template.replaces,
            lost_adapters=self._lost_adapters,
            seconds=self.seconds,
            predicted_capacity=self._predict_capacity(race),
            capacity=rows / batch_seconds,
            ttft_ms=1e3 * times.first_token,
            tpot_ms=1e3 * times.step,
        )

    def _check_adapters(self) -> None:
        """Raise RequestError for adapters that cannot be computed, before a race that takes minutes."""
        if not self.request.takes_adapters:
            return
        source = self.generator.source
        if self.generator.task != "generate":
            raise RequestError(
                f"{source.reference!r} is an encoder-decoder, and adapters are computed beside causal language models only; "
                "merge the adapter into it (upshift merge)"
            )
        from upshift.serving.engine.adapters import check_fits

        for folder in self.request.adapters.values():
            check_fits(source, Path(folder))

    def _load_decoder(self, race: Race) -> Any:
        """Return the loaded engine, with all adapters of the request if there are any."""
        if not self.request.takes_adapters:
            return self.generator.decoder
        from upshift.serving.engine.adapters import AdapterDecoder

        decoder: Any = self.generator.decoder
        if race.divided is not None:
            raise RequestError(f"adapters are computed beside models in memory only ({race.divided}); give more memory")
        self._adapters = AdapterDecoder(decoder, self.generator.source)
        for name, folder in self.request.adapters.items():
            self._adapters.load(name, Path(folder))
        return self._adapters

    @property
    def _engine(self) -> object:
        """Return the loaded engine, of whole requests or of single tokens."""
        return self.generator.text_engine or self.generator.decoder

    @property
    def _mixes(self) -> bool:
        """Return whether a pass computes prompts beside the next tokens of other texts."""
        return self.generator.text_engine is not None or self.generator.decoder.mixes

    def _measure(self, race: Race, prompts: list[list[int]], rows: int, cache_tokens: int | None) -> PassTimes:
        """Make the scheduler of the loaded engine. Return the times of the engine's passes."""
        estimator = TtftEstimator(token_seconds=0.0, step_seconds=0.0, output_length=0)
        max_waiting = self.request.max_waiting
        engine = self.generator.text_engine
        if engine is not None:
            self.scheduler: RequestQueue[Any] = TextScheduler(engine, rows, cache_tokens, estimator, max_waiting=max_waiting)
            return measure_texts(engine, prompts, rows)
        scheduler = Scheduler(self._load_decoder(race), rows, cache_tokens, estimator, max_waiting=max_waiting)
        if self._adapters is not None:
            scheduler.assign_adapters = self._adapters.assign
        self.scheduler = scheduler
        return measure_passes(scheduler, prompts, self.generator.prompts.tokenizer, rows)

    def _predict_capacity(self, race: Race) -> float | None:
        """Return the requests per second that follow from the race's times, or None without such times."""
        chosen_run = next((run for run in race.runs if run.setup == race.chosen), None)
        if chosen_run is None or not chosen_run.first_seconds or not chosen_run.step_seconds:
            return None
        return race.chosen.batch / (chosen_run.first_seconds + chosen_run.step_seconds * (self.output_length - 1))

    def _cache_tokens(self) -> int | None:
        """Return the tokens that the cache holds, or None if that is unknown. Replicas on a CPU share its memory."""
        if self.generator.text_engine is not None:
            return self.generator.text_engine.cache_tokens
        cache_tokens = self.generator.cache_tokens()
        if cache_tokens is not None and self.generator.host.device == "cpu":
            return cache_tokens // self.request.replicas
        return cache_tokens

    def answer(self, message: Request | Cancel | EngineEnded | ReadPrompt) -> list[Value]:
        """Take a message. Return what can be answered at once: tokens, a carried-out order, or a refusal.

        Raise an error that is a message."""
        if isinstance(message, EngineEnded):
            raise message
        if isinstance(message, LoadAdapter | UnloadAdapter):
            return [self._change_adapters(message)]
        assert not isinstance(message, Embed), "the server sends them to encoders"
        if isinstance(message, ReadPrompt):
            return self._end_reading(message)
        if self._prompt_thread is not None and isinstance(message, Generate | Tokenize) and takes_long(message):
            refused = self._begin_reading(message, self._prompt_thread)
            return [] if refused is None else [refused]
        if isinstance(message, Tokenize | Detokenize | DescribeTokenizer):
            return token_replies(message, self.generator.prompts.tokenizer, self._tokenize_chat, self.generator.vocabulary)
        refused = self.take(message)
        return [] if refused is None else [refused]

    def _change_adapters(self, order: LoadAdapter | UnloadAdapter) -> Done | Refused:
        try:
            if self._adapters is None:
                raise RequestError("this server takes no adapters; start it with --adapter-folder")
            if isinstance(order, LoadAdapter):
                self._adapters.load(order.name, Path(order.folder))
            elif self._lost_adapters.pop(order.name, None) is None:
                self._adapters.unload(order.name)
        except Exception as error:  # from the files of the adapter
            return Refused.from_error(order.id, error)
        return Done(id=order.id)

    def _tokenize_chat(self, request: Tokenize) -> list[int]:
        self._pictures.check(request)
        return self._read_prompt(request)

    def _begin_reading(self, request: Generate | Tokenize, thread: PromptThread) -> Refused | None:
        """Begin to read a prompt in the thread for it. Return the refusal of a request that is rejected at once."""
        try:
            self._pictures.check(request)
        except RequestError as error:
            return Refused.from_error(request.id, error)
        waited = 0.0 if isinstance(request, Tokenize) or request.arrival is None else time.perf_counter() - request.arrival
        refused = self.scheduler.begin_reading(request.id, waited)
        if refused is None:
            thread.begin(request)
        return refused

    def _end_reading(self, read: ReadPrompt) -> list[Value]:
        """Go on with a request whose prompt was read, unless it was canceled."""
        request = read.request
        if not self.scheduler.end_reading(request.id, read.seconds):
            return []
        if isinstance(read.read, Exception):
            return [Refused.from_error(request.id, read.read)]
        if isinstance(request, Tokenize):
            return read.read
        refused = self.take(request, read.read)
        return [] if refused is None else [refused]

    def take(self, message: Generate | Cancel, prompt: list[int] | None = None) -> Refused | None:
        """Add a request to the queue, or cancel one. Return the refusal of a request that is rejected at once.

        ``prompt`` has the token ids if they were read before."""
        if isinstance(message, Cancel):
            self.scheduler.cancel(message.id)
            self._open_requests.pop(message.id, None)
            return None
        try:
            with panics_as_errors():
                sequence = self._make_sequence(message, prompt)
                adapter = self._find_adapter(message.adapter)
                arrival = time.perf_counter() if message.arrival is None else message.arrival
                ticket = Ticket(message.id, sequence, arrival, is_conversation=is_chat(message.prompt), top=message.top)
                ticket.prompt_top = message.prompt_top
                ticket.adapter = adapter
                opened = self._open_request(message, ticket)
                refused = self.scheduler.add(ticket)
        except Exception as error:  # from the request's own template, text or options
            return Refused.from_error(message.id, error)
        if refused is None:
            self._open_requests[message.id] = opened
        return refused

    def _open_request(self, message: Generate, ticket: Ticket) -> OpenRequest:
        """Return what turns the tokens of a request into its answer."""
        sequence = ticket.sequence
        calls, reasoning = self._open_calls(message), self._open_reasoning(message, sequence.prompt)
        markers = "" if calls is None else self._tools.markers
        markers += "" if reasoning is None or self._reader.reasoning_form is None else self._reader.reasoning_form.markers
        decode = self._tools.decoder(self._stream_prompts.tokenizer, markers) if markers else self._stream_prompts.decode
        stops, turn_end = sequence.options.stop_strings, self._template.end_text
        stream = TextStream(decode, stops, shows_stop=message.shows_stop_string, turn_end=turn_end)
        unsent_ids = sequence.prompt[:1] if sequence.scores_prompt else []
        token_bytes = self._grammars.token_bytes
        return OpenRequest(ticket, stream, token_bytes, calls, reasoning, unsent_ids, message.with_token_ids)

    def _find_adapter(self, name: str | None) -> str | None:
        """Return the key of an adapter. Raise RequestError for an unknown name."""
        if name is None:
            return None
        if name in self._lost_adapters:
            raise RequestError(f"the adapter {name!r} was lost when the engine restarted: {self._lost_adapters[name]}")
        if self.generator.text_engine is not None and name in self.request.adapters:
            return self.request.adapters[name]
        if self._adapters is None:
            raise RequestError(f"the adapter {name!r} is not loaded; ask for the model alone")
        return self._adapters.key_of(name)

    def _open_reasoning(self, request: Generate, prompt: list[int]) -> ReasoningStream | None:
        """Return the stream of the reasoning in an answer, or None if there is none."""
        form = self._reader.reasoning_form if is_chat(request.prompt) else None
        is_open = None if form is None else self._reader.begins_reasoning(prompt)
        return None if form is None or is_open is None else ReasoningStream(form, is_open=is_open)

    def _open_calls(self, request: Generate) -> CallStream | None:
        """Return the stream of the calls in an answer, or None if the request gives no tools."""
        if request.tools is None or self._tools.format is None:
            return None
        return CallStream(self._tools.format, schemas_of_tools(request.tools), request.max_calls)

    def run_pass(self) -> list[NewToken]:
        """Run one pass of the engine. Return the new tokens of the open requests."""
        new_tokens: list[NewToken] = []
        for ticket, token in self.scheduler.step():
            request = self._open_requests.get(ticket.id)
            if request is None:
                continue
            sequence = ticket.sequence
            new_tokens.append(
                NewToken(request, token, sequence.ending, len(sequence.tokens) == 1, ticket.logprob, sequence.is_scoring)
            )
            if ticket.sequence.ending is not None:
                del self._open_requests[ticket.id]
        if self._adapters is not None:
            self._adapters.remove_unused(ticket.adapter for ticket in self.scheduler.tickets)
        return new_tokens

    def take_failures(self) -> list[Refused]:
        """Return the refusals of the requests for which the last pass could not choose a token, and forget them."""
        failed = self.scheduler.failed
        self.scheduler.failed = []
        for ticket, _ in failed:
            self._open_requests.pop(ticket.id, None)
        return [Refused.from_error(ticket.id, error) for ticket, error in failed]

    @property
    def is_busy(self) -> bool:
        return self.scheduler.is_busy

    def watch(self, inbox: queue.Queue[Any]) -> None:
        """Start the threads that put messages into the inbox, beside those of clients.

        One thread reads the prompts with pictures, and the long ones, while the running answers go on. If the engine has
        processes of its own, another thread puts in an error when one of them ends, so that this process ends, too."""
        watch_processes(self._engine, inbox.put)
        self._prompt_thread = start_prompt_thread(
            self.generator.prompts,
            self._read_prompt,
            inbox.put,
            self.scheduler.is_reading,
            allow_special=self.request.allow_special,
            vocabulary=self.generator.vocabulary,
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(
            live=len(self.scheduler.live) + len(self.scheduler.apart),
            waiting=len(self.scheduler.waiting) + len(self.scheduler.reading),
            resident_bytes=self._resident_bytes(),
            learned=self.scheduler.estimator.learned,
        )

    def trim_heap(self) -> None:
        """Return free memory to the system if the process has grown. Reading one large JSON schema leaves 30 MB of it."""
        if resident_bytes() > self._trimmed_bytes + TRIM_BYTES:
            trim_heap()
            self._trimmed_bytes = resident_bytes()

    def _resident_bytes(self) -> int:
        """Return the bytes that this process occupies, with those of the engine's own processes."""
        return resident_bytes() + own_bytes(self._engine)

    def _options(self, arguments: Mapping[str, Any]) -> GenerationOptions:
        """Return the options of a request: its own, then those of the server's ``--set``, then those of the model's files."""
        requested = {name: value for name, value in arguments.items() if value is not None}
        defaults = self.request.options
        if any(name in requested for name in LENGTHS):
            defaults = {name: value for name, value in defaults.items() if name not in LENGTHS}
        return self.generator.options(**{**defaults, **requested})

    def _limit_answer(self, ids: list[int], options: GenerationOptions, default: int | None) -> GenerationOptions:
        """Return the options of a request that limits no answer.

        The limit is that of ``--set``, else ``default``. Without a default it is the server's, or fewer tokens if the model's
        files say so. No limit exceeds the positions that the prompt leaves."""
        allowed = DEFAULT_ANSWER_TOKENS if default is None else default
        server_limits = any(self.request.options.get(name) is not None for name in LENGTHS)
        file_limits = default is None and (options.max_new_tokens is not None or options.max_length is not None)
        if server_limits or file_limits:
            limit = self.generator.limit_options(ids, options, "the prompt", serves=True).new_tokens
            allowed = limit if server_limits else min(limit, allowed)
        positions_left = self.generator.positions_left(ids)
        if positions_left is not None:
            allowed = min(allowed, positions_left)
        return options.changed(max_new_tokens=max(allowed, 1), max_length=None)

    def _make_sequence(self, request: Generate, prompt: list[int] | None = None) -> GeneratedSequence:
        """Return the sequence for a request. Raise RequestError for a prompt or an option that is not possible.

        ``prompt`` has the token ids if they were read before."""
        generator = self.generator
        if prompt is None:
            self._pictures.check(request)
            prompt = self._read_prompt(request)
        ids = cut_prompt(request, prompt, self.generator.longest, generator.prompts.tokenizer)
        check_token_ids(ids, generator.vocabulary)
        options = self._options(request.options)
        if request.options.get("max_new_tokens") is None:
            options = self._limit_answer(ids, options, request.default_tokens)
        options = self._end_tokens(request, options)
        self._check_context(ids, options)
        if request.top is not None or request.prompt_top is not None:
            self._grammars.check()
        if request.prompt_top is not None and generator.start is not None:
            raise RequestError(
                "the model reads its prompt by an encoder, which gives its tokens no log-probabilities; ask without"
            )
        grammar = self._make_guide(request, ids, options)
        if generator.text_engine is not None:
            check_request(options, grammar)
        return GeneratedSequence(
            0,
            ids,
            options,
            generator.prompts.tokenizer,
            start=generator.start,
            grammar=grammar,
            scores_prompt=request.prompt_top is not None,
        )

    def _read_prompt(self, request: Generate | Tokenize, reader: PromptReader | None = None) -> list[int]:
        """Return the token ids of a prompt, by the reader of another thread if it is given."""
        reader = reader or self._reader
        prompt: Any = self._pictures.read_files(request.prompt)
        if is_token_ids(prompt):
            return list(prompt)
        if not has_media(prompt):
            return reader.read(prompt, request.tools, request.template, request.suffix if isinstance(request, Generate) else None)
        key = json.dumps([prompt, request.tools, request.template.to_json()])  # each choice of an answer has the same prompt
        return self._processed.find_or_process(key, lambda: reader.read(prompt, request.tools, request.template))

    def _make_guide(self, request: Generate, ids: list[int], options: GenerationOptions) -> TokenGuide | None:
        """Return what limits the tokens of an answer, or None. Reasoning is free, and counts only towards its budget."""
        grammar = self._make_grammar(request)
        budget = request.reasoning_budget
        form = self._reader.reasoning_form if is_chat(request.prompt) else None
        if budget is not None and form is None:
            raise RequestError(
                "thinking_token_budget limits the reasoning, and the chat template of the model shows none; leave it out"
            )
        is_open = None if form is None or (grammar is None and budget is None) else self._reader.begins_reasoning(ids)
        if form is None or is_open is None:
            return grammar
        tokenizer = self.generator.prompts.tokenizer
        return ReasoningGuide(tokenizer, form, is_open=is_open, budget=budget, grammar=grammar, eos_ids=options.eos_token_id)

    def _make_grammar(self, request: Generate) -> Grammar | None:
        """Return the grammar that the answer must match: of a call, of a JSON schema, or of either. None allows any text."""
        if request.tools is not None and (request.forced_tools or request.json_schema is not None):
            assert self._tools.format is not None
            schemas = schemas_of_tools(request.tools)
            named = {name: schemas[name] for name in request.forced_tools or schemas}
            special_ids = self._tools.special_ids
            return self._grammars.from_lark(grammar_of_call(self._tools.format, named, special_ids, request.json_schema))
        if request.regex is not None:
            return self._grammars.from_regex(request.regex)
        if request.choices:
            return self._grammars.from_choices(request.choices)
        if request.lark is not None:
            return self._grammars.from_lark(request.lark, "the grammar")
        return None if request.json_schema is None else self._grammars.from_json_schema(request.json_schema)

    def _end_tokens(self, request: Generate, options: GenerationOptions) -> GenerationOptions:
        """Return the options with the tokens that end the text of this request. Raise RequestError if they are not possible."""
        count = self.generator.vocabulary
        largest = max(request.stop_token_ids, default=0)
        if largest >= count:
            raise RequestError(f"stop_token_ids has {largest}, which is no token of the model; give some of 0 to {count - 1:,}")
        if request.options.get("min_new_tokens") and options.min_new_tokens > options.new_tokens:
            raise RequestError(
                f"min_tokens is {options.min_new_tokens:,}, and the answer has at most {options.new_tokens:,} tokens; give a "
                "greater max_tokens, or a smaller min_tokens"
            )
        if is_chat(request.prompt) and not request.ignore_eos:
            options = self._template.end_answer(options)
        model_ids = () if request.ignore_eos else options.eos_token_id
        return options.changed(eos_token_id=tuple(dict.fromkeys((*model_ids, *request.stop_token_ids))))

    def _check_context(self, ids: list[int], options: GenerationOptions) -> None:
        """Raise ContextTooLong, in OpenAI's words, if the model has too few positions for the prompt with its answer."""
        prompt = len(ids)
        answer = options.new_tokens
        exceeded = self.generator.exceeded_positions(ids, answer)
        if exceeded is not None:
            limit, by_prompt = exceeded
            context = f"This model's maximum context length is {limit} tokens. However, "  # clients read these numbers
            if by_prompt:
                raise ContextTooLong(f"{context}your prompt has {prompt} tokens. Please reduce the length of the prompt.")
            raise ContextTooLong(
                f"{context}you requested {prompt + answer} tokens ({prompt} in the prompt, {answer} in the "
                "completion). Please reduce the length of the prompt, or of the completion (max_tokens)."
            )
        try:
            self.generator.check_positions(ids, options, "the prompt", serves=True)
        except RequestError as error:  # the prompt is beyond longrope's border
            raise ContextTooLong(str(error)) from None
