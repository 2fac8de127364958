"""Layouts on two real processes: cut the sequence, exchange for heads, come back, with gradients.

Run it: python examples/layouts.py. It exits non-zero when a value is wrong.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from ulysses_dtensor import Layout, Transition, count_collectives, distribute, redistribute

RANKS = 2
SEQUENCE, HEADS = Layout("b (sp s) h d"), Layout("b s (sp h) d")
SHAPE = (1, 9, 5, 4)  # 9 tokens and 5 heads on 2 ranks: nothing divides


def check(what: str, right: bool) -> None:
    if not right:
        raise SystemExit(f"wrong: {what}")
    if dist.get_rank() == 0:
        print(f"right: {what}")


def walk(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("sp",))

    # A layout is text that binds to a mesh: placements for DTensor, shapes for each rank.
    check("9 tokens are held as 5 and 4", SEQUENCE.local_shape(SHAPE, mesh) == (1, 5 - rank, 5, 4))
    check("5 heads are held as 3 and 2", HEADS.local_shape(SHAPE, mesh) == (1, 9, 3 - rank, 4))

    # A transition between two of them says what will be sent before anything is.
    move = Transition(SEQUENCE, HEADS, SHAPE, mesh)
    if rank == 0:
        print(move)

    # Every rank has the same whole tensors here, and keeps its tokens.
    torch.manual_seed(0)
    wholes = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    q, k, v = (distribute(whole, mesh, SEQUENCE) for whole in wholes)
    check("each rank holds its tokens", torch.equal(q.to_local(), wholes[0].chunk(RANKS, dim=1)[rank]))

    # One all-to-all takes all three to "all tokens, my heads"; a head's attention needs nothing else.
    with count_collectives() as count:
        q, k, v = redistribute((q, k, v), HEADS)
    check("three tensors, one all-to-all", count.kinds == ["all-to-all"])
    check("the bytes are those of the transition", count.bytes_sent == 3 * move.bytes_sent((rank,)))

    # Attention on plain local tensors: what a rank computes is a part of what one device would.
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # each (B, S, H, D)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    local = attend(q.to_local(), k.to_local(), v.to_local())
    one_device = attend(*wholes)
    check("each rank computes its heads", torch.allclose(local, one_device.tensor_split([3], dim=2)[rank]))

    # The gradient takes the way back, and is whole on every rank, as the tensors were.
    local.square().sum().backward()
    for whole in wholes:
        (expected,) = torch.autograd.grad(one_device.square().sum(), whole, retain_graph=True)
        assert whole.grad is not None
        check("the gradient is that of one device", torch.allclose(whole.grad, expected, atol=1e-6))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        spawn(walk, args=(str(Path(directory) / "store"),), nprocs=RANKS)
