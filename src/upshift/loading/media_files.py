"""Read the images and sounds that a user names, and check their files before a model is loaded."""

from __future__ import annotations

import wave
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from upshift.errors import MissingExtra, RequestError

Modality = Literal["image", "audio", "text"]
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
SAMPLE_TYPES = {1: np.uint8, 2: np.int16, 4: np.int32}  # the type of a .wav file's samples, by the bytes of a sample


class MediaItem(NamedTuple):
    """An image or a sound by its path, or a text. ``origin`` is its file, or its line, for messages."""

    modality: Modality
    content: str
    origin: str


class Sound(NamedTuple):
    """The samples [T] of a sound in fp32, the mean of its channels, and how many there are a second."""

    samples: np.ndarray
    rate: int


def modality_of(file: Path) -> Modality | None:
    """Return whether a file is an image or a sound by its suffix, or None if it is neither."""
    suffix = file.suffix.lower()
    if suffix in IMAGE_SUFFIXES:
        return "image"
    return "audio" if suffix in SOUND_SUFFIXES else None


def check_media(items: Iterable[MediaItem]) -> None:
    """Raise RequestError with the first file that does not exist or cannot be read. Only headers are read."""
    for item in items:
        if item.modality == "text":
            continue
        if not Path(item.content).is_file():
            raise RequestError(f"{_named(item)} does not exist; correct the path, or leave it out")
        if item.modality == "image":
            read_image(item, header_only=True)
        else:
            sound_header(item)


def check_sounds(items: Sequence[MediaItem], *, rate: int, longest_seconds: float | None) -> None:
    """Raise RequestError with the first sound that is longer than the model reads, and MissingExtra for another rate without
    the library that changes it."""
    for item in items:
        if item.modality != "audio":
            continue
        own_rate, seconds = sound_header(item)
        if own_rate != rate:
            _check_resampler(item, rate)
        if longest_seconds is not None and seconds > longest_seconds:
            raise RequestError(
                f"{_named(item)} has {seconds:.1f} s, and the model reads {longest_seconds:g}; cut it into shorter files"
            )


def read_image_file(
    file: str | BinaryIO, *, purpose: str, header_only: bool = False, as_stored: bool = False, max_pixels: int | None = None
) -> Any:
    """Return an image in RGB, as Pillow reads it; with ``header_only`` its width and height in pixels.

    ``as_stored``: keep the channels of the file, and the numbers of a palette.
    Raise OSError if it cannot be read, or has more than ``max_pixels``.
    ``purpose``: what the image is for. MissingExtra says it where Pillow is not installed."""
    if find_spec("PIL") is None:
        raise MissingExtra(library="Pillow", extra="images", purpose=purpose)
    from PIL import Image

    try:
        with Image.open(file) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise OSError(f"it has more than {max_pixels:,} pixels")
            if header_only:
                return image.size
            return image.copy() if as_stored else image.convert("RGB")
    except (SyntaxError, Image.DecompressionBombError) as error:  # of a broken PNG, and of an image that is far too large
        raise OSError(str(error)) from None


def read_image(item: MediaItem, *, header_only: bool = False) -> Any:
    """Return an image in RGB, as Pillow reads it. Raise RequestError if it cannot be read."""
    try:
        return read_image_file(item.content, purpose="reading images", header_only=header_only)
    except OSError as error:
        raise RequestError(f"{_named(item)} is no image that can be read ({error}); replace it, or leave it out") from None


def sound_header(item: MediaItem) -> tuple[int, float]:
    """Return the samples a second and the seconds of a sound. Raise RequestError if it cannot be read."""
    if Path(item.content).suffix.lower() == ".wav":
        try:
            with wave.open(item.content, "rb") as file:
                if file.getsampwidth() in SAMPLE_TYPES and file.getnframes() > 0:
                    return file.getframerate(), file.getnframes() / file.getframerate()
        except (OSError, EOFError, wave.Error):
            pass  # not PCM: the library below may read it, or says why not
    info = _with_soundfile(item, lambda library: library.info(item.content))
    if not info.frames:
        raise RequestError(f"{_named(item)} has no samples; replace it, or leave it out")
    return info.samplerate, info.frames / info.samplerate


def read_sound_at(item: MediaItem, rate: int) -> Sound:
    """Return the samples of a sound at another rate. Raise RequestError if it cannot be read."""
    sound = read_sound(item)
    if sound.rate == rate:
        return sound
    _check_resampler(item, rate)
    import soxr

    return Sound(soxr.resample(sound.samples, sound.rate, rate), rate)


def _check_resampler(item: MediaItem, rate: int) -> None:
    if find_spec("soxr") is None:
        purpose = f"changing {_named(item)} to the {rate:,} samples a second that the model takes"
        raise MissingExtra(library="soxr", extra="audio", purpose=purpose)


def read_sound(item: MediaItem) -> Sound:
    """Return the samples of a sound. Raise RequestError if it cannot be read."""
    if Path(item.content).suffix.lower() == ".wav":
        try:
            with wave.open(item.content, "rb") as file:
                width = file.getsampwidth()
                if width in SAMPLE_TYPES:
                    data = np.frombuffer(file.readframes(file.getnframes()), dtype=SAMPLE_TYPES[width])
                    return Sound(_as_floats(data, file.getnchannels()), file.getframerate())
        except (OSError, EOFError, wave.Error):
            pass
    samples, rate = _with_soundfile(item, lambda library: library.read(item.content, dtype="float32", always_2d=True))
    return Sound(samples.mean(axis=1), rate)


def _as_floats(data: np.ndarray, channels: int) -> np.ndarray:
    """Return samples from -1 to 1 of PCM samples, the mean of the channels."""
    middle = 128 if data.dtype == np.uint8 else 0  # samples of 8 bits have no sign
    scale = np.iinfo(data.dtype).max + 1 - middle
    samples = (data.astype(np.float64) - middle) / scale
    mean: np.ndarray = samples.reshape(-1, channels).mean(axis=1).astype(np.float32)
    return mean


def _with_soundfile(item: MediaItem, read: Any) -> Any:
    if find_spec("soundfile") is None:
        raise MissingExtra(library="soundfile", extra="audio", purpose=f"reading {_named(item)}")
    import soundfile

    try:
        return read(soundfile)
    except (OSError, soundfile.LibsndfileError) as error:
        raise RequestError(f"{_named(item)} is no sound that can be read ({error}); replace it, or leave it out") from None


def _named(item: MediaItem) -> str:
    return item.origin if item.origin == item.content else f"{item.origin}: {item.content}"
