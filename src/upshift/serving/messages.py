"""Define the messages between the server and an engine process. Each message is one line of JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from upshift.errors import EngineFailed, RequestError
from upshift.inference.engine_errors import ComputationFailed, reason_of
from upshift.value import Value

PromptEnding = Literal["answer", "nothing", "open"]  # of a chat: an answer begins, nothing follows, or the last message goes on
Task = Literal["generate", "encode", "score"]
Ending = Literal["stop", "length"]  # as OpenAI's finish_reason
Prompt = str | tuple[int, ...] | tuple[dict[str, Any], ...]  # a text, token ids, or the messages of a chat
EXPECTED_TOKENS = (128, 128)  # tokens of a prompt, and of an answer
MAX_ERROR_CHARACTERS = 1000  # of an error that is sent to a client
MAX_LINE_BYTES = 2**20  # of a message from an engine: one vector, or the text of a few tokens
RACING = "racing and loading"  # a part of a start
CONTEXT_CODE = "context_length_exceeded"  # OpenAI's code for a prompt, or prompt and answer, that are too long


def cut_error(text: str) -> str:
    """Return the beginning of an error's text, which may quote a request of any length."""
    return text[:MAX_ERROR_CHARACTERS]


ErrorText = Annotated[str, AfterValidator(cut_error)]


class ContextTooLong(RequestError):
    """The prompt, or the prompt with its answer, is longer than the model's context."""


class LearnedLoad(Value):
    """The experience of an engine with its requests. The engine that starts in its place goes on from it."""

    answer_lengths: tuple[int, ...] = Field(description="of the newest answers, in tokens")
    ttft_ratios: tuple[float, ...] = Field(description="of real to estimated times to the first token, of the newest requests")


class EngineRequest(Value):
    """The settings that an engine starts with.

    The race and the warm-up run on the prompts of the file ``prompts``. Without a file, they run on random prompts of
    ``prompt_length`` tokens."""

    model: str
    quality: str = "exact"
    engine: str | None = None
    engine_python: str | None = Field(None, description="the Python interpreter of an environment that has vLLM")
    engine_arguments: dict[str, Any] = Field({}, description="engine arguments of vLLM that the user fixes, by name")
    tensor_parallel: int = Field(1, gt=0, description="devices that share each layer; above 1 the engine is torch")
    max_ttft_ms: float | None = Field(None, description="promise: longest time to the first token of an admitted request")
    max_tpot_ms: float | None = Field(None, description="promise: longest mean time of a further token")
    concurrency: int = Field(8, gt=0, description="maximum number of sequences that are computed at once")
    prompts: str | None = Field(None, description="a file of expected prompts")
    prompt_length: int | None = Field(None, gt=0, description="expected tokens; None: EXPECTED_TOKENS, or what the model allows")
    output_length: int | None = Field(None, gt=0)
    max_waiting: int = Field(256, gt=0)
    generation_options: tuple[str, ...] = Field((), description="options of the user that an encoder would not use")
    max_memory: tuple[str, ...] = ()
    race_seconds: float | None = None
    options: dict[str, Any] = Field({}, description="GenerationOptions of requests that do not give them, by name")
    chat_template: str | None = Field(None, description="the text of a template in place of the tokenizer's own")
    allow_special: bool = Field(False, description="control tokens in the texts of a chat's messages stay control tokens")
    image_folder: str | None = Field(None, description="whose pictures a message may name by file: URLs; None allows none")
    takes_adapters: bool = Field(False, description="the engine is one that computes adapters")
    adapters: dict[str, str] = Field({}, description="folders of the adapters to load, by their names")
    is_restart: bool = Field(False, description="the engine was ready before: adapters that are gone do not stop it")
    learned: LearnedLoad | None = Field(None, description="by the engine before this one")
    replica: int = Field(0, ge=0)
    replicas: int = Field(1, gt=0, description="engines of this model; they share the cores, or use GPUs of their own")
    modules: tuple[str, ...] = Field((), description="a spare process imports these, and then waits for a second request")


