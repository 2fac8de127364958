"""Do the ranks of a sequence group agree on what they are about to do; an error of one is raised on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ulysses_dtensor.collectives import all_gather, all_reduce_max
from ulysses_dtensor.contents import MASK, content_hash, held_hash, holds_functions, text_hash
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.leftovers import tensors_in
from ulysses_dtensor.trees import keystr, tree_flatten_with_path

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_FACT_SLOTS = 6  # a problem, four facts, the inputs' structure
_INPUT_SLOTS = 58
_MESSAGE_BYTES = 4096


def agree(
    mesh: DeviceMesh,
    *,
    problem: Exception | None,
    args: Any,
    kwargs: Any,
    facts: Sequence[tuple[str, object]],
    who: str,
) -> bool:
    """Returns, when the ranks of a group pass equal inputs and facts and none has a problem, whether they are seeded alike.

    Args:
        mesh: one-dimensional; its ranks compare.
        problem: what this rank found wrong; it is raised on all ranks.
        args: positional inputs of the model; tensors are compared by content.
        kwargs: keyword inputs.
        facts: (name, value) pairs that must be equal, at most four.
        who: name for errors.

    Raises:
        PlanError: on every rank alike, naming the inputs or facts that differ and the ranks.

    Communication: one all-reduce of 1 KiB; two small all-gathers more when something differs.
    """
    names, hashes = _input_hashes(args, kwargs)
    facts = [*facts, ("the inputs' structure", "; ".join(names))]
    slots = [int(problem is not None), *(text_hash(str(value)) for _, value in facts)]
    labels = ["", *(name for name, _ in facts)]
    assert len(slots) <= _FACT_SLOTS
    shown = hashes[: _INPUT_SLOTS - 1]
    rest = hashes[_INPUT_SLOTS - 1 :]
    device = torch.device(mesh.device_type)
    values = torch.zeros(_FACT_SLOTS + _INPUT_SLOTS, dtype=torch.int64, device=device)
    values[: len(slots)] = torch.tensor(slots, device=device)
    for at, value in enumerate(shown):
        values[_FACT_SLOTS + at] = value.to(device)
    for at, value in enumerate(rest):
        values[-1] = (values[-1] * 31 + value.to(device) + at) & MASK
    values = torch.cat((values, _random_state_hash(device).view(1)))
    extremes = torch.cat((values, -values))
    all_reduce_max(extremes, mesh.get_group())
    largest, smallest = extremes.view(2, -1).tolist()
    equal = [a == -b for a, b in zip(largest, smallest, strict=True)]
    if largest[0] == 0 and all(equal[:-1]):
        return equal[-1]
    rows = all_gather(values[:-1], mesh.get_group()).tolist()
    if largest[0]:
        raise PlanError(_gathered_problems(mesh, problem)) from problem
    labels += [""] * (_FACT_SLOTS - len(labels))
    labels += [f"input {name}" for name in names[: _INPUT_SLOTS - 1]]
    raise PlanError(_difference(rows, labels, who, mesh))


def _difference(rows: list[list[int]], labels: list[str], who: str, mesh: DeviceMesh) -> str:
    lines = []
    structure = labels.index("the inputs' structure")
    structure_differs = any(row[structure] != rows[0][structure] for row in rows)
    for at in range(len(rows[0])):
        column = [row[at] for row in rows]
        if len(set(column)) == 1 or (structure_differs and at >= _FACT_SLOTS):
            continue
        label = labels[at] if at < len(labels) else "inputs past the first ones"
        alike: dict[int, list[int]] = {}
        for rank, value in enumerate(column):
            alike.setdefault(value, []).append(rank)
        lines.append(f"{label}: ranks {' / '.join(str(ranks) for ranks in alike.values())} of the group differ")
    return (
        f"{who}: the ranks of a sequence group must make the same call with the same whole inputs and the same model.\n  "
        + "\n  ".join(lines)
        + f"\n  Group: {mesh}. Give all of them the same batch (sampler, noise, time step) and the same weights (seed, "
        "checkpoint), as on one device."
    )


def _gathered_problems(mesh: DeviceMesh, problem: Exception | None) -> str:
    text = str(problem or "").encode()[:_MESSAGE_BYTES]
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    rows = all_gather(message.to(mesh.device_type), mesh.get_group()).cpu()
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
    said: dict[str, list[int]] = {}
    for rank, found in enumerate(texts):
        if found:
            said.setdefault(found, []).append(rank)
    if len(said) == 1 and len(next(iter(said.values()))) == len(texts):
        return next(iter(said))
    return "\n".join(f"{found}\n  (found on ranks {ranks} of the sequence group)" for found, ranks in said.items())


def _input_hashes(args: Any, kwargs: Any) -> tuple[list[str], list[torch.Tensor]]:
    names, hashes = [], []
    for path, x in tree_flatten_with_path((args, dict(sorted(kwargs.items()))))[0]:
        name = keystr(path[1:]).strip("[]'\"") or "?"
        if isinstance(x, torch.Tensor):
            names.append(f"{name} {tuple(x.shape)} {x.dtype}")
            hashes.append(torch.zeros((), dtype=torch.int64) if isinstance(x, DTensor) else content_hash(x))
        else:
            value = repr(x) if x is None or isinstance(x, (bool, int, float, str)) else type(x).__name__
            names.append(f"{name} = {value}")
            held = [] if x is None or isinstance(x, (bool, int, float, str)) else list(tensors_in(x))
            state = held_hash(x) if holds_functions(x) else state_hash([y for y in held if not isinstance(y, DTensor)])
            hashes.append(torch.tensor(state))
    return names, hashes


def roll(history: str, event: str) -> str:
    """Returns a short digest of a history of events and one more event."""
    return f"{text_hash(history + event):x}"


def state_hash(tensors: Sequence[torch.Tensor]) -> int:
    """Returns one hash of the contents of many tensors, in order."""
    hashes = [content_hash(x).cpu() for x in tensors]
    return int(content_hash(torch.stack(hashes))) if hashes else 0


def _random_state_hash(device: torch.device) -> torch.Tensor:
    state = torch.get_rng_state()
    if device.type != "cpu":
        state = torch.cat((state, torch.get_device_module(device).get_rng_state().cpu()))
    return content_hash(state).to(device)
