"""FSDP2 training on real text over (dp, sp): a source file of the standard library a sample, every token weighed alike.

torchrun --nproc-per-node 4 examples/train_fsdp2.py 2, where 2 is sp and dp is what remains; python alone starts two ranks.
Exits non-zero when a loss or a gradient norm of the first steps is not that of one device on the whole batch.
"""

import copy
import os
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor

from ulysses_dtensor import UlyssesPlan, parallelize_module
from ulysses_dtensor.loss import cross_entropy

WIDTH, HEADS, LAYERS, SEQUENCE, SAMPLES, STEPS, COMPARED, IGNORED = 64, 4, 2, 512, 4, 6, 3, -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.output(y)
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches() -> torch.Tensor:
    """Returns bytes (STEPS, SAMPLES, SEQUENCE + 1), the same on every rank; short files end in IGNORED."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda file: file.stat().st_size)
    texts = [file.read_bytes()[: SEQUENCE + 1] for file in files[: STEPS * SAMPLES]]
    rows = [F.pad(torch.tensor(list(text)), (0, SEQUENCE + 1 - len(text)), value=IGNORED) for text in texts]
    return torch.stack(rows).view(STEPS, SAMPLES, -1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> tuple[float, float]:
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def main() -> None:
    dist.init_process_group()
    device, sp = "cuda" if torch.cuda.is_available() else "cpu", int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mesh = init_device_mesh(device, (dist.get_world_size() // sp, sp), mesh_dim_names=("dp", "sp"))
    torch.manual_seed(0)
    one_device = Decoder().double().to(device)
    model = copy.deepcopy(one_device)
    parallelize_module(model, mesh["sp"], UlyssesPlan(outputs="shard"))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(one_device.parameters(), lr=1e-3)
    for number, whole in enumerate(batches().to(device)):
        ids, labels = whole[:, :-1].clamp(min=0), whole[:, 1:]
        own = slice(mesh.get_local_rank("dp"), None, mesh.size(0))  # this replica's samples, whole
        found = step(model, optimizer, cross_entropy(model(ids[own]), labels[own], ignore_index=IGNORED, mesh=mesh))
        if dist.get_rank() == 0:
            print(f"step {number}: loss {found[0]:.6f}, gradient norm {found[1]:.6f}")
        if number < COMPARED:
            expected = step(one_device, reference, F.cross_entropy(one_device(ids).mT, labels, ignore_index=IGNORED))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=0.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main() if "RANK" in os.environ else torchrun(["--standalone", "--nproc-per-node", "2", __file__])
