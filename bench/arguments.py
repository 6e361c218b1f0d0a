"""Types of command line options that several benchmarks have."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A number of at least one. Raises ArgumentTypeError, or ValueError for what is no number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below one")
    return number
