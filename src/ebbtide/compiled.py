"""Compiled modules, where they were built: each does what Python does without it, only faster.

They are compiled when the package is installed and a C compiler is there. One is used after it has
shown on this machine that it is right. `EBBTIDE_PURE=1` leaves them all out.
"""

from __future__ import annotations

import functools
import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar, cast

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

PURE_VARIABLE = "EBBTIDE_PURE"

M = TypeVar("M")


def compiled_module(
    name: str, is_right: Callable[[M], bool], what: str
) -> functools._lru_cache_wrapper[M | None]:
    """A call that gives the module `name`, or None: not built, not wanted, or not right on this
    machine. `what` names it in the log.

    The first call of it looks, and takes as long as `is_right`; later ones have the same answer.
    It raises ConfigError for a value of EBBTIDE_PURE other than 0 and 1.
    """
    return functools.cache(lambda: _find(name, is_right, what))


def _find(name: str, is_right: Callable[[M], bool], what: str) -> M | None:
    if _is_pure():
        return None
    try:
        found = cast("M", import_module(name))
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
