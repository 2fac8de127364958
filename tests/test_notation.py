"""Text to axis groups: what is read, what is written back, and where an error points."""

from keyword import iskeyword

import pytest
from einops.parsing import ParsedExpression
from einops.parsing import _ellipsis as einops_ellipsis
from hypothesis import given
from hypothesis import strategies as st

from ulysses_dtensor.errors import LayoutError, caret
from ulysses_dtensor.notation import Axis, parse, position_of, render

# Python's keywords are names too, but einops warns of them.
NAMES = st.from_regex(r"[A-Za-z]([A-Za-z0-9_]{0,4}[A-Za-z0-9])?", fullmatch=True).filter(
    lambda name: not iskeyword(name)
)


@st.composite
def axis_groups(draw: st.DrawFn) -> tuple[Axis, ...]:
    """Draws what a text can say: named axes cut by any mesh axes, axes of size one, at most one ellipsis."""
    names = draw(st.lists(NAMES, unique=True, max_size=8))
    axes: list[Axis] = []
    while names:
        size = draw(st.integers(1, min(3, len(names))))
        group, names = names[:size], names[size:]
        axes.append(Axis(group[-1], tuple(group[:-1])))
    axes += [Axis("1")] * draw(st.integers(0, 2)) + [Axis("...")] * draw(st.integers(0, 1))
    return tuple(draw(st.permutations(axes)))


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("", ()),
        ("s", (Axis("s"),)),
        ("b (sp s) h d", (Axis("b"), Axis("s", ("sp",)), Axis("h"), Axis("d"))),
        ("(cp sp s)", (Axis("s", ("cp", "sp")),)),
        ("(s)", (Axis("s"),)),
        ("... 1 (tp h_2) 1", (Axis("..."), Axis("1"), Axis("h_2", ("tp",)), Axis("1"))),
        ("b...d", (Axis("b"), Axis("..."), Axis("d"))),
    ],
)
def test_text_is_read_as_axes(text: str, axes: tuple[Axis, ...]) -> None:
    assert parse(text) == axes


@given(axis_groups())
def test_rendered_text_reads_back(axes: tuple[Axis, ...]) -> None:
    assert parse(render(axes)) == axes


@given(axis_groups(), st.sampled_from(["  ", "\t", "\n", " \n  "]))
def test_white_space_does_not_matter(axes: tuple[Axis, ...], space: str) -> None:
    text = render(axes)
    wide = text.replace(" ", space).replace("(", f"({space}").replace(")", f"{space})")
    assert parse(f"{space}{wide}{space}") == axes


@given(axis_groups())
def test_einops_reads_the_same_groups(axes: tuple[Axis, ...]) -> None:
    einops_says = {"...": einops_ellipsis, "1": []}
    expected = [einops_says.get(axis.name, [*axis.mesh_axes, axis.name]) for axis in axes]
    assert ParsedExpression(render(axes)).composition == expected


@pytest.mark.parametrize(
    ("text", "reason", "position"),
    [
        ("b (sp (s))", "a parenthesis inside a parenthesis", 6),
        ("b sp) s", "a closing parenthesis without an opening one", 4),
        ("b () s", "an empty composed axis; name the tensor axis inside it", 2),
        ("b (sp s", "a parenthesis that is never closed", 2),
        ("b s b", "'b' is named twice", 4),
        ("b (sp s) (sp h)", "'sp' is named twice", 10),
        ("... b ...", "'...' is named twice", 6),
        ("b (sp 1)", "'1' inside a composed axis; only mesh axes and one named tensor axis go there", 6),
        ("b (sp ...)", "'...' inside a composed axis; only mesh axes and one named tensor axis go there", 6),
        ("b 16 s", "the size 16; only 1 may stand as a number, name every other axis", 2),
        ("b s -> b h", "an arrow; a layout is one side of a move, give source and destination apart", 4),
        ("b s > h", "an arrow; a layout is one side of a move, give source and destination apart", 4),
        ("b s - h", "an arrow; a layout is one side of a move, give source and destination apart", 4),
        ("b, s", "'b,' is no axis name (letters and digits, no leading or trailing underscore)", 0),
        ("b _s", "'_s' is no axis name (letters and digits, no leading or trailing underscore)", 2),
        ("b s_", "'s_' is no axis name (letters and digits, no leading or trailing underscore)", 2),
        ("b 2s", "'2s' is no axis name (letters and digits, no leading or trailing underscore)", 2),
        ("b . s", "'.' is no axis name (letters and digits, no leading or trailing underscore)", 2),
        ("b .... s", "'.' is no axis name (letters and digits, no leading or trailing underscore)", 5),
        ("b *", "'*' is no axis name (letters and digits, no leading or trailing underscore)", 2),
    ],
)
def test_rejects_what_breaks_the_grammar_and_points_at_it(text: str, reason: str, position: int) -> None:
    with pytest.raises(LayoutError) as raised:
        parse(text)
    assert str(raised.value) == f"Layout: {reason}.\n    {text}\n    {' ' * position}^"


def test_error_shows_text_of_several_lines_on_one() -> None:
    assert caret("b\n(sp\ts", 2, "why") == "why\n    b (sp s\n      ^"


def test_position_is_of_the_whole_name() -> None:
    assert position_of("sps (sp s)", "sp") == 5
    assert position_of("sps (sp s)", "s") == 8
