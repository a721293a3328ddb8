"""Check the body of a request before an address reads it: a JSON object in UTF-8, whatever type the client names.

``curl -d`` names every body a form. As with other OpenAI-compatible servers, such a body is read as the JSON that it
is. Browsers are the exception: a page of another site may send a form without asking, so there the type has to be
named."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from upshift.serving.refusals import Refusal

MOST_DEPTH = 200  # of objects and lists in each other
WITH_BODY = "/v1/"  # addresses
JSON_TYPE = (b"content-type", b"application/json")
WORDS = {list: "an array", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}


def takes_body(scope: Any) -> bool:
    return bool(scope["method"] == "POST" and scope["path"].startswith(WITH_BODY))


def problem_of(scope: Any, body: bytes) -> Refusal | None:
    """Return why a body cannot be read, or None."""
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        return Refusal(415, f"a body with Content-Encoding {_shown(encoding)} is not read here; send it as it is")
    named = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    is_json = named == b"application/json" or (named.startswith(b"application/") and named.endswith(b"+json"))
    if named and not is_json and b"origin" in headers:
        return Refusal(415, f"a browser's body is read as application/json alone, not as {_shown(named)}")
    words = _problem_of_content(body)
    return None if words is None else Refusal(400, f"{words}; send a JSON object in UTF-8")


def as_json(scope: Any) -> Any:
    """Return the scope of the same request with the type of a body that was found to be JSON."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != JSON_TYPE[0]]
    return {**scope, "headers": [*headers, JSON_TYPE]}


def _problem_of_content(body: bytes) -> str | None:
    if not body.strip():
        return "the body is empty"
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        return "the body is not UTF-8"
    except RecursionError:
        return "the body is nested too deeply"
    except json.JSONDecodeError as error:
        return f"the body is not JSON ({error})"
    except ValueError as error:  # NaN, or a number of thousands of digits
        return f"the body has a number that is not possible ({str(error).partition(';')[0]})"
    if not isinstance(found, dict):
        return f"the body is {WORDS[type(found)]}"
    return "the body is nested too deeply" if _is_deep(found) else None


def _is_deep(document: Any) -> bool:
    level = [document]
    for _ in range(MOST_DEPTH):
        inside = [one for value in level for one in (value.values() if isinstance(value, dict) else value)]
        level = [one for one in inside if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _shown(value: bytes) -> str:
    return ascii(value.decode("latin-1"))[:100]
