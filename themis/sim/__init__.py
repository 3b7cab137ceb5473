"""The cluster simulator: prices, on clusters nobody has here, the very plans that the runtime executes. No torch."""
