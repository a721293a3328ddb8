"""Plan for rows with images (``--images``): how many a row has, and which program trains them."""

from __future__ import annotations

from upshift.cli import tables
from upshift.errors import RequestError
from upshift.importing import importing
from upshift.models.profile import Images
from upshift.models.source import ModelSource
from upshift.planning.program import PROGRAMS, ProgramName, read_program

DEFAULT_PROGRAM: ProgramName = "transformers"
SIGNS = ("vision", "image", "visual")  # how the fields of a config begin that says something about images


def with_images(source: ModelSource, number: int | None) -> ModelSource:
    """Return the source with the images of each row: ``number``, or the default for the model.

    The default is 1 for a model that is trained on chats with images alone, as upshift train decides, and else 0."""
    if number is None:
        number = 1 if _needs_images(source) else 0
    return source.changed(images_per_row=number) if number else source


def _needs_images(source: ModelSource) -> bool:
    """Return whether transformers lists the model's class for images with text, and for no loss of texts alone."""
    if not any(name.startswith(SIGNS) for name in source.config):
        return False
    with importing():
        from upshift.models.build import find_architecture
        from upshift.models.tasks import inputs_of

    architecture = find_architecture(source.hf_config, source.reference)
    task = architecture.task
    reads_images = "image" in inputs_of(architecture.model_class)
    return architecture.objective is None and task is not None and task.name == "image-text-to-text" and reads_images


def program_for(source: ModelSource, name: str | None) -> ProgramName:
    """Return the program to plan for. Raise RequestError for one that is not planned for rows with images."""
    if not source.images_per_row:
        return read_program(name)
    program = DEFAULT_PROGRAM if name is None else read_program(name)
    able = [name for name, facts in PROGRAMS.items() if facts.takes_images]
    if program not in able:
        raise RequestError(f"--program {program} is not planned for rows with images; use one of {', '.join(able)}")
    return program


def refuse_with_images(source: ModelSource, *, data: str | None, objective: str | None, quick: bool) -> None:
    """Raise RequestError for an option that rows with images do not have."""
    if not source.images_per_row:
        return
    given = {"--data": data, "--objective": objective, "--quick": quick or None}
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise RequestError(
            f"{name} is not for rows with images, whose size --images and --sequence-length say; leave {name} out, or plan for "
            "text alone with --images 0"
        )


def print_images(images: Images | None, sequence_length: int) -> None:
    """Print the images that a plan assumes."""
    if images is None:
        return
    takes = f"{images.tokens_per_row:,} of the {sequence_length:,} tokens"
    tables.out.print(f"Assumed in each row: {images.describe()}, {takes} (--images)", highlight=False)
    tables.dim("upshift train trains such rows by transformers' Trainer without a plan: at most 8 at once, fp32 or bf16")
