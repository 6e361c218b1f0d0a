"""Whether an index can be opened without harm: tried in a process of its own.

LMDB maps its file. What another program, or a crash of the machine, has left of it can end the
process that looks at it by a signal, or keep it busy for ever; here that process is a child.

Run as a program, this module is the child: `python -m ebbtide.tiers.index_probe PATH`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

import lmdb

_log = logging.getLogger("ebbtide.tiers")

TIMEOUT_S = 120.0  # a million records take some 3 s when nothing of them is cached
DATABASES_MAX = 4
SPARE_BYTES = 1 << 20
EXIT_UNUSABLE = 1


def index_is_sound(path: str) -> bool:
    """Have a child read every entry of the environment in `path`. Blocks, about 0.2 s and more.

    A child that cannot be started says nothing against the index.
    """
    command = [sys.executable, "-P", "-m", "ebbtide.tiers.index_probe", path]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        _log.error("Reading the index does not end")
        return False
    except OSError as error:
        _log.warning("The index is opened without a probe (%s)", error.strerror)
        return True
    if done.returncode < 0:
        _log.error("Reading the index ended in %s", signal.Signals(-done.returncode).name)
    elif done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        _log.error("The index cannot be read: %s", lines[-1] if lines else done.returncode)
    return done.returncode == 0


def read_everything(path: str) -> None:
    """Touch every entry, and what a writer looks at first. Raises lmdb.Error, or worse."""
    # An index without a free page needs some for the trial of writing, which is given up again.
    data = os.path.join(path, "data.mdb")
    map_bytes = (os.path.getsize(data) if os.path.exists(data) else 0) + SPARE_BYTES
    environment = lmdb.open(
        path, map_size=map_bytes, max_dbs=DATABASES_MAX, readahead=False, create=False
    )
    with environment.begin() as transaction:
        names = [bytes(name) for name, _ in transaction.cursor()]
    opened = [environment.open_db(name, create=False) for name in names]
    with environment.begin(buffers=True) as transaction:
        for database in opened:
            for _, value in transaction.cursor(db=database):
                bytes(value[:1])
    with environment.begin(write=True) as transaction:
        for database in opened:
            transaction.put(b"probe", b"", db=database)
        transaction.abort()
    environment.close()


def main() -> int:
    """0: sound. 1: LMDB says that it is not."""
    try:
        read_everything(sys.argv[1])
    except lmdb.Error as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNUSABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
