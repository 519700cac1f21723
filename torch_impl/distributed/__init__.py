"""Calls on several ranks: a sharded vocabulary, DTensors, and what ranks tell each other."""
