"""`ebbtide serve` of another protocol. Usage: newer_store.py MAJOR MINOR ARGUMENT..."""

from __future__ import annotations

import sys

from ebbtide.connectors import message

if __name__ == "__main__":
    # Before the messages are made: it is the default of their fields.
    message.VERSION = (int(sys.argv[1]), int(sys.argv[2]))
    from ebbtide.cli import main

    sys.exit(main(["serve", *sys.argv[3:]]))
