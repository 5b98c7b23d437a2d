"""Many jobs: who runs them, in which processes, and the table of how each ended."""
