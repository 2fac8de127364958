"""How a plan shares attentions out: heads alone, heads and rows of queries, or whichever sends fewest bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ulysses_dtensor.rows import Shape, Split, elements_sent


@dataclass(frozen=True, slots=True)
class Strategy:
    """`rows` of ranks share the queries, the ranks of a row the heads; `auto` picks by bytes, attention by attention.

    One row is Ulysses: query, key and value move from tokens to heads. As many rows as ranks move no query and gather keys and
    values, which sends less where `H_kv * (P - 1) < H`.
    """

    rows: int = 1
    auto: bool = False

    def splits(self, ranks: int, *, causal: bool) -> tuple[Split, ...]:
        """Returns what there is to choose from."""
        choices = sorted({1, self.rows, ranks}) if self.auto else [self.rows]
        return tuple(Split(rows, ranks // rows, causal and rows == self.rows > 1) for rows in choices)

    def choose(
        self, query: Shape, key: Shape, value: Shape, seq_dim: int, head_dim: int, ranks: int, *, causal: bool
    ) -> Split:
        """Returns the split for one attention, from its global shapes; of equal ones that with fewer rows."""
        splits = self.splits(ranks, causal=causal)
        if len(splits) == 1:
            return splits[0]
        return min(splits, key=lambda split: elements_sent(query, key, value, seq_dim, head_dim, split))


ULYSSES = Strategy()
