"""`python -m hone.cli`: the command line."""

from hone.cli.dispatch import main

raise SystemExit(main())
