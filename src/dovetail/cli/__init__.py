"""The command line: a command builds a request, passes it to the pipeline, and prints the result.

Results go to standard output, everything else to standard error, also what the user's code prints.
The exit status is

    0     the command did what it was asked for
    1     a run failed, the user's code raised or ended the program, or there is a bug
    2     the input or the usage is invalid
    3     no plan is feasible
    130   Ctrl-C came before there was a plan to return

An error is one line. `--debug`, anywhere among the arguments, shows its traceback before that.

Nothing here imports torch before a command needs it, so that help and errors come at once.
"""

import sys
import traceback
from typing import Annotated

INTERRUPTED = 130
"""The exit status after a Ctrl-C outside a search. A shell reports SIGINT by this number."""

try:
    import typer

    from dovetail.cli.benching import bench
    from dovetail.cli.learning import learn
    from dovetail.cli.output import command, say
    from dovetail.cli.planning import plan
    from dovetail.cli.predicting import PREDICT_EPILOG, predict
    from dovetail.cli.scheduling import schedule
    from dovetail.cli.showing import capture, machine, networks
    from dovetail.cli.training import EPILOG, train, train_report
    from dovetail.cli.using import export, report, run
    from dovetail.errors import DovetailError, InfeasibleError
    from dovetail.methods import PLACERS, SCHEDULERS, listing
    from dovetail.runtime.forking import start_fork_server
    from dovetail.runtime.user_code import exits_noticed, line_of, location_of, refuse_exit
# These imports take a third of a second, in which Ctrl-C may come as well.
except KeyboardInterrupt:
    sys.stderr.write("interrupted\n")
    sys.exit(INTERRUPTED)

DEBUG = "--debug"
FORKING = ("run", "train")
"""Commands that start processes: a server imports for these what this process imports meanwhile."""

app = typer.Typer(
    help="Finds how to run a neural network fastest on the devices you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for function in (machine, networks, capture, run, report, export, bench):
    app.command()(command(function))
app.command(epilog=listing("Placers:", PLACERS))(command(plan))
app.command(epilog=listing("Schedulers:", SCHEDULERS))(command(schedule))
app.command(epilog=EPILOG)(command(train))
app.command("train-report")(command(train_report))
app.command(epilog=PREDICT_EPILOG)(command(predict))
app.add_typer(learn, name="learn")


@app.callback()
def _of_all_commands(
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show the traceback of an error. It may stand anywhere")
    ] = False,
) -> None:
    # This shows the option in the help. `main` takes it out of the arguments, so that it may stand
    # behind a command as well.
    del debug


def main() -> None:
    """Run the command line and exit with its status."""
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG]
    debug = DEBUG in sys.argv[1:]
    if arguments and arguments[0] in FORKING and "--help" not in arguments:
        start_fork_server()
    try:
        # In this mode typer returns the status of a typer.Exit, and 130 for a Ctrl-C, but does not
        # catch errors.
        with exits_noticed(refuse_exit):
            status = app(arguments, standalone_mode=False)
    except typer.Exit as stop:
        status = stop.exit_code
    except (typer.Abort, KeyboardInterrupt) as error:
        status = INTERRUPTED
        if debug:
            _show_traceback(error)
    except BaseException as error:
        status = _tell(error, debug)
    if status == INTERRUPTED:
        say("interrupted")
    sys.exit(status or 0)


def _tell(error: BaseException, debug: bool) -> int:
    """Tell the user of the error, and return the exit status. Raise it if it is a bug of ours."""
    if debug:
        _show_traceback(error)
    if isinstance(error, DovetailError):
        begin = "no feasible plan" if isinstance(error, InfeasibleError) else "error"
        say(f"{begin}: {error.line}")
        return error.exit_status
    # Usage errors of typer have this method. typer does not export their base class.
    if hasattr(error, "format_message"):
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
        else:
            say(f"error: {error.format_message()}")
        return getattr(error, "exit_code", 2)
    # The user's code was called where nobody expected it to raise, as by a property of an object.
    if location_of(error, libraries=False):
        say(f"error: {line_of(error)}")
        return 1
    raise error


def _show_traceback(error: BaseException) -> None:
    sys.stderr.write("".join(traceback.format_exception(error)))
