"""`UlyssesPlan` and `parallelize_module`: find, validate all, convert."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ulysses_dtensor.attention import UlyssesAttention, declare, is_declared
from ulysses_dtensor.errors import LayoutError, PlanError
from ulysses_dtensor.flex import show_flex
from ulysses_dtensor.forwards import convert_ancestor, convert_attention, convert_beside, convert_block
from ulysses_dtensor.layout import Layout, LayoutLike, as_layout
from ulysses_dtensor.leaving import leave_after_gloo
from ulysses_dtensor.meshes import checked_mesh, plan_mesh
from ulysses_dtensor.models import plain, world_of
from ulysses_dtensor.region import Region, region_of
from ulysses_dtensor.strategy import Strategy

Outputs = Literal["replicate", "shard"]
Check = Literal["always", "first"]
Choice = Literal["ulysses", "auto"]


@dataclass(eq=False)  # not frozen: torch sets src_data_rank on every style
class UlyssesPlan(ParallelStyle):
    """Makes a whole model sequence-parallel: finds its attentions and blocks and converts them in place.

    The model is called as on one device, with whole inputs on every rank of a sequence group; between its blocks each
    rank holds its share of the tokens. Outputs, loss and gradients equal one device's, or an error is raised.

    Args:
        attention: attentions that detection cannot know, by name pattern (`"layers.*.attn"`): a `UlyssesAttention` for a
            module called with query, key and value, `"sdpa"` for one whose forward reaches
            `scaled_dot_product_attention` by ways that reading it does not show. None: every module whose forward
            calls it, or `flex_attention`, and every `nn.MultiheadAttention`.
        inputs: layouts of the blocks' arguments that the probe cannot decide, by name: `{"temb": "b c"}` for one that is
            used whole, `{"freqs": "(sp s) d"}` for one that is cut at its tokens.
        whole: name patterns of modules that every rank runs whole, with the attentions in them: `("model.visual",)` for a vision
            tower over small images beside a long text.
        outputs: `"replicate"` returns whole plain tensors, `"shard"` DTensors cut at their tokens.
        strategy: `"ulysses"` moves heads; `"auto"` picks, for each self-attention, between this and gathering keys and values
            for queries that stay, by the bytes sent.
        check: whether the ranks compare inputs and plan before every forward (`"always"`), or before the first alone.

    Raises:
        PlanError: an option is none of these.
        LayoutError: a layout in `inputs` breaks the notation.

    Communication: for every self-attention two all-to-alls forward and two backward; one small all-reduce a forward
    (`check`); one all-gather where a tensor leaves as a whole one; one all-reduce of the gradients at the end of a backward
    when neither FSDP nor DDP reduces them.
    """

    attention: Mapping[str, UlyssesAttention | Literal["sdpa"]] | None = None
    inputs: Mapping[str, LayoutLike] | None = None
    whole: Sequence[str] = ()
    outputs: Outputs = "replicate"
    check: Check = "always"
    strategy: Choice = "ulysses"
    input_layouts: dict[str, Layout] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.outputs not in ("replicate", "shard"):
            raise PlanError(f"UlyssesPlan: outputs={self.outputs!r} is neither 'replicate' nor 'shard'.")
        if self.check not in ("always", "first"):
            raise PlanError(f"UlyssesPlan: check={self.check!r} is neither 'always' nor 'first'.")
        if self.strategy not in ("ulysses", "auto"):
            raise PlanError(f"UlyssesPlan: strategy={self.strategy!r} is neither 'ulysses' nor 'auto'.")
        if isinstance(self.whole, str):
            raise PlanError(f"UlyssesPlan: whole={self.whole!r} is a text, not a sequence of names.")
        for pattern, style in (self.attention or {}).items():
            if style != "sdpa" and not isinstance(style, UlyssesAttention):
                raise PlanError(
                    f"UlyssesPlan: attention[{pattern!r}]={style!r} is neither a UlyssesAttention nor 'sdpa'."
                )
        self.input_layouts.update({name: as_layout(layout) for name, layout in (self.inputs or {}).items()})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, axes = plan_mesh(device_mesh, "UlyssesPlan")
        found, problems = self.find(module, axes)
        if problems:
            raise PlanError(f"UlyssesPlan on {type(module).__name__}:\n  " + "\n  ".join(problems))
        leave_after_gloo(mesh)
        world = world_of(module)
        show_flex(module)
        world.show_attention(module)
        region = Region(
            mesh,
            outputs=self.outputs,
            check=self.check,
            inputs=self.input_layouts,
            axes=axes,
            strategy=self.strategy_on(axes),
            signature=f"{self!r} on {type(module).__name__}, blocks {', '.join(found.blocks)}",
            who=f"UlyssesPlan on {type(module).__name__}",
            world=world,
            parts={name: part for name in found.blocks if (part := found.part_of(name))},
        )
        for name, style in self.declared(module).items():
            if isinstance(style, UlyssesAttention):
                declare(module.get_submodule(name), style, mesh, axes=tuple(axes), alone=False)
        converted: set[int] = set()
        for name, held in found.blocks.items():
            block = module.get_submodule(name)
            if id(block) not in converted:
                converted.add(id(block))
                convert_block(block, region, name, tuple(found.attentions[inner] for inner in held))
        for name, attention in found.attentions.items():
            if id(attention) not in converted:
                converted.add(id(attention))
                convert_attention(attention, region, name)
        beside = partial(convert_beside, whole=found.whole)
        for names, convert in ((found.beside, beside), (found.ancestors, convert_ancestor)):
            for name in names:
                other = module.get_submodule(name)
                if id(other) not in converted:
                    converted.add(id(other))
                    convert(other, region, name or "the model")
        return module

    def strategy_on(self, axes: Mapping[str, int]) -> Strategy:
        """Returns how attentions are shared out on mesh dimensions of these sizes: of two, the first has rows of queries."""
        return Strategy(next(iter(axes.values())) if len(axes) > 1 else 1, self.strategy == "auto")

    def find(self, model: nn.Module, mesh: Any, *, converted: bool = False) -> tuple[plain.Found, list[str]]:
        """Returns what this plan converts in `model`, and everything that is wrong with it, a line each.

        `converted` allows for a model that is converted already, to explain it.
        """
        problems: list[str] = []
        if isinstance(model, DistributedDataParallel):
            problems.append("the model is wrapped in DistributedDataParallel. Convert the module, then wrap it.")
        styles = self.declared(model)
        for pattern in self.attention or {}:
            if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in model.named_modules()):
                problems.append(f"attention pattern {pattern!r} matches no module.")
        world = world_of(model)
        left_out = self._left_out(model, problems)
        found = plain.find(model, {name: model.get_submodule(name) for name in styles}, world, left_out)
        parts = [name for name in left_out if any(f"{name}.".startswith(f"{block}.") for block in found.blocks)]
        if parts:
            problems.append(
                f"whole names {parts[0]}, which lies in a stack of blocks that are converted. Name the stack."
            )
        if not found.attentions and not problems and left_out:
            problems.append(f"whole={self.whole!r} leaves no attention to convert.")
        elif not found.attentions and not problems:
            problems.append(world.nothing_found(model))
        if "" in found.blocks:
            problems.append("the model is itself an attention. Convert the model that holds it.")
        for name, module in model.named_modules():
            if not converted and (region_of(module) is not None or is_declared(module)):
                problems.append(f"{name or 'the model'} is converted already. Convert a model once.")
                break
        problems += world.problems(model, found.blocks)
        problems += self._input_problems(model, mesh, found)
        return found, problems

    def declared(self, model: nn.Module) -> dict[str, Any]:
        """Returns what `attention` says of the modules of `model`, by name."""
        styles = {}
        for pattern, style in (self.attention or {}).items():
            styles.update(
                {name: style for name, _ in model.named_modules() if name and fnmatch.fnmatchcase(name, pattern)}
            )
        return styles

    def _left_out(self, model: nn.Module, problems: list[str]) -> list[str]:
        """Returns the names of the modules that `whole` names."""
        named = [name for name, _ in model.named_modules() if name]
        matches = {pattern: fnmatch.filter(named, pattern) for pattern in self.whole}
        problems += [f"whole={pattern!r} matches no module." for pattern, found in matches.items() if not found]
        return [name for found in matches.values() for name in found]

    def _input_problems(self, model: nn.Module, mesh: Any, found: plain.Found) -> list[str]:
        problems = []
        takers = [type(model.get_submodule(name)).forward for name in found.blocks] + [type(model).forward]
        parameters = [inspect.signature(forward).parameters for forward in takers]
        known = {name for names in parameters for name in names} - {"self"}
        open_ended = any(p.kind is p.VAR_KEYWORD for names in parameters for p in names.values())
        for name, layout in self.input_layouts.items():
            if found.blocks and name not in known and not open_ended:
                problems.append(
                    f"inputs[{name!r}]: neither a block nor the model has such an argument, they have {', '.join(sorted(known))}."
                )
            try:
                layout.dims_of_mesh_axes(mesh, None if "..." in layout.names else len(layout.axes))
            except LayoutError as error:
                problems.append(f"inputs[{name!r}]: {error}")
        return problems


def parallelize_module(
    module: nn.Module, mesh: DeviceMesh, plan: ParallelStyle | dict[str, ParallelStyle] | None = None
) -> nn.Module:
    """Converts `module` in place and returns it: torch's own `parallelize_module`, with everything checked first.

    Args:
        module: the model, before or after FSDP2 wraps it, before DDP does.
        mesh: one-dimensional with a name, for example `mesh["sp"]` of `init_device_mesh("cuda", (dp, sp), ...)`. A
            `UlyssesPlan` also takes two dimensions, `mesh["cp", "sp"]`: the ranks along `sp` share the heads, those along `cp`
            the queries, for more ranks than heads.
        plan: a `UlyssesPlan` (the default), or any torch `ParallelStyle`, or a dictionary of them by module name.

    Raises:
        PlanError: nothing matches, something is converted already, or the plan does not fit; nothing is changed then.

    Communication: none.

    Example:
        model = parallelize_module(model, mesh["sp"], UlyssesPlan())
        for block in model.layers:
            fully_shard(block)  # over all ranks, dp x sp
        fully_shard(model)
    """
    plan = UlyssesPlan() if plan is None else plan
    checked_mesh(mesh, "parallelize_module")
    if isinstance(plan, dict):
        for pattern in plan:
            if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in module.named_modules()):
                raise PlanError(f"parallelize_module: {pattern!r} matches no module of {type(module).__name__}.")
    return torch_parallelize_module(module, mesh, plan)
