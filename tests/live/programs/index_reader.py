"""A foreign process that looks at a store's LMDB, as an operator's tool might.

`hold PATH`: keeps a read transaction until it is killed. `die PATH COUNT`: so many processes, each
killed within one.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import lmdb


def begin(path: str) -> tuple[object, object]:
    environment = lmdb.open(path, max_dbs=4, readonly=True)
    return environment, environment.begin()


def main(verb: str, path: str, count: int = 0) -> None:
    if verb == "hold":
        reading = begin(path)
        print("reading", flush=True)  # noqa: T201  # the parent waits for it
        time.sleep(600)
        del reading
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                reading = begin(path)
            finally:  # also where the table of readers is full
                os.kill(os.getpid(), signal.SIGKILL)
            del reading
        os.waitpid(child, 0)
    print("done", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
