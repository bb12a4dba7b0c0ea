"""Adapters: what they hold, apart from the format that they are stored in."""
