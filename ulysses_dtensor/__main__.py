"""`python -m ulysses_dtensor` and the `ulysses-dtensor` script."""

import sys


def main() -> None:
    """Runs the command line, or says which extra it needs."""
    try:
        from ulysses_dtensor.cli import app
    except ImportError as error:
        sys.exit(f"ulysses-dtensor needs the extra 'demo': pip install 'ulysses_dtensor[demo]' ({error})")
    app()


if __name__ == "__main__":
    main()
