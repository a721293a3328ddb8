"""Choose the length of sequences: the user's length, else a default that the model has positions for."""

from __future__ import annotations

from upshift.errors import RequestError
from upshift.models.profile import Images
from upshift.models.profile_cache import encoder_has_prompt, images_of, positions_of
from upshift.models.source import ModelSource

DEFAULT_SEQUENCE_LENGTH = 512


def default_length(positions: int | None, default: int = DEFAULT_SEQUENCE_LENGTH) -> int:
    """Return the default number of tokens in a sequence.

    ``positions``: the positions of the model, or None for any number."""
    return default if positions is None else min(default, positions)


def sequence_length_of(source: ModelSource, length: int | None) -> int:
    """Return ``length``, or the default if it is None. Raise RequestError if the model has fewer positions."""
    positions = positions_of(source)
    images = images_of(source) if source.images_per_row else None
    if images is not None:
        _check_places_of_images(images, length, positions)
    if length is None:
        return default_length(positions, DEFAULT_SEQUENCE_LENGTH + (0 if images is None else images.tokens_per_row))
    if length < 2:
        raise RequestError(f"--sequence-length {length} is not usable; use at least 2{_upper_limit(positions)}")
    if positions is not None and length > positions:
        raise RequestError(
            f"--sequence-length {length} is longer than the model's {positions} positions; use at most {positions}"
        )
    return length


def _check_places_of_images(images: Images, length: int | None, positions: int | None) -> None:
    """Raise RequestError if the images of a row leave no place for text."""
    longest = length if length is not None else positions
    if longest is None or longest > images.tokens_per_row + 1:
        return
    what = f"--sequence-length {length}" if length is not None else f"The model has {positions} positions, which"
    verb = "takes" if images.per_row == 1 else "take"
    raise RequestError(
        f"{what} leaves no place for text: {images.describe()} {verb} {images.tokens_per_row:,} tokens of a row; use "
        f"{'a longer one, or ' if length is not None else ''}fewer images (--images)"
    )


def _upper_limit(positions: int | None) -> str:
    return "" if positions is None else f" and at most {positions}, the model's positions"


def prompt_and_answer_lengths(
    source: ModelSource, prompt: int | None, answer: int | None, *, defaults: tuple[int, int], options: tuple[str, str]
) -> tuple[int, int]:
    """Return the number of tokens of a prompt and of its answer.

    None means the default, or less if the model has too few positions. If both are None, they share the positions in the ratio
    of the defaults. If an encoder reads the prompt, each may take all positions, less the decoder's start token for the answer.
    ``options``: the names of both on the command line. Raise RequestError if the model has too few positions."""
    positions = positions_of(source)
    if positions is None:
        return (defaults[0] if prompt is None else prompt), (defaults[1] if answer is None else answer)
    if encoder_has_prompt(source):
        return _checked_length(prompt, positions, defaults[0], options[0]), _checked_length(
            answer, positions - 1, defaults[1], options[1]
        )
    if prompt is None and answer is None:
        answer = max(min(defaults[1], positions * defaults[1] // sum(defaults)), 1)
    if answer is None:
        assert prompt is not None
        answer = max(default_length(positions - prompt, defaults[1]), 1)
    if prompt is None:
        prompt = max(default_length(positions - answer, defaults[0]), 1)
    if prompt + answer > positions:
        raise RequestError(
            f"{options[0]} {prompt} and {options[1]} {answer} are longer than the model's {positions} positions; "
            f"use at most {positions} together"
        )
    return prompt, answer


def _checked_length(length: int | None, max_length: int, default: int, option: str) -> int:
    if length is not None and length > max_length:
        raise RequestError(f"{option} {length} is longer than the model allows; use at most {max_length}")
    return default_length(max_length, default) if length is None else length


def check_border(prompt: int, answer: int, border: int, *, shown: str, length: str, reference: str) -> None:
    """Raise RequestError if an answer of ``answer`` tokens takes a prompt of ``prompt`` tokens over longrope's border.

    The keys that were cached before would be those of the other side. The last token of an answer is not computed. ``shown``
    and ``length`` are the words for the prompt and for the option."""
    if prompt <= border < prompt + answer - 1:
        raise RequestError(
            f"{shown}, and with {length} it crosses a border: above {border:,} tokens {reference!r} rotates positions by other "
            f"factors (longrope); ask for at most {border + 1 - prompt:,} tokens, or give a prompt of more than {border:,}"
        )
