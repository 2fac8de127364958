"""What a model's own code may do with the region's tensors between and after its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ulysses_dtensor.boundary import dim_of, enter, holds_dtensor, is_shard_of, leave, local_of, shard
from ulysses_dtensor.deferred import Deferred, defer
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.randomness import refuse_draw
from ulysses_dtensor.trees import tree_map

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Facts of the global tensor: answered by the DTensor itself.
_FACTS = frozenset(
    "shape dtype device requires_grad ndim layout is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "size dim numel nelement element_size itemsize nbytes stride is_floating_point is_complex get_device names __len__ "
    "__repr__ __hash__ grad retain_grad retains_grad register_hook output_nr _version _backward_hooks".split()
)
# Element by element: done on each rank's own tokens.
_ELEMENTWISE = frozenset(
    "add sub mul div true_divide neg __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ "
    "float double half bfloat16 to type type_as clone contiguous detach relu gelu silu tanh sigmoid exp square abs".split()
)
_IN_PLACE = frozenset("__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __set__ data".split())
_IN_PLACE_MESSAGE = (
    "UlyssesPlan: {name} changes a hidden state in place between the blocks, where it is held in shards. "
    "Write it out of place."
)


class Tail(TorchFunctionMode):
    """Open while a converted model's forward runs; blocks and wrapped modules see plain tensors and pass it by.

    A function of the model's own code that gets a tensor of the region is done on each rank's tokens where it works
    element by element; any other one gets the whole tensor, gathered, as on one device. In place it is refused.
    """

    def __init__(self, mesh: DeviceMesh, on_backward: Callable[[], None], *, seeded_alike: bool = True) -> None:
        super().__init__()
        self.mesh, self.on_backward, self.seeded_alike = mesh, on_backward, seeded_alike
        self._wholes: dict[tuple[int, bool], tuple[DTensor, torch.Tensor, int]] = {}

    def whole(self, x: DTensor) -> torch.Tensor:
        """Returns the whole tensor, gathered once a forward (once more with gradients, if first without)."""
        key = (id(x), torch.is_grad_enabled())
        if key not in self._wholes:
            gathered = leave(x, self.on_backward)
            self._wholes[key] = (x, gathered, _version(gathered))
        return self._wholes[key][1]

    def check(self) -> None:
        """Refuses what wrote into a view of a hidden state, or into the state itself: the shards have not seen it.

        Raises:
            PlanError: a gathered tensor, or a view of it, was changed in place.
        """
        if any(_version(gathered) != version for _, gathered, version in self._wholes.values()):
            raise PlanError(_IN_PLACE_MESSAGE.format(name="the model's own code"))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.seeded_alike:
            refuse_draw(func, kwargs)
        if not holds_dtensor((args, list(kwargs.values())), (DTensor, Deferred)):
            return func(*args, **kwargs)
        name = _name(func)
        held = [x for x in _tensors((args, kwargs)) if is_shard_of(x, self.mesh)]
        deferred = [x for x in _tensors((args, kwargs)) if isinstance(x, Deferred)]
        if (held or deferred) and name == "register_hook" and not _is_torchs(args[1:], kwargs):
            raise PlanError(
                "UlyssesPlan: register_hook on a hidden state between the blocks, where it is held in shards: the hook would "
                "see a shard's gradient. Hook the model's inputs or outputs."
            )
        asks_for_type = name == "type" and len(args) == 1 and not kwargs
        if not (held or deferred) or name in _FACTS or asks_for_type or (held and _is_identity(name, args)):
            return func(*args, **kwargs)
        if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or kwargs.get("out") is not None:
            raise PlanError(_IN_PLACE_MESSAGE.format(name=name))
        if name in _ELEMENTWISE and not deferred and len({(tuple(x.shape), x.placements) for x in held}) == 1:
            result = self.elementwise(func, held[0], args, kwargs)
            if result is not None:
                return result
        result = defer(func, name, args, kwargs, elementwise=self.elementwise, on_backward=self.on_backward)
        if result is not None:
            return result
        whole = {id(x): self.whole(x) for x in held} | {id(x): x.whole(self.whole) for x in deferred}
        args, kwargs = tree_map(lambda x: whole.get(id(x), x), (args, kwargs))
        return func(*args, **kwargs)

    def elementwise(self, func: Any, held: DTensor, args: Any, kwargs: Any) -> DTensor | None:
        """Returns `func` of each rank's tokens as shards; None where a plain operand does not broadcast to them."""
        dim, shape = dim_of(held), tuple(held.shape)

        def local(x: Any) -> Any:
            if isinstance(x, DTensor):
                return local_of(x)
            if isinstance(x, torch.Tensor) and x.ndim >= len(shape) - dim:
                at = x.ndim - (len(shape) - dim)
                return enter(x, self.mesh, at if x.shape[at] == shape[dim] else None, shape[dim])
            return enter(x, self.mesh, None, shape[dim]) if isinstance(x, torch.Tensor) else x

        plain = [x for x in _tensors((args, kwargs)) if not isinstance(x, DTensor)]
        if any(torch.broadcast_shapes(shape, x.shape) != shape for x in plain if _broadcasts(shape, x)) or not all(
            _broadcasts(shape, x) for x in plain
        ):
            return None
        args, kwargs = tree_map(local, (args, kwargs))
        return shard(func(*args, **kwargs), self.mesh, dim, shape[dim], self.on_backward)


def _is_torchs(args: Any, kwargs: Any) -> bool:
    """Whether the hook to register is one of torch's own, as FSDP2 registers to know that a backward begins."""
    hook = next(iter((*args, *kwargs.values())), None)
    return (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith("torch.")


def _is_identity(name: str, args: Any) -> bool:
    """Whether this is `x.view_as(x)`, by which autograd passes a custom function's input on: module hooks, FSDP."""
    return name == "view_as" and len(args) == 2 and args[0] is args[1]


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _broadcasts(shape: tuple[int, ...], x: torch.Tensor) -> bool:
    sizes = tuple(x.shape)
    return len(sizes) <= len(shape) and all(a in (1, b) for a, b in zip(sizes[::-1], shape[::-1], strict=False))


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, values)
    return found
