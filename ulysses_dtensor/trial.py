"""One guess of which arguments of a module are per token, judged by running it on a few tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ulysses_dtensor.calls import Dims, Option
from ulysses_dtensor.compare import alike, close, same
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.leftovers import Watch, tensors_in
from ulysses_dtensor.multihead import NO_WEIGHTS, Withheld
from ulysses_dtensor.operands import Subset, apart, held_by, place, untouched
from ulysses_dtensor.passes import graph_nodes
from ulysses_dtensor.stub import Attention, AttentionStub, Dropout
from ulysses_dtensor.tokens import Held
from ulysses_dtensor.trees import TreeSpec, tree_flatten, tree_unflatten
from ulysses_dtensor.unseen import unseen

_TOKENS_ALONE = 3  # how many single tokens must use a parameter for it to count as always used
_TAINTED = "it mixes tokens outside attention: NaN or large values in some tokens reached others"
_LARGE = 1e4  # past what a branch on the size of values lets pass, and within float16
Drop = tuple[int, str] | None
"""The dim of a dropped tensor's tokens and where others stand (see `Held`); None where every rank holds all of it."""

Verdict = tuple[tuple[int | None, ...], tuple[tuple[Held, Held], ...], tuple[Drop, ...]]
"""The token dim of each output leaf, what each attention call's operands hold, and what each dropout call's tensor holds."""


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
    attentions: list[Attention]
    dropouts: list[Dropout]
    drawn: list[tuple[str, tuple[int, ...]]]
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
        option: Option,
        sliced: Dims,
        seq_len: int,
        attentions: tuple[nn.Module, ...],
    ) -> None:
        self.call, self.module, self.leaves, self.spec = call, module, leaves, spec
        self.option, self.sliced, self.seq_len, self.attentions = option, sliced, seq_len, attentions
        self.hidden = option.hidden
        sizes = {size for x in leaves if isinstance(x, torch.Tensor) for size in x.shape} | {seq_len}
        sizes |= {size for p in module.parameters() for size in p.shape}
        # No count of tokens that the module sees, nor what is left of it, equals any size that it has: a coincidence would tell
        # nothing.
        self.some = next(n for n in itertools.chain((5, 6, 7, 4, 3), itertools.count(8)) if n not in sizes)
        fits = (n for n in itertools.count(max(11, self.some + 6)) if not {n, n - self.some} & sizes)
        self.tokens = next(fits)
        self.context_tokens = [next(fits) + at for at, _ in enumerate((*option.contexts, option.gathered))]

    def without(self, leaf: int) -> Trial:
        """Returns the same trial with one leaf left whole."""
        sliced = {at: dim for at, dim in self.sliced.items() if at != leaf}
        return Trial(self.call, self.module, self.leaves, self.spec, self.option, sliced, self.seq_len, self.attentions)

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
        part = self.run(some, plain_errors=True)
        dims = self._output_dims(whole, part, len(some))
        if whole.attentions and all(self._misplaced(call) for call in whole.attentions):
            raise Rejected(3, self._strange_operands(whole.attentions))
        self._compare(whole, part, some, dims, "a slice of its tokens")
        held = self._held(whole, part, some, dims)
        for single in ([self.tokens // 2], [self.tokens - 1]):
            alone = self.run(single, plain_errors=True)
            self._compare(whole, alone, single, dims, "a single token")
            self._compare_operands(whole, alone, held, self._subset(single))
        self._check_tables(everything, dims)
        tainted = [1, self.tokens // 2 + 1, self.tokens - 2]
        for value in (float("nan"), _LARGE):
            dirty = self.run(everything, plain_errors=True, tainted=tainted, taint=value)
            self._compare_taint(whole, dirty, tainted, dims)
            clean = self._subset([i for i in everything if i not in tainted])
            calls = zip(whole.attentions, dirty.attentions, held, strict=True)
            if not all(untouched(a, b, each, clean) for a, b, each in calls):
                raise Rejected(5, _TAINTED)
        self._compare_gradients(everything, some, dims)
        return dims, held, self._drops(whole, part, some, held)

    def _subset(self, at: list[int]) -> Subset:
        return Subset(next(iter(self.hidden)), tuple(at), self.tokens)

    def _held(
        self, whole: _Run, part: _Run, some: list[int], dims: tuple[int | None, ...]
    ) -> tuple[tuple[Held, Held], ...]:
        """Returns what each attention call's operands hold: the hidden state's tokens, another cut argument's, or whole ones."""
        parts = [(part, self._subset(some))]
        for number, context in enumerate(self.option.contexts):
            count = self.context_tokens[number]
            at = list(range(1, count - 2))
            run = self.run(list(range(self.tokens)), plain_errors=True, contexts={number: at})
            self._compare(whole, run, list(range(self.tokens)), dims, "some tokens of another sequence")
            parts.append((run, Subset(next(iter(context)), tuple(at), count)))
        if any(len(run.attentions) != len(whole.attentions) for run, _ in parts):
            raise Rejected(6, "it calls attention another number of times for fewer tokens")
        found = []
        for number, call in enumerate(whole.attentions):
            held = held_by(call, [(run.attentions[number], subset) for run, subset in parts])
            if held is None:
                raise Rejected(3, self._strange_operands([call]))
            found.append(held)
        if whole.attentions and not any(each.of is not None for held in found for each in held):
            raise Rejected(3, self._strange_operands(whole.attentions))
        return tuple(found)

    def _misplaced(self, call: Attention) -> bool:
        """Whether neither query nor key can hold the tokens, by their number."""
        return all(x.shape[call.seq_dim] < self.tokens for x in (call.query, call.key))

    def _strange_operands(self, calls: Sequence[Attention]) -> str:
        lengths = sorted({x.shape[call.seq_dim] for call in calls for x in (call.query, call.key)})
        return (
            f"its attention saw {lengths} tokens where {self.tokens} were given: the dim of the tokens is another one, they are "
            "regrouped (windows), or others stand among them. Declare the layout with UlyssesPlan(inputs=...)"
        )

    def _compare_operands(self, whole: _Run, part: _Run, held: tuple[tuple[Held, Held], ...], subset: Subset) -> None:
        calls = zip(whole.attentions, part.attentions, held, strict=True)
        if not all(apart(a, b, each, subset) for a, b, each in calls):
            raise Rejected(5, "it mixes tokens outside attention: query, key or value of a token depend on others")

    def _drops(self, whole: _Run, part: _Run, some: list[int], held: Sequence[tuple[Held, Held]]) -> tuple[Drop, ...]:
        """Returns which dim of each dropout call's tensor is cut, and where others stand; None for what all ranks drop alike.

        A call that cannot be followed (the tokens of one expert) drops this rank's tokens, if the block has no others.
        """
        others = any(each.of is None or each.others != "none" for pair in held for each in pair)
        if len(whole.dropouts) != len(part.dropouts):
            if others:
                raise Rejected(
                    6, "it drops out another number of times for fewer tokens, beside tokens that every rank holds"
                )
            return ()
        drops: list[Drop] = []
        for a, b in zip((each.x for each in whole.dropouts), (each.x for each in part.dropouts), strict=True):
            places = ((dim, place(a, b, dim, self._subset(some))) for dim in range(min(a.ndim, b.ndim)))
            found = next(((dim, where) for dim, where in places if where not in (None, "whole")), None)
            if a.shape == b.shape or (found is not None and found[0] >= whole.dropouts[len(drops)].dims):
                drops.append(None)
                continue
            if found is None and others:
                raise Rejected(
                    5, "it drops out a tensor in which tokens and others, that every rank holds, are not told apart"
                )
            drops.append(found or (0, "none"))
        return tuple(drops)

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
        contexts: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> _Run:
        leaves = list(self.leaves)
        made: dict[tuple[int, int], torch.Tensor] = {}
        for number, dims in enumerate((*self.option.contexts, self.option.gathered)):
            count = self.context_tokens[number]
            for leaf, dim in dims.items():
                key = (id(self.leaves[leaf]), dim)
                if key not in made:
                    index = self._index(contexts.get(number, list(range(count))), leaves[leaf])
                    x = self._values(leaves[leaf], dim, count=count).index_select(dim, index)
                    made[key] = x.requires_grad_(gradients and x.is_floating_point())
                leaves[leaf] = made[key]
        for leaf, dim in self.hidden.items():
            key = (id(self.leaves[leaf]), dim)
            if key not in made:
                x = self._values(leaves[leaf], dim, tainted, taint).index_select(dim, self._index(at, leaves[leaf]))
                made[key] = x.requires_grad_(gradients and x.is_floating_point())
            leaves[leaf] = made[key]
        for leaf, dim in self.sliced.items():
            if leaf in uncut:
                continue
            size = leaves[leaf].shape[dim]
            spread = [min(size - 1, i) if consecutive else i * self.seq_len // self.tokens for i in at]
            leaves[leaf] = leaves[leaf].detach().index_select(dim, self._index(spread, leaves[leaf]))
        args, kwargs = tree_unflatten(leaves, self.spec)
        drawn = {at for dims in (self.hidden, *self.option.contexts, self.option.gathered) for at in dims}
        given = [
            (x, x.detach().clone() if at in drawn or at in self.sliced else _version(x))
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
        if any(isinstance(x, Withheld) for x in tensors_in(list(attributes.values()))):
            raise Rejected(6, NO_WEIGHTS)
        if any(isinstance(x, Withheld) for x in outputs):
            if not any(self.module is attention for attention in self.attentions):
                raise Rejected(6, NO_WEIGHTS)
            outputs = [None if isinstance(x, Withheld) else x for x in outputs]  # its caller mostly throws them away
        return _Run(
            outputs,
            spec,
            stub.flags,
            stub.attentions,
            stub.dropouts,
            stub.drawn,
            written,
            attributes,
            {at: leaves[at] for at in self.hidden},
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

    def _values(
        self,
        like: torch.Tensor,
        dim: int,
        tainted: Sequence[int] = (),
        taint: float = 0.0,
        count: int | None = None,
    ) -> torch.Tensor:
        shape = list(like.shape)
        shape[dim] = count or self.tokens
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
        if whole.drawn != part.drawn:
            name = next(iter((*whole.drawn, *part.drawn)))[0]
            raise Rejected(
                6,
                f"it draws random numbers ({name}) for the tokens at hand: ranks that are seeded alike would draw the same for "
                "different tokens. Draw before the blocks and pass the numbers, or use a dropout of torch.nn.functional",
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
                    raise Rejected(5, _TAINTED)


def _first_difference(a: list[Any], b: list[Any]) -> str:
    for x, y in itertools.zip_longest(a, b):
        if x != y:
            return f"{x} for {y}"
    return ""


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version
