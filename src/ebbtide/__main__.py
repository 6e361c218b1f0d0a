"""`python -m ebbtide` is the command line."""

import sys

from ebbtide.cli import main

if __name__ == "__main__":
    sys.exit(main())
