"""`explain`: what a plan does to a model, before it does it, and what the probe decided once it ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ulysses_dtensor.attend import routes_of
from ulysses_dtensor.attention import declared_in
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import FlexCall, empty_flex, seen_flex, show_flex
from ulysses_dtensor.heads import heads_of
from ulysses_dtensor.inside import declared_attention
from ulysses_dtensor.layout import mesh_sizes
from ulysses_dtensor.models.plain import Found
from ulysses_dtensor.probe import Decision
from ulysses_dtensor.region import Region, region_of
from ulysses_dtensor.rows import Split, inward, outward
from ulysses_dtensor.strategy import Strategy
from ulysses_dtensor.tables import table
from ulysses_dtensor.trees import tree_map

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ulysses_dtensor.plan import UlyssesPlan


_COLUMNS = (
    "module",
    "what",
    "layout in",
    "layout out",
    "heads per rank (kv)",
    "bytes sent in",
    "bytes sent out",
    "found",
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention in a dry run: global shapes with the dims of tokens and heads."""

    module: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    seq_dim: int
    head_dim: int
    itemsize: int
    causal: bool = False
    declared: bool = False

    @property
    def to_itself(self) -> bool:
        """Whether keys are as many as queries: a self-attention, or one to a sequence of the same length."""
        return self.query[self.seq_dim] == self.key[self.seq_dim]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a plan converts; `str` is a table."""

    model: str
    axes: dict[str, int]
    strategy: Strategy
    found: Found
    calls: tuple[AttentionCall, ...]
    decisions: dict[str, Decision | None]
    ran: bool
    agreement_seconds: float | None

    @property
    def ranks(self) -> int:
        """How many ranks share a sequence."""
        return prod(self.axes.values())

    def __str__(self) -> str:
        cut = f"tokens cut by {', '.join(self.axes)}"
        rows: list[tuple[str, ...]] = []
        for block, attentions in self.found.blocks.items():
            rows.append((block, "block", cut, cut, "", "", "", self._certificate(block)))
            for name in attentions:
                calls = [call for call in self.calls if call.module == name] or [None]
                rows += [(name, "attention", *self._attention(call)) for call in calls]
        rows += [
            (name, "beside", "as it comes", "as it comes", *[""] * 3, self._beside(name)) for name in self.found.beside
        ]
        for name in self.found.ancestors:
            rows.append(
                (
                    name or "(the model)",
                    "holds blocks",
                    "whole",
                    f"whole, or {cut}",
                    *[""] * 3,
                    "its own code runs as it is",
                )
            )
        title = f"{self.model} on {', '.join(f'{name}={size}' for name, size in self.axes.items())}"
        if self.agreement_seconds is not None:
            title += f"; the ranks agreed in {self.agreement_seconds * 1000:.1f} ms before the last forward"
        return table(_COLUMNS, rows, title=title)

    def _attention(self, call: AttentionCall | None) -> tuple[str, ...]:
        if call is None:
            note = "not called in the dry run" if self.ran else "pass example_inputs to see sizes"
            return ("sequence cut", "heads cut", "", "", "", note)
        split = self._split(call)
        num_heads, num_kv_heads = call.query[call.head_dim], call.key[call.head_dim]
        heads = [heads_of(num_heads, num_kv_heads, split.columns, column) for column in range(split.columns)]
        counts = sorted({(each.num_query, each.num_kv) for each in heads}, reverse=True)
        shown = ", ".join(f"{query} ({kv})" for query, kv in counts)
        figures = [f"{sent * call.itemsize:,}" for sent in _sent(call, split)]
        notes = [f"{num_heads} query, {num_kv_heads} kv heads"]
        idle = sum(each.num_query == 0 for each in heads) * split.rows
        if idle:
            columns = _most_columns(num_heads, self.ranks)
            notes.append(f"{idle} ranks idle, none on a mesh of (cp={self.ranks // columns}, sp={columns})")
        if not call.to_itself:
            notes.append("keys of another sequence: nothing is sent of one that every rank holds")
        return (*self._layouts(call, split), shown, *figures, "; ".join(notes + self._choices(call)))

    def _split(self, call: AttentionCall) -> Split:
        if call.declared or not call.to_itself:
            return Split(1, self.ranks)
        shapes = (call.query, call.key, call.value)
        return self.strategy.choose(*shapes, call.seq_dim, call.head_dim, self.ranks, causal=call.causal)

    def _choices(self, call: AttentionCall) -> list[str]:
        """Returns what each way of sharing out would send, where there is a choice or a cheaper one."""
        if call.declared or not call.to_itself or self.ranks == 1:
            return []
        splits = Strategy(self.strategy.rows, auto=True).splits(self.ranks, causal=call.causal)
        sent = {split.rows: sum(_sent(call, split)) * call.itemsize for split in splits}
        if not self.strategy.auto and sent[self.strategy.rows] <= min(sent.values()):
            return []
        ways = {1: "moving heads", self.ranks: "gathering keys and values"}
        said = ", ".join(f"{ways.get(rows, f'{rows} rows')} {size:,} bytes" for rows, size in sent.items())
        return [said if self.strategy.auto else f"{said} (strategy='auto')"]

    def _layouts(self, call: AttentionCall, split: Split) -> tuple[str, str]:
        names = {call.seq_dim: "s", call.head_dim: "h", len(call.query) - 1: "d"}
        axes = [names.get(dim, "b" if dim == 0 else f"b{dim}") for dim in range(len(call.query))]
        everything = " ".join(self.axes)
        if split.rows == 1:
            of_tokens, of_heads = "", everything
        elif split.columns == 1:
            of_tokens, of_heads = everything, ""
        else:
            of_tokens, of_heads = tuple(self.axes)
        held = _layout(axes, {call.seq_dim: everything})
        return held, _layout(axes, {call.seq_dim: of_tokens, call.head_dim: of_heads})

    def _beside(self, name: str) -> str:
        if name in self.found.whole:
            return "every rank runs all of it"
        return self._certificate(name) if name in self.decisions else "left alone unless a block's output reaches it"

    def _certificate(self, name: str) -> str:
        if name not in self.decisions:
            return "to be proven at the first forward"
        found = self.decisions[name]
        if found is None:
            return "mixes tokens: gets whole tensors"
        sliced = f", arguments {[at for at, _ in found.sliced]} cut per token" if found.sliced else ""
        spare = f", {len(found.spare)} parameters tied" if found.spare else ""
        return f"tokens stay apart: proven in {found.seconds * 1000:.0f} ms{sliced}{spare}"


def _layout(axes: list[str], cut: dict[int, str]) -> str:
    return " ".join(f"({cut[dim]} {axis})" if cut.get(dim) else axis for dim, axis in enumerate(axes))


def _sent(call: AttentionCall, split: Split) -> tuple[int, int]:
    """Returns the elements that the busiest ranks send on the way in and out."""
    shapes, dims = (call.query, call.key, call.value), (call.seq_dim, call.head_dim)
    ways = []
    for rank in range(split.rows * split.columns):
        if split.rows > 1:
            into, out = (
                inward(*shapes, *dims, split, rank),
                outward((*call.query[:-1], call.value[-1]), *dims, split, rank),
            )
        else:
            into, of_output = routes_of(*shapes, *dims, split.columns, rank)
            out = (of_output,)
        ways.append((sum(route.elements_sent for route in into), sum(route.elements_sent for route in out)))
    sent_in, sent_out = (max(column) for column in zip(*ways, strict=True))
    return sent_in, sent_out


def _most_columns(num_heads: int, ranks: int) -> int:
    """Returns the largest divisor of `ranks` that leaves no rank without heads."""
    fits = (columns for columns in range(1, ranks + 1) if ranks % columns == 0)
    return max(columns for columns in fits if -(-num_heads // columns) * (columns - 1) < num_heads)


def explain(
    model: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    plan: UlyssesPlan | None = None,
    example_inputs: Any = None,
) -> Explanation:
    """Prints, and returns, what `plan` converts in `model`; applies nothing.

    Args:
        model: on any device, the meta device too; or a converted model, whose certificate is then shown.
        mesh: the mesh, or its shape, `{"sp": 4}` or `{"cp": 2, "sp": 4}`: no process group is needed.
        plan: default `UlyssesPlan()`.
        example_inputs: a tuple of positional or a mapping of keyword arguments, for sizes: the model is run on fake tensors.

    Raises:
        PlanError: the plan does not fit the model.

    Communication: none.
    """
    from ulysses_dtensor.plan import UlyssesPlan

    plan = plan or UlyssesPlan()
    sizes = mesh_sizes(mesh)
    if len(sizes) > 2:
        raise PlanError(
            f"explain: mesh={dict(sizes)} has {len(sizes)} dimensions. Pass the sequence dimension alone, or two."
        )
    region = next((found for module in model.modules() if (found := region_of(module)) is not None), None)
    found, problems = plan.find(model, dict(sizes), converted=region is not None)
    if problems:
        raise PlanError(f"explain: UlyssesPlan on {type(model).__name__}:\n  " + "\n  ".join(problems))
    calls = () if example_inputs is None else tuple(_dry_run(model, found, region, example_inputs, plan, dict(sizes)))
    explanation = Explanation(
        type(model).__name__,
        dict(sizes),
        plan.strategy_on(dict(sizes)) if region is None else region.strategy,
        found,
        calls,
        _decisions(region),
        example_inputs is not None,
        None if region is None else region.agreement_seconds,
    )
    print(explanation)
    return explanation


def _decisions(region: Region | None) -> dict[str, Decision | None]:
    return {} if region is None else {key[0]: decision for key, decision in region.decisions.items()}


class _Record(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.calls: list[AttentionCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            tensors = _qkv(args, kwargs)
            causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
            self._add([tuple(x.shape) for x in tensors], -2, -3, tensors[0].element_size(), causal=bool(causal))
        elif func is seen_flex:
            flex = FlexCall(*args, **kwargs)
            shapes = [tuple(x.shape) for x in (flex.query, flex.key, flex.value)]
            self._add(shapes, -2, -3, flex.query.element_size(), declared=True)
            return empty_flex(flex)
        elif func is F.multi_head_attention_forward:
            heads = args[4]
            shapes = [(x.shape[1] if x.ndim > 2 else 1, heads, x.shape[0], args[3] // heads) for x in args[:3]]
            causal = bool(kwargs.get("is_causal", False))
            self._add(shapes, -2, -3, args[0].element_size(), causal=causal)
        elif func is declared_attention:
            shapes = [tuple(x.shape) for x in args[:3]]
            self._add(shapes, kwargs["seq_dim"], kwargs["head_dim"], args[0].element_size(), declared=True)
        return func(*args, **kwargs)

    def _add(
        self,
        shapes: list[tuple[int, ...]],
        seq_dim: int,
        head_dim: int,
        itemsize: int,
        *,
        causal: bool = False,
        declared: bool = False,
    ) -> None:
        query, key, value = (tuple(int(n) for n in shape) for shape in shapes)
        name = self.stack[-1] if self.stack else "?"
        dims = (seq_dim % len(query), head_dim % len(query))
        self.calls.append(AttentionCall(name, query, key, value, *dims, itemsize, causal, declared))


def _qkv(args: Any, kwargs: Any) -> list[torch.Tensor]:
    names = ("query", "key", "value")
    return [args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names)]


def _dry_run(
    model: nn.Module, found: Found, region: Region | None, inputs: Any, plan: UlyssesPlan, axes: dict[str, int]
) -> list[AttentionCall]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    record = _Record()
    show_flex(model)
    with ExitStack() as stack:
        for name, module in found.attentions.items():
            stack.enter_context(_named(module, name, record.stack))
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.no_grad())
        if any(p.is_meta for p in model.parameters()):
            stack.enter_context(torch.device("meta"))  # so that what the forward makes anew is meta too
        if region is not None:
            from ulysses_dtensor.region import bypass

            stack.enter_context(bypass(model))
        else:
            stack.enter_context(declared_in(model, plan.declared(model), axes))
        stack.enter_context(record)
        args = tree_map(lambda x: fake.from_tensor(x) if isinstance(x, torch.Tensor) else x, inputs)
        if isinstance(args, Mapping):
            model(**args)
        else:
            model(*args) if isinstance(args, (tuple, list)) else model(args)
    return list(dict.fromkeys(record.calls))


@contextmanager
def _named(module: nn.Module, name: str, stack: list[str]) -> Iterator[None]:
    before = module.register_forward_pre_hook(lambda *_: stack.append(name))
    after = module.register_forward_hook(lambda *_: stack.pop() and None, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
