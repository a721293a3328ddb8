"""Define the bodies of requests by OpenAI's names: chat completions, completions and embeddings.

A field that is not defined here is an error that names the field."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from upshift.errors import RequestError
from upshift.inference.generation.options import MIN_DIVISOR
from upshift.serving.messages import Generate, Prompt, TemplateOptions, Tokenize
from upshift.serving.protocols.chat_messages import (
    MAX_TOOLS,
    NOT_KEPT,
    AllowedTools,
    Body,
    CheckedBody,
    ForcedTool,
    Function,
    FunctionName,
    Message,
    Tool,
    check_calls,
    prompt_ending,
    template_messages,
)

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class AnswerForm(Body):
    """The form of an answer: any text, any JSON object, or JSON that matches a schema."""

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer, or None if any text is allowed."""
        return None


class TextForm(AnswerForm):
    type: Literal["text"]


class ObjectForm(AnswerForm):
    type: Literal["json_object"]

    @property
    def schema_of_answer(self) -> dict[str, Any]:
        return ANY_OBJECT


class NamedSchema(Body):
    """A named JSON schema. Answers always match it, whether ``strict`` is set or not."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(ANY_OBJECT, alias="schema")
    strict: bool | None = None


class SchemaForm(AnswerForm):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def schema_of_answer(self) -> dict[str, Any]:
        return self.json_schema.schema_


ResponseFormat = Annotated[TextForm | ObjectForm | SchemaForm, Field(discriminator="type")]
TEXT = TextForm(type="text")

MAX_CHOICES = 16
MAX_PROMPTS = 256
MAX_INPUTS = 2048  # texts of a request for embeddings
MAX_LIKELIEST = 20  # tokens that are reported at one position
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKENS = 64
MAX_SHOWN_KEYS = 8  # of a wrong logit_bias
MAX_STOPS = 16  # texts; OpenAI takes 4, and Anthropic more
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
HINT = "taken without effect: models here do not know it"
ONLY_DEFAULT = "not OpenAI's; taken with this value only"
MAX_FORM_CHARACTERS = 2**16
MAX_CHOICE_TEXTS = 1024
Form = Annotated[str, StringConstraints(min_length=1, max_length=MAX_FORM_CHARACTERS)]
Choices = Annotated[list[Form], Field(min_length=1, max_length=MAX_CHOICE_TEXTS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TOKEN_KEY = "^[0-9]{1,9}$"
TokenKey = Annotated[str, StringConstraints(pattern=TOKEN_KEY)]  # keys of JSON are strings
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]

# The checks of the validators below as JSON schemas, for the page at /docs.
TEMPERATURE_SCHEMA: dict[str, Any] = {"not": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": MIN_DIVISOR}}
LOGPROBS_SCHEMA: dict[str, Any] = {
    "if": {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer"}}},
    "then": {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
}


class RequestBody(CheckedBody):
    """The fields of every request of OpenAI's."""

    model: str = Field("", description="one of GET /v1/models; may be left out if there is one")
    user: str | None = Field(None, description=NOT_KEPT)


