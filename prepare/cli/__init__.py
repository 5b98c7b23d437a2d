"""The command line: bare words, flags, and everything else through Hydra."""
