"""`explain`: what a plan does to a model, before it does it, and what the probe decided once it ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ulysses_dtensor.attend import routes_of
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import empty_flex, seen_flex, show_flex
from ulysses_dtensor.heads import heads_of
from ulysses_dtensor.inside import declared_attention
from ulysses_dtensor.layout import mesh_sizes
from ulysses_dtensor.models.plain import Found
from ulysses_dtensor.probe import Decision
from ulysses_dtensor.region import Region, region_of
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


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a plan converts; `str` is a table."""

    model: str
    mesh_axis: str
    ranks: int
    found: Found
    calls: tuple[AttentionCall, ...]
    decisions: dict[str, Decision | None]
    ran: bool
    agreement_seconds: float | None

    def __str__(self) -> str:
        cut = f"tokens cut by {self.mesh_axis}"
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
        title = f"{self.model} on {self.mesh_axis}={self.ranks}"
        if self.agreement_seconds is not None:
            title += f"; the ranks agreed in {self.agreement_seconds * 1000:.1f} ms before the last forward"
        return table(_COLUMNS, rows, title=title)

    def _attention(self, call: AttentionCall | None) -> tuple[str, ...]:
        if call is None:
            note = "not called in the dry run" if self.ran else "pass example_inputs to see sizes"
            return ("sequence cut", "heads cut", "", "", "", note)
        ndim = len(call.query)
        seq_dim, head_dim = call.seq_dim % ndim, call.head_dim % ndim
        names = {seq_dim: "s", head_dim: "h", ndim - 1: "d"}
        axes = [names.get(dim, "b" if dim == 0 else f"b{dim}") for dim in range(ndim)]
        held = [
            " ".join(f"({self.mesh_axis} {a})" if at == dim else a for at, a in enumerate(axes))
            for dim in (seq_dim, head_dim)
        ]
        heads = [heads_of(call.query[head_dim], call.key[head_dim], self.ranks, rank) for rank in range(self.ranks)]
        counts = sorted({(each.num_query, each.num_kv) for each in heads}, reverse=True)
        shown = ", ".join(f"{query} ({kv})" for query, kv in counts)
        sent = []
        for rank in range(self.ranks):
            into, out = routes_of(call.query, call.key, call.value, seq_dim, head_dim, self.ranks, rank)
            sent.append((sum(route.elements_sent for route in into) * call.itemsize, out.elements_sent * call.itemsize))
        figures = [f"{max(column):,}" for column in zip(*sent, strict=True)]
        idle = sum(each.num_query == 0 for each in heads)
        note = f"{call.query[head_dim]} query, {call.key[head_dim]} kv heads" + (f"; {idle} ranks idle" if idle else "")
        return (held[0], held[1], shown, *figures, note)

    def _beside(self, name: str) -> str:
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


def explain(
    model: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    plan: UlyssesPlan | None = None,
    example_inputs: Any = None,
) -> Explanation:
    """Prints, and returns, what `plan` converts in `model`; applies nothing.

    Args:
        model: on any device, the meta device too; or a converted model, whose certificate is then shown.
        mesh: the mesh, or its shape, `{"sp": 4}`: no process group is needed.
        plan: default `UlyssesPlan()`.
        example_inputs: a tuple of positional or a mapping of keyword arguments, for sizes: the model is run on fake tensors.

    Raises:
        PlanError: the plan does not fit the model.

    Communication: none.
    """
    from ulysses_dtensor.plan import UlyssesPlan

    plan = plan or UlyssesPlan()
    sizes = mesh_sizes(mesh)
    if len(sizes) != 1:
        raise PlanError(f"explain: mesh={dict(sizes)} has {len(sizes)} dimensions. Pass the sequence dimension alone.")
    region = next((found for module in model.modules() if (found := region_of(module)) is not None), None)
    found, problems = plan.find(model, sizes, converted=region is not None)
    if problems:
        raise PlanError(f"explain: UlyssesPlan on {type(model).__name__}:\n  " + "\n  ".join(problems))
    calls = () if example_inputs is None else tuple(_dry_run(model, found, region, example_inputs))
    explanation = Explanation(
        type(model).__name__,
        sizes[0][0],
        sizes[0][1],
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
            self._add(_qkv(args, kwargs), -2, -3)
        elif func is seen_flex:
            self._add(_qkv(args[1:], kwargs), -2, -3)
            return empty_flex(*args, **kwargs)
        elif func is declared_attention:
            self._add(args[:3], kwargs["seq_dim"], kwargs["head_dim"])
        return func(*args, **kwargs)

    def _add(self, tensors: Any, seq_dim: int, head_dim: int) -> None:
        shapes = [tuple(int(n) for n in x.shape) for x in tensors]
        name = self.stack[-1] if self.stack else "?"
        self.calls.append(
            AttentionCall(name, shapes[0], shapes[1], shapes[2], seq_dim, head_dim, tensors[0].element_size())
        )


def _qkv(args: Any, kwargs: Any) -> list[torch.Tensor]:
    names = ("query", "key", "value")
    return [args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names)]


def _dry_run(model: nn.Module, found: Found, region: Region | None, inputs: Any) -> list[AttentionCall]:
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
