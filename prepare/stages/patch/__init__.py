"""Change the lines of a model's code that lose a layout: choose them, and write them as a patch."""
