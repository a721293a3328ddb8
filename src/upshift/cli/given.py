"""Read which options the command line gives. An option that is given and not used is refused, never ignored."""

from __future__ import annotations

import typer


def given_options(context: typer.Context) -> dict[str, str]:
    """By the parameter's name, as it is written: ``{"global_batch": "--global-batch"}``."""
    return {
        parameter.name: parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
        for parameter in context.command.params
        if parameter.name and (source := context.get_parameter_source(parameter.name)) and source.name == "COMMANDLINE"
    }
