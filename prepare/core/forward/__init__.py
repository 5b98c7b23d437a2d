"""Run a model once without side effects: example inputs, formatting, errors."""
