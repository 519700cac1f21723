"""Adapters for programs that people train with, one file a program."""
