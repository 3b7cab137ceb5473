"""The training program: configuration, data, the loop, metrics and checkpoints."""
