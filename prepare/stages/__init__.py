"""Stages: what a run does with a model, one folder each."""
