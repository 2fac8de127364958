"""One family on one device and on simulated ranks: outputs, loss and every gradient compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.plan import UlyssesPlan, parallelize_module
from ulysses_dtensor.sweep.tiny import DEFAULT, VOCABULARY, Sizes, model_of
from ulysses_dtensor.testing import run_on_mesh

LENGTH = 13
RANKS = (2, 4)
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Of gradients, relative to the largest of each parameter. Transformers computes losses, and much of a layer, in float32."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one family; `kind` is right, refused, wrong, failed (an error that is not ours) or unbuilt."""

    family: str
    kind: str
    detail: str
    implementation: str = ""
    dtype: str = ""
    error: float = 0.0


def judge(family: str, sizes: Sizes = DEFAULT, length: int = LENGTH, ranks: Sequence[int] = RANKS) -> Result:
    """Returns what becomes of a family: with SDPA where it has that, in float64 where it takes that."""
    trouble = ""
    for implementation in ("sdpa", "eager"):
        for dtype in (torch.float64, torch.float32):
            try:
                model = model_of(family, implementation, dtype, sizes)
            except Exception as error:
                trouble = _said(error)
                continue
            kind, detail, largest = compare(model, dtype, ranks, length, sizes.seed)
            return Result(family, kind, detail, implementation, str(dtype).removeprefix("torch."), largest)
    return Result(family, "unbuilt", trouble)


def compare(
    model: nn.Module, dtype: torch.dtype, ranks: Sequence[int] = RANKS, length: int = LENGTH, seed: int = 0
) -> tuple[str, str, float]:
    """Returns how a model fares: kind, detail, and the largest error of a gradient."""
    largest, notes, passed = 0.0, [], 0
    for name, inputs in inputs_of(length, seed):
        try:
            expected = _run(copy.deepcopy(model), inputs)
        except Exception as error:
            notes.append(f"{name}: not on one device ({_said(error)[:60]})")
            continue
        if not expected[0].isfinite():  # a token with nothing to look at, under eager attention in float64
            notes.append(f"{name}: no number on one device")
            continue
        for count in ranks:
            try:
                found = run_on_mesh({"sp": count}, _run_converted, model, inputs)
            except Exception as error:
                cause = _cause(error)
                kind = "refused" if isinstance(cause, PlanError) or "PlanError" in str(error) else "failed"
                if not passed or kind == "failed":
                    return kind, f"{name}, {count} ranks: {_said(cause)}", largest
                notes.append(f"{name}: refused ({_said(cause)[:80]})")
                break
            for run in found:
                worst, where = _worst(run, expected)
                largest = max(largest, worst)
                if not worst <= TOLERANCE[dtype]:
                    return "wrong", f"{name}, {count} ranks: {where} off by {worst:.1e}", worst
            passed += 1
    if not passed:
        return "failed", "; ".join(notes), largest
    return "right", "; ".join(notes), largest


def inputs_of(length: int = LENGTH, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields calls: plain, padded on the left, padded on the right, packed documents with labels in the second only."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    yield "plain", {"input_ids": ids, "labels": ids}
    at, third = torch.arange(length), length // 3
    for side, kept in (
        ("left", at >= torch.tensor([[0], [third]])),
        ("right", at < torch.tensor([[length], [length - third]])),
    ):
        labels = ids.masked_fill(~kept, -100)
        yield f"padded {side}", {"input_ids": ids, "attention_mask": kept.long(), "labels": labels}
    first = length // 2 - 1
    positions = torch.cat((torch.arange(first), torch.arange(length - first)))[None]
    labels = ids[:1].masked_fill(at < first, -100)  # some rank has no token that counts
    # With a cache, which is on by default, the library does not look for documents in the positions.
    yield "packed", {"input_ids": ids[:1], "position_ids": positions, "labels": labels, "use_cache": False}


def _run(model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    out = model(**inputs)
    out.loss.backward()
    logits = out.logits.detach()
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return out.loss.detach(), logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _run_converted(mesh: DeviceMesh, model: nn.Module, inputs: dict[str, Any]) -> Any:
    return _run(parallelize_module(copy.deepcopy(model), mesh, UlyssesPlan()), inputs)


def _worst(found: Any, expected: Any) -> tuple[float, str]:
    """Returns the largest error, relative to the largest of each value, and whose it is."""
    loss, logits, gradients = expected
    errors = {"the loss": _error(found[0], loss), "the logits": _error(found[1], logits)}
    for name, value in gradients.items():
        errors[f"the gradient of {name}"] = _error(found[2][name], value) if name in found[2] else float("inf")
    where = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors[where], where


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-6)
    return float((found - expected).abs().max()) / scale if expected.numel() else 0.0


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
