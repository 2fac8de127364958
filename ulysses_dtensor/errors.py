"""The two errors this library raises on purpose."""


class LayoutError(ValueError):
    """A layout's text, its binding to a mesh, or a move between two layouts breaks a rule."""


class PlanError(ValueError):
    """A plan cannot be applied to a model, or a forward breaks what the plan promises."""


def caret(text: str, position: int, reason: str) -> str:
    """Returns `reason` with `text`, on one line, and a caret under `position` below it."""
    return f"{reason}\n    {''.join(' ' if c.isspace() else c for c in text)}\n    {' ' * position}^"
