"""Placement policies behind one abstract base."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from themis.core.errors import ConfigError
from themis.policies.base import LayerContext, Policy
from themis.policies.ep import EP, Uniform
from themis.policies.eplb import EPLB
from themis.policies.exact_load import ExactLoad
from themis.policies.faster_moe import FasterMoE
from themis.policies.flex_moe import FlexMoE
from themis.policies.smart_moe import SmartMoE
from themis.policies.themis import Themis, ThemisRM
from themis.policies.themis_joint import ThemisJoint

#: Makers of each policy with its defaults, by the name that the command line uses.
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "ep": EP,
    "uniform": Uniform,
    "faster-moe": FasterMoE,
    "smart-moe": SmartMoE,
    "flex-moe": FlexMoE,
    "eplb": EPLB,
    "exact-load": ExactLoad,
    "themis": Themis,
    "themis-rm": ThemisRM,
    "themis-joint": ThemisJoint,
}


def make_policy(name: str, values: Mapping[str, Any]) -> Policy:
    """The policy of that name, with those of `values` that it has fields for; ConfigError where there is none."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} is unknown; there are {', '.join(POLICIES)}")
    policy: Any = POLICIES[name]()
    known = {item.name for item in fields(policy)}
    return replace(policy, **{key: value for key, value in values.items() if key in known})  # type: ignore[no-any-return]


__all__ = [
    "EP",
    "EPLB",
    "POLICIES",
    "ExactLoad",
    "FasterMoE",
    "FlexMoE",
    "LayerContext",
    "Policy",
    "SmartMoE",
    "Themis",
    "ThemisJoint",
    "ThemisRM",
    "Uniform",
    "make_policy",
]
