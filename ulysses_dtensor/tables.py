"""Text tables, by rich."""

from __future__ import annotations

import io
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str | None = None) -> str:
    """Returns a table as text, as wide as it needs to be.

    Raises:
        ImportError: rich is not installed; the message names the extra.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError("Tables need rich. Install the extra: pip install 'ulysses_dtensor[demo]'") from error
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    out = io.StringIO()
    Console(file=out, width=240, no_color=True, highlight=False, markup=False).print(made)
    return out.getvalue().rstrip()