class TemplateOptions(Value):
    """The options of a request for the chat template. ``variables`` is a JSON object, for the reason in ``Generate``."""

    variables: str = "{}"
    effort: str | None = Field(None, description="of reasoning")
    thinking: bool | None = Field(None, description="whether to reason; None: as the template does by itself")
    ending: PromptEnding = "answer"


class Generate(Value):
    """A request for one text.

    ``options`` holds GenerationOptions by name. ``json_schema`` is the schema that the answer must match. It is a
    string because pydantic reads at most 200 nested levels, and so is ``tools``, a list. ``top`` is the number of likeliest
    tokens to report beside each chosen token. None reports no scores."""

    kind: Literal["generate"] = "generate"
    id: int = 0  # the engine numbers them
    prompt: Prompt
    suffix: str | None = Field(None, description="the text that follows the answer, where the prompt is a text")
    adapter: str | None = Field(None, description="the name of an adapter")
    options: dict[str, Any] = {}
    default_tokens: int | None = Field(None, description="of an answer, if neither the request nor the server's --set limits it")
    ignore_eos: bool = Field(False, description="the model's own tokens that end a text do not end this one")
    stop_token_ids: tuple[int, ...] = Field((), description="further tokens that end the text")
    json_schema: str | None = None
    tools: str | None = Field(None, description="tools in OpenAI's form that the answer may call")
    forced_tools: tuple[str, ...] = Field((), description="names of tools: the answer is a call of one of them")
    max_calls: int | None = Field(None, description="of tools in the answer")
    top: int | None = None
    prompt_top: int | None = Field(None, description="as top, for each token of the prompt")
    regex: str | None = Field(None, description="a regular expression that the whole answer must match")
    choices: tuple[str, ...] = Field((), description="texts of which the answer must be one")
    lark: str | None = Field(None, description="a grammar of llguidance that the answer must match")
    template: TemplateOptions = TemplateOptions()
    reasoning_budget: int | None = Field(None, description="tokens of the reasoning")
    max_prompt_tokens: int | None = Field(None, description="to which a longer prompt is cut; -1: what leaves room for an answer")
    truncation_side: Literal["left", "right"] | None = Field(None, description="at which it is cut; None: that of the tokenizer")
    shows_stop_string: bool = Field(False, description="whether the text has the stop string that ended it")
    with_token_ids: bool = Field(False, description="whether the pieces have the token ids of the prompt and of the answer")
    arrival: float | None = Field(None, description="when it came, by the clock of the engine's process, which sets it")


class Embed(Value):
    """A request for vectors. Each vector is cut to its first ``dimensions`` dimensions. None keeps all dimensions.

    A cross-encoder gives a vector of one score for each pair of texts. ``raw`` leaves out its activation."""

    kind: Literal["embed"] = "embed"
    id: int = 0  # the engine numbers them
    texts: tuple[str | tuple[int, ...], ...] = Field(description="texts, or their token ids")
    dimensions: int | None = None
    pairs: tuple[tuple[str, str], ...] = Field((), description="for a cross-encoder, in place of texts")
    raw: bool = False
    max_document_tokens: int | None = Field(None, ge=1, description="of the second text of a pair, or of texts after the first")

    @property
    def inputs(self) -> tuple[str | tuple[int, ...] | tuple[str, str], ...]:
        """Return the texts or the pairs, each of which gets a vector."""
        return self.texts or self.pairs


class Tokenize(Value):
    """A request for the token ids of a prompt. ``template`` and ``tools`` are for a chat."""

    kind: Literal["tokenize"] = "tokenize"
    id: int = 0  # the engine numbers them
    prompt: str | tuple[dict[str, Any], ...]
    add_special_tokens: bool = True
    tools: str | None = None
    template: TemplateOptions = TemplateOptions()
    with_texts: bool = Field(False, description="whether the reply has the texts of the tokens, too")


class DescribeTokenizer(Value):
    """A request for the settings of the tokenizer, as a JSON object in the form of a text."""

    kind: Literal["describe_tokenizer"] = "describe_tokenizer"
    id: int = 0  # the engine numbers them


