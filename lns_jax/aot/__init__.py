"""Ahead of time: a train step compiled for TPUs on any CPU, and what its program says of memory, work and time."""
