"""A Transformers model under FSDP2 on real text over (dp, sp); its first steps are compared with one device's.

torchrun --nproc-per-node 4 examples/transformers_fsdp2.py --sp 2 [--model FOLDER --text FOLDER --tokens 4096]

The model is a tiny one of random weights that reads bytes, unless a local folder is named. dp is what remains of the ranks.
Exits non-zero when a loss or a gradient norm is not that of one device on the whole batch. Needs the extras demo, transformers.
"""

import copy
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ulysses_dtensor import UlyssesPlan, parallelize_module
from ulysses_dtensor.demo.corpus import draw_batches, read_corpus

TOLERANCE = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 3e-2}  # the library computes its losses in float32


def tiny_model() -> Any:
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def tokens_of(text: torch.Tensor, folder: Path | None) -> torch.Tensor:
    """Returns the text's tokens (N,): its bytes, or what the folder's tokenizer makes of it."""
    if folder is None:
        return text
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer(bytes(text.tolist()).decode(errors="replace"), return_tensors="pt").input_ids[0]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor]) -> tuple[float, float]:
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def main(
    model: Annotated[Path | None, typer.Option(help="A folder with a model and its tokenizer.")] = None,
    text: Annotated[Path | None, typer.Option(help="A file or folder; the standard library if none.")] = None,
    sp: Annotated[int, typer.Option(min=1, help="Ranks that share a sequence.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Of each sequence; any number.")] = 1001,
    steps: int = 4,
    compared: Annotated[int, typer.Option(help="Steps that one device takes too.")] = 2,
    dtype: str = "float64",
) -> None:
    """Trains, one sequence for each replica and step."""
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size() // sp, sp), mesh_dim_names=("dp", "sp"))
    source: Any = tiny_model() if model is None else transformers.AutoModelForCausalLM.from_pretrained(model)
    one_device = source.to(device, getattr(torch, dtype))
    parallel = copy.deepcopy(one_device)

    parallelize_module(parallel, mesh["sp"], UlyssesPlan())
    parallel.activation_checkpointing_enable()
    for layer in parallel.get_decoder().layers:
        fully_shard(layer)
    fully_shard(parallel)

    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(one_device.parameters(), lr=1e-3)
    corpus = tokens_of(read_corpus(text, at_least=16 * tokens), model)
    batches = draw_batches(corpus, seq_len=tokens - 1, steps=steps, replicas=mesh.size(0), seed=0).to(device)
    replica = mesh.get_local_rank("dp")
    for number, batch in enumerate(batches):  # (dp, 1, S), whole on every rank
        loss, norm = step(parallel, optimizer, [parallel(input_ids=batch[replica], labels=batch[replica]).loss])
        mean = torch.tensor(
            loss, device=device, dtype=torch.float64
        )  # of this replica's sequence, the same on its sp ranks
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        found = (mean.item() / mesh.size(0), norm)
        if dist.get_rank() == 0:
            print(f"step {number}: loss {found[0]:.6f}, gradient norm {found[1]:.6f}")
        if number < compared:
            each = [one_device(input_ids=ids, labels=ids).loss for ids in batch]
            torch.testing.assert_close(found, step(one_device, reference, each), rtol=TOLERANCE[dtype], atol=0.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
