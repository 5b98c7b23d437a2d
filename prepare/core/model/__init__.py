"""Facts about a model and its tensors: names, layouts, computed weights, known issues."""
