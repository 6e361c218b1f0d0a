"""Types and checks of command line options that several benchmarks have."""

from __future__ import annotations

import argparse
import math
import os
import shutil

from ebbtide.errors import ConfigError
from ebbtide.sizes import format_size


def count(text: str) -> int:
    """A number of at least one. Raises ArgumentTypeError, or ValueError for what is no number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below one")
    return number


def positive_seconds(text: str) -> float:
    """A time above zero. Raises ArgumentTypeError, or ValueError for what is no number."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time above zero")
    return number


def check_directory(path: str | None) -> None:
    """Raises ConfigError unless `--dir` was not given or is there."""
    if path is not None and not os.path.isdir(path):
        raise ConfigError("There is no such directory", next_step="Make it first.", path=path)


def check_room(directory: str, needed_bytes: int, next_step: str) -> None:
    """Raises ConfigError when the directory's file system has less room."""
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            "The file system is too small",
            next_step=next_step,
            needed=format_size(needed_bytes),
            free=format_size(free_bytes),
        )
