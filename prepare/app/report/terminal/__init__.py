"""Terminal output made from records."""
