"""Placement and split chosen together: our own planner (docs/joint.md)."""
