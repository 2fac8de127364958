"""Do tokens stay apart in a module, and which of its arguments are per token: found by running it on a few tokens.

The module runs with attention replaced by a stub that looks at each token alone, and dropout off. *Slice test*: the
output for some of the tokens equals the output when only those tokens are given. *NaN taint*: NaN in three tokens
reaches no other token. Arguments are tried whole first, then cut at each dim that is long enough. Constant parameters
and arguments get telling values first, and what the module writes elsewhere than in its result is compared too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ulysses_dtensor.calls import Dims, Option
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import out_of_reach
from ulysses_dtensor.leftovers import tensors_in
from ulysses_dtensor.telling import telling, telling_values
from ulysses_dtensor.tokens import Held
from ulysses_dtensor.trees import TreeSpec
from ulysses_dtensor.trial import Drop, Rejected, Trial, Verdict
from ulysses_dtensor.unseen import without_dispatch_modes

_MAX_TRIALS, _MAX_TRIALS_IN_ALL = 256, 768  # beyond the likely ones, of one candidate for the hidden state and of all


@dataclass(frozen=True, slots=True)
class Decision:
    """What the probe found of one module called in one way.

    `hidden` and `sliced` give the token dim of the call's tensor leaves by their number, `outputs` that of each leaf
    of the result (None: no tokens). `contexts` are held sequences of other lengths, `gathered` those that must be gathered.
    `attentions` and `dropouts` say of each such call, in order, which tokens its operands hold. `spare` names parameters
    that a single token may leave unused, `unused` are leaves in shards from which no result has a gradient.
    """

    hidden: tuple[tuple[int, int], ...]
    sliced: tuple[tuple[int, int], ...]
    outputs: tuple[int | None, ...]
    contexts: tuple[tuple[int, int], ...]
    gathered: tuple[int, ...]
    attentions: tuple[tuple[Held, Held], ...]
    dropouts: tuple[Drop, ...]
    spare: tuple[str, ...]
    unused: tuple[int, ...]
    seconds: float


class Mixes(PlanError):
    """The module does not keep tokens apart, or could not be run on a few tokens."""


def probe(
    call: Callable[..., Any],
    module: nn.Module,
    leaves: Sequence[Any],
    spec: TreeSpec,
    options: Sequence[Option],
    *,
    seq_len: Callable[[Dims], int],
    fixed: Mapping[int, int | None],
    attentions: Sequence[nn.Module],
    who: str,
) -> Decision:
    """Returns how `module` may be called on shards of its tokens.

    Args:
        call: runs the module's own forward.
        module: for its parameters and buffers.
        leaves: flat arguments of the call; tensors of global shape, plain (per-token ones may be meta stand-ins).
        spec: how the leaves make up (args, kwargs).
        options: candidates for the hidden state.
        seq_len: the number of tokens that an option implies.
        fixed: token dims of leaves that were declared; None: declared as used whole.
        attentions: the module's converted attentions; when there are any, one has to run.
        who: name for errors.

    Raises:
        Mixes: no way of calling the module keeps its tokens apart; the message says what was seen.
    """
    started = time.perf_counter()
    trouble: list[Rejected] = []
    budget = iter(range(_MAX_TRIALS_IN_ALL))
    in_objects = [x for leaf in leaves if not isinstance(leaf, torch.Tensor) for x in tensors_in(leaf)]
    with torch.inference_mode(False), without_dispatch_modes(), _fresh_caches(), telling_values(module, in_objects):
        # A single value may decide which way the module goes: it stays what it is.
        told = {id(x): telling(x) for x in leaves if isinstance(x, torch.Tensor) and x.numel() != 1}
        actual, leaves = leaves, [told.get(id(x), x) for x in leaves]

        def trials(option: Option) -> Iterator[Trial]:
            length = seq_len(option.hidden)
            for sliced in _guesses(leaves, option, length, fixed, budget):
                yield Trial(call, module, leaves, actual, spec, option, sliced, length, tuple(attentions))

        for trial, (outputs, held, drops) in _passed(map(trials, options), fixed, trouble):
            return Decision(
                hidden=tuple(trial.hidden.items()),
                sliced=tuple(trial.sliced.items()),
                outputs=outputs,
                contexts=tuple(item for dims in trial.option.contexts for item in dims.items()),
                gathered=tuple(trial.option.gathered),
                attentions=held,
                dropouts=drops,
                spare=trial.spare_parameters(),
                unused=trial.unused_leaves(),
                seconds=time.perf_counter() - started,
            )
    reason = (
        str(max(trouble, key=lambda each: (each.weight, each.seq_len))) if trouble else "no argument could hold tokens"
    )
    raise Mixes(f"{who}: {reason}.{out_of_reach(module)}")


def _passed(
    options: Iterator[Iterator[Trial]], fixed: Mapping[int, int | None], trouble: list[Rejected]
) -> Iterator[tuple[Trial, Verdict]]:
    """Yields what passes, best first: a result per token for the longest sequence, then whole results alone.

    A block given whole streams that returns one of them whole (text and image) may work the other way round too.
    """
    streams, later = [], []
    for trials in options:
        passing = ((trial, verdict) for trial in trials if (verdict := trial.verdict(trouble)) is not None)
        first = next(passing, None)
        if first is None:
            continue
        found = _with_fewest_cuts(*first, fixed)
        per_token = any(dim is not None for dim in found[1][0])
        if per_token and (found[0].option.is_held or not found[0].returns_whole_stream):
            yield found
        (streams if per_token else later).append(found)
    yield from sorted(streams, key=lambda found: -found[0].seq_len)
    yield from later


@contextmanager
def _fresh_caches() -> Iterator[None]:
    """Keeps what is derived from parameters and cached apart: autocast's casts, and parametrizations'."""
    torch.clear_autocast_cache()
    cache = nn.utils.parametrize._cache  # private: `parametrize.cached()` has no other way to look into it
    kept = dict(cache)
    cache.clear()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        cache.clear()
        cache.update(kept)


def _guesses(
    leaves: Sequence[Any], option: Option, seq_len: int, fixed: Mapping[int, int | None], budget: Iterator[int]
) -> Iterator[Dims]:
    """Yields which leaves to cut and where: what is declared alone, then likely ones, then every way of few cuts."""
    hidden = {at for dims in (option.hidden, *option.contexts, option.gathered) for at in dims}
    declared = {at: dim for at, dim in fixed.items() if dim is not None and at not in hidden}
    choices: dict[int, list[int]] = {}
    for at, x in enumerate(leaves):
        if isinstance(x, torch.Tensor) and at not in hidden and at not in fixed:
            exact = [dim for dim, size in enumerate(x.shape) if size == seq_len]
            choices[at] = exact + [dim for dim, size in enumerate(x.shape) if size > seq_len]
    choices = {at: dims for at, dims in choices.items() if dims}
    masks = {at for at in choices if sum(size == seq_len for size in leaves[at].shape) > 1}
    likely = {at: dims[0] for at, dims in choices.items() if at not in masks}
    yield declared
    yield {**declared, **{at: dim for at, dim in likely.items() if leaves[at].is_floating_point()}}
    yield {**declared, **likely}
    trials = 0
    for count in range(1, len(choices) + 1):
        for picked in itertools.combinations(choices, count):
            for dims in itertools.product(*(choices[at] for at in picked)):
                trials += 1
                if trials > _MAX_TRIALS or next(budget, None) is None:
                    return
                yield {**declared, **dict(zip(picked, dims, strict=True))}


def _with_fewest_cuts(trial: Trial, verdict: Verdict, fixed: Mapping[int, int | None]) -> tuple[Trial, Verdict]:
    """Leaves whole again what need not be cut: a mask, which the attention wants whole, passes the probe either way."""
    for leaf in [leaf for leaf in trial.sliced if leaf not in fixed]:
        fewer = trial.without(leaf)
        found = fewer.verdict([])
        if found is not None:
            trial, verdict = fewer, found
    return trial, verdict
