"""The console script. It imports the commands only once Ctrl-C is taken care of."""

from __future__ import annotations

import signal

from obole.cli import signals


def main() -> None:
    """Run the command line of `sys.argv` and leave with its exit status (see `failures.py`)."""
    signals.handle(signals.leave)
    from obole.cli.commands import command_line
    from obole.cli.streams import prepare_streams

    line = command_line()
    prepare_streams()
    signals.handle(signal.default_int_handler)
    try:
        line.main()
    finally:
        signals.handle(signals.leave)  # the interpreter takes its leave
