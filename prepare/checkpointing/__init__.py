"""The parts of `prepare.checkpoint`: files of weights, what is beside them, how a model takes them in."""
