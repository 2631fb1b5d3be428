"""`python -m tether` is the command line."""

from tether.cli.app import main

if __name__ == "__main__":
    main()
