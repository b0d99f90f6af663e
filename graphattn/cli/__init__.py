"""The `graphattn` command."""


def main() -> None:
    """Run the installed script `graphattn`."""
    from graphattn.cli.app import app

    app()
