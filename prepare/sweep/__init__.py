"""Sweeps: the processes that execute many jobs, the order they share, and the table of their results."""