class StructuredOutputs(Body):
    """The form of an answer, by vLLM's names. Exactly one of them may be given."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = Field(None, description="true: any JSON object")
    regex: Form | None = None
    choice: Choices | None = None
    grammar: Form | None = Field(None, description="in llguidance's variant of Lark")


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="not OpenAI's; with include_usage: each event has the counts so far")
    include_obfuscation: bool = Field(False, description="false: nothing is added to answers")


class SamplingRequest(RequestBody):
    """The fields that chat completions and completions share.

    A ``temperature`` of 0 takes the likeliest token. Without a temperature, the model's generation_config.json
    applies."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, json_schema_extra=TEMPERATURE_SCHEMA)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="not OpenAI's; transformers' name; 0, or -1 as in vLLM, limits nothing")
    min_p: float | None = Field(None, ge=0, le=1, description="likewise")
    repetition_penalty: float | None = Field(None, ge=MIN_DIVISOR, description="likewise")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=MAX_BIASED_TOKENS)] | None = Field(
        None, description="by token ids of the model", json_schema_extra={"propertyNames": {"pattern": TOKEN_KEY}}
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = Field(False, description="not OpenAI's; the text goes on after the tokens with which the model ends it")
    min_tokens: int | None = Field(None, ge=0, description="not OpenAI's; tokens before the text may end")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = Field(
        [], description="not OpenAI's; further tokens that end the text"
    )
    return_token_ids: bool = Field(False, description="not OpenAI's; the answer has the token ids of the prompt and of the text")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST, description="not OpenAI's; likeliest tokens of the prompt")
    return_tokens_as_token_ids: bool = Field(False, description="not OpenAI's; log-probabilities name tokens as token_id:N")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="not OpenAI's; a longer prompt is cut to so many tokens; -1: to those that leave room for one more",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="not OpenAI's; the side at which a prompt is cut; without it, that of the tokenizer"
    )
    include_stop_str_in_output: bool = Field(False, description="not OpenAI's; the text ends with the stop string that ended it")
    structured_outputs: StructuredOutputs | None = Field(None, description="not OpenAI's; the form of the answer")
    guided_json: dict[str, Any] | str | None = Field(None, description="the older name of structured_outputs.json")
    guided_regex: Form | None = Field(None, description="likewise")
    guided_choice: Choices | None = Field(None, description="likewise")
    guided_grammar: Form | None = Field(None, description="likewise")
    metadata: dict[str, str] | None = Field(None, description=NOT_KEPT)
    store: bool | None = Field(None, description=NOT_KEPT)
    service_tier: str | None = Field(None, description=NOT_KEPT)
    prompt_cache_key: str | None = Field(None, description=NOT_KEPT)
    safety_identifier: str | None = Field(None, description=NOT_KEPT)
    prompt_cache_retention: str | None = Field(None, description=NOT_KEPT)
    request_id: str | None = Field(None, description=NOT_KEPT)
    session_id: str | None = Field(None, description=NOT_KEPT)
    # Fields of vLLM's that clients send with the value that changes nothing. Others are errors.
    use_beam_search: Literal[False] = Field(False, description=ONLY_DEFAULT)
    length_penalty: float = Field(1.0, ge=1, le=1, description=ONLY_DEFAULT)
    skip_special_tokens: Literal[True] = Field(True, description=ONLY_DEFAULT)
    spaces_between_special_tokens: Literal[True] = Field(True, description=ONLY_DEFAULT)
    priority: Literal[0] = Field(0, description=ONLY_DEFAULT)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_token_keys(cls, biases: Any) -> Any:
        wrong_keys = [key for key in biases if not re.fullmatch(TOKEN_KEY, key)] if isinstance(biases, dict) else []
        if wrong_keys:
            shown = ", ".join(wrong_keys[:MAX_SHOWN_KEYS])
            raise PydanticCustomError("no_tokens", "{keys} in logit_bias are no token ids; give whole numbers", {"keys": shown})
        return biases

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < MIN_DIVISOR:
            raise PydanticCustomError("too_small", f"{temperature:g} is too small; give 0, or {MIN_DIVISOR:g} to 2")
        return temperature

    def check(self) -> None:
        """Raise RequestError for fields that do not fit together, where the description at /docs cannot say so."""
        names = [name for name, value in self._forms.items() if value is not None and value is not False]
        if self.structured_outputs is not None and not any(name.startswith("structured_outputs") for name in names):
            raise RequestError("structured_outputs is empty; give one of json, json_object, regex, choice and grammar")
        if len(names) > 1:
            raise RequestError(f"{' and '.join(names)} are several forms for one answer; give one of them")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is for streams; set stream to true, or leave it out")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs is not possible in a stream; leave out one of them")
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise RequestError("truncation_side is for truncate_prompt_tokens; give both, or neither")

    @property
    def _forms(self) -> dict[str, Any]:
        """Return the forms of the answer by the names of their fields. None and False stand for no form."""
        forms: dict[str, Any] = {
            name: getattr(self, name) for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        }
        nested = self.structured_outputs or StructuredOutputs()
        values = {name.rstrip("_"): getattr(nested, name) for name in StructuredOutputs.model_fields}
        return forms | {f"structured_outputs.{name}": value for name, value in values.items()}

    def _form(self, kind: str) -> Any:
        """Return the form of a kind, under its older or its newer name, or None."""
        older, newer = self._forms.get(f"guided_{kind}"), self._forms[f"structured_outputs.{kind}"]
        return newer if older is None else older

    @property
    def max_answer_tokens(self) -> int | None:
        """Return the maximum number of tokens of an answer."""
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """Return the maximum number of tokens of an answer if neither the request nor the server limits it."""
        return None

    @property
    def top_count(self) -> int | None:
        """Return the number of likeliest tokens to report, or None to report no log-probabilities at all."""
        return None

    @property
    def json_schema(self) -> str | None:
        """Return the JSON schema that the answer must match, as a string."""
        schema = ANY_OBJECT if self._form("json_object") else self._form("json")
        return schema if schema is None or isinstance(schema, str) else json.dumps(schema)

    @property
    def prompt_top(self) -> int | None:
        """Return the number of likeliest tokens to report for each token of the prompt, or None to report nothing."""
        return self.prompt_logprobs

    def engine_request(self, prompt: Prompt, *, seed: int) -> Generate:
        """Return the engine's request for one text."""
        return Generate(
            prompt=prompt,
            options=self._options(seed),
            default_tokens=self.default_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            json_schema=self.json_schema,
            regex=self._form("regex"),
            choices=tuple(self._form("choice") or ()),
            lark=self._form("grammar"),
            top=self.top_count,
            prompt_top=self.prompt_top,
            with_token_ids=self.return_token_ids,
            max_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            shows_stop_string=self.include_stop_str_in_output,
        )

    def _options(self, seed: int) -> dict[str, Any]:
        """Return the GenerationOptions of the request, by name."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
        options: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.top_k == -1:
            options["top_k"] = 0
        if self.temperature == 0:
            options |= {"do_sample": False, "temperature": None}
        elif self.temperature is not None or self.top_p is not None:
            options["do_sample"] = True
        if self.logit_bias:
            options["sequence_bias"] = [((int(token),), bias) for token, bias in self.logit_bias.items()]
        if self.stop:
            options["stop_strings"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.min_tokens:
            options["min_new_tokens"] = self.min_tokens
        return options | {"seed": seed, "max_new_tokens": self.max_answer_tokens}


class ChatRequest(SamplingRequest):
    model_config = ConfigDict(json_schema_extra=LOGPROBS_SCHEMA)

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, description="the newer name of max_tokens")
    response_format: ResponseFormat = TEXT
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | ForcedTool | AllowedTools = Field(
        "auto",
        description="required: the answer is a call. A named tool: it is a call of that tool. Allowed tools: of these alone",
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call in an answer")
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS)] = Field(
        [], description="the older form of tools; an answer has at most one call, in function_call"
    )
    function_call: Literal["none", "auto"] | FunctionName = Field("auto", description="the older form of tool_choice")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=HINT)
    prediction: dict[str, Any] | None = Field(None, description=HINT)
    modalities: list[Literal["text"]] = Field(["text"], description="answers are texts")
    reasoning_effort: Effort | None = Field(None, description="for the chat template")
    enable_thinking: bool | None = Field(None, description="not OpenAI's; for the chat template: whether the model reasons")
    chat_template_kwargs: dict[str, Any] = Field({}, description="not OpenAI's; variables of the chat template")
    thinking_token_budget: int | None = Field(None, ge=0, description="not OpenAI's; tokens after which the reasoning ends")
    include_reasoning: bool = Field(True, description="not OpenAI's; false: the answer leaves the reasoning out")
    add_generation_prompt: bool | None = Field(None, description="not OpenAI's; false: the template begins no answer")
    continue_final_message: bool = Field(False, description="not OpenAI's; the answer goes on with the last message")
    echo: bool = Field(False, description="not OpenAI's; with continue_final_message: the answer begins with that message")

    def check(self) -> None:
        super().check()
        check_calls(self.messages)
        if self.echo and not self.continue_final_message:
            raise RequestError("echo repeats the message that continue_final_message goes on with; set both, or neither")
        self._check_tools()
        has_form = self.response_format.schema_of_answer is not None
        has_other_form = any(self._forms.values())
        if has_form and has_other_form:
            raise RequestError("response_format and another form of the answer were given; give one of them")
        if self._offered_tools and has_other_form:
            raise RequestError("an answer in a form calls no tools; set tool_choice to none, or leave out one of them")

    def _check_tools(self) -> None:
        """Raise RequestError for tools, and a choice of them, that do not fit together."""
        if self.tools and self.functions:
            raise RequestError("functions is the older form of tools; give one of them")
        field, choice = ("functions", "function_call") if self.functions else ("tools", "tool_choice")
        names = [tool.function.name for tool in self._tools]
        if len(set(names)) < len(names):
            raise RequestError(f"two {field} have the same name; give each a name of its own")
        unknown_names = set(self._named_tools) - set(names)
        if unknown_names:
            raise RequestError(f"{choice} names {min(unknown_names)}, which is not in {field}; name one of them")
        if self.tool_choice == "required" and not names:
            raise RequestError("tool_choice is required, and there are no tools; give some")
        if self.functions and self.tool_choice != "auto":
            raise RequestError("tool_choice is for tools, and the request has functions; give function_call in its place")
        if self.function_call != "auto" and not self.functions:
            raise RequestError("function_call is for functions, and there are none; give some, or use tools and tool_choice")

    @property
    def _tools(self) -> list[Tool]:
        """Return the tools, in whichever form they came."""
        return self.tools or [Tool(type="function", function=function) for function in self.functions]

    @property
    def _named_tools(self) -> list[str]:
        """Return the names of tools that the choice of tools has."""
        choice = self.function_call if self.functions else self.tool_choice
        if isinstance(choice, AllowedTools):
            return [tool.function.name for tool in choice.allowed_tools.tools]
        if isinstance(choice, ForcedTool):
            return [choice.function.name]
        return [choice.name] if isinstance(choice, FunctionName) else []

    @property
    def _offered_tools(self) -> list[Tool]:
        """Return the tools that the answer may call."""
        if "none" in (self.tool_choice, self.function_call):
            return []
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in self._tools if tool.function.name in self._named_tools]
        return self._tools

    @property
    def _forced_names(self) -> list[str]:
        """Return the names of the tools of which the answer must call one, or nothing if it need not call any."""
        choice = self.tool_choice
        is_required = choice.allowed_tools.mode == "required" if isinstance(choice, AllowedTools) else choice == "required"
        if is_required:
            return [tool.function.name for tool in self._offered_tools]
        return [] if isinstance(choice, AllowedTools) else self._named_tools

    def engine_request(self, prompt: Prompt, *, seed: int) -> Generate:
        request = (
            super()
            .engine_request(prompt, seed=seed)
            .model_copy(update={"template": self._template_options, "reasoning_budget": self.thinking_token_budget})
        )
        if not self._offered_tools:
            return request
        return request.model_copy(
            update={
                "tools": json.dumps([tool.to_template() for tool in self._offered_tools]),
                "forced_tools": tuple(self._forced_names),
                "max_calls": None if self.parallel_tool_calls and not self.functions else 1,
            }
        )

    def tokenize_request(self) -> Tokenize:
        """Return the engine's request for the token ids of the prompt."""
        (prompt, *_) = self.prompts()
        tools = [tool.to_template() for tool in self._offered_tools]
        return Tokenize(prompt=prompt, tools=json.dumps(tools) if tools else None, template=self._template_options)

    @property
    def _template_options(self) -> TemplateOptions:
        variables = json.dumps(self.chat_template_kwargs)
        ending = prompt_ending(self.add_generation_prompt, self.continue_final_message)
        return TemplateOptions(variables=variables, effort=self.reasoning_effort, thinking=self.enable_thinking, ending=ending)

    @model_validator(mode="after")
    def _check_top(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("not_told", "top_logprobs needs log-probabilities; set logprobs to true as well")
        return self

    @property
    def top_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def json_schema(self) -> str | None:
        schema = None if self._forced_names else self.response_format.schema_of_answer  # a call has its own form
        return super().json_schema if schema is None else json.dumps(schema)

    @property
    def max_answer_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def prompts(self) -> list[Any]:
        return [template_messages(self.messages)] * self.n


class CompletionRequest(SamplingRequest):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    suffix: str | None = Field(None, description="the text that follows the answer, for models that fill in the middle")
    echo: bool = Field(
        False, description="whether the text begins with the prompt, with its log-probabilities if they are wanted"
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    max_tokens: int | None = Field(None, ge=0, description="0 with echo or prompt_logprobs: only the prompt")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="taken with the value of n only")

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of is {self.best_of}, and {self.n} texts are computed; give {self.n}, or leave it out")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise RequestError("max_tokens is 0, so there is no answer; give 1 or more, or echo, or prompt_logprobs")
        if self.suffix and not all(isinstance(prompt, str) for prompt in _split_texts(self.prompt)):
            raise RequestError("suffix belongs to a prompt that is a text, and this one has token ids; leave suffix out")
        if self.suffix and self.truncate_prompt_tokens is not None:
            raise RequestError("truncate_prompt_tokens would cut the prompt or its suffix; leave out one of them")

    def engine_request(self, prompt: Prompt, *, seed: int) -> Generate:
        return super().engine_request(prompt, seed=seed).model_copy(update={"suffix": self.suffix or None})

    @property
    def max_answer_tokens(self) -> int | None:
        """Return the maximum number of tokens of an answer. An engine computes one even if none is wanted."""
        return None if self.max_tokens is None else max(self.max_tokens, 1)

    @property
    def prompt_top(self) -> int | None:
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    @property
    def top_count(self) -> int | None:
        return self.logprobs

    @property
    def default_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS

    def prompts(self) -> list[Any]:
        """Return each prompt ``n`` times. Token ids become tuples."""
        return [prompt for prompt in _split_texts(self.prompt) for _ in range(self.n)]


def _split_texts(texts: Any) -> list[Any]:
    """Return a list of texts and of tuples of token ids, from one or several of either."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts[0], int):
        return [tuple(texts)]
    return [text if isinstance(text, str) else tuple(text) for text in texts]


class EmbeddingRequest(RequestBody):
    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="the first ones alone, for models that are trained for it")

    def texts(self) -> tuple[Any, ...]:
        """Return the texts. Token ids become tuples."""
        return tuple(_split_texts(self.input))
