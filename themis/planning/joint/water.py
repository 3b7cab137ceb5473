"""Water levels: an amount split over holders that already carry load, own tokens before others'."""

from __future__ import annotations

from typing import Any

from themis.planning.compiled import compiled

#: The level is done when what it pours out is this close to the amount.
CLOSE = 1e-6
MAX_STEPS = 24


@compiled
def _taken(above: Any, own: Any, price: Any) -> Any:
    """What a holder takes when the level stands `above` its load."""
    if above <= own:
        return max(0.0, above)
    return max(own, above - price)


@compiled
def _rises(above: Any, own: Any, price: Any) -> Any:
    """Whether that grows with the level."""
    return 0 < above <= own or above > own + price


@compiled
def pour(base_H: Any, own_H: Any, holders: Any, amount: Any, price: Any, share_H: Any) -> None:
    """Split `amount` over the first `holders` entries; the shares come in `share_H`.

    They minimise the sum of (base + share)^2 / 2 + price * max(0, share - own): a holder takes up to `own` at its
    load, and more only where others stand higher by `price`. Newton's steps on the level, bisected where they leave
    the bracket, as what is poured rises with the level in straight pieces.
    """
    low = high = base_H[0]
    for i in range(1, holders):
        low, high = min(low, base_H[i]), max(high, base_H[i])
    high = min(low + amount, high + amount / holders) + price
    level = low + amount / holders
    for _ in range(MAX_STEPS):
        missing, rising = amount, 0
        for i in range(holders):
            missing -= _taken(level - base_H[i], own_H[i], price)
            rising += _rises(level - base_H[i], own_H[i], price)
        if abs(missing) <= CLOSE * amount:
            break
        low, high = (low, level) if missing < 0 else (level, high)
        level = level + missing / rising if rising > 0 else low
        if level <= low or level >= high:
            level = (low + high) / 2
    poured = 0.0
    for i in range(holders):
        share_H[i] = _taken(level - base_H[i], own_H[i], price)
        poured += share_H[i]
    for i in range(holders):
        share_H[i] = share_H[i] * (amount / poured) if poured > 0 else amount / holders
