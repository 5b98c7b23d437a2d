"""Prepares a model as the command line says: `python run.py --help`."""

from prepare.cli.main import main

if __name__ == "__main__":
    main()
