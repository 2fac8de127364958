"""One guess of which arguments of a module are per token, judged by running it on a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ulysses_dtensor.compare import close
from ulysses_dtensor.findings import TAINTED, Drop, compare, compare_taint, drops_of, output_dims
from ulysses_dtensor.operands import Subset, apart, held_by, untouched
from ulysses_dtensor.passes import graph_nodes
from ulysses_dtensor.stub import Attention
from ulysses_dtensor.tokens import Held
from ulysses_dtensor.tryout import Rejected, Run, Tryout

_TOKENS_ALONE = 3  # how many single tokens must use a parameter for it to count as always used
_LARGE = 1e4  # past what a branch on the size of values lets pass, and within float16
Verdict = tuple[tuple[int | None, ...], tuple[tuple[Held, Held], ...], tuple[Drop, ...]]
"""The token dim of each output leaf, what each attention call's operands hold, and what each dropout call's tensor holds."""


@dataclass
class _Gradients:
    hidden: dict[int, torch.Tensor]
    parameters: dict[str, torch.Tensor]


class Trial(Tryout):
    """One guess of which leaves are per token at which dim, judged on a few tokens."""

    def without(self, leaf: int) -> Trial:
        """Returns the same trial with one leaf left whole."""
        sliced = {at: dim for at, dim in self.sliced.items() if at != leaf}
        return Trial(
            self.call,
            self.module,
            self.leaves,
            self.actual,
            self.spec,
            self.option,
            sliced,
            self.seq_len,
            self.attentions,
        )

    def verdict(self, trouble: list[Rejected]) -> Verdict | None:
        """Returns the outputs' token dims and the number of attention calls, or None, with the reason in `trouble`."""
        for avoid in ({self.tokens, self.some, *self.context_tokens}, ()):
            try:
                return self.judge()
            except Rejected as rejected:
                rejected.seq_len = self.seq_len
                trouble.append(rejected)
            if avoid:  # a size inside the module (a text and two registers) may equal a number made up: try others
                self.choose_counts(avoid)
        return None

    def judge(self) -> Verdict:
        """Returns the verdict.

        Raises:
            Rejected: the tokens do not stay apart when the leaves are cut so.
        """
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
        dims = output_dims(whole, part, self.tokens, len(some))
        if whole.attentions and all(self._misplaced(call) for call in whole.attentions):
            raise Rejected(3, self._strange_operands(whole.attentions))
        compare(whole, part, some, dims, "a slice of its tokens")
        parts = self._parts(whole, part, some, dims)
        held = self._held(whole, parts)
        for single in ([self.tokens // 2], [self.tokens - 1]):
            alone = self.run(single, plain_errors=True)
            compare(whole, alone, single, dims, "a single token")
            self._compare_operands(whole, alone, held, self._subset(single))
        self._check_tables(everything, dims)
        tainted = [1, self.tokens // 2 + 1, self.tokens - 2]
        clean = self._subset([i for i in everything if i not in tainted])
        for value in (float("nan"), _LARGE):
            dirty = self.run(everything, plain_errors=True, tainted=tainted, taint=value)
            compare_taint(whole, dirty, clean.at, dims)
            calls = zip(whole.attentions, dirty.attentions, held, strict=True)
            if not all(untouched(a, b, each, clean) for a, b, each in calls):
                raise Rejected(5, TAINTED)
        self._check_actual_values(everything, some, held)
        empty = self.run(everything, plain_errors=True, tainted=everything, taint=0.0)
        if len(empty.attentions) != len(whole.attentions):
            raise Rejected(6, "whether its attention runs depends on its tokens' values, which differ between ranks")
        self._compare_gradients(everything, some, dims)
        self.returns_whole_stream = any(
            dim is None and isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim >= 3
            for x, dim in zip(whole.outputs, dims, strict=True)
        )
        return dims, held, drops_of(whole, parts, held)

    def _subset(self, at: list[int]) -> Subset:
        return Subset(next(iter(self.hidden)), tuple(at), self.tokens)

    def _parts(self, whole: Run, part: Run, some: list[int], dims: tuple[int | None, ...]) -> list[tuple[Run, Subset]]:
        """Returns runs on some tokens of one argument that is cut: the hidden state, and each other sequence in shards."""
        parts = [(part, self._subset(some))]
        for number, context in enumerate(self.option.contexts):
            count = self.context_tokens[number]
            at = list(range(1, count - 2))
            run = self.run(list(range(self.tokens)), plain_errors=True, contexts={number: at})
            compare(whole, run, list(range(self.tokens)), dims, "some tokens of another sequence")
            parts.append((run, Subset(next(iter(context)), tuple(at), count)))
        return parts

    def _held(self, whole: Run, parts: list[tuple[Run, Subset]]) -> tuple[tuple[Held, Held], ...]:
        """Returns what each attention call's operands hold: the hidden state's tokens, another cut argument's, or whole ones."""
        if any(len(run.attentions) != len(whole.attentions) for run, _ in parts):
            raise Rejected(6, "it calls attention another number of times for fewer tokens")
        found = []
        for number, call in enumerate(whole.attentions):
            held = held_by(call, [(run.attentions[number], subset) for run, subset in parts])
            if held is None:
                raise Rejected(3, self._strange_operands([call]))
            found.append((self._with_others(held[0], call.query, call), self._with_others(held[1], call.key, call)))
        if whole.attentions and not any(each.of is not None for held in found for each in held):
            raise Rejected(3, self._strange_operands(whole.attentions))
        return tuple(found)

    def _with_others(self, held: Held, operand: torch.Tensor, call: Attention) -> Held:
        """Returns `held` with the number of tokens that every rank holds, and which argument has so many."""
        counts = {next(iter(dims)): self.context_tokens[at] for at, dims in enumerate(self.option.contexts)}
        own = counts.get(held.of, self.tokens) if held.of is not None else 0
        others = operand.shape[call.seq_dim] - own
        cut = {*self.hidden, *self.sliced, *(at for dims in self.option.contexts for at in dims)}
        likes = (
            (at, dim)
            for at, x in enumerate(self.leaves)
            if isinstance(x, torch.Tensor) and at not in cut and x.ndim > 1
            for dim in range(x.ndim)
        )
        like = next(((at, dim) for at, dim in likes if others and self.leaves[at].shape[dim] == others), None)
        return replace(held, count=others, like=like)

    def _check_actual_values(self, everything: list[int], some: list[int], held: tuple[tuple[Held, Held], ...]) -> None:
        """The probe gave constant arguments other values: with their own, attention has to be given the same tokens."""
        if all(a is b for a, b in zip(self.leaves, self.actual, strict=True)):
            return
        whole, part = (self.run(at, plain_errors=True, actual=True) for at in (everything, some))
        calls = [held_by(a, [(b, self._subset(some))]) for a, b in zip(whole.attentions, part.attentions, strict=False)]
        own = {next(iter(self.hidden))}
        expected = [tuple(each if each.of in own else Held(None) for each in pair) for pair in held]
        if len(whole.attentions) != len(held) or calls != expected:
            raise Rejected(
                6, "which tokens its attention gets depends on the values of an argument (a mask that is all zeros)"
            )

    def _misplaced(self, call: Attention) -> bool:
        """Whether neither query nor key can hold the tokens, by their number."""
        return all(x.shape[call.seq_dim] < self.tokens for x in (call.query, call.key))

    def _strange_operands(self, calls: Sequence[Attention]) -> str:
        lengths = sorted({x.shape[call.seq_dim] for call in calls for x in (call.query, call.key)})
        return (
            f"its attention saw {lengths} tokens where {self.tokens} were given: the dim of the tokens is another one, they are "
            "regrouped (windows), or others stand among them. Declare the layout with UlyssesPlan(inputs=...)"
        )

    def _compare_operands(self, whole: Run, part: Run, held: tuple[tuple[Held, Held], ...], subset: Subset) -> None:
        calls = zip(whole.attentions, part.attentions, held, strict=True)
        if not all(apart(a, b, each, subset) for a, b, each in calls):
            raise Rejected(5, "it mixes tokens outside attention: query, key or value of a token depend on others")

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

    def unused_leaves(self) -> tuple[int, ...]:
        """Returns the leaves in shards on which no result of the module depends, for gradients."""
        run = self.run(list(range(self.tokens)), plain_errors=True, gradients=True)
        used = {id(getattr(node, "variable", None)) for node in graph_nodes(run.outputs)}
        return tuple(at for at, x in run.given.items() if id(x) not in used)

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
            expected = None if b is None else 4.0 * b
            found = None if a is None else a.index_select(dim, self.index(some, a))
            if not close(found, expected, summands=() if expected is None else (expected,)):
                raise Rejected(
                    5,
                    "its backward mixes tokens, or does not scale with the gradient (a hook or a function that divides by a "
                    "norm or clips)",
                )
        for name, a in whole.parameters.items():
            summands = [4.0 * found.parameters[name] for found in (part, other) if name in found.parameters]
            if not summands or not close(a, torch.stack(summands).sum(0), summands=summands):
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
                weights.append(scale * self.values(x, dim).index_select(dim, self.index(at, x)))
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

    def _silent_attention(self) -> str:
        names = ", ".join(sorted({type(attention).__name__ for attention in self.attentions}))
        return (
            f"its attention ({names}) did not run: forward never reached scaled_dot_product_attention or flex_attention. If it "
            "computes attention by other means, route it through F.scaled_dot_product_attention or declare it with "
            "UlyssesPlan(attention=...)"
        )
