"""Text to axis groups: the grammar of einops, narrowed to what a placement can say."""

import re
from dataclasses import dataclass
from functools import lru_cache

from ulysses_dtensor.errors import LayoutError, caret

ELLIPSIS = "..."
_TOKEN = re.compile(r"\s*(?:(\.\.\.)|([()])|([^\s().]+)|(.))")


@dataclass(frozen=True, slots=True)
class Axis:
    """One tensor axis and the mesh axes it is cut by, outermost first.

    `name` is an identifier, `"1"` (an axis of size one) or `"..."` (any number of axes).
    """

    name: str
    mesh_axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"({' '.join((*self.mesh_axes, self.name))})" if self.mesh_axes else self.name


@lru_cache(maxsize=4096)
def parse(text: str) -> tuple[Axis, ...]:
    """Returns the axes that `text` names, in order.

    Raises:
        LayoutError: the text breaks the grammar; the message shows where.
    """
    axes: list[Axis] = []
    group: list[str] | None = None
    group_start = 0
    seen: set[str] = set()
    for token, position in _tokens(text):
        if token == "(":
            if group is not None:
                raise _error(text, position, "a parenthesis inside a parenthesis")
            group, group_start = [], position
        elif token == ")":
            if group is None:
                raise _error(text, position, "a closing parenthesis without an opening one")
            if not group:
                raise _error(text, group_start, "an empty composed axis; name the tensor axis inside it")
            axes.append(Axis(group[-1], tuple(group[:-1])))
            group = None
        else:
            _check_name(text, position, token, inside=group is not None)
            if token != "1" and token in seen:
                raise _error(text, position, f"{token!r} is named twice")
            seen.add(token)
            if group is None:
                axes.append(Axis(token))
            else:
                group.append(token)
    if group is not None:
        raise _error(text, group_start, "a parenthesis that is never closed")
    return tuple(axes)


def render(axes: tuple[Axis, ...]) -> str:
    """Returns the text of `axes`; `parse(render(axes)) == axes`."""
    return " ".join(str(axis) for axis in axes)


def position_of(text: str, name: str) -> int:
    """Returns where `name` stands in `text`, for an error's caret."""
    return next(position for token, position in _tokens(text) if token == name)


def _tokens(text: str) -> list[tuple[str, int]]:
    matches = ((match.group().strip(), match.end()) for match in _TOKEN.finditer(text))
    return [(token, end - len(token)) for token, end in matches if token]


def _check_name(text: str, position: int, token: str, *, inside: bool) -> None:
    if token in (ELLIPSIS, "1"):
        if inside:
            raise _error(
                text, position, f"{token!r} inside a composed axis; only mesh axes and one named tensor axis go there"
            )
    elif token.isdecimal():
        raise _error(text, position, f"the size {token}; only 1 may stand as a number, name every other axis")
    elif token in ("->", "-", ">"):
        raise _error(text, position, "an arrow; a layout is one side of a move, give source and destination apart")
    elif not token.isidentifier() or token[0] == "_" or token[-1] == "_":
        raise _error(
            text, position, f"{token!r} is no axis name (letters and digits, no leading or trailing underscore)"
        )


def _error(text: str, position: int, reason: str) -> LayoutError:
    return LayoutError(caret(text, position, f"Layout: {reason}."))