class Detokenize(Value):
    """A request for the text of token ids."""

    kind: Literal["detokenize"] = "detokenize"
    id: int = 0  # the engine numbers them
    tokens: tuple[int, ...]


class LoadAdapter(Value):
    """An order to load the adapter of a folder under a name."""

    kind: Literal["load_adapter"] = "load_adapter"
    id: int = 0  # the engine numbers them
    name: str
    folder: str


class UnloadAdapter(Value):
    """An order to forget an adapter. Requests that it computes now go on."""

    kind: Literal["unload_adapter"] = "unload_adapter"
    id: int = 0  # the engine numbers them
    name: str


class Cancel(Value):
    """An order to stop a request because its client no longer waits for the answer."""

    kind: Literal["cancel"] = "cancel"
    id: int


class Ready(Value):
    """The report of an engine that is ready for requests.

    ``seconds`` holds the times of importing, racing, loading and proving. ``capacity`` is in requests per second, for
    requests of the expected lengths."""

    kind: Literal["ready"] = "ready"
    task: Task
    setup: str
    replicas: int = Field(1, description="number of engines that this report covers")
    rows: int = Field(description="sequences that are computed at once")
    cache_tokens: int | None = Field(description="capacity of the cache for all sequences together; None: unknown")
    positions: int | None = Field(description="maximum tokens of a prompt with its answer")
    resident_bytes: int
    chats: bool = Field(True, description="whether the model has a chat template")
    replaces_template: bool = Field(False, description="--chat-template is used in place of the tokenizer's own")
    lost_adapters: dict[str, str] = Field({}, description="why adapters were not loaded again after a restart, by their names")
    seconds: dict[str, float]
    late_imports: int = Field(0, description="modules that the process imported after it had its request")
    predicted_capacity: float | None = None
    capacity: float | None = None
    ttft_ms: float | None = Field(None, description="measured time to the first token of a prompt that runs alone")
    tpot_ms: float | None = Field(None, description="measured time of a further token while all rows are used")


class Imported(Value):
    """The names of the modules that an engine has imported, for its spare process to import."""

    kind: Literal["imported"] = "imported"
    modules: tuple[str, ...]


class SpareReady(Value):
    """The report of a spare process that has imported the modules of an engine, and waits."""

    kind: Literal["spare"] = "spare"
    resident_bytes: int


class Failed(Value):
    """The report of an engine that cannot start. ``exit_code`` is the exit code for the command line."""

    kind: Literal["failed"] = "failed"
    why: ErrorText
    exit_code: int


class TokenScore(Value):
    """The log-probability of a token.

    ``logprob`` comes from the model's logits before temperature, penalties and grammars are applied. ``top`` holds the
    likeliest tokens at the same position."""

    spelled: tuple[int, ...] = Field(description="bytes of the token, possibly a part of a character")
    logprob: float | None = Field(description="None for the first token of a prompt, which nothing comes before")
    top: tuple[TokenScore, ...] = ()
    token: int = Field(0, description="id; of the tokens of a prompt, and of those beside them")
    rank: int = Field(1, description="among all tokens at this position; likewise")

    @property
    def text(self) -> str:
        r"""Return the token as text. Write a part of a character in OpenAI's form: bytes:\xe2\x80."""
        try:
            return bytes(self.spelled).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.spelled)


class ToolCall(Value):
    """A call of a tool: its index in the answer, the name of the tool, and the arguments as a JSON object."""

    index: int
    name: str
    arguments: str


