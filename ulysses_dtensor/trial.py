"""One guess of which arguments of a module are per token, judged by running it on a few tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ulysses_dtensor.compare import alike, close, same
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.leftovers import Watch
from ulysses_dtensor.passes import graph_nodes
from ulysses_dtensor.stub import AttentionStub
from ulysses_dtensor.trees import TreeSpec, tree_flatten, tree_unflatten
from ulysses_dtensor.unseen import unseen

_TOKENS_ALONE = 3  # how many single tokens must use a parameter for it to count as always used
_LARGE = 1e4  # past what a branch on the size of values lets pass, and within float16
Dims = dict[int, int]
"""Leaf number to the dim of its tokens."""

Verdict = tuple[tuple[int | None, ...], int]
"""The token dim of each output leaf, and how many attention calls there were."""


class Rejected(Exception):
    """One trial failed; `weight` ranks how much its message tells."""

    def __init__(self, weight: int, message: str) -> None:
        super().__init__(message)
        self.weight = weight


@dataclass
class _Run:
    outputs: list[Any]
    spec: TreeSpec
    flags: list[tuple[Any, ...]]
    lengths: set[int]
    buffers: dict[str, torch.Tensor]
    attributes: dict[str, Any]
    hidden: dict[int, torch.Tensor]


@dataclass
class _Gradients:
    hidden: dict[int, torch.Tensor]
    parameters: dict[str, torch.Tensor]


class Trial:
    """One guess of which leaves are per token at which dim, judged on a few tokens."""

    def __init__(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        leaves: Sequence[Any],
        spec: TreeSpec,
        hidden: Dims,
        sliced: Dims,
        seq_len: int,
        attentions: tuple[nn.Module, ...],
    ) -> None:
        self.call, self.module, self.leaves, self.spec = call, module, leaves, spec
        self.hidden, self.sliced, self.seq_len, self.attentions = hidden, sliced, seq_len, attentions
        sizes = {size for x in leaves if isinstance(x, torch.Tensor) for size in x.shape} | {seq_len}
        sizes |= {size for p in module.parameters() for size in p.shape}
        # No count of tokens that the module sees, nor what is left of it, equals any size that it has: a coincidence would tell
        # nothing.
        self.some = next(n for n in itertools.chain((5, 6, 7, 4, 3), itertools.count(8)) if n not in sizes)
        fits = (n for n in itertools.count(max(11, self.some + 6)) if not {n, n - self.some} & sizes)
        self.tokens = next(fits)

    def without(self, leaf: int) -> Trial:
        """Returns the same trial with one leaf left whole."""
        sliced = {at: dim for at, dim in self.sliced.items() if at != leaf}
        return Trial(self.call, self.module, self.leaves, self.spec, self.hidden, sliced, self.seq_len, self.attentions)

    def verdict(self, trouble: list[Rejected]) -> Verdict | None:
        """Returns the outputs' token dims and the number of attention calls, or None, with the reason in `trouble`."""
        try:
            return self.judge()
        except Rejected as rejected:
            trouble.append(rejected)
            return None

    def judge(self) -> Verdict:
        everything = list(range(self.tokens))
        some = [(2 + 3 * i) % self.tokens for i in range(self.some)]
        if len(set(some)) != len(some):
            some = everything[1 : 1 + self.some]
        whole = self.run(everything, plain_errors=False)
        floating = [x for x in whole.outputs if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]
        if floating and all(x.isnan().all() for x in floating):
            raise Rejected(4, "it gives nothing but NaN for random tokens, which tells nothing")
        if self.attentions and not whole.flags:
            raise Rejected(5, self._silent_attention())
        if whole.lengths - {self.tokens}:
            raise Rejected(
                3,
                f"its attention saw {sorted(whole.lengths)} tokens where {self.tokens} were given: the dim of the tokens is "
                "another one, or they are regrouped (windows). Declare the layout with UlyssesPlan(inputs=...)",
            )
        part = self.run(some, plain_errors=True)
        dims = self._output_dims(whole, part, len(some))
        self._compare(whole, part, some, dims, "a slice of its tokens")
        for single in ([self.tokens // 2], [self.tokens - 1]):
            self._compare(whole, self.run(single, plain_errors=True), single, dims, "a single token")
        self._check_tables(everything, dims)
        tainted = [1, self.tokens // 2 + 1, self.tokens - 2]
        for value in (float("nan"), _LARGE):
            self._compare_taint(
                whole, self.run(everything, plain_errors=True, tainted=tainted, taint=value), tainted, dims
            )
        self._compare_gradients(everything, some, dims)
        return dims, len(whole.flags)

    def _check_tables(self, everything: list[int], dims: tuple[int | None, ...]) -> None:
        """A leaf longer than the sequence may be cut only if the module itself reads no more than its first entries."""
        longer = [leaf for leaf, dim in self.sliced.items() if self.leaves[leaf].shape[dim] > self.seq_len]
        if not longer:
            return
        first = self.run(everything, plain_errors=True, consecutive=True)
        whole = self.run(everything, plain_errors=True, consecutive=True, uncut=longer)
        for a, b in zip(first.outputs, whole.outputs, strict=True):
            if isinstance(a, torch.Tensor) and not close(a, b):
                raise Rejected(4, "an argument longer than the sequence is used beyond its first entries")

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
    ) -> _Run:
        leaves = list(self.leaves)
        for leaf, dim in self.hidden.items():
            values = self._values(leaves[leaf], dim, tainted, taint).index_select(dim, self._index(at, leaves[leaf]))
            leaves[leaf] = values.requires_grad_(gradients and values.is_floating_point())
        for leaf, dim in self.sliced.items():
            if leaf in uncut:
                continue
            size = leaves[leaf].shape[dim]
            spread = [min(size - 1, i) if consecutive else i * self.seq_len // self.tokens for i in at]
            leaves[leaf] = leaves[leaf].detach().index_select(dim, self._index(spread, leaves[leaf]))
        args, kwargs = tree_unflatten(leaves, self.spec)
        given = [
            (x, x.detach().clone() if at in self.hidden or at in self.sliced else _version(x))
            for at, x in enumerate(leaves)
            if isinstance(x, torch.Tensor)
        ]
        watch = Watch(self.module, {**{f"argument {at}": x for at, x in enumerate(args)}, **kwargs})
        before = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        stub = AttentionStub()
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
        return _Run(
            outputs, spec, stub.flags, stub.lengths, written, attributes, {at: leaves[at] for at in self.hidden}
        )

    def spare_parameters(self) -> tuple[str, ...]:
        """Returns the parameters that some tokens may leave unused: none where each single token uses all, else all.

        Which expert of a mixture a token uses depends on the token, so that having been used tells nothing.
        """
        named = dict(self.module.named_parameters())
        trainable = {id(p) for p in named.values() if p.requires_grad}
        for token in range(_TOKENS_ALONE if trainable else 0):
            run = self.run([token], plain_errors=True, gradients=True)
            if not trainable <= {id(getattr(node, "variable", None)) for node in graph_nodes(run.outputs)}:
                return tuple(named)
        return tuple(name for name, p in named.items() if not p.requires_grad)  # frozen now, perhaps not for ever

    def _compare_gradients(self, everything: list[int], some: list[int], dims: tuple[int | None, ...]) -> None:
        """Backward too must keep tokens apart, and be linear: what leaves the region multiplies gradients."""
        if any(isinstance(part, FSDPModule) for part in self.module.modules() if part is not self.module):
            return  # a backward through part of them would leave their states half way
        rest = [token for token in everything if token not in some]
        whole, part, other = (
            self._gradients(at, dims, scale) for at, scale in ((everything, 4.0), (some, 1.0), (rest, 1.0))
        )
        for leaf, dim in self.hidden.items():
            a, b = whole.hidden.get(leaf), part.hidden.get(leaf)
            if (a is None) != (b is None) or (
                a is not None and b is not None and not close(a.index_select(dim, self._index(some, a)), 4.0 * b)
            ):
                raise Rejected(
                    5,
                    "its backward mixes tokens, or does not scale with the gradient (a hook or a function that divides by a "
                    "norm or clips)",
                )
        for name, a in whole.parameters.items():
            b = 4.0 * sum(found.parameters[name] for found in (part, other) if name in found.parameters)
            if not isinstance(b, torch.Tensor) or not close(a, b):
                raise Rejected(
                    5,
                    f"the gradient of its parameter {name} is not a sum over tokens (an auxiliary loss made from the tokens at "
                    "hand, a hook that clips)",
                )

    def _gradients(self, at: list[int], dims: tuple[int | None, ...], scale: float) -> _Gradients:
        """Returns the gradients of hidden leaves and parameters, for a weighted sum of the outputs at these tokens."""
        run = self.run(at, plain_errors=True, gradients=True)
        outputs, weights = [], []
        for x, dim in zip(run.outputs, dims, strict=True):
            if isinstance(x, torch.Tensor) and dim is not None and x.requires_grad:
                outputs.append(x)
                weights.append(scale * self._values(x, dim).index_select(dim, self._index(at, x)))
        inputs = {leaf: x for leaf, x in run.hidden.items() if x.requires_grad}
        parameters = {
            name: p for name, p in self.module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)
        }
        if not outputs or "CheckpointFunctionBackward" in {node.name() for node in graph_nodes(outputs)}:
            return _Gradients(
                {}, {}
            )  # torch differentiates a reentrant checkpoint with respect to all its leaves or none
        wanted = [*inputs.values(), *parameters.values()]
        found = torch.autograd.grad(outputs, wanted, weights, allow_unused=True) if wanted else ()
        of_inputs, of_parameters = found[: len(inputs)], found[len(inputs) :]
        return _Gradients(
            {leaf: gradient for leaf, gradient in zip(inputs, of_inputs, strict=True) if gradient is not None},
            {name: gradient for name, gradient in zip(parameters, of_parameters, strict=True) if gradient is not None},
        )

    def _values(self, like: torch.Tensor, dim: int, tainted: Sequence[int] = (), taint: float = 0.0) -> torch.Tensor:
        shape = list(like.shape)
        shape[dim] = self.tokens
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(like.dtype)
        if tainted:
            values.index_fill_(dim, torch.tensor(tainted), taint)
        return values.to(like.device)

    def _index(self, at: list[int], like: torch.Tensor) -> torch.Tensor:
        return torch.tensor(at, device=like.device)

    def _silent_attention(self) -> str:
        names = ", ".join(sorted({type(attention).__name__ for attention in self.attentions}))
        return (
            f"its attention ({names}) did not run: forward never reached scaled_dot_product_attention or flex_attention. If it "
            "computes attention by other means, route it through F.scaled_dot_product_attention or declare it with "
            "UlyssesPlan(attention=...)"
        )

    def _output_dims(self, whole: _Run, part: _Run, some: int) -> tuple[int | None, ...]:
        if whole.spec != part.spec:
            raise Rejected(4, "its result has another structure for fewer tokens")
        dims: list[int | None] = []
        for a, b in zip(whole.outputs, part.outputs, strict=True):
            if not isinstance(a, torch.Tensor):
                if a is not None and not isinstance(a, (bool, int, float, str, torch.dtype, torch.device)):
                    raise Rejected(4, f"its result holds a {type(a).__name__}, which cannot be looked into")
                dims.append(None)
                continue
            pairs = list(zip(a.shape, b.shape, strict=False))
            changed = [dim for dim, (m, n) in enumerate(pairs) if m != n]
            if a.ndim != b.ndim or len(changed) > 1 or (changed and pairs[changed[0]] != (self.tokens, some)):
                raise Rejected(
                    4,
                    f"an output is {tuple(a.shape)} for {self.tokens} tokens and {tuple(b.shape)} for {some}: not per token",
                )
            dims.append(changed[0] if changed else None)
        return tuple(dims)

    def _compare(self, whole: _Run, part: _Run, at: list[int], dims: tuple[int | None, ...], what: str) -> None:
        if whole.flags != part.flags:
            raise Rejected(
                6,
                f"its attention was called with other arguments for {what}: {_first_difference(part.flags, whole.flags)}. "
                "An attention's flags must not depend on how many tokens a rank holds",
            )
        for name in whole.buffers.keys() | part.buffers.keys():
            if not close(whole.buffers.get(name), part.buffers.get(name)):
                raise Rejected(6, f"it writes the buffer {name!r} from the tokens at hand, which differ between ranks")
        for name in sorted(whole.attributes.keys() | part.attributes.keys()):
            if not alike(whole.attributes.get(name), part.attributes.get(name)):
                raise Rejected(
                    6,
                    f"it keeps {name}, made from the tokens at hand, which differ between ranks. Compute it from the "
                    "block's result outside the blocks, where the whole sequence is",
                )
        for a, b, dim in zip(whole.outputs, part.outputs, dims, strict=True):
            if not isinstance(a, torch.Tensor):
                if a != b:
                    raise Rejected(4, f"it returns {a!r} for all tokens and {b!r} for {what}")
                continue
            expected = a if dim is None else a.index_select(dim, self._index(at, a))
            if not close(expected, b):
                kind = "a value computed from its tokens" if dim is None else f"another result for {what}"
                raise Rejected(5, f"it mixes tokens outside attention, or counts positions from zero: it gives {kind}")

    def _compare_taint(self, whole: _Run, tainted: _Run, at: list[int], dims: tuple[int | None, ...]) -> None:
        if whole.flags != tainted.flags:
            raise Rejected(
                6,
                f"its attention's arguments depend on its tokens' values: {_first_difference(tainted.flags, whole.flags)}",
            )
        others = [i for i in range(self.tokens) if i not in at]
        for a, b, dim in zip(whole.outputs, tainted.outputs, dims, strict=True):
            if isinstance(a, torch.Tensor):
                clean, dirty = (a, b) if dim is None else (x.index_select(dim, self._index(others, x)) for x in (a, b))
                if not close(clean, dirty):
                    raise Rejected(
                        5, "it mixes tokens outside attention: NaN or large values in some tokens reached others"
                    )


def _first_difference(a: list[Any], b: list[Any]) -> str:
    for x, y in itertools.zip_longest(a, b):
        if x != y:
            return f"{x} for {y}"
    return ""


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version
