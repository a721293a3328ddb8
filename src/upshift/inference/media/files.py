"""Read which images, sounds and texts to encode, and check their files before a model is loaded.

The input is a folder of images and sounds, or JSON lines that name them: {"image": PATH}, {"audio": PATH} or {"text": "..."}."""

from __future__ import annotations

import wave
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from upshift.errors import MissingExtra, RequestError
from upshift.inference.image_files import read_image_file
from upshift.inference.resumable_output import first_record, is_text, parse_object, read_lines

Modality = Literal["image", "audio", "text"]
MODALITIES: tuple[Modality, ...] = ("image", "audio", "text")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
FORMS = '{"image": "a.png"}, {"audio": "a.wav"} or {"text": "..."}'
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


def holds_media(path: Path) -> bool:
    """Return whether an input is a folder, or JSON lines whose first line names an image or a sound."""
    if path.is_dir():
        return True
    record = first_record(path)
    return record is not None and any(key in record for key in ("image", "audio"))


def read_media(path: Path, *, option: str = "--input") -> list[MediaItem]:
    """Return the items of an input: the files of a folder by name, or the lines of a .jsonl file, or of a .txt file of texts.

    ``option`` names the input in messages. Raise RequestError with the file or the line that is no item. Paths in a .jsonl file
    are relative to its folder."""
    if path.is_dir():
        return _read_folder(path, option)
    if path.suffix == ".txt":
        texts = read_lines(path, lambda line, name: line)
        return [MediaItem("text", text, f"{path} line {number}") for number, text in enumerate(texts, start=1)]
    items = []
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            origin = f"{path} line {number}"
            record = parse_object(line) or {}
            modality = next((modality for modality in MODALITIES if modality in record), None)
            if modality is None or len(record) != 1 or not is_text(record[modality]):
                raise RequestError(f"{origin} is no image, sound or text; write {FORMS} on each line")
            content = record[modality] if modality == "text" else str(path.parent / record[modality])
            items.append(MediaItem(modality, content, origin))
    return items


def _read_folder(folder: Path, option: str) -> list[MediaItem]:
    items = []
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):
            continue
        modality = modality_of(file)
        if modality is None or not file.is_file():
            suffixes = ", ".join((*IMAGE_SUFFIXES, *SOUND_SUFFIXES))
            raise RequestError(f"{option} {folder} has {file.name}, which is no image or sound ({suffixes}); move it elsewhere")
        items.append(MediaItem(modality, str(file), str(file)))
    if not items:
        raise RequestError(f"{option} {folder} has no files; give a folder of images or sounds")
    return items


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
