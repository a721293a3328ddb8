"""Run ``upshift generate``: write texts to prompts, by the fastest engine that has the requested quality."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table

from upshift.cli import generate_xla, tables
from upshift.cli.options import (
    Engine,
    EnginePython,
    EngineSettings,
    GenerationSettings,
    Json,
    MaxMemory,
    MaxTpot,
    MaxTtft,
    Model,
    OnRay,
    Overwrite,
    Quality,
    RaceSeconds,
    TensorParallel,
    WorkerReplicas,
    option,
    read_generation_settings,
    read_settings_of,
)
from upshift.cli.progress import importing_libraries
from upshift.cli.tables import describe_copies, dim, print_race_notes, race_table, run_printer
from upshift.cli.usage.help_page import Panel
from upshift.errors import MissingExtra, RequestError
from upshift.inference.resumable_output import count_lines, first_record
from upshift.inference.workers.options import (
    LEAST_MEDIA,
    WorkerOptions,
    encoding_workers,
    generation_workers,
    refuse_ranks,
    refuse_workers,
)
from upshift.loading.placement.memory_limits import read_max_memory
from upshift.settings import wait_briefly
from upshift.text import join_names
from upshift.versions import installed_version

BATCH_FORM = "openai-batch"
BATCH_ROWS = 32  # answers that are computed at once
Prompts = Annotated[
    Path | None,
    option(
        "--prompts",
        text="The prompts: a .txt file with one prompt in each line, a .jsonl file, or a folder of sounds. Needs --output.",
        panel=Panel.TEXT, metavar="PATH",
    ),
]  # fmt: skip
Output = Annotated[
    Path | None,
    option(
        "--output", "-o", text="The .jsonl file for the answers, in the order of --prompts.", panel=Panel.OUTPUT, metavar="PATH"
    ),
]  # fmt: skip
Prompt = Annotated[
    str | None,
    option("--prompt", text="One prompt. The answer is printed while it is generated.", panel=Panel.TEXT, metavar="TEXT"),
]
MaxNewTokens = Annotated[
    int | None,
    option(
        "--max-new-tokens", text="The longest answer, in tokens.", panel=Panel.TEXT, metavar="N", default="the model's, or 128",
        least=1,
    ),
]  # fmt: skip
Stop = Annotated[list[str] | None, option("--stop", text="End an answer after this text.", panel=Panel.TEXT, metavar="TEXT")]
Seed = Annotated[
    int | None,
    option("--seed", text="The seed of sampling.", panel=Panel.TEXT, metavar="N", default="0", least=0),
]
Chat = Annotated[
    bool, option("--chat", text="Each prompt is a message of a user. Uses the chat template of the model.", panel=Panel.TEXT)
]
Draft = Annotated[
    str | None,
    option(
        "--draft", text="A smaller model that guesses tokens, which MODEL checks. Needs --engine torch, openvino or vllm.",
        panel=Panel.ENGINES, metavar="MODEL", default="none",
    ),
]  # fmt: skip
Backend = Annotated[
    str,
    option(
        "--backend", text="What computes: race tests the installed engines, xla uses TensorFlow", panel=Panel.ENGINES,
        metavar="NAME", choices=("race", "xla"),
    ),
]  # fmt: skip
Form = Annotated[
    str,
    option(
        "--format", text="The form of --prompts and --output: plain, or requests as for OpenAI's batches", panel=Panel.TEXT,
        metavar="NAME", choices=("plain", BATCH_FORM),
    ),
]  # fmt: skip
NOT_OF_BATCHES = {  # the parameters that a batch of requests does not take
    "prompt": "--prompt", "max_new_tokens": "--max-new-tokens", "stop": "--stop", "seed": "--seed", "chat": "--chat",
    "engine_python": "--engine-python", "engine_settings": "--engine-set", "replicas": "--replicas", "on_ray": "--ray",
    "tensor_parallel": "--tensor-parallel", "backend": "--backend",
}  # fmt: skip
WIDE = 90  # characters of a terminal that shows all columns of a race
SOUND_BLOCK = 32  # sounds between two records of the progress
LEAST_SOUNDS = 8  # that a worker computes together
TAKEN_BY_SOUNDS = ("model", "prompts", "output", "max_new_tokens", "replicas", "on_ray", "overwrite", "as_json")
UNSET: tuple[Any, ...] = ([], "plain", "exact", "race")  # the defaults of the other parameters, beside None and False
UNLIKE_FLAGS = {"options": "--set", "form": "--format", "engine_settings": "--engine-set", "on_ray": "--ray"}
FLAGS = {"max_new_tokens": "--max-new-tokens", "seed": "--seed", "stop_strings": "--stop"}  # --set can give these, too


def command(
    model: Model,
    prompts: Prompts = None,
    output: Output = None,
    prompt: Prompt = None,
    max_new_tokens: MaxNewTokens = None,
    options: GenerationSettings = None,
    stop: Stop = None,
    seed: Seed = None,
    chat: Chat = False,
    form: Form = "plain",
    quality: Quality = "exact",
    engine: Engine = None,
    engine_python: EnginePython = None,
    engine_settings: EngineSettings = None,
    draft: Draft = None,
    backend: Backend = "race",
    max_ttft_ms: MaxTtft = None,
    max_tpot_ms: MaxTpot = None,
    max_memory: MaxMemory = None,
    race_seconds: RaceSeconds = None,
    replicas: WorkerReplicas = None,
    tensor_parallel: TensorParallel = None,
    on_ray: OnRay = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Answer prompts with a language model. Tests the installed engines on some prompts, and uses the fastest one."""
    given = dict(locals())
    wait_briefly()
    refuse_ranks("generate")
    if prompts is not None and _holds_sounds(prompts):
        _transcribe(given)
        return
    _check_request(given)
    flags = {"max_new_tokens": max_new_tokens, "seed": seed, "stop_strings": tuple(stop or ()) or None}
    generation_options = _merge_options(options or [], flags)
    race_options = {
        "quality": quality, "engine": engine, "max_ttft_ms": max_ttft_ms, "max_tpot_ms": max_tpot_ms, "max_memory": max_memory,
        "race_seconds": race_seconds, "engine_python": engine_python, "draft": draft, "tensor_parallel": tensor_parallel,
        "engine_arguments": read_settings_of("--engine-set", engine_settings or [], example="tensor_parallel_size=2"),
    }  # fmt: skip
    if form == BATCH_FORM and prompts is not None and output is not None:
        _answer_batch(model, prompts, output, race_options, generation_options, as_json=as_json)
        return
    if backend != "race":
        refuse_workers(WorkerOptions(replicas, on_ray), "--backend xla computes in one process")
        generate_xla.check(backend, {**race_options, "stop": stop})
        generate_xla.run(
            model, prompt=prompt, prompts=prompts, output=output, chat=chat, options=generation_options, as_json=as_json
        )
        return
    arguments = _generator_arguments(model, race_options, chat=chat)
    generator, generation = _prepare(arguments, generation_options)
    if prompt is not None:
        _stream(generator, prompt, generation, as_json=as_json)
        return
    assert prompts is not None and output is not None
    with generation_workers(generator, WorkerOptions(replicas, on_ray), arguments, count_lines(prompts)) as pool:
        _generate_file(generator, prompts, output, generation, pool, as_json=as_json)


