"""The Pallas kernels: their launches, and the functions that a backend has."""
