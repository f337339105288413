"""`python -m dovetail`, and the command `dovetail`: the command line, as a program of its own."""

import atexit
import os
import sys
import threading
from collections.abc import Callable

from dovetail.interrupts import INTERRUPTED


def run(main: Callable[[], None] | None = None) -> None:
    """Run a command line, by default that of `dovetail`, and end the process with its status."""
    status = 1

    def end() -> None:
        # A thread that is in torch's code while Python is taken down ends the process by SIGABRT,
        # whoever started it. Once all else is cleaned up, nothing is left to take down.
        if threading.active_count() > 1 or status == INTERRUPTED:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            except (OSError, ValueError):
                return  # Python tells of it
            os._exit(status)

    # What is registered first is called last.
    atexit.register(end)
    try:
        if main is None:
            # Imported here, where an interrupt is handled.
            from dovetail.cli import main as of_dovetail

            main = of_dovetail
        main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
        raise


if __name__ == "__main__":
    run()
