"""Running a module on a few made-up tokens, unseen: what it returns, how it calls attention, what it leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ulysses_dtensor.calls import Dims, Option
from ulysses_dtensor.compare import same
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.leftovers import Watch, tensors_in
from ulysses_dtensor.multihead import NO_WEIGHTS, Withheld
from ulysses_dtensor.stub import Attention, AttentionStub, Dropout
from ulysses_dtensor.trees import TreeSpec, tree_flatten, tree_unflatten
from ulysses_dtensor.unseen import unseen


class Rejected(Exception):
    """One trial failed; `weight`, then the number of tokens that it took there to be, rank how much its message tells."""

    def __init__(self, weight: int, message: str) -> None:
        super().__init__(message)
        self.weight, self.seq_len = weight, 0


@dataclass
class Run:
    """What one run came to; `hidden` are its inputs, for gradients, `given` all that hold tokens."""

    outputs: list[Any]
    spec: TreeSpec
    flags: list[tuple[Any, ...]]
    attentions: list[Attention]
    dropouts: list[Dropout]
    drawn: list[tuple[str, tuple[int, ...]]]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    hidden: dict[int, torch.Tensor]
    given: dict[int, torch.Tensor]


class Tryout:
    """A module and one guess of which leaves of its call are per token, at which dim."""

    def __init__(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        leaves: Sequence[Any],
        actual: Sequence[Any],
        spec: TreeSpec,
        option: Option,
        sliced: Dims,
        seq_len: int,
        attentions: tuple[nn.Module, ...],
    ) -> None:
        self.call, self.module, self.leaves, self.actual, self.spec = call, module, leaves, actual, spec
        self.option, self.sliced, self.seq_len, self.attentions = option, sliced, seq_len, attentions
        self.hidden, self.returns_whole_stream = option.hidden, False
        self.choose_counts()

    def choose_counts(self, avoid: Collection[int] = ()) -> None:
        """Chooses how many tokens are made up, none of the numbers in `avoid`."""
        self.checked: set[int] = set()
        self.others: dict[int, bool] = {}
        sizes = {size for x in self.leaves if isinstance(x, torch.Tensor) for size in x.shape} | {self.seq_len, *avoid}
        sizes |= {size for p in self.module.parameters() for size in p.shape}
        if any(_adds_keys(part) for part in self.module.modules()):  # and pads its mask for them
            sizes |= {size + more for size in sizes for more in (1, 2)}
        # No count of tokens that the module sees, nor what is left of it, equals any size that it has: a coincidence would tell
        # nothing.
        self.some = next(n for n in itertools.chain((5, 6, 7, 4, 3), itertools.count(8)) if n not in sizes)
        fits = (n for n in itertools.count(max(11, self.some + 6)) if not {n, n - self.some} & sizes)
        self.tokens = next(fits)
        self.context_tokens = [next(fits) for _ in self.option.contexts]

    def run(
        self,
        at: list[int],
        *,
        plain_errors: bool,
        tainted: Sequence[int] = (),
        taint: float = float("nan"),
        gradients: bool = False,
        consecutive: bool = False,
        uncut: Sequence[int] = (),
        contexts: Mapping[int, list[int]] = MappingProxyType({}),
        actual: bool = False,
    ) -> Run:
        """Returns the run on the tokens numbered `at`, of which the `tainted` ones hold `taint`.

        Args:
            at: which of the made-up tokens are given.
            plain_errors: whether the module has run on all of them, so that an error tells of their number.
            tainted: which tokens hold `taint`.
            taint: NaN, or a large value.
            gradients: whether the inputs require gradients.
            consecutive: per-token leaves are cut to their first entries, not to entries spread over them.
            uncut: leaves that are left whole though they are per token.
            contexts: which tokens of other sequences are given, by their number; all of those left out.
            actual: whether arguments used whole have the call's own values, not telling ones.

        Raises:
            Rejected: it raised, wrote to what it was given, or returned what cannot be looked into.
        """
        leaves = list(self.actual if actual else self.leaves)
        made: dict[tuple[int, int], torch.Tensor] = {}
        for number, dims in enumerate((*self.option.contexts, self.option.gathered)):
            for leaf, dim in dims.items():
                gathered = number == len(self.option.contexts)  # comes whole, with masks of its own length beside it
                count = self.leaves[leaf].shape[dim] if gathered else self.context_tokens[number]
                key = (id(self.leaves[leaf]), dim)
                if key not in made:
                    index = self.index(contexts.get(number, list(range(count))), leaves[leaf])
                    x = self.values(leaves[leaf], dim, count=count).index_select(dim, index)
                    made[key] = x.requires_grad_(gradients and x.is_floating_point())
                leaves[leaf] = made[key]
        for leaf, dim in self.hidden.items():
            key = (id(self.leaves[leaf]), dim)
            if key not in made:
                x = self.values(leaves[leaf], dim, tainted, taint).index_select(dim, self.index(at, leaves[leaf]))
                made[key] = x.requires_grad_(gradients and x.is_floating_point())
            leaves[leaf] = made[key]
        for leaf, dim in self.sliced.items():
            if leaf in uncut:
                continue
            size = leaves[leaf].shape[dim]
            spread = [min(size - 1, i) if consecutive else i * self.seq_len // self.tokens for i in at]
            leaves[leaf] = leaves[leaf].detach().index_select(dim, self.index(spread, leaves[leaf]))
        args, kwargs = tree_unflatten(leaves, self.spec)
        drawn = {at for dims in (self.hidden, *self.option.contexts, self.option.gathered) for at in dims}
        given = [
            (x, x.detach().clone() if at in drawn or at in self.sliced else _version(x))
            for at, x in enumerate(leaves)
            if isinstance(x, torch.Tensor)
        ]
        watch = Watch(self.module, {**{f"argument {at}": x for at, x in enumerate(args)}, **kwargs})
        before = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        counts = (len(at), *(len(contexts.get(number, range(n))) for number, n in enumerate(self.context_tokens)))
        stub = AttentionStub(
            {count for count in counts if count > 1}, (len(at), self.seq_len), self.checked, self.others
        )
        try:
            with unseen(gradients), stub:
                result = self.call(*args, **kwargs)
        except PlanError as error:
            raise Rejected(6, str(error).removeprefix("UlyssesPlan: ").removesuffix(".")) from error
        except Exception as error:
            weight = 4 if plain_errors else 2
            raise Rejected(weight, f"it failed on {len(at)} tokens: {type(error).__name__}: {error}") from error
        finally:
            attributes, containers = watch.put_back()
            written = {}
            for name, buffer in self.module.named_buffers():
                if name in before and not same(buffer, before[name]):
                    written[name] = buffer.detach().clone()
                    with torch.no_grad():
                        buffer.copy_(before[name])
        if containers:
            raise Rejected(6, f"it writes to what it is given as {', '.join(containers)}. Return the values instead")
        if any(not same(x.detach(), was) if isinstance(was, torch.Tensor) else _version(x) != was for x, was in given):
            raise Rejected(
                6, "it changes an argument in place, which is a shard of the caller's. Write it out of place"
            )
        outputs, spec = tree_flatten(result)
        if any(isinstance(x, Withheld) for x in tensors_in(list(attributes.values()))):
            raise Rejected(6, NO_WEIGHTS)
        if any(isinstance(x, Withheld) for x in outputs):
            if not any(self.module is attention for attention in self.attentions):
                raise Rejected(6, NO_WEIGHTS)
            outputs = [None if isinstance(x, Withheld) else x for x in outputs]  # its caller mostly throws them away
        return Run(
            outputs,
            spec,
            stub.flags,
            stub.attentions,
            stub.dropouts,
            stub.drawn,
            written,
            attributes,
            {at: leaves[at] for at in self.hidden},
            {at: leaves[at] for at in drawn},
        )

    def values(
        self,
        like: torch.Tensor,
        dim: int,
        tainted: Sequence[int] = (),
        taint: float = 0.0,
        count: int | None = None,
    ) -> torch.Tensor:
        """Returns random values shaped like a leaf with all made-up tokens (or `count`) at `dim`."""
        shape = list(like.shape)
        shape[dim] = count or self.tokens
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(like.dtype)
        if tainted:
            values.index_fill_(dim, torch.tensor(tainted), taint)
        return values.to(like.device)

    def index(self, at: list[int], like: torch.Tensor) -> torch.Tensor:
        """Returns token numbers as an index into `like`."""
        return torch.tensor(at, device=like.device)


def _adds_keys(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn)


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version
