"""What the server and an engine's process say to each other: a line of JSON each."""

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
    """What an engine is started with. The race and the proof run on ``prompts``, else on made-up ones of ``prompt_length``."""

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
    """``options``: GenerationOptions by their names. ``json_schema``: the answer is JSON that it allows; a text, as pydantic
    reads no more than 200 levels. ``top``: so many of the likeliest tokens are told of beside each token that is chosen; None:
    nothing is told of either."""

    kind: Literal["generate"] = "generate"
    id: int = 0  # the engine numbers them
    prompt: Prompt
    options: dict[str, Any] = {}
    json_schema: str | None = None
    top: int | None = None


class Embed(Value):
    """``dimensions``: of each vector, the first ones; None: all."""

    kind: Literal["embed"] = "embed"
    id: int = 0  # the engine numbers them
    texts: tuple[str, ...]
    dimensions: int | None = None


class Cancel(Value):
    """Nobody waits for it any more."""

    kind: Literal["cancel"] = "cancel"
    id: int


class Ready(Value):
    """``seconds``: of importing, racing, loading and proving. ``capacity``: requests a second of the expected lengths."""

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
    """It cannot start; ``exit_code``: that of the command line."""

    kind: Literal["failed"] = "failed"
    why: str
    exit_code: int


class TokenScore(Value):
    """``logprob``: by the model's own logits, before temperature, penalties and forms. ``top``: the likeliest in its place."""

    spelled: tuple[int, ...] = Field(description="its bytes, which may be a part of a character")
    logprob: float
    top: tuple[TokenScore, ...] = ()

    @property
    def text(self) -> str:
        """A part of a character as OpenAI writes it: bytes:\\xe2\\x80."""
        try:
            return bytes(self.spelled).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.spelled)


class Piece(Value):
    """More of a text. ``tokens``: of this piece; ``cached_tokens``: of the prompt, that were not computed for it; ``scores``: of
    the tokens, where they were asked for, that which ends a text left out; ``ending``: it is the last one."""

    kind: Literal["piece"] = "piece"
    id: int
    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int = 0
    scores: tuple[TokenScore, ...] = ()
    ending: Ending | None = None


class Vector(Value):
    """Of one text, in the order of the request's. ``row``: fp32 in base64, as clients may ask for it; ``tokens``: of the text."""

    kind: Literal["vector"] = "vector"
    id: int
    row: str
    tokens: int
    last: bool


class Refused(Value):
    """A request that is not done, by the status of HTTP that says so: 400, 413, 429 or 500. ``failure``: the type of what it
    raised, which is all that a log may say."""

    kind: Literal["refused"] = "refused"
    id: int
    status: int
    why: str
    retry_after: float | None = Field(None, description="seconds")
    failure: str | None = None

    @classmethod
    def failed(cls, id: int, error: Exception) -> Refused:
        """By its own doing: the others go on."""
        if isinstance(error, RequestError):
            return cls(id=id, status=400, why=str(error))
        name = type(error).__name__
        return cls(id=id, status=500, why=f"the engine failed at this request alone: {name}: {error}"[:MOST_WORDS], failure=name)


class Beat(Value):
    """The engine runs; what it has to do."""

    kind: Literal["beat"] = "beat"
    live: int
    waiting: int
    resident_bytes: int


ToEngine = Annotated[Generate | Embed | Cancel, Field(discriminator="kind")]
FromEngine = Annotated[Ready | Failed | Piece | Vector | Refused | Beat, Field(discriminator="kind")]
TO_ENGINE: TypeAdapter[Generate | Embed | Cancel] = TypeAdapter(ToEngine)
FROM_ENGINE: TypeAdapter[Ready | Failed | Piece | Vector | Refused | Beat] = TypeAdapter(FromEngine)
