"""Losses over sequence shards that weigh every token of the group alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from ulysses_dtensor.collectives import all_reduce_sum, group_of
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.layout import chunk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def next_token_labels(labels: torch.Tensor, *, ignore_index: int = -100) -> torch.Tensor:
    """Returns labels (B, S) shifted by one on the whole sequence, so that position `i` holds the token after it.

    Args:
        labels: global (B, S), as tokens stand.
        ignore_index: what the last position, which has no next token, gets.
    """
    return F.pad(labels[:, 1:], (0, 1), value=ignore_index)


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Returns the mean cross entropy over the valid tokens, or their sum, the same number on every rank of the group.

    Args:
        logits: global (B, S, V), a DTensor cut at its tokens as `UlyssesPlan(outputs="shard")` returns it; a plain whole
            tensor gives what `torch.nn.functional.cross_entropy` gives.
        labels: global (B, S), plain, equal on the ranks of a sequence group; position `i` is the target of logits `i`
            (see `next_token_labels`).
        ignore_index: label of tokens that do not count.
        reduction: `"mean"`, or `"sum"` for a count of one's own to divide by (valid tokens of all micro-batches).
        mesh: the mesh of all dp x sp ranks, to weigh tokens alike over dp too: the loss is then the mean over every
            token of all replicas, and gradients are right under a reducer that averages over that mesh. None: over the
            sequence group, and replicas average as data parallelism does.

    Raises:
        PlanError: logits are not cut at their tokens, shapes do not fit, or the reduction is neither.

    Communication: one all-reduce of one or two numbers forward, none backward.
    """
    if reduction not in ("mean", "sum"):
        raise PlanError(f"cross_entropy: reduction={reduction!r} is neither 'mean' nor 'sum'.")
    if labels.shape != logits.shape[:-1]:
        raise PlanError(f"cross_entropy: labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}.")
    group_mesh = None
    count = (labels != ignore_index).sum()
    if isinstance(logits, DTensor):
        group_mesh, placement = logits.device_mesh, logits.placements[0]
        if group_mesh.ndim != 1 or type(placement) is not Shard or placement.dim not in range(labels.ndim):
            raise PlanError(
                f"cross_entropy: logits are placed {logits.placements}; they must be cut at their tokens over one mesh "
                "dimension. Redistribute them."
            )
        start, stop = chunk(0, labels.shape[placement.dim], group_mesh.size(), group_mesh.get_local_rank())
        labels = labels.narrow(placement.dim, start, stop - start)
        logits = logits.to_local()
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=ignore_index, reduction="sum"
    )
    if mesh is None:
        total = total if group_mesh is None else _Summed.apply(total, group_mesh.get_group(), 1)
        return total if reduction == "sum" else total / count
    # Where a sequence ran whole on every rank, total and count are both counted P times.
    group = group_of(mesh, mesh.mesh_dim_names or ())
    count = (labels != ignore_index).sum()
    all_reduce_sum(count, group)
    ranks = 1 if group_mesh is None else group_mesh.size()
    total = _Summed.apply(total, group, mesh.size() // ranks)
    return total if reduction == "sum" else total / count


class _Summed(torch.autograd.Function):
    """The sum over a group, as a number that every rank holds; its gradient is each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, scale: int) -> torch.Tensor:
        ctx.scale = scale
        total = x.clone()
        all_reduce_sum(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override] - torch types it *Any
        return gradient * ctx.scale, None, None
