"""The token of the HTTP endpoints: read once, compared in constant time, never logged."""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from typing import TYPE_CHECKING

from ebbtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ebbtide.config import HttpConfig

VARIABLE = "EBBTIDE_HTTP_TOKEN"
CHARACTERS_MIN = 16
CHARACTERS_MAX = 4096


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def read_token(http: HttpConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """The token, from its file or from EBBTIDE_HTTP_TOKEN; None: none is asked for.

    Raises ConfigError when other machines could read without one.
    """
    from_variable = environ.get(VARIABLE)
    if http.token_file is not None and from_variable is not None:
        raise ConfigError(
            f"The HTTP token is given in http.token_file and in {VARIABLE}",
            next_step="Remove one of them.",
        )
    token = from_variable if http.token_file is None else _read_file(http.token_file)
    if token is not None:
        _check(token)
    elif not is_loopback(http.host):
        raise ConfigError(
            "HTTP would be open to other machines without a token",
            next_step=f"Set http.token_file or {VARIABLE}, or listen on 127.0.0.1.",
            host=http.host,
        )
    return token


def grants(token: str | None, authorization: str | None) -> bool:
    """Whether a request with this Authorization header may read."""
    if token is None:
        return True
    scheme, _, given = (authorization or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode("ascii"))
    return same and scheme.lower() == "bearer"


def _read_file(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(CHARACTERS_MAX + 2)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "The file of the HTTP token cannot be read",
            next_step="Check http.token_file: the path, its permissions, and that it is ASCII.",
            token_file=path,
        ) from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            "Everybody may read the HTTP token",
            next_step=f"Run: chmod o-rwx {path}",
            token_file=path,
        )
    return text.strip()


def _check(token: str) -> None:
    """The token itself stands in no message."""
    plain = token.isascii() and token.isprintable() and " " not in token
    if not plain or not CHARACTERS_MIN <= len(token) <= CHARACTERS_MAX:
        raise ConfigError(
            f"The HTTP token must have {CHARACTERS_MIN} to {CHARACTERS_MAX} characters without "
            "spaces",
            next_step="Make one: openssl rand -hex 32",
            characters=len(token),
        )
