"""The command line: commands, flags, and everything else through Hydra."""
