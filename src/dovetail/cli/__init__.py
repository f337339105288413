"""The command line: a command builds a request, passes it to the pipeline, and prints the result.

Results go to standard output, everything else to standard error. The exit status is

    0     the command did what it was asked for
    1     a run failed, or there is a bug
    2     the input or the usage is invalid
    3     no plan is feasible
    130   Ctrl-C came before there was a plan to return

Nothing here imports torch before a command needs it, so that help and errors come at once.
"""

import sys

import typer

from dovetail.cli.benching import bench
from dovetail.cli.learning import learn
from dovetail.cli.output import say
from dovetail.cli.planning import plan
from dovetail.cli.predicting import PREDICT_EPILOG, predict
from dovetail.cli.scheduling import schedule
from dovetail.cli.showing import capture, machine, networks
from dovetail.cli.training import EPILOG, train, train_report
from dovetail.cli.using import export, report, run
from dovetail.errors import DovetailError, InfeasibleError, InvalidError
from dovetail.methods import PLACERS, SCHEDULERS, listing

INTERRUPTED = 130
"""The exit status after a Ctrl-C outside a search. A shell reports SIGINT by this number."""

app = typer.Typer(
    help="Finds how to run a neural network fastest on the devices you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (machine, networks, capture, run, report, export, bench):
    app.command()(command)
app.command(epilog=listing("Placers:", PLACERS))(plan)
app.command(epilog=listing("Schedulers:", SCHEDULERS))(schedule)
app.command(epilog=EPILOG)(train)
app.command("train-report")(train_report)
app.command(epilog=PREDICT_EPILOG)(predict)
app.add_typer(learn, name="learn")


def main() -> None:
    """Run the command line and exit with its status."""
    try:
        # In this mode typer returns the status of a typer.Exit, and 130 for a Ctrl-C, but does not
        # catch errors.
        status = app(standalone_mode=False)
    except typer.Exit as stop:
        status = stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except InvalidError as error:
        say(f"error: {error}")
        sys.exit(2)
    except InfeasibleError as error:
        say(f"no feasible plan: {error}")
        sys.exit(3)
    except DovetailError as error:
        say(f"error: {error}")
        sys.exit(1)
    except Exception as error:
        # Usage errors of typer have this method. typer does not export their base class.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            say(f"error: {error.format_message()}")
        sys.exit(getattr(error, "exit_code", 2))
    if status == INTERRUPTED:
        say("interrupted")
    sys.exit(status or 0)
