"""Which query and key/value heads each rank owns or reads: integers only."""

from __future__ import annotations

from dataclasses import dataclass

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.layout import chunk


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one rank: query heads `[query[0], query[1])`, kv heads `[kv[0], kv[1])`, global numbers.

    `kv_of_query` gives, for each of the rank's query heads, the position of its kv head among the rank's kv heads;
    None when grouped-query attention over the local heads already pairs them (`enable_gqa`, or one kv head a query).
    """

    query: tuple[int, int]
    kv: tuple[int, int]
    kv_of_query: tuple[int, ...] | None

    @property
    def num_query(self) -> int:
        return self.query[1] - self.query[0]

    @property
    def num_kv(self) -> int:
        return self.kv[1] - self.kv[0]


def heads_of(num_heads: int, num_kv_heads: int, ranks: int, rank: int) -> Heads:
    """Returns the heads of `rank` when `num_heads` query heads are cut over `ranks` as `torch.chunk` cuts them.

    A rank reads exactly the kv heads that its query heads use, so a kv head may be read by several ranks
    (`num_kv_heads < ranks`, or sizes that do not divide). A rank without query heads reads none.

    Raises:
        PlanError: `num_heads` is no multiple of `num_kv_heads`.

    Example:
        >>> heads_of(24, 6, 4, 1)
        Heads(query=(6, 12), kv=(1, 3), kv_of_query=(0, 0, 1, 1, 1, 1))
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise PlanError(
            f"attention: num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}. "
            "Every kv head must serve the same number of query heads."
        )
    group = num_heads // num_kv_heads
    start, stop = chunk(0, num_heads, ranks, rank)
    if start == stop:
        return Heads((start, stop), (0, 0), None)
    kv_start, kv_stop = start // group, (stop - 1) // group + 1
    kv_of_query = tuple(head // group - kv_start for head in range(start, stop))
    local_group, rest = divmod(stop - start, kv_stop - kv_start)
    paired = not rest and kv_of_query == tuple(index // local_group for index in range(stop - start))
    return Heads((start, stop), (kv_start, kv_stop), None if paired else kv_of_query)
