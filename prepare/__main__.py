"""Run the command line as `python -m prepare`."""

from prepare.app.cli.main import main

if __name__ == "__main__":
    main()
