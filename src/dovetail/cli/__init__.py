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

import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

from dovetail.interrupts import INTERRUPTED, end_of_interrupts, leave_interrupts, take_interrupts

take_interrupts()
try:
    from importlib import import_module

    import typer

    from dovetail.errors import DovetailError, InfeasibleError
    from dovetail.runtime.forking import start_fork_server
    from dovetail.runtime.user_code import exits_noticed, line_of, location_of, refuse_exit, said
    from dovetail.units import printable
# Ctrl-C may come during these imports as well.
except KeyboardInterrupt:
    sys.stderr.write("interrupted\n")
    sys.exit(INTERRUPTED)
leave_interrupts()

COMMANDS = {
    "plan": ("planning", "Find where each operation should run"),
    "run": ("using", "Run a plan and compare it with its prediction"),
    "report": ("using", "Write a plan's page: timeline, graph, methods, memory"),
    "export": ("using", "Write a plan in another tool's format"),
    "schedule": ("scheduling", "Find which operations to run at once on one device"),
    "train": ("training", "Train a model with a parameter server and workers"),
    "train-report": ("training", "Write a page that compares training runs"),
    "predict": ("predicting", "Apply a trained model to a data set"),
    "learn": ("learning", "Train a policy that places networks"),
    "machine": ("showing", "Show a machine's devices and links"),
    "networks": ("showing", "List the built-in networks"),
    "capture": ("showing", "Capture a network as a graph and save it"),
}
"""A command's name -> its module, imported when the command is called, and its line in the help."""
DEBUG = "--debug"
FORKING = {
    "plan": ("torch", "dovetail.costs.measured", "dovetail.executors.worker"),
    "run": ("torch", "dovetail.executors.worker"),
    "train": (
        "torch",
        # torch imports it with the first optimizer of a process, which takes longer than a fork.
        "torch._dynamo",
        "dovetail.training.backends.processes.server",
        "dovetail.training.backends.processes.worker",
        "dovetail.training.modules",
    ),
}
"""A command that starts processes -> what they import. A server that forks them imports it while
this process imports its own part."""
NO_MEMORY = ("allocate memory", "failed to map segment", "bad_alloc", "can't start new thread")
"""What the texts of errors say that the system, its loader, torch and Python raise for want of
memory."""
OTHER_BACKENDS = ("threads", "simulated", "ray")
"""Backends of `train` that fork nothing."""


def make_app(*names: str) -> typer.Typer:
    """The command line with these commands. The others are only listed in its help."""
    app = typer.Typer(
        help="Finds how to run a neural network fastest on the devices you have.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # To import rich's way of showing help takes as long as all else that a help needs.
        rich_markup_mode=None,
        context_settings={"max_content_width": 100},
    )
    app.callback()(_of_all_commands)
    for name, (module_name, line) in COMMANDS.items():
        if name not in names:
            app.command(name, short_help=line)(lambda: None)
            continue
        module = import_module(f"dovetail.cli.{module_name}")
        function = getattr(module, name.replace("-", "_"))
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name, short_help=line)
        else:
            epilog = getattr(module, "EPILOGS", {}).get(name)
            add = app.command(name, short_help=line, epilog=epilog)
            add(import_module("dovetail.cli.options").command(function))
    return app


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
    take_interrupts()
    arguments = [argument for argument in sys.argv[1:] if argument != DEBUG]
    debug = DEBUG in sys.argv[1:]
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        from dovetail.runtime.files import use_own_cache

        # Before torch is imported, here or by a process that this one starts.
        use_own_cache()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the import takes a while
        from dovetail.runtime.ranks import end_with_launcher

        end_with_launcher()
    if name in FORKING and _may_fork(arguments):
        start_fork_server(FORKING[name])
    run_app(lambda: make_app(name), arguments, debug)


def run_app(make: Callable[[], typer.Typer], arguments: list[str], debug: bool) -> None:
    """Run the command line that `make` returns, and exit with its status. An error is one line,
    with `debug` below its traceback."""
    try:
        app = make()
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
        _say("interrupted")
    end_of_interrupts()
    sys.exit(status or 0)


def _may_fork(arguments: list[str]) -> bool:
    """Whether a command of `FORKING` may start processes."""
    if "--help" in arguments or "--rules" in arguments:
        return False
    text = " ".join(arguments)
    # Only what is planned for this machine is measured, and compared there.
    named = re.search(r"--machine[ =](\S+)", text)
    if arguments[0] == "plan" and named is not None and not named[1].startswith("here"):
        return False
    return not any(f"--backend{by}{other}" in text for by in " =" for other in OTHER_BACKENDS)


def _tell(error: BaseException, debug: bool) -> int:
    """Tell the user of the error, and return the exit status. Raise it if it is a bug of ours."""
    if debug:
        _show_traceback(error)
    if isinstance(error, DovetailError):
        begin = "no feasible plan" if isinstance(error, InfeasibleError) else "error"
        _say(f"{begin}: {error.line}")
        return error.exit_status
    # Usage errors of typer have this method. typer does not export their base class.
    if hasattr(error, "format_message"):
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show(file=sys.stdout)  # type: ignore[attr-defined]
        else:
            _say(f"error: {error.format_message()}")
        return getattr(error, "exit_code", 2)
    # The user's code was called where nobody expected it to raise, as by a property of an object.
    if location_of(error, libraries=False):
        _say(f"error: {line_of(error)}")
        return 1
    # It may be lacking wherever the command is, also while a library is imported.
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        told = said(cause)
        if isinstance(cause, MemoryError) or any(sign in told for sign in NO_MEMORY):
            _say(f"error: there is too little memory: {told[:200]}; free some, or raise its limit")
            return 1
        cause = cause.__cause__ or cause.__context__
    raise error


def _say(text: str) -> None:
    sys.stderr.write(printable(text) + "\n")


def _show_traceback(error: BaseException) -> None:
    sys.stderr.write("".join(traceback.format_exception(error)))