def _holds_sounds(prompts: Path) -> bool:
    """Return whether the prompts are a folder, or JSON lines whose first line names a sound and no prompt."""
    if prompts.is_dir():
        return True
    record = first_record(prompts)
    return record is not None and "audio" in record and not {"prompt", "messages"} & set(record)


def _refuse_for_sounds(given: Mapping[str, Any]) -> None:
    """Raise RequestError for an option that is set and that sounds do not have. ``given``: the command's parameters."""
    for name, value in given.items():
        if name not in TAKEN_BY_SOUNDS and value is not None and value is not False and value not in UNSET:
            flag = UNLIKE_FLAGS.get(name, f"--{name.replace('_', '-')}")
            raise RequestError(f"{flag} is for prompts of text, and --prompts {given['prompts']} has sounds; leave it out")


def _transcribe(given: Mapping[str, Any]) -> None:
    """Write one JSON line for each sound, and go on with those of an earlier, interrupted run.

    ``given``: the command's parameters. Bad files are refused before the model is loaded."""
    _refuse_for_sounds(given)
    model, prompts, output = given["model"], given["prompts"], given["output"]
    max_new_tokens = given["max_new_tokens"]
    from upshift.inference.media.files import read_media, with_whole_paths
    from upshift.inference.resumable_output import UnfinishedLines, check_output, output_identity
    from upshift.inference.weights import files_identity, find_weights
    from upshift.loading.media_files import check_media

    if output is None:
        raise RequestError(f"--prompts {prompts} has sounds, and no --output; add --output FILE.jsonl")
    check_output(output, (".jsonl",), prompts, overwrite=given["overwrite"])
    items = read_media(prompts, option="--prompts")
    check_media(items)
    find_weights(model)
    with importing_libraries():
        from upshift.inference.media.speech import Transcriber

    with tables.step("Reading the model"):
        transcriber = Transcriber(model, max_new_tokens=max_new_tokens)
        transcriber.check(items)
    files = files_identity(Path(item.content) for item in items)
    inputs = prompts if prompts.is_file() else Path(items[0].content)
    identity = output_identity(inputs, transcriber.source, files, repr(max_new_tokens))
    start = time.perf_counter()
    seconds_of_sound = 0.0
    workers = WorkerOptions(given["replicas"], given["on_ray"])
    arguments = {"model": model, "max_new_tokens": max_new_tokens}
    with (
        encoding_workers(transcriber, workers, arguments, len(items), least=LEAST_MEDIA) as pool,
        closing(UnfinishedLines(output, len(items), identity)) as lines,
        tables.bar("Transcribing") as update,
    ):
        num_resumed = lines.done
        size = SOUND_BLOCK if pool is None else pool.block_size(len(items), SOUND_BLOCK, least=LEAST_SOUNDS)
        blocks = [items[begin : begin + size] for begin in range(num_resumed, len(items), size)]
        given_blocks = map(with_whole_paths, blocks)
        results = map(transcriber.write_down, given_blocks) if pool is None else pool.encode(given_blocks, "write_down")
        for block, transcripts in zip(blocks, results, strict=True):
            update(lines.done, len(items))
            seconds_of_sound += sum(transcript.seconds for transcript in transcripts)
            lines.add(
                {"audio": item.content, "text": found.text, "tokens": len(found.tokens), "seconds": round(found.seconds, 3)}
                for item, found in zip(block, transcripts, strict=True)
            )
        lines.finish()
    seconds = time.perf_counter() - start
    num_now = len(items) - num_resumed
    if given["as_json"]:
        document = {"sounds": len(items), "transcribed": num_now, "seconds": seconds, "output": str(output)}
        sys.stdout.write(json.dumps(document) + "\n")
        return
    rate = f", {seconds_of_sound / seconds:,.1f} s of sound a second" if num_now else ""
    tables.out.print(f"{len(items):,} texts in {output} ({num_now:,} now{rate})", soft_wrap=True)


