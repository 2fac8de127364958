"""A model in torchtitan's style: its inner attention is a module of its own, called with query, key and value.

torchrun --nproc-per-node 2 examples/inner_attention.py, with any number of ranks; python alone starts two.
Exits non-zero when an output or a gradient is not that of one device.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor.parallel import parallelize_module

from ulysses_dtensor import UlyssesAttention, UlyssesPlan, count_collectives, explain

WIDTH, HEADS, KV_HEADS, HEAD_SIZE, LAYERS, SEQUENCE = 48, 6, 3, 8, 2, 37


class InnerAttention(nn.Module):
    """Could be any kernel; only the layout of what it takes and returns is declared."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # (B, H, S, D)
        weights = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
        future = torch.ones(weights.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = weights.masked_fill(future, float("-inf")).softmax(-1)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_SIZE, bias=False)
        self.inner_attention = InnerAttention()
        self.output = nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 96), nn.SiLU(), nn.Linear(96, WIDTH))

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        q, (k, v) = self.q(self.norm(x)), self.kv(self.norm(x)).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for y in (q, k, v))
        rotary = rotary[: x.shape[1]]  # of the whole table, as if this were the whole sequence
        q, k = (torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * rotary).flatten(3) for y in (q, k))
        x = x + self.output(self.inner_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    rotary: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))
        angles = torch.outer(torch.arange(64), 100.0 ** -torch.linspace(0, 1, HEAD_SIZE // 2))
        self.register_buffer("rotary", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers.values():
            x = layer(x, self.rotary)
        return self.head(x)


def main() -> None:
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("sp",))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    one_device = Model().to(device)
    ids = torch.randint(256, (2, SEQUENCE)).to(device)
    plan = UlyssesPlan(attention={"layers.*.inner_attention": UlyssesAttention("b h (sp s) d -> b (sp h) s d")})
    model = parallelize_module(copy.deepcopy(one_device), mesh, plan)
    with count_collectives() as count:
        found = results(model, model(ids), ids)
    assert count.kinds.count("all-to-all") == 4 * LAYERS, count.kinds
    expected = results(one_device, one_device(ids), ids)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if dist.get_rank() == 0:
        explain(model, mesh, plan)
        print(f"logits and {len(found) - 1} gradients equal one device's; two exchanges each way for an attention")
    dist.destroy_process_group()


def results(model: nn.Module, logits: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor | None]:
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {"logits": logits, **{name: p.grad for name, p in model.named_parameters()}}


if __name__ == "__main__":
    main() if "RANK" in os.environ else torchrun(["--standalone", "--nproc-per-node", "2", __file__])
