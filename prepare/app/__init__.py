"""The program: command line, jobs, sweeps and reports."""
