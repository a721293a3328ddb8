"""Define the classes of all commands: they print our help pages, and say in our words what is wrong with an option."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from upshift.cli.usage.foreign_config import with_foreign_words
from upshift.cli.usage.from_axolotl import read_axolotl
from upshift.cli.usage.from_llama_factory import read_llama_factory
from upshift.cli.usage.help_page import CONFIG, first_page, help_page, is_option
from upshift.cli.usage.messages import (
    MAY_BE_EMPTY,
    USAGE_ERROR,
    MissingValue,
    check_extra,
    check_numbers,
    check_words,
    describe_error,
)
from upshift.cli.usage.run_file import AXOLOTL, INIT, LLAMA_FACTORY, with_file_words, write_run_file
from upshift.errors import RequestError
from upshift.text import did_you_mean

HELP_ALL = "--help-all"
PAGE_WIDTH = 80
FOREIGN_READERS = {AXOLOTL: read_axolotl, LLAMA_FACTORY: read_llama_factory}  # of configs, by the parameter


class HelpCommand(TyperCommand):
    """A command with our help page, which also checks what the parser of the command line lets pass."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_page(self, ctx.command_path, width=formatter.width, styled=_is_styled()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _print_all_help(self, ctx, args)
        if ctx.resilient_parsing or _asks_for_help(ctx, args):
            return super().parse_args(ctx, args)
        path = ctx.command_path
        values: dict[str, Any] = {}
        try:
            values, extra, order = self.make_parser(ctx).parse_args(list(args))
            if not ctx.allow_extra_args:
                check_extra(self, path, extra)
            check_words(path, values, order, MAY_BE_EMPTY)
            check_numbers(self, path, values, order)
            words = list(args)
            foreign = next((name for name in FOREIGN_READERS if values.get(name)), None)
            if foreign is not None:
                reader = FOREIGN_READERS[foreign]
                words = with_foreign_words(self, ctx, words, values, parameter=foreign, read=reader)
                values = self.make_parser(ctx).parse_args(list(words))[0]
            elif values.get(CONFIG):
                words = with_file_words(self, ctx, words, values)
                values = self.make_parser(ctx).parse_args(list(words))[0]
            if values.get(INIT):
                self._write_file(ctx, values)
            return super().parse_args(ctx, words)
        except USAGE_ERROR as error:
            problem = describe_error(self, path, error, values)
            if isinstance(problem, MissingValue) and not args:
                problem.page = first_page(self, path, width=PAGE_WIDTH, styled=_is_styled())
            raise problem from None

    def _write_file(self, ctx: Any, values: dict[str, Any]) -> None:
        """Write a file with all options, and exit."""
        file = write_run_file(self, ctx, values)
        typer.echo(f"Wrote {file}. Set what you need in it, then run: {ctx.command_path} --config {file}", err=True)
        ctx.exit(0)


class HelpGroup(TyperGroup):
    """A group of commands with our help page. It suggests the command that a wrong name looks like."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_page(self, ctx.command_path, width=formatter.width, styled=_is_styled()))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _print_all_help(self, ctx, args[:1])
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit(0)
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            raise describe_error(self, ctx.command_path, error, {}) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not ctx.resilient_parsing:
            path = ctx.command_path
            raise RequestError(f"there is no command {path} {name}{did_you_mean(name, self.commands)}; see {path} --help")
        return super().resolve_command(ctx, args)


def _print_all_help(command: Any, ctx: Any, args: list[str]) -> None:
    """Print the page with all options and exit, if the user asks for it. A shell that completes a command line does not ask."""
    if not ctx.resilient_parsing and _has_help_all(command, args):
        width = ctx.make_formatter().width
        typer.echo(help_page(command, ctx.command_path, width=width, detailed=True, styled=_is_styled()), nl=False)
        ctx.exit(0)


def _asks_for_help(ctx: Any, args: list[str]) -> bool:
    """Return whether the first word asks for the page. Then no other word is read, nor the file of one."""
    return bool(args) and args[0] in ctx.help_option_names


def _has_help_all(command: Any, args: list[str]) -> bool:
    """Return whether --help-all is among the options before ``--``. It may also be the value of an option, such as a prompt."""
    valued = {name for parameter in command.params if is_option(parameter) and not parameter.is_flag for name in parameter.opts}
    words = iter(args)
    for word in words:
        if word in (HELP_ALL, "--"):
            return word == HELP_ALL
        if word in valued:
            next(words, None)
    return False


def _is_styled() -> bool:
    """Return whether standard output is a terminal that shows colors."""
    from upshift.cli.tables import out

    return out.is_terminal and not out.no_color
