"""Helpers for tests of distributed code, shipped so that users can test their own models with them."""
