"""Charts of records as SVG."""
