# SPDX-License-Identifier: Apache-2.0
"""`lmcache-ec`: an operator's commands for the cache on this host."""

import errno
import os
import signal
import sys

_READER_GONE = 128 + signal.SIGPIPE
_INTERRUPTED = 128 + signal.SIGINT
_UNWRITTEN = 1
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main() -> None:
    """Run the command in this process's arguments, and end the process.

    Ctrl-C ends it quietly: commands handle it; before they begin and after they end the signal has its default
    effect. A closed pipe (`| head`) ends it as quietly, with SIGPIPE's status; the signal itself would also be raised
    by a store that closes its connection. If there is no room for output, it prints one line, with status 1.
    """
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job ignores it
    status: object = 0
    try:
        if handled:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from lmcache_ec.cli.commands import app  # this takes most of a short command's time

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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard what is left to flush at the end
    sys.exit(status)  # type: ignore[arg-type]