def _check_request(given: Mapping[str, Any]) -> None:
    """Raise RequestError for options that do not go together, or files that cannot be used. ``given``: the command's
    parameters."""
    if given["form"] == BATCH_FORM:
        _check_batch_options(given)
    _check_files(given["prompt"], given["prompts"], given["output"], overwrite=given["overwrite"])
    if given["prompt"] is not None:
        refuse_workers(WorkerOptions(given["replicas"], given["on_ray"]), "--prompt is one text")


def _check_files(prompt: str | None, prompts: Path | None, output: Path | None, *, overwrite: bool) -> None:
    """Raise RequestError unless there is one prompt, or a file of prompts that can be read and an output that can be written."""
    from upshift.inference.generation.prompts import check_files

    if (prompt is None) == (prompts is None) or (prompts is None) != (output is None):
        given = {"--prompt": prompt, "--prompts": prompts, "--output": output}
        names = join_names(name for name, value in given.items() if value is not None)
        raise RequestError(
            f"generate takes either --prompt TEXT, or --prompts FILE with --output FILE.jsonl, and was given {names}"
        )
    if prompts is not None and output is not None:
        check_files(prompts, output, overwrite=overwrite)
    elif overwrite:
        raise RequestError("--overwrite is for --output, and the answer to --prompt is printed; leave --overwrite out")


def _check_batch_options(given: Mapping[str, Any]) -> None:
    """Raise RequestError for an option that the requests of a batch have themselves, or that a server's engine has not.

    ``given``: the command's parameters."""
    for name, option_name in NOT_OF_BATCHES.items():
        value = given[name]
        if value is not None and value is not False and value not in ([], "race"):
            raise RequestError(
                f"{option_name} is not possible with --format {BATCH_FORM}, whose requests have their own options; leave it out"
            )


