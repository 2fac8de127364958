"""The certificate of a model in one process: what would be converted, and whether tokens stay apart there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from ulysses_dtensor.attention import declared_in
from ulysses_dtensor.calls import Call, hidden_options
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import show_flex
from ulysses_dtensor.layout import mesh_sizes
from ulysses_dtensor.models.plain import Found
from ulysses_dtensor.plan import UlyssesPlan
from ulysses_dtensor.probe import Decision, Mixes, probe
from ulysses_dtensor.tables import table
from ulysses_dtensor.trees import tree_flatten


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was found of each block; `str` is a table, `passed` whether the plan would take the model."""

    model: str
    found: Found
    decisions: Mapping[str, Decision | str]

    @property
    def passed(self) -> bool:
        """Whether every block ran and keeps its tokens apart."""
        return all(isinstance(self.decisions.get(name), Decision) for name in self.found.blocks)

    def __str__(self) -> str:
        rows = []
        for name, attentions in self.found.blocks.items():
            decision = self.decisions.get(name, "did not run on these inputs")
            rows.append((name, ", ".join(attentions), *self._findings(decision)))
        title = f"{self.model}: {'tokens stay apart' if self.passed else 'REFUSED'}"
        return table(("block", "attentions", "verdict", "cut per token", "ms"), rows, title=title)

    def _findings(self, decision: Decision | str) -> tuple[str, str, str]:
        if isinstance(decision, str):
            return (f"refused: {decision}", "", "")
        cut = ", ".join(f"argument {leaf} at dim {dim}" for leaf, dim in (*decision.hidden, *decision.sliced))
        return ("tokens stay apart", cut, f"{decision.seconds * 1000:.0f}")


def certify(model: nn.Module, inputs: Any, mesh: Mapping[str, int], plan: UlyssesPlan | None = None) -> Certificate:
    """Returns the certificate of `model` on `inputs`: runs it once as it is and probes each block at its first call.

    Args:
        model: not converted; left as it is.
        inputs: a tuple of positional or a mapping of keyword arguments, or one tensor.
        mesh: the mesh's shape, `{"sp": 2}`.
        plan: default `UlyssesPlan()`.

    Raises:
        PlanError: the plan does not fit the model at all.

    Communication: none.
    """
    plan = plan or UlyssesPlan()
    found, problems = plan.find(model, mesh_sizes(mesh))
    if problems:
        raise PlanError(f"UlyssesPlan on {type(model).__name__}:\n  " + "\n  ".join(problems))
    show_flex(model)
    decisions: dict[str, Decision | str] = {}
    # Under a mode torch takes none of its fast paths for inference, which would hand nested tensors to the blocks.
    declared = declared_in(model, plan.declared(model), dict(mesh_sizes(mesh)))
    with declared, ExitStack() as stack, torch.no_grad(), BaseTorchFunctionMode():
        for name in found.blocks:
            hook = partial(_probe_first_call, decisions, found, plan, mesh, name)
            handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        if isinstance(inputs, Mapping):
            model(**inputs)
        else:
            model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return Certificate(type(model).__name__, found, decisions)


def _probe_first_call(
    decisions: dict[str, Decision | str],
    found: Found,
    plan: UlyssesPlan,
    mesh: Mapping[str, int],
    name: str,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> None:
    if name in decisions:
        return
    leaves, spec = tree_flatten((args, kwargs))
    call = Call(module, leaves, spec, plan.input_layouts, None, mesh)
    attentions = [found.attentions[inner] for inner in found.blocks[name]]
    try:
        decisions[name] = probe(
            vars(module).get("forward", partial(type(module).forward, module)),
            module,
            leaves,
            spec,
            hidden_options(call),
            seq_len=call.seq_len,
            fixed=call.declared,
            attentions=attentions,
            who=f"{name} ({type(module).__name__})",
        )
    except Mixes as error:
        decisions[name] = str(error)
