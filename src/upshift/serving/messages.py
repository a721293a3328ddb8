"""Define the messages between the server and an engine's process: one line of JSON each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from upshift.errors import RequestError
from upshift.value import Value

Task = Literal["generate", "encode"]
Ending = Literal["stop", "length"]  # as OpenAI's finish_reason
MOST_WORDS = 1000  # of an error that is passed on
Prompt = str | tuple[int, ...] | tuple[dict[str, str], ...]  # a text, token ids, or the messages of a chat


EXPECTED = (128, 128)  # tokens of a prompt, and of an answer


class EngineRequest(Value):
    """The settings that an engine starts with. The race and the proof run on ``prompts``, or else on made-up prompts
    of ``prompt_length``."""

    model: str
    quality: str = "exact"
    engine: str | None = None
    max_ttft_ms: float | None = Field(None, description="promised: an admitted request's first token comes within")
    max_tpot_ms: float | None = Field(None, description="promised: a token more of each sequence, in the mean")
    concurrency: int = Field(8, gt=0, description="most sequences at once")
    prompts: str | None = Field(None, description="a file of what to expect")
    prompt_length: int | None = Field(None, gt=0, description="tokens to expect; None: EXPECTED, or what the model has room for")
    output_length: int | None = Field(None, gt=0)
    max_waiting: int = Field(256, gt=0)
    max_memory: tuple[str, ...] = ()
    race_seconds: float | None = None
    replica: int = Field(0, ge=0)
    replicas: int = Field(1, gt=0, description="engines of this model, which share the cores, or have a GPU each")


class Generate(Value):
    """A request for one text.

    ``options`` are GenerationOptions by their names. ``json_schema`` is the schema that the answer must keep to. It
    is a text, because pydantic reads no more than 200 levels. ``top`` is the number of likeliest tokens that are
    reported beside each chosen token. None reports no scores at all."""

    kind: Literal["generate"] = "generate"
    id: int = 0  # the engine numbers them
    prompt: Prompt
    options: dict[str, Any] = {}
    json_schema: str | None = None
    top: int | None = None


class Embed(Value):
    """A request for vectors. ``dimensions`` is how many of the first dimensions each vector keeps. None keeps all."""

    kind: Literal["embed"] = "embed"
    id: int = 0  # the engine numbers them
    texts: tuple[str, ...]
    dimensions: int | None = None


class Cancel(Value):
    """A request is canceled because nobody waits for its answer any more."""

    kind: Literal["cancel"] = "cancel"
    id: int


class Ready(Value):
    """The engine is ready. ``seconds`` are of importing, racing, loading and proving. ``capacity`` is in requests a
    second of the expected lengths."""

    kind: Literal["ready"] = "ready"
    task: Task
    setup: str
    replicas: int = Field(1, description="engines that this is said of")
    rows: int = Field(description="sequences at once")
    cache_tokens: int | None = Field(description="that live and reserved sequences may have together; None: no limit is known")
    positions: int | None = Field(description="tokens of a prompt and its answer")
    resident_bytes: int
    seconds: dict[str, float]
    predicted_capacity: float | None = None
    capacity: float | None = None
    ttft_ms: float | None = Field(None, description="of a prompt alone, measured")
    tpot_ms: float | None = Field(None, description="with all rows filled, measured")


class Failed(Value):
    """The engine cannot start. ``exit_code`` is the exit code of the command line."""

    kind: Literal["failed"] = "failed"
    why: str
    exit_code: int


class TokenScore(Value):
    """The log-probability of a token. ``logprob`` comes from the model's own logits, before temperature, penalties
    and forms. ``top`` holds the likeliest tokens in its place."""

    spelled: tuple[int, ...] = Field(description="its bytes, which may be a part of a character")
    logprob: float
    top: tuple[TokenScore, ...] = ()

    @property
    def text(self) -> str:
        r"""Return the token as text. A part of a character is written as OpenAI writes it: bytes:\xe2\x80."""
        try:
            return bytes(self.spelled).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.spelled)


class Piece(Value):
    """A further part of an answer's text.

    ``tokens`` counts those of this piece. ``cached_tokens`` counts those of the prompt that were not computed for
    this request. ``scores`` are those of the tokens, if the request asks for them, without the token that ends the
    text. ``ending`` marks the last piece."""

    kind: Literal["piece"] = "piece"
    id: int
    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    scores: tuple[TokenScore, ...] = ()
    ending: Ending | None = None


class Vector(Value):
    """The vector of one text, in the order of the request's texts. ``row`` is fp32 in base64, as clients may ask for
    it. ``tokens`` counts those of the text."""

    kind: Literal["vector"] = "vector"
    id: int
    row: str
    tokens: int
    last: bool


class Refused(Value):
    """A request that is not done. ``status`` is the HTTP status: 400, 413, 429 or 500. ``failure`` is the type of the
    exception, which is all that a log may say."""

    kind: Literal["refused"] = "refused"
    id: int
    status: int
    why: str
    retry_after: float | None = Field(None, description="seconds")
    failure: str | None = None

    @classmethod
    def failed(cls, id: int, error: Exception) -> Refused:
        """Return the refusal of a request that failed alone: the other requests go on."""
        if isinstance(error, RequestError):
            return cls(id=id, status=400, why=str(error))
        name = type(error).__name__
        return cls(id=id, status=500, why=f"the engine failed at this request alone: {name}: {error}"[:MOST_WORDS], failure=name)


class Beat(Value):
    """A sign that the engine runs, with the number of live and waiting sequences."""

    kind: Literal["beat"] = "beat"
    live: int
    waiting: int
    resident_bytes: int


ToEngine = Annotated[Generate | Embed | Cancel, Field(discriminator="kind")]
FromEngine = Annotated[Ready | Failed | Piece | Vector | Refused | Beat, Field(discriminator="kind")]
TO_ENGINE: TypeAdapter[Generate | Embed | Cancel] = TypeAdapter(ToEngine)
FROM_ENGINE: TypeAdapter[Ready | Failed | Piece | Vector | Refused | Beat] = TypeAdapter(FromEngine)
