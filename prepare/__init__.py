"""Declare how a PyTorch model is to be prepared, do it in one pass, and audit what came of it."""

import logging

# Without a handler of the application, Python would print warnings of this logger to stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())
