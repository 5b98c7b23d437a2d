"""Helpers that know no model and load no torch: files, text, options, progress."""
