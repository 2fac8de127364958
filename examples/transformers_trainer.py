"""`transformers.Trainer` under FSDP2 with sequence parallelism, on real text; its losses are compared with one rank's.

torchrun --nproc-per-node 4 examples/transformers_trainer.py 2, where 2 is sp and dp is what remains.
Exits non-zero when a loss or gradient norm is not that of the same Trainer without ranks. Extras demo, transformers; accelerate.
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
from torch.utils.data import DataLoader, DistributedSampler

from ulysses_dtensor import UlyssesPlan, parallelize_module
from ulysses_dtensor.demo.corpus import draw_batches, read_corpus

TOKENS, SAMPLES, STEPS, IGNORED, TOLERANCE = 301, 4, 3, -100, 1e-4


class SequenceParallelTrainer(transformers.Trainer):
    """Gives all ranks of a sequence group the same samples, whole: the plan cuts them.

    What Trainer counts over all ranks it counts `sp` times, tokens and losses alike, so that its means are right as they are.
    """

    args: Any
    replicas, replica = 1, 0

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.args.use_cpu:  # accelerate itself takes FSDP for DDP on CPUs; not needed on GPUs
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.accelerator.state.distributed_type, self.accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
            self.is_fsdp_enabled = True

    def get_train_dataloader(self) -> DataLoader:
        dataset: Any = self.train_dataset
        sampler = DistributedSampler(dataset, self.replicas, self.replica, seed=self.args.seed)
        return DataLoader(dataset, self.args.train_batch_size, sampler=sampler, collate_fn=self.data_collator)


def read_samples() -> Any:
    """Returns a list of windows of text; some hide part of their labels: replicas have unequal numbers of tokens that count."""
    text = read_corpus(None, at_least=16 * TOKENS)
    windows = draw_batches(text, seq_len=TOKENS - 1, steps=STEPS, replicas=SAMPLES, seed=0).flatten(0, 2)
    shown = [torch.arange(TOKENS) >= 40 * (at % 4) for at in range(len(windows))]
    return [{"input_ids": ids, "labels": ids.where(show, IGNORED)} for ids, show in zip(windows, shown, strict=True)]


def train(mesh: DeviceMesh | None) -> list[dict[str, float]]:
    """Trains on all ranks, or on one without any; returns the loss and the gradient norm of each step."""
    sizes: Any = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
    model, replicas, fsdp = transformers.LlamaForCausalLM(config), 1, {}
    if mesh is not None:
        parallelize_module(model, mesh["sp"], UlyssesPlan())  # before Trainer wraps it
        layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        fsdp = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "activation_checkpointing": True, **layers}}
        replicas = mesh.size(0)
    options: Any = {"max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none", **fsdp}
    options |= {"per_device_train_batch_size": SAMPLES // replicas, "use_cpu": not torch.cuda.is_available()}
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(folder, save_strategy="no", disable_tqdm=True, **options)
        trainer = SequenceParallelTrainer(model, args, train_dataset=read_samples())
        trainer.replicas, trainer.replica = replicas, 0 if mesh is None else mesh.get_local_rank("dp")
        trainer.train()
        assert mesh is None or isinstance(trainer.model, FSDPModule)
    return [{name: float(row[name]) for name in ("loss", "grad_norm")} for row in trainer.state.log_history[:STEPS]]


def main() -> None:
    if "RANK" not in os.environ:
        print(json.dumps(train(None)))
        return
    dist.init_process_group()
    device, sp = "cuda" if torch.cuda.is_available() else "cpu", int(sys.argv[1]) if len(sys.argv) > 1 else 2
    found = train(init_device_mesh(device, (dist.get_world_size() // sp, sp), mesh_dim_names=("dp", "sp")))
    if dist.get_rank() == 0:  # the same in a process that knows of no ranks
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "ACCELERATE", "FSDP")
        alone = {key: value for key, value in os.environ.items() if not key.startswith(ranks)}
        output = subprocess.check_output([sys.executable, __file__], env=alone | {"CUDA_VISIBLE_DEVICES": "0"})
        for ours, one in zip(found, json.loads(output.splitlines()[-1]), strict=True):
            print("; ".join(f"{name} {ours[name]:.6f}, alone {one[name]:.6f}" for name in ours))
            torch.testing.assert_close(ours, one, rtol=TOLERANCE, atol=0.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
