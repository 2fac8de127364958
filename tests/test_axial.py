"""Any two axes: layers that work along one tensor axis at a time, cut along the other, equal one device.

What the layers share is only that each has an axis that must be whole and another along which all is independent:
space and time of a video, rows and columns of a pair representation, points and channels of a weather grid.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ulysses_dtensor import count_collectives, distribute, redistribute
from ulysses_dtensor.testing import local_by_torch_chunk, run_on_mesh

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Program = list[tuple[str, Layer]]
"""For each layer: the layout that it works in, and what it computes of a local tensor and its weight."""


def attend(dim: int) -> Layer:
    """Returns softmax attention with a residual along `dim`; the last dim is channels."""

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.movedim(dim, -2)
        q, k, v = (rows @ weight).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1) @ v
        return x + mixed.movedim(-2, dim)

    return layer


def spectrum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A filter over the whole grid of (time, latitude, longitude, channel), channel by channel."""
    waves = torch.fft.rfft2(x, dim=(1, 2))
    return x + torch.fft.irfft2(waves / (1 + waves.abs()), s=x.shape[1:3], dim=(1, 2)) * weight.sum()


def mix_channels(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A gated map of all channels, point by point."""
    return x + torch.softmax(x @ weight[:, : x.shape[-1]], dim=-1)


VIDEO: Program = [("b (sp t) x c", attend(2)), ("b t (sp x) c", attend(1)), ("b (sp t) x c", attend(2))]
PAIRS: Program = [
    ("(cp sp i) j c", attend(1)),
    ("i (cp sp j) c", attend(0)),
    ("(cp i) (sp j) c", lambda x, w: x * w.sum()),
]
PAIRS_2D: Program = [
    ("(cp b) (sp i) j c", attend(2)),
    ("(cp b) i (sp j) c", attend(1)),
    ("b (cp i) (sp j) c", mix_channels),
]
GRID: Program = [("t lat lon (sp c)", spectrum), ("t (sp lat) lon c", mix_channels), ("t lat lon (sp c)", spectrum)]


def run_layers(mesh: DeviceMesh, program: Program, x: torch.Tensor, weights: list[torch.Tensor]) -> list[str]:
    """Runs the program on the mesh and checks output, input gradient and weight gradients against one device."""
    whole, ours = x.clone().requires_grad_(), [weight.clone().requires_grad_() for weight in weights]
    y = whole
    for (_, layer), weight in zip(program, ours, strict=True):
        y = layer(y, weight)
    y.square().sum().backward()

    rank_weights = [weight.clone().requires_grad_() for weight in weights]
    start = x.clone().requires_grad_()
    held = distribute(start, mesh, program[0][0])
    with count_collectives() as count:
        for (layout, layer), weight in zip(program, rank_weights, strict=True):
            held = redistribute(held, layout)
            local = layer(held.to_local(), weight)
            held = DTensor.from_local(
                local, mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
            )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    expected = local_by_torch_chunk(y.detach(), program[-1][0], mesh, coordinate)
    torch.testing.assert_close(held.to_local().detach(), expected, rtol=1e-12, atol=1e-12)
    held.to_local().square().sum().backward()
    torch.testing.assert_close(start.grad, whole.grad, rtol=1e-11, atol=1e-11)
    for mine, one_device in zip(rank_weights, ours, strict=True):
        gradient = torch.zeros_like(mine) if mine.grad is None else mine.grad
        torch.distributed.all_reduce(gradient)
        torch.testing.assert_close(gradient, one_device.grad, rtol=1e-11, atol=1e-11)
        assert gradient.abs().max() > 0
    return count.kinds


@pytest.mark.parametrize(
    ("sizes", "program", "shape"),
    [
        pytest.param({"sp": 2}, VIDEO, (1, 4, 6, 3), id="video"),
        pytest.param({"sp": 4}, VIDEO, (2, 5, 9, 3), id="video, 5 frames of 9 patches on 4 ranks"),
        pytest.param({"sp": 4}, VIDEO, (1, 2, 3, 3), id="video, fewer frames and patches than ranks"),
        pytest.param({"cp": 2, "sp": 2}, PAIRS, (7, 7, 3), id="pair representation of 7 residues on 2 x 2 ranks"),
        pytest.param({"cp": 2, "sp": 3}, PAIRS, (5, 5, 3), id="pair representation of 5 residues on 2 x 3 ranks"),
        pytest.param({"cp": 2, "sp": 2}, PAIRS_2D, (3, 5, 4, 3), id="batch, rows, columns and channels on 2 x 2 ranks"),
        pytest.param({"sp": 3}, GRID, (2, 4, 6, 5), id="weather grid, 5 channels and 4 latitudes on 3 ranks"),
    ],
)
def test_layers_along_one_axis_at_a_time_equal_one_device(
    sizes: dict[str, int], program: Program, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    channels = shape[-1]
    weights = [torch.randn(channels, 3 * channels, generator=generator, dtype=torch.float64) for _ in program]
    kinds = run_on_mesh(sizes, run_layers, program, x, weights)
    assert all(set(kind) == {"all-to-all"} for kind in kinds)
    assert {len(kind) for kind in kinds} == {len(program) - 1}


def test_the_check_itself_fails_when_a_layer_sees_a_cut_axis() -> None:
    x = torch.randn(1, 4, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.randn(3, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run_on_mesh({"sp": 2}, run_layers, [("b (sp t) x c", attend(1))], x, [weight])
