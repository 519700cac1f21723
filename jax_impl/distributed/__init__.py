"""Calls on several devices: a sharded vocabulary, and what devices tell each other."""
