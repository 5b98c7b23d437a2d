"""Prepare a model from the command line: `python run.py --help`."""

from prepare.cli.main import main

if __name__ == "__main__":
    main()
