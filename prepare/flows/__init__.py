"""The parts of the layout flow: its records, what is watched, and the facts it is judged by."""
