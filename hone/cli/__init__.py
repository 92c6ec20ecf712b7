"""The command line: a thin layer over the Python API; every option is a field of a spec."""

from hone.cli.dispatch import main

__all__ = ["main"]
