"""HTML pages, made from records."""
