"""What ``bench/fuzz.py`` is made of: problems, their data, the truth, what runs them, and who judges."""
