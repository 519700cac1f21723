"""Drop-ins and adapters for programs that people train with, one file a program."""
