"""Which heads a rank owns and reads, by counting them one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.heads import Heads, heads_of


def assert_heads_are_right(num_heads: int, num_kv_heads: int, ranks: int) -> list[Heads]:
    """Checks every rank's heads against the definition: query head q reads kv head q // (num_heads / num_kv_heads)."""
    table = [heads_of(num_heads, num_kv_heads, ranks, rank) for rank in range(ranks)]
    assert [head for heads in table for head in range(*heads.query)] == list(range(num_heads))
    for heads in table:
        read = [head // (num_heads // num_kv_heads) for head in range(*heads.query)]
        assert list(range(*heads.kv)) == sorted(set(read))
        assert (heads.num_query, heads.num_kv) == (len(read), len(set(read)))
        local = heads.kv_of_query
        if local is None and read:
            assert heads.num_query % heads.num_kv == 0
            local = tuple(index // (heads.num_query // heads.num_kv) for index in range(heads.num_query))
        assert [heads.kv[0] + index for index in local or ()] == read
    return table


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 20))
def test_every_query_head_reads_its_own_kv_head_and_no_rank_reads_more(group: int, num_kv: int, ranks: int) -> None:
    assert_heads_are_right(group * num_kv, num_kv, ranks)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "ranks", "most_query", "most_kv"),
    [
        pytest.param(40, 8, 40, 1, 1, id="verl#1226"),
        pytest.param(71, 1, 2, 36, 1, id="Falcon-7B on 2"),
        pytest.param(71, 1, 8, 9, 1, id="Falcon-7B on 8"),
        pytest.param(28, 4, 8, 4, 2, id="Qwen2.5-7B on 8"),
        pytest.param(8, 2, 4, 2, 1, id="LlamaFactory#10794"),
        pytest.param(7, 7, 4, 2, 2, id="DeepSpeed#6392, 7 heads"),
        pytest.param(20, 20, 8, 3, 3, id="DeepSpeed#6392, 20 heads"),
        pytest.param(12, 12, 8, 2, 2, id="FastVideo#884"),
        pytest.param(24, 6, 4, 6, 2, id="divides neither way"),
    ],
)
def test_sizes_that_others_refuse(num_heads: int, num_kv_heads: int, ranks: int, most_query: int, most_kv: int) -> None:
    table = assert_heads_are_right(num_heads, num_kv_heads, ranks)
    assert max(heads.num_query for heads in table) == most_query
    assert max(heads.num_kv for heads in table) == most_kv


def test_rank_without_query_heads_reads_none() -> None:
    assert heads_of(7, 7, 5, 4) == Heads(query=(7, 7), kv=(0, 0), kv_of_query=None)
    assert heads_of(12, 12, 8, 7).num_query == 0


def test_pairing_is_given_only_where_grouped_attention_would_pair_wrongly() -> None:
    assert heads_of(8, 2, 4, 1).kv_of_query is None
    assert heads_of(24, 6, 4, 0).kv_of_query == (0, 0, 0, 0, 1, 1)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(7, 2), (4, 0), (2, 4)])
def test_rejects_groups_of_unequal_size(num_heads: int, num_kv_heads: int) -> None:
    with pytest.raises(PlanError, match=rf"num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}. Every"):
        heads_of(num_heads, num_kv_heads, 2, 0)


def test_the_check_itself_fails_on_a_wrong_table(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Heads(query=(0, 4), kv=(0, 2), kv_of_query=(0, 1, 0, 1))
    monkeypatch.setitem(assert_heads_are_right.__globals__, "heads_of", lambda *_: wrong)
    with pytest.raises(AssertionError):
        assert_heads_are_right(4, 2, 1)
