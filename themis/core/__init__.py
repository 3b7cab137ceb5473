"""Values that every other package speaks in: topology, loads, placements, plans, costs, errors. No torch."""
