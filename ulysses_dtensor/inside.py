"""What the code of a block sees while it runs on this rank's tokens: attention over the whole sequence, dropout of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function

from ulysses_dtensor.attend import attend
from ulysses_dtensor.collectives import all_reduce_max
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import mode_is_open, seen_flex, sharded_flex
from ulysses_dtensor.heads import Heads, heads_of
from ulysses_dtensor.randomness import own_random_state, refuse_draw
from ulysses_dtensor.sdpa import sharded_sdpa

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DROPOUTS = frozenset({F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout})


class Inside(TorchFunctionMode):
    """Open while a block, or a module that keeps tokens apart, runs on its local tokens."""

    def __init__(self, group: ProcessGroup, seq_len: int, *, seeded_alike: bool = True) -> None:
        super().__init__()
        self.group, self.seq_len, self.seeded_alike = group, seq_len, seeded_alike

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return sharded_sdpa(*args, **kwargs, seq_len=self.seq_len, group=self.group)
        if func is seen_flex:
            return sharded_flex(*args, **kwargs, seq_len=self.seq_len, group=self.group)
        if func is declared_attention:
            del kwargs["mesh"]
            return attend(*args, **kwargs, seq_len=self.seq_len, group=self.group)
        if func is F.multi_head_attention_forward:
            raise PlanError(MULTIHEAD)
        if func in DROPOUTS and drops(func, args, kwargs):
            with own_random_state(args[0].device, self.group):
                return func(*args, **kwargs)
        if not self.seeded_alike:
            refuse_draw(func, kwargs)
        return func(*args, **kwargs)


MULTIHEAD = (
    "UlyssesPlan: the block calls nn.MultiheadAttention, which is not supported yet. "
    "Write the attention with F.scaled_dot_product_attention."
)


def declared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Heads], torch.Tensor],
    *,
    seq_dim: int,
    head_dim: int,
    mesh: DeviceMesh | None,
) -> torch.Tensor:
    """Hands an attention that was declared by layout to whichever mode its block runs in; runs it alone without one.

    Args:
        query: local.
        key: local.
        value: local.
        call: the attention itself.
        seq_dim: dim of the tokens.
        head_dim: dim of the heads.
        mesh: where plain tensors are shards of equal length when no block is running; None: they are whole then.

    Raises:
        PlanError: no block is running, and the ranks' tensors differ in length.
    """
    tensors, dims = (query, key, value), {"seq_dim": seq_dim, "head_dim": head_dim, "mesh": mesh}
    if mode_is_open():
        return handle_torch_function(declared_attention, tensors, *tensors, call, **dims)
    if mesh is None:
        return call(query, key, value, heads_of(query.shape[head_dim], key.shape[head_dim], 1, 0))
    local = query.shape[seq_dim]
    lengths = torch.tensor([local, -local], device=query.device)
    all_reduce_max(lengths, mesh.get_group())
    longest, shortest = lengths.tolist()
    if longest != -shortest:
        raise PlanError(
            f"UlyssesAttention: plain tensors of {-shortest} to {longest} tokens on the ranks of {mesh}. Plain tensors "
            "cannot say how an uneven sequence is cut; pass DTensors in the attention's layout."
        )
    del dims["mesh"]
    return attend(*tensors, call, **dims, seq_len=local * mesh.size(), group=mesh.get_group())


def drops(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this dropout call draws random numbers."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", func is F.dropout)
    return bool(p) and bool(training)
