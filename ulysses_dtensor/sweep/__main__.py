"""The sweep's command line: `python -m ulysses_dtensor.sweep`. Needs the extras `demo` and `transformers`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the sweep, or says which extra it needs."""
    try:
        from ulysses_dtensor.sweep.run import app
    except ImportError as error:
        sys.exit(f"the sweep needs an extra ({error}): pip install 'ulysses_dtensor[demo,transformers]'")
    app()


if __name__ == "__main__":
    main()
