"""The `silobayes` command: a table of sub-commands and the one place where errors become exit codes.

Sub-commands are imported when they are called, so `silobayes --help` starts without NumPy or JAX.
Exit codes: 0 done, 2 the input is not acceptable (nothing was charged), 1 any other refusal.
"""

from dataclasses import dataclass
from importlib import import_module

import click

from silobayes.core.errors import InvalidInput, SiloBayesError


@dataclass(frozen=True, kw_only=True)
class _Entry:
    module: str
    summary: str


COMMANDS = {
    "calibrate": _Entry(module="silobayes.cli.calibrate", summary="Whether a study's intervals would hold the truth."),
    "demo": _Entry(module="silobayes.cli.demo", summary="The main job on simulated silos, offline."),
    "explain": _Entry(module="silobayes.cli.explain", summary="A study in plain words for a data-protection officer."),
    "init": _Entry(module="silobayes.cli.init", summary="A commented study file to start from."),
    "ledger": _Entry(module="silobayes.cli.ledger", summary="Create or show the privacy ledger of a data set."),
    "methods": _Entry(module="silobayes.cli.methods", summary="What there is to choose from, and what it releases."),
    "plan": _Entry(module="silobayes.cli.plan", summary="Noise, rounds and widths before any row is read."),
    "predict": _Entry(module="silobayes.cli.predict", summary="Means or probabilities of new rows, with intervals."),
    "privacy": _Entry(module="silobayes.cli.privacy", summary="The accountant as a calculator."),
    "report": _Entry(module="silobayes.cli.report", summary="One self-contained HTML file of a finished run."),
    "resume": _Entry(module="silobayes.cli.resume", summary="Go on with a run; nothing is charged again."),
    "run": _Entry(module="silobayes.cli.run", summary="One posterior from the silos of a study."),
    "summary": _Entry(module="silobayes.cli.summary", summary="The coefficients of a run as a reader wants them."),
    "verify": _Entry(module="silobayes.cli.verify", summary="Recompute the price of a run from its ledgers."),
}
"""Name -> module that defines a click command of that name, and the line shown by --help."""


class _Refused(click.ClickException):
    exit_code = 1


class _BadInput(click.ClickException):
    exit_code = 2


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return getattr(import_module(COMMANDS[cmd_name].module), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table: click's own would import every sub-command for its first line of help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SiloBayesError as error:
            one_line = " ".join(str(error).split())
            raise (_BadInput if isinstance(error, InvalidInput) else _Refused)(one_line) from error


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """One posterior from many silos, with a privacy guarantee you can check."""
