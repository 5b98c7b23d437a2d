"""Run two models on the same inputs, deterministically and within a budget."""
