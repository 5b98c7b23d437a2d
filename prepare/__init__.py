"""Declare how a PyTorch model is to be prepared, do it in one pass, and audit what came of it."""
