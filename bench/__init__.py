"""Benchmarks: one registry, one runner (``python -m bench.run``), one report (``python -m bench.report``)."""
