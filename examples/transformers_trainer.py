"""`transformers.Trainer` under FSDP2 with sequence parallelism, on real text; its losses are compared with one rank's.

torchrun --nproc-per-node 4 examples/transformers_trainer.py 2, where 2 is sp and dp is what remains.
Exits non-zero when a logged loss or gradient norm is not that of the same Trainer without ranks. Needs the extras demo,
transformers, and accelerate.
"""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ulysses_dtensor import UlyssesPlan, parallelize_module
from ulysses_dtensor.demo.corpus import draw_batches, read_corpus

TOKENS, SAMPLES, STEPS, IGNORED, TOLERANCE = 301, 4, 3, -100, 1e-4


class SequenceParallelTrainer(transformers.Trainer):
    """Gives all ranks of a sequence group the same samples, whole: the plan cuts them.

    What Trainer counts over all ranks it counts `sp` times, tokens and losses alike, so that its means are right as they are.
    """

    def __init__(self, *args: Any, mesh: DeviceMesh | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replicas, self.replica = (mesh.size(0), mesh.get_local_rank("dp")) if mesh is not None else (1, 0)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.args.use_cpu:  # accelerate itself takes FSDP for DDP on CPUs; not needed on GPUs
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.accelerator.state.distributed_type, self.accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
            self.is_fsdp_enabled = True

    def get_train_dataloader(self) -> DataLoader:
        return self._loader(self.train_dataset, self.args.train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._loader(chosen, self.args.eval_batch_size, shuffle=False)

    def _loader(self, dataset: Any, batch_size: int, *, shuffle: bool) -> DataLoader:
        sampler = DistributedSampler(dataset, self.replicas, self.replica, shuffle=shuffle, seed=self.args.seed)
        return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=self.data_collator)


class Windows(Dataset):
    """Windows of text; some hide part of their labels, so that replicas have unequal numbers of tokens that count."""

    def __init__(self) -> None:
        corpus = read_corpus(None, at_least=16 * TOKENS)
        self.ids = draw_batches(corpus, seq_len=TOKENS - 1, steps=STEPS, replicas=SAMPLES, seed=0).flatten(0, 2)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        labels = self.ids[at].clone()
        labels[: 40 * (at % 4)] = IGNORED
        return {"input_ids": self.ids[at], "labels": labels}


def model_of() -> Any:
    sizes: Any = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def train(mesh: DeviceMesh | None) -> list[dict[str, float]]:
    """Trains on all ranks, or on one without any; returns losses and gradient norms step by step, and a last loss over all."""
    model, fsdp = model_of(), {}
    if mesh is not None:
        parallelize_module(model, mesh["sp"], UlyssesPlan())  # before Trainer wraps it
        layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        fsdp = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "activation_checkpointing": True, **layers}}
    batch = SAMPLES // (1 if mesh is None else mesh.size(0))
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            max_steps=STEPS,
            logging_steps=1,
            learning_rate=1e-3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            **fsdp,
        )
        trainer = SequenceParallelTrainer(model, args, train_dataset=Windows(), eval_dataset=Windows(), mesh=mesh)
        trainer.train()
        assert mesh is None or isinstance(trainer.model, FSDPModule)
        trainer.evaluate()
    names = ("loss", "grad_norm", "eval_loss")
    return [{name: float(entry[name]) for name in names if name in entry} for entry in trainer.state.log_history]


def train_without_ranks() -> list[dict[str, float]]:
    """Returns what `train` gives in a process of its own that knows of no ranks."""
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "ACCELERATE", "FSDP")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_ranks)}
    command = [sys.executable, __file__, "alone"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if result.returncode:
        sys.exit(result.stderr)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    if "alone" in sys.argv:
        print(json.dumps(train(None)))
        return
    dist.init_process_group()
    device, sp = "cuda" if torch.cuda.is_available() else "cpu", int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mesh = init_device_mesh(device, (dist.get_world_size() // sp, sp), mesh_dim_names=("dp", "sp"))
    found = train(mesh)
    if dist.get_rank() == 0:
        expected = train_without_ranks()
        for ours, alone in zip(found, expected, strict=True):
            print("; ".join(f"{name} {value:.6f}, alone {alone[name]:.6f}" for name, value in ours.items()))
            torch.testing.assert_close(ours, alone, rtol=TOLERANCE, atol=0.0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
