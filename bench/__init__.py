"""Benchmarks: one command line, ``python -m bench NAME``; ``python -m bench --help`` lists the names."""