def _answer_batch(
    model: str, prompts: Path, output: Path, race_options: Mapping[str, Any], settings: dict[str, Any], *, as_json: bool
) -> None:
    """Write the answers to a file of batch requests, and go on with those of an earlier, interrupted run."""
    for library in ("fastapi", "prometheus-client", "llguidance"):
        if installed_version(library) is None:
            raise MissingExtra(library=library, extra="serve", purpose=f"--format {BATCH_FORM}")
    from upshift.serving.messages import EngineRequest
    from upshift.serving.offline_batch import answer_batch_file

    names = ("quality", "engine", "max_ttft_ms", "max_tpot_ms", "race_seconds")
    request = EngineRequest(
        model=model, concurrency=BATCH_ROWS, max_memory=tuple(race_options["max_memory"] or ()),
        options={name: value for name, value in settings.items() if value is not None},
        **{name: race_options[name] for name in names},
    )  # fmt: skip
    start = time.perf_counter()
    name = Path(model).resolve().name if Path(model).is_dir() else model
    with tables.bar("Generating") as update:
        counts = answer_batch_file(request, name, prompts, output, update)
    seconds = time.perf_counter() - start
    if as_json:
        document = {
            "requests": counts.total, "generated": counts.total - counts.resumed, "failed": counts.failed, "seconds": seconds,
            "output": str(output),
        }  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
        return
    new = counts.total - counts.resumed
    tables.out.print(f"{counts.total:,} answers in {output} ({new:,} now, {counts.failed:,} of them errors)")