class Piece(Value):
    """The next part of an answer's text.

    ``reasoning`` comes before the text and is no part of it. ``tokens`` is the number of tokens in this piece, and
    ``reasoning_tokens`` of those in the reasoning. ``cached_tokens`` is the number of prompt tokens that were reused from the
    cache. ``calls`` holds the calls of tools that are complete with this piece. ``scores`` holds the tokens' log-probabilities
    if the request asks for them, without the token that ends the text, and ``prompt_scores`` those of the prompt. ``ending`` is
    set on the last piece only. ``stop_string`` is the stop string that ended the text, or None if something else did."""

    kind: Literal["piece"] = "piece"
    id: int
    text: str
    reasoning: str = ""
    tokens: int
    reasoning_tokens: int = 0
    prompt_tokens: int
    cached_tokens: int = 0
    calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = Field((), description="of the tokens in this piece, if the request asks for them")
    prompt_ids: tuple[int, ...] = Field((), description="of the whole prompt, on the first piece, likewise")
    scores: tuple[TokenScore, ...] = ()
    prompt_scores: tuple[TokenScore, ...] = ()
    ending: Ending | None = None
    stop_string: str | None = None

    @property
    def last(self) -> bool:
        return self.ending is not None

    @property
    def is_empty(self) -> bool:
        """Return whether the piece tells a client nothing, as while a call or a stop string is held back."""
        return not (self.text or self.reasoning or self.calls or self.scores or self.token_ids or self.ending)


class Vector(Value):
    """The vector of one text. Vectors come in the order of the request's texts.

    ``row`` is the fp32 vector in base64, the form that clients may ask for. ``tokens`` is the number of tokens of the
    text."""

    kind: Literal["vector"] = "vector"
    id: int
    row: str
    tokens: int
    last: bool


class Tokens(Value):
    """The next token ids of a prompt, and their texts if the request asks for them."""

    kind: Literal["tokens"] = "tokens"
    id: int
    ids: tuple[int, ...]
    texts: tuple[str, ...] = ()
    last: bool


class DecodedText(Value):
    """The next part of the text of token ids."""

    kind: Literal["decoded"] = "decoded"
    id: int
    text: str
    last: bool


class Done(Value):
    """The answer to an order that has been carried out."""

    kind: Literal["done"] = "done"
    id: int
    last: bool = True


class Refused(Value):
    """The answer to a request that the engine rejects or that failed.

    ``status`` is the HTTP status: 400, 413, 429 or 500. ``code`` is OpenAI's name of the error, where it has one.
    ``failure`` is the type of the exception. Logs contain only this type, because the message may quote the request."""

    kind: Literal["refused"] = "refused"
    id: int
    status: int
    why: ErrorText
    code: str | None = None
    retry_after: float | None = Field(None, description="seconds")
    failure: str | None = None

    @classmethod
    def from_error(cls, id: int, error: Exception) -> Refused:
        """Return the answer to a request that failed with ``error``: alone, or with the engine if that is an EngineFailed."""
        if isinstance(error, ContextTooLong):
            return cls(id=id, status=400, why=str(error), code=CONTEXT_CODE)
        if isinstance(error, RequestError):
            return cls(id=id, status=400, why=str(error))
        cause = error.__cause__ if isinstance(error, EngineFailed) and isinstance(error.__cause__, Exception) else error
        failure = cause.kind if isinstance(cause, ComputationFailed) else type(cause).__name__
        if isinstance(error, EngineFailed):
            why = f"the engine failed, and starts again: {reason_of(cause)}"
        else:
            reason = cause.reason if isinstance(cause, ComputationFailed) else f"{failure}: {cause}"
            why = f"the engine failed at this request alone: {reason}"
        return cls(id=id, status=500, why=why, failure=failure)


class Heartbeat(Value):
    """A sign that the engine runs, with the numbers of its live and waiting sequences."""

    kind: Literal["beat"] = "beat"
    live: int
    waiting: int
    resident_bytes: int
    learned: LearnedLoad | None = None


Request = Generate | Embed | Tokenize | Detokenize | DescribeTokenizer | LoadAdapter | UnloadAdapter
Reply = Piece | Vector | Tokens | DecodedText | Done
ToEngine = Annotated[Request | Cancel, Field(discriminator="kind")]
EngineMessage = Ready | Imported | SpareReady | Failed | Reply | Refused | Heartbeat
FromEngine = Annotated[EngineMessage, Field(discriminator="kind")]
TO_ENGINE: TypeAdapter[Request | Cancel] = TypeAdapter(ToEngine)
FROM_ENGINE: TypeAdapter[EngineMessage] = TypeAdapter(FromEngine)
