# SPDX-License-Identifier: Apache-2.0
"""Whether there can be a disk tier at a path; errors are written for the user who has to correct it.

An engine about to make the folder and `lmcache-ec doctor`, which makes nothing, call the same function: what would
end a start is found before it.
"""

import errno
import os
from pathlib import Path

from lmcache_ec.host import disk
from lmcache_ec.tiers.disk_folder import open_root


def check_place(folder: Path) -> None:
    """ValueError if this user can neither open the folder nor make it. It names the path, the obstacle and the
    remedy. Makes and changes nothing."""
    try:
        os.close(open_root(str(folder)))
    except FileNotFoundError:
        if why := _why_not_made(folder):
            raise ValueError(f"{folder} cannot be made: {why}") from None
    except OSError as error:
        raise ValueError(_why_not_opened(folder, error)) from None


def _why_not_made(folder: Path) -> str:
    found = disk(folder)
    above, user = found.nearest, os.geteuid()
    if not above.is_dir():
        return f"{above} is a file, name a folder"
    if not found.takes_files:
        return f"{above} is on {found.kind}, which cannot hold files: name another folder"
    if os.statvfs(above).f_flag & os.ST_RDONLY:
        return f"{above} is on a file system that is mounted read only: name another folder"
    if not found.writable:
        return f"{above} is not writable for user {user}: make the folder for that user, or name another one"
    return ""


def _why_not_opened(folder: Path, error: OSError) -> str:
    nearest, user = disk(folder).nearest, os.geteuid()
    if error.errno == errno.ELOOP:
        return f"{folder} cannot be opened: {_looping(folder)} is a link that leads to itself: name another folder"
    if error.errno == errno.ENOTDIR:
        cannot = "" if nearest == folder else f"{folder} cannot be made: "
        return f"{cannot}{nearest} is a file, name a folder"
    if error.errno == errno.EACCES:
        return f"{folder} cannot be opened: user {user} may not enter {nearest}: allow it, or name another folder"
    return f"{folder} cannot be opened: {error.strerror}: name another folder"


def _looping(folder: Path) -> Path:
    """The first link on the path that leads nowhere."""
    for path in (*reversed(folder.parents), folder):
        try:
            os.stat(path)
        except OSError:
            return path
    return folder  # corrected meanwhile
