"""Run one forward of a model without leaving traces: its example input and its errors."""
