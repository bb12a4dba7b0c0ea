"""Benchmarks against ``cp``, tensorstore and other tools: ``python -m bench --help``."""
