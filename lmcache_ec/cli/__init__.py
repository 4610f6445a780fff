# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec`: what an operator asks of the cache on this host."""

import errno
import os
import signal
import sys

_READER_GONE = 128 + signal.SIGPIPE
_INTERRUPTED = 128 + signal.SIGINT
_UNWRITTEN = 1
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main() -> None:
    """Run the command that the arguments of this process name, and end the process.

    Ctrl-C ends it quietly: commands handle it; before they begin and after they end the signal has its default
    effect. A closed pipe (`| head`) ends it as quietly, with SIGPIPE's status; the signal itself would also come of a
    store that closes its connection. Output for which there is no room is one line, and status 1.
    """
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a job in the background ignores it
    status: object = 0
    try:
        if handled:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from lmcache_ec.cli.commands import app  # most of the time that a short command takes

        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except SystemExit as end:
        status = _READER_GONE if isinstance(end.__context__, BrokenPipeError) else end.code
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        print(f"Standard output cannot be written: {error.strerror}", file=sys.stderr)
        status = _UNWRITTEN
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    if status in (_READER_GONE, _UNWRITTEN):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to flush at the end has nowhere to go
    sys.exit(status)  # type: ignore[arg-type]
