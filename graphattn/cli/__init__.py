"""The `graphattn` command."""


def main() -> None:
    """Entry point of the installed script."""
    from graphattn.cli.app import app

    app()
