"""The parts of ``python -m bench fuzz``: problems, their data, the truth, what runs them, and who judges."""
