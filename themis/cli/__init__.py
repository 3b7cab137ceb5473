"""The command `themis`."""
