"""Entry point of `python -m mutualrl`, the same as `mutualrl`."""

from mutualrl.cli.app import main

main()
