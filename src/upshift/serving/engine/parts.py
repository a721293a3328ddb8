"""Write the contents of messages as a chat template takes them: as texts, or as parts that are texts and pictures."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

from upshift.errors import RequestError
from upshift.inference.generation.media import IMAGE
from upshift.loading.media_files import read_image_file

MAX_PIXELS = 2**25  # of one picture: a small file can have more than fit into memory


def write_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are all parts."""
    return [{**message, "content": _parts_of(message.get("content"))} for message in messages]


def _parts_of(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def read_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose parts hold the pictures themselves in place of their bytes in base64."""
    return [
        {**message, "content": [_read_part(part, f"messages.{number}") for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for number, message in enumerate(messages)
    ]


def _read_part(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    if part["type"] != IMAGE:
        return dict(part)
    try:
        data = io.BytesIO(base64.b64decode(part["data"], validate=True))
        picture = read_image_file(data, purpose="a message with a picture", max_pixels=MAX_PIXELS)
    except (OSError, binascii.Error) as error:
        reason = str(error) if "pixels" in str(error) else "it is no picture that pillow knows"
        raise RequestError(f"the picture in {place} cannot be read ({reason}); send a PNG or JPEG file in base64") from None
    return {"type": IMAGE, "image": picture}
