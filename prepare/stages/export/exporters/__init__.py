"""The built-in exporters: one file for each format of artefacts."""
