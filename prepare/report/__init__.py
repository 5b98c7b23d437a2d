"""Tables and pages, made from records and plain data alone; nothing here imports torch."""
