"""Terminal output, pages and charts, made from records without torch."""
