"""The report: the terminal, the pages and the charts, drawn from the records of a run."""
