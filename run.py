"""Prepare a model from the command line: `python run.py --help`."""

from prepare.app.cli.main import main

# The shell completion of Hydra completes only files that hold the word @hydra.main.

if __name__ == "__main__":
    main()
