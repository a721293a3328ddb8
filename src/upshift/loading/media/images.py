"""Read the images of prompts and of rows to encode."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, BinaryIO

from upshift.errors import MissingExtra


def read_image_file(file: str | BinaryIO, *, purpose: str, header_only: bool = False, max_pixels: int | None = None) -> Any:
    """Return an image in RGB, as Pillow reads it; None with ``header_only``. Raise OSError if it cannot be read, or has more than
    ``max_pixels``.

    ``purpose``: what the image is for. MissingExtra says it where Pillow is not installed."""
    if find_spec("PIL") is None:
        raise MissingExtra(library="Pillow", extra="images", purpose=purpose)
    from PIL import Image

    try:
        with Image.open(file) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise OSError(f"it has more than {max_pixels:,} pixels")
            return None if header_only else image.convert("RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:  # of a broken PNG, and of an image that is far too large
        raise OSError(str(error)) from None
