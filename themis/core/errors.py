"""The errors Themis raises on purpose, and the one way to check an argument."""

from __future__ import annotations

from numbers import Integral
from typing import NoReturn


class ThemisError(Exception):
    """Base of every error Themis raises on purpose; its text is one line that a user can act on."""


class ConfigError(ThemisError, ValueError):
    """A bad argument, flag, file or configuration: names what was given and what would be right."""


class PeerError(ThemisError, RuntimeError):
    """A peer failed or missed a time limit; `ranks` are the ranks that are to blame, as far as known."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class CheckpointError(ThemisError, RuntimeError):
    """A checkpoint that is missing, incomplete or does not fit the model."""


def require(condition: bool, argument: str, given: object, wanted: str) -> None:
    """Raise ConfigError naming `argument`, what was `given` and what is `wanted`, unless `condition` holds."""
    if not condition:
        reject(argument, repr(given), wanted)


def is_whole(value: object, least: int) -> bool:
    """Whether `value` is a whole number, Python's or NumPy's but no bool, of at least `least`."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def reject(argument: str, described: str, wanted: str) -> NoReturn:
    """Raise ConfigError on an argument too large to show: `described` says in words what is wrong with it."""
    raise ConfigError(f"{argument} is {described}; it must be {wanted}")
