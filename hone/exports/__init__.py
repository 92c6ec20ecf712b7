"""Models as single files of other programs' formats."""
