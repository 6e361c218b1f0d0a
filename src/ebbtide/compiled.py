"""Compiled modules, where they were built: each does what Python does without it, only faster.

They are compiled when the package is installed and a C compiler is there. One is used after it has
shown on this machine that it is right. `EBBTIDE_PURE=1` leaves them all out.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

PURE_VARIABLE = "EBBTIDE_PURE"


def compiled_module(name: str, is_right: Callable[[Any], bool], what: str) -> Any | None:
    """The module `name`, or None: not built, not wanted, or not right on this machine.

    `what` names it in the log. Raises ConfigError for a value of EBBTIDE_PURE other than 0 and 1.
    As long as `is_right` takes; callers keep the answer.
    """
    if _is_pure():
        return None
    try:
        found = import_module(name)
    except ImportError as error:
        logger.debug("There is no %s: %s", what, error)
        return None
    if not is_right(found):
        logger.warning(
            "The %s is wrong on this machine and is not used. Set %s=1 to leave it out.",
            what,
            PURE_VARIABLE,
        )
        return None
    return found


def _is_pure() -> bool:
    text = os.environ.get(PURE_VARIABLE, "0")
    if text not in ("0", "1"):
        raise ConfigError(
            f"{PURE_VARIABLE} is 0 or 1", next_step="Unset it, or write 1", found=text
        )
    return text == "1"
