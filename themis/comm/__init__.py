"""Communication between ranks: mesh, token AlltoAll, sparse collectives, and who is to blame when they fail."""
