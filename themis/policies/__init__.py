"""Placement policies behind one abstract base."""

from collections.abc import Callable, Mapping

from themis.policies.base import LayerContext, Policy
from themis.policies.ep import EP, Uniform
from themis.policies.themis import Themis, ThemisRM

#: Makers of each policy with its defaults, by the name that the command line uses.
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "ep": EP,
    "uniform": Uniform,
    "themis": Themis,
    "themis-rm": ThemisRM,
}

__all__ = ["EP", "POLICIES", "LayerContext", "Policy", "Themis", "ThemisRM", "Uniform"]
