"""Every option of every command, with a value of a wrong type: one line that names the option, and exit code 2.

The tables are made from the commands themselves, so that a new option is covered by itself."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from upshift.cli import main as command_line
from upshift.cli.usage import foreign_options
from upshift.cli.usage.commands import MAY_BE_EMPTY, _has_help_all
from upshift.cli.usage.help_page import is_option, long_name
from upshift.cli.usage.messages import annotation_of, number_type
from upshift.errors import RequestError
from upshift.inference.generation.options import GenerationOptions
from upshift.planning.search.space import settable_fields

ROOT: Any = typer.main.get_command(command_line.app)


def commands(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))
    if not getattr(command, "commands", None):
        yield path, command


COMMANDS = dict(commands())
OPTIONS = [(path, option) for path, command in COMMANDS.items() for option in command.params if is_option(option)]
NUMBERS = [
    (path, option, kind) for path, option in OPTIONS if (kind := number_type(annotation_of(COMMANDS[path], option))) is not None
]  # fmt: skip
FLAGS = [(path, option) for path, option in OPTIONS if option.is_flag]
TEXTS = [
    (path, option) for path, option in OPTIONS
    if not option.is_flag and number_type(annotation_of(COMMANDS[path], option)) is None
]  # fmt: skip


def choices_of(option: Any) -> list[str]:
    """Return the values that a shell completes."""
    completed = option.shell_complete(typer.Context(ROOT), "") if not option.is_flag else []
    return [item.value for item in completed]


def answer(*words: str) -> tuple[int, str]:
    """Return the exit code and the standard error of ``upshift``, as the installed command gives them."""
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(err), redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", ["upshift", *words])
        patch.setattr(command_line, "app", ROOT)  # else each call builds all commands again
        with pytest.raises(SystemExit) as ended:
            command_line.main()
    return int(ended.value.code or 0), err.getvalue()


def check_refusal(*words: str, names: str) -> str:
    code, err = answer(*words)
    lines = err.splitlines()
    assert (code, len(lines)) == (2, 1), (code, err)
    assert lines[0].startswith("upshift: ") and names in lines[0], err
    for foreign in ("Input should", "Invalid value", "validation error", "Traceback", "pydantic", "Error:"):
        assert foreign not in err
    return lines[0]


def named(cases: list[Any]) -> list[str]:
    return [" ".join((*case[0], long_name(case[1]))) for case in cases]


def test_the_tables_have_all_options() -> None:
    assert len(COMMANDS) > 20 and len(OPTIONS) > 200
    assert len(NUMBERS) + len(FLAGS) + len(TEXTS) == len(OPTIONS)


@pytest.mark.parametrize(("path", "option", "kind"), NUMBERS, ids=named(NUMBERS))
@pytest.mark.parametrize("value", ["many", "", "-1", "nan", "inf", "1e400"])
def test_a_wrong_number(path: tuple[str, ...], option: Any, kind: type, value: str) -> None:
    check_refusal(*path, long_name(option), value, names=long_name(option))


@pytest.mark.parametrize(("path", "option", "kind"), NUMBERS, ids=named(NUMBERS))
def test_a_number_of_the_wrong_size(path: tuple[str, ...], option: Any, kind: type) -> None:
    if kind is int:
        check_refusal(*path, long_name(option), "1.5", names=long_name(option))
        check_refusal(*path, *placeholders(path), long_name(option), "1" + 30 * "0", names=long_name(option))
    else:
        assert kind is float


def placeholders(path: tuple[str, ...]) -> list[str]:
    """Return a word for each argument and option that the command needs."""
    words = []
    for parameter in COMMANDS[path].params:
        if parameter.required:
            words += (
                [long_name(parameter), "8" if long_name(parameter) == "--bits" else "word"] if is_option(parameter) else ["word"]
            )
    return words


@pytest.mark.parametrize(("path", "option"), TEXTS, ids=named(TEXTS))
def test_an_empty_text(path: tuple[str, ...], option: Any) -> None:
    if option.name in MAY_BE_EMPTY:
        assert option.name in ("allow", "prompt")
        return
    line = check_refusal(*path, long_name(option), "", names=long_name(option))
    assert "is empty" in line
    assert "is empty" in check_refusal(*path, long_name(option), " ", names=long_name(option))


@pytest.mark.parametrize(("path", "option"), FLAGS, ids=named(FLAGS))
def test_a_flag_with_a_value(path: tuple[str, ...], option: Any) -> None:
    assert "takes no value" in check_refusal(*path, f"{long_name(option)}=yes", names=long_name(option))


WITH_CHOICES = [(path, option) for path, option in TEXTS if choices_of(option)]


def test_options_with_choices_are_found() -> None:
    found = {long_name(option) for _, option in WITH_CHOICES}
    assert {
        "--backend",
        "--dtype",
        "--fully-shard",
        "--kind",
        "--largest",
        "--lr-scheduler-type",
        "--measure",
        "--pruner",
    } <= found


@pytest.mark.parametrize(("path", "option"), WITH_CHOICES, ids=named(WITH_CHOICES))
def test_a_wrong_choice(path: tuple[str, ...], option: Any) -> None:
    choices = choices_of(option)
    line = check_refusal(*path, long_name(option), "x" + choices[0], names=long_name(option))
    assert ", ".join(choices) in line and f"did you mean {choices[0]}" in line
    assert ", ".join(choices) in option.help  # listed in the help, too


FOLDERS = [(path, option) for path, option in OPTIONS if option.metavar == "FOLDER"]


def test_folders_are_found() -> None:
    assert {" ".join(path) for path, _ in FOLDERS} >= {
        "train",
        "tune",
        "quantize",
        "convert",
        "shard",
        "merge",
        "profile",
        "demo",
    }


@pytest.mark.parametrize(("path", "option"), FOLDERS, ids=named(FOLDERS))
def test_a_file_is_no_output_folder(path: tuple[str, ...], option: Any) -> None:
    line = check_refusal(*path, long_name(option), __file__, names=f"{long_name(option)} {__file__} is a file")
    assert "give a folder" in line


@pytest.mark.parametrize("words", ["train MODEL --data d --plan", "tune MODEL --data d --space"])
def test_a_file_that_is_not_there(words: str, tmp_path: Path) -> None:
    option = words.split()[-1]
    check_refusal(*words.split(), str(tmp_path / "none"), names=f"{option} {tmp_path}/none does not exist")
    check_refusal(*words.split(), str(tmp_path), names=f"{option} {tmp_path} is a folder")


VALUED = [(path, option) for path, option in OPTIONS if not option.is_flag]


@pytest.mark.parametrize(("path", "option"), VALUED, ids=named(VALUED))
def test_an_option_without_its_value(path: tuple[str, ...], option: Any) -> None:
    assert option.metavar in check_refusal(*path, long_name(option), names=long_name(option))


ONCE = [(path, option) for path, option in VALUED if not option.multiple]


@pytest.mark.parametrize(("path", "option"), ONCE, ids=named(ONCE))
def test_an_option_twice(path: tuple[str, ...], option: Any) -> None:
    assert "2 times" in check_refusal(*path, long_name(option), "1", long_name(option), "2", names=long_name(option))


def some_option(path: tuple[str, ...]) -> list[str]:
    """Return an option that the command does not need: without any word, it shows its examples first."""
    names = {long_name(option) for option in COMMANDS[path].params if is_option(option)}
    options = (("--json",), ("--quick",), ("--seed", "9"), ("--port", "9"), ("--rows", "9"), ("--dry-run",))
    return next([name, *value] for name, *value in options if name in names)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_an_unknown_option_and_a_missing_argument(path: tuple[str, ...]) -> None:
    if path != ("bench", "run"):  # it passes options that it does not have to the case
        line = check_refusal(*path, "--hlep", names="--hlep")
        assert "--help-all" in line
    needed = [parameter for parameter in COMMANDS[path].params if parameter.required]
    if needed:
        line = check_refusal(*path, *some_option(path), names="needs")
        assert all(long_name(parameter).split()[0] in line for parameter in needed)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("trian",), "did you mean train"),
        (("bench", "lst"), "did you mean list"),
        (("train", "MODEL", "--lerning-rate", "1"), "did you mean --learning-rate"),
        (("serve", "MODEL", "--max-latency-ms", "500"), "--max-ttft-ms"),
        (("serve", "MODEL", "--max-memory", "12"), "--total-memory"),
        (("plan", "MODEL", "OTHER"), "'OTHER'"),
        (("plan", ""), "MODEL is empty"),
        (("profile", "--", "train", "MODEL", "--data", "d", "--epochs", "x"), "--epochs x is not a number of at least 0.001"),
        (("plan", "MODEL", "--rows", "0"), "--rows 0 is not a whole number of at least 1"),
        (("train", "MODEL", "--learning-rate", "0"), "--learning-rate 0 is not a number above 0"),
        (("generate", "MODEL", "--prompt", "a", "--quality", "best"), "--quality 'best'"),
        (("generate", "MODEL", "--prompt", "a", "--engine", "torhc"), "did you mean torch"),
        (("tune", "MODEL", "--data", "d", "--space", __file__, "--objective", "time,los"), "--objective 'los'"),
        (("plan", "MODEL", "--on", "h100", "--set", "precsion=bf16"), "MODEL"),
        (("launch", "--slurm", "--", "train", "MODEL"), "upshift train needs --data PATH"),
        (("launch", "--slurm", "--nodes", "0", "--", "train", "MODEL", "--data", "d"), "--nodes 0 is no range"),
        (("shard", "MODEL", "--max-shard-size", "big", "--output", "o"), "--max-shard-size 'big' is no size of memory"),
        (("inspect", "MODEL", "--placement", "--max-memory", "0=lots"), "--max-memory 0: 'lots' is no size of memory"),
    ],
)
def test_a_mistake_gets_the_next_step(words: tuple[str, ...], expected: str) -> None:
    assert expected in check_refusal(*words, names="")


def test_an_empty_word_of_the_command_after_the_dashes_is_that_commands() -> None:
    train = ("train", "no-such-model", "--data", "d", "--allow", "")
    assert answer("launch", "--slurm", "--dry-run", "--", *train) == (0, "")
    if find_spec("torch") is None:
        pytest.skip("upshift profile reads the words of train with torch, which is not installed")
    code, err = answer("profile", "--", *train)
    assert code == 2 and "'no-such-model' does not exist" in err.splitlines()[-1]
    check_refusal("bench", "run", "no-such-case", "--", "--x", "", names="no-such-case")


def test_an_empty_model_is_named() -> None:
    assert "is empty" in check_refusal("serve", "", names="MODEL")


@pytest.mark.parametrize(("path", "option"), TEXTS, ids=named(TEXTS))
def test_the_name_of_an_option_may_be_a_value(path: tuple[str, ...], option: Any) -> None:
    """Only where it stands as an option it prints the page with all options."""
    assert not _has_help_all(COMMANDS[path], [long_name(option), "--help-all"])
    assert _has_help_all(COMMANDS[path], [long_name(option), "--help-all", "--help-all"])
    assert _has_help_all(COMMANDS[path], [long_name(option), "text", "--help-all"])
    assert not _has_help_all(COMMANDS[path], ["--", "--help-all"])


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_completion_prints_no_page(path: tuple[str, ...]) -> None:
    """A shell completes ``upshift train --help-all --da``: it parses the words before the last one, and must get no page."""
    with redirect_stdout(io.StringIO()) as out:
        COMMANDS[path].make_context(path[-1], ["--help-all"], resilient_parsing=True)
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("load-test http://127.0.0.1:1 --prompts p --prompt-words 64", ("--prompt-words 64", "--prompts p")),
        ("serve m --prompts p --prompt-length 4000", ("--prompt-length 4000", "--prompts p")),
        ("bench compare true true --max-rounds 5", ("--max-rounds 5", "--rounds 12")),
    ],
)
def test_options_that_exclude_each_other_are_both_named(words: str, options: tuple[str, str]) -> None:
    with pytest.raises(RequestError) as problem:
        command_line.app(words.split(), standalone_mode=False)
    assert all(option in str(problem.value) for option in options)


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--learning_rate", "--learning-rate"),
        ("--num_train_epochs", "--epochs"),
        ("--output_dir", "--output"),
        ("--per_device_train_batch_size", "--set per_device_train_batch_size=VALUE"),
        ("--gradient-accumulation-steps", "--set gradient_accumulation_steps=VALUE"),
    ],
)
def test_an_option_of_another_library_names_ours(option: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"{option}; did you mean {meant}"):
        command_line.app(["train", "m", "--data", "d", option, "3"], standalone_mode=False)


METAVARS = {
    path: {name: str(option.metavar or "") for option in command.params if is_option(option) for name in option.opts}
    for path, command in COMMANDS.items()
}
FOREIGN = sorted({*foreign_options.WORDS_OF, *foreign_options.REMARK_OF})


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_hint_names_options_that_the_command_has(path: tuple[str, ...]) -> None:
    """An independent reading of the hint: its words are options of the command, or values of the option before them."""
    for name in FOREIGN:
        hint = foreign_options.foreign_hint(f"--{name.replace('_', '-')}", METAVARS[path])
        assert hint == foreign_options.foreign_hint(f"--{name}", METAVARS[path])
        words = hint.removeprefix("; did you mean ").removesuffix("?").split()
        if not hint.startswith("; did you mean"):
            continue
        assert words[0].startswith("--")
        for index, word in enumerate(words):
            if not word.startswith("--"):
                assert words[index - 1].startswith("--")
                continue
            takes_value = index + 1 < len(words) and not words[index + 1].startswith("--")
            option = next(option for option in COMMANDS[path].params if is_option(option) and word in option.opts)
            assert takes_value != option.is_flag, (name, hint)
            if word == "--set":
                field = words[index + 1].split("=")[0]
                known = settable_fields() if option.metavar == "FIELD=VALUE" else GenerationOptions.model_fields
                assert field in known, (name, hint)


def test_no_hint_is_left_unused() -> None:
    """Each line of the table is the answer to a name in some command."""
    given = {foreign_options.foreign_hint(name, metavars) for name in FOREIGN for metavars in METAVARS.values()}
    listed = {words for of_name in foreign_options.WORDS_OF.values() for words in of_name}
    assert [words for words in sorted(listed) if f"; did you mean {words}?" not in given] == []
    remarks = {remark for of_name in foreign_options.REMARK_OF.values() for remark in of_name}
    assert [remark for remark in sorted(remarks) if f"; {remark}" not in given] == []


def test_the_options_of_other_trainers_have_a_hint() -> None:
    """No option of transformers' or TRL's scripts that many commands use is answered by a page alone."""
    common = """
        lr learning_rate num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps batch_size bf16 fp16
        warmup_ratio weight_decay lr_scheduler_type output_dir logging_steps save_steps save_strategy eval_strategy optim
        gradient_checkpointing max_seq_length max_length model_name_or_path dataset_name report_to seed load_in_4bit use_peft
        lora_r lora_alpha lora_target_modules deepspeed fsdp push_to_hub packing attn_implementation torch_dtype device
        resume_from_checkpoint trust_remote_code max_grad_norm dataset_text_field neftune_noise_alpha beta use_liger_kernel
        sequence_len micro_batch_size cutoff_len template finetuning_type num_processes mixed_precision
    """
    silent = [
        name for name in common.split() if f"--{name.replace('_', '-')}" not in METAVARS["train",]
        and not foreign_options.foreign_hint(name, METAVARS["train",])
    ]  # fmt: skip
    assert silent == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("train m --lr 1", "--learning-rate X"),
        ("train m --fp16", "--set precision=fp16"),
        ("train m --bf16", "--set precision=bf16"),
        ("train m --max-length 3", "--sequence-length N"),
        ("train m --batch-size 3", "--global-batch N"),
        ("tune m --lr 3", "--space FILE"),
        ("plan m --batch-size 3", "--global-batch N"),
        ("plan m --fp16", "--set precision=fp16"),
        ("plan m --gpu t4", "--on NAME"),
        ("plan m --inference", "--generate"),
        ("plan m --qlora", "--lora-rank 16 --load-in-4bit"),
        ("generate m --max-length 3", "--max-new-tokens N"),
        ("generate m --temperature 3", "--set temperature=VALUE"),
        ("serve m --max-model-len 3", "--engine vllm --engine-set max_model_len=N"),
    ],
)
def test_a_remembered_option_gets_ours(words: str, meant: str) -> None:
    assert f"; did you mean {meant}?; see" in check_refusal(*words.split(), names="has no option")


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ("train m --device cuda", "CUDA_VISIBLE_DEVICES"),
        ("train m --trust-remote-code", "never run"),
        ("generate m --optim x", ""),
    ],
)
def test_an_option_that_is_not_needed_gets_no_wrong_guess(words: str, remark: str) -> None:
    line = check_refusal(*words.split(), names="has no option")
    assert remark in line and "did you mean" not in line
