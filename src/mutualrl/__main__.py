"""`python -m mutualrl` is `mutualrl`."""

from mutualrl.cli.app import main

main()
