"""Gates: how tokens choose experts."""

from themis.moe.gates.base import Assignment, Gate
from themis.moe.gates.softmax import SoftmaxGate

__all__ = ["Assignment", "Gate", "SoftmaxGate"]
