"""Keep the layout in a model's own code: find its calls, and rewrite them in a subclass."""
