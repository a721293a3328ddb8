"""Send requests to the server that serving_protocol.py has started, for the cases of vLLM's tests."""

from __future__ import annotations

import os

import openai
from transformers import AutoTokenizer

URL = os.environ["SERVING_PROTOCOL_URL"]
FOLDER = os.environ["SERVING_PROTOCOL_MODEL"]
MODEL = "tiny"
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
client = openai.OpenAI(base_url=URL + "/v1", api_key="x", max_retries=0, timeout=60)
SYS = [{"role": "system", "content": "you are a helpful assistant"}, {"role": "user", "content": "what is 1+1?"}]
SERIES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Who won?"},
    {"role": "assistant", "content": "The Dodgers."},
    {"role": "user", "content": "Where?"},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "maximum": 100, "minimum": 0},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 3, "maxItems": 4},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
LANGS = ["Python", "Java", "JavaScript", "C++", "C#", "PHP", "TypeScript", "Ruby", "Swift", "Kotlin"]
ADDRESS = r"((25[0-5]|(2[0-4]|1\d|[1-9]|)\d)\.){3}(25[0-5]|(2[0-4]|1\d|[1-9]|)\d)"

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": WEATHER}}
    for name in ("get_current_weather", "get_forecast")
]


def complete(**fields):
    return client.completions.create(
        **{"model": MODEL, "prompt": "Hello, my name is", "max_tokens": 5, "temperature": 0.0, **fields}
    )


def chat(**fields):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": SYS, "max_completion_tokens": 5, "temperature": 0.0, **fields}
    )
