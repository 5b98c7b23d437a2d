"""Weights in 8 bits: which are quantized, and how."""
