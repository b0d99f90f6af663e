"""``python -m graphattn.cli``."""

from graphattn.cli import main

main()