def _generator_arguments(model: str, race_options: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """Return the arguments of the Generator. Unless the user says otherwise, the race takes no longer than the run."""
    longest_race = race_options["race_seconds"]
    return {
        **race_options,
        "model": model,
        "chat": chat,
        "max_memory": read_max_memory(race_options["max_memory"]),
        "race_seconds": "run" if longest_race is None else longest_race,
        "tensor_parallel": race_options["tensor_parallel"] or 1,
    }


def _prepare(arguments: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the generator and its checked options."""
    from upshift.inference.engine_environment import choose_environment
    from upshift.inference.weights import find_weights

    find_weights(arguments["model"])  # a wrong path, or a wrong interpreter, is refused before libraries are imported
    choose_environment(
        arguments["engine"], arguments["engine_python"], arguments["engine_arguments"],
        tensor_parallel=arguments["tensor_parallel"],
    )  # fmt: skip
    with importing_libraries():
        from upshift.inference.generation.generator import Generator

    with tables.step("Reading the model"):
        generator = Generator(**arguments, on_run=run_printer("tokens/s"))
    return generator, generator.options(**options)


def _merge_options(pairs: list[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of generation: those of ``--set`` (NAME=VALUE) and those of flags of their own.

    Raise RequestError if the two give different values for one option."""
    options = read_generation_settings(pairs)
    for name, value in flags.items():
        set_value = options.get(name)
        if value is not None and set_value is not None and _as_tuple(set_value) != _as_tuple(value):
            texts = " ".join(map(str, _as_tuple(value)))
            assignment = f"{name}={json.dumps(set_value)}"
            raise RequestError(f"--set {assignment} and {FLAGS[name]} {texts} say two things; leave out one of them")
        if value is not None:
            options[name] = value
    return options


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _stream(generator: Any, prompt: str, options: Any, *, as_json: bool) -> None:
    """Write the answer to one prompt as it comes, or one JSON document."""
    if as_json:
        (completion,) = generator.complete([prompt], options)
        document = {"prompt": prompt, **_answer_fields(completion), "race": generator.race.model_dump(mode="json")}
        sys.stdout.write(json.dumps(document) + "\n")
        return
    start = time.perf_counter()
    first_text_time = 0.0
    for piece in generator.pieces(prompt, options):
        first_text_time = first_text_time or time.perf_counter()
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    chosen = generator.race.chosen
    if generator.race.divided is not None:
        dim(generator.race.divided, tables.err)
    dim(f"{chosen.label()}; first text after {first_text_time - start:.1f} s with the race, loading included", tables.err)


def _generate_file(generator: Any, prompts: Path, output: Path, options: Any, workers: Any, *, as_json: bool) -> None:
    """Write the answers to all prompts of a file, and go on with those of an earlier, interrupted run."""
    from upshift.inference.generation.prompts import BLOCK_PROMPTS, prompt_record, read_prompts
    from upshift.inference.resumable_output import UnfinishedLines, output_identity, read_blocks

    with tables.step("Checking the prompts"):
        total, beyond = generator.check_prompts(read_prompts(prompts), options)
    with tables.step("Racing the installed engines on some of the prompts"):
        first_block = next(read_blocks(read_prompts(prompts), size=BLOCK_PROMPTS))
        (workers or generator).prepare([*generator.read(first_block, options), *beyond], options, total=total)
    setup = generator.race.chosen.changed(batch=1)  # the texts are the same at any batch size
    identity = output_identity(prompts, generator.source, setup.to_json(), options.to_json(), repr(generator.prompts.chat))
    num_tokens = 0
    start = time.perf_counter()
    size = BLOCK_PROMPTS if workers is None else workers.block_size(total, BLOCK_PROMPTS)
    with closing(UnfinishedLines(output, total, identity)) as answers, tables.bar("Generating") as update:
        num_resumed = answers.done
        update(num_resumed, total)
        blocks = read_blocks(read_prompts(prompts), size=size, skip=num_resumed)
        for block, completions in (workers or generator).complete_blocks(blocks, options, first=num_resumed):
            num_tokens += sum(len(completion.tokens) for completion in completions)
            answers.add(
                {**prompt_record(prompt), **_answer_fields(completion)}
                for prompt, completion in zip(block, completions, strict=True)
            )  # fmt: skip
            update(answers.done, total)
        answers.finish()
    seconds = time.perf_counter() - start
    num_generated = total - num_resumed
    if as_json:
        race = generator.race.model_dump(mode="json")
        document = {
            "race": race, "prompts": total, "generated": num_generated, "tokens": num_tokens, "seconds": seconds,
            "output": str(output),
        }  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
        return
    _print_race(generator, None if workers is None else workers.size)
    tables.out.print(f"{total:,} answers in {output} ({num_generated:,} now, {num_tokens / seconds:,.0f} tokens/s)")


def _print_race(generator: Any, copies: int | None) -> None:
    race = generator.race
    if race.runs:
        tables.out.print(_generate_race_table(race))
        _print_bandwidth_share(generator)
    if race.divided is not None:
        dim(race.divided)
    print_race_notes(race, "tokens/s")
    tables.out.print(f"Chosen: {race.chosen.label()}, {race.chosen.batch} at once{describe_copies(copies)}")


def _answer_fields(completion: Any) -> dict[str, Any]:
    return {
        "text": completion.text, "ending": completion.ending, "prompt_tokens": completion.prompt_tokens,
        "tokens": len(completion.tokens),
    }  # fmt: skip


def _print_bandwidth_share(generator: Any) -> None:
    """Print how near the chosen setup's step is to the bound by memory bandwidth: a step reads all weights once."""
    from upshift.hardware.probe_cache import measure

    (run,) = (run for run in generator.race.runs if run.setup == generator.race.chosen)
    with tables.step("Measuring this machine"):
        measured = measure(generator.host).measured
    if measured is None:
        return
    runs_on_cpu = run.setup.device == "cpu"
    rates = measured.cpu if runs_on_cpu else measured.gpu
    rate = None if rates is None else rates.memory_bytes_per_second
    if rate and run.step_seconds:
        read_seconds = run.weight_bytes / rate
        memory = "memory" if runs_on_cpu else "the GPU's memory"
        dim(
            f"Its weights, read once, take {1e3 * read_seconds:.1f} ms at the {rate / 1e9:.1f} GB/s that {memory} gives here: "
            f"{read_seconds / run.step_seconds:.0%} of a step"
        )


def _generate_race_table(race: Any) -> Table:
    """Return the race's table.

    rows: sequences at once; first: time to the first tokens of so many prompts; step: time of one more token of each; GB/s: of
    weights, in a step; cosine: of the logits of the token that agrees least; diff: of any logit, over the largest."""
    columns = {
        "first ms": lambda run: f"{1e3 * run.first_seconds:.0f}",
        "step ms": lambda run: f"{1e3 * run.step_seconds:.1f}",
        "GB/s": lambda run: f"{run.weight_bytes / run.step_seconds / 1e9 if run.step_seconds else 0.0:.1f}",
    }
    if tables.out.width < WIDE:
        del columns["GB/s"]  # a line below the table has it for the chosen setup
    return race_table(race, "rows", "tokens/s", columns)
