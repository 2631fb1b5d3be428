"""The command line."""

from tether.cli.app import main as main
