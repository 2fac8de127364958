"""Attention and dropout replaced by functions of each token alone: what a module sees while it is probed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ulysses_dtensor.compare import close
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import FlexCall, seen_flex, stub_flex
from ulysses_dtensor.heads import Heads, heads_of
from ulysses_dtensor.inside import DROPOUTS, declared_attention, draws, drops
from ulysses_dtensor.multihead import multi_head_attention
from ulysses_dtensor.randomness import DRAWS, IDLE, kernel_state, kernels_drew
from ulysses_dtensor.sdpa import SdpaCall

_MAX_SCORES = 2**26
_OF_ELEMENTS = frozenset({F.dropout, F.alpha_dropout, torch.dropout, torch.alpha_dropout, torch.native_dropout})


@dataclass(frozen=True, slots=True)
class Attention:
    """The operands of one attention call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seq_dim: int


@dataclass(frozen=True, slots=True)
class Dropout:
    """The tensor of one dropout call, and how many of its dims have numbers of their own: a feature is dropped as a whole."""

    x: torch.Tensor
    dims: int


class AttentionStub(TorchFunctionMode):
    """Replaces attention by a function of each token alone that depends on all of query, key and value.

    Args:
        made_up: numbers of tokens that only the probe has: what has such a size is made from the tokens at hand.
        lengths: how many tokens the probe gives, for how many.
        checked: numbers of the declared attention calls whose heads have been compared.
        others: of each attention call, whether its keys are another sequence's, as the first run shows.
    """

    def __init__(
        self,
        made_up: Collection[int] = (),
        lengths: tuple[int, int] = (0, 0),
        checked: set[int] | None = None,
        others: dict[int, bool] | None = None,
    ) -> None:
        super().__init__()
        self.made_up, self.lengths = made_up, lengths
        self.checked = set() if checked is None else checked
        self.others = {} if others is None else others
        self.flags: list[tuple[Any, ...]] = []
        self.attentions: list[Attention] = []
        self.dropouts: list[Dropout] = []
        self.drawn: list[tuple[str, tuple[int, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if func is seen_flex:
            return stub_flex(self._attention, FlexCall(*args, **kwargs))
        if func is declared_attention:
            return self._declared(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self._sdpa, *args, **kwargs)
        if func in DROPOUTS:
            self.dropouts.append(Dropout(args[0].detach().clone(), args[0].ndim if func in _OF_ELEMENTS else 2))
            return undropped(func, args[0]) if drops(func, args, kwargs) else func(*args, **kwargs)
        result = func(*args, **kwargs)
        if _name(func) in DRAWS and isinstance(result, torch.Tensor):
            self.drawn.append((_name(func), tuple(result.shape)))
        return result

    def _sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).written_out()
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
        flags = ("scaled_dot_product_attention", float(dropout_p), bool(is_causal), scale, bool(enable_gqa))
        if (
            attn_mask is not None
            and attn_mask.ndim >= 1
            and (at_hand := {query.shape[-2], key.shape[-2]} & set(attn_mask.shape[-2:]) & set(self.made_up))
        ):
            raise PlanError(
                f"its attention mask {tuple(attn_mask.shape)} is made from the tokens at hand ({at_hand.pop()}), not "
                "from the whole sequence. Make it before the blocks and pass it to them; pass it twice where the block uses it for "
                "each token too"
            )
        return self._attention(query, key, value, -2, -3, (*flags, Argument(attn_mask)))

    def _declared(self, query: Any, key: Any, value: Any, call: Any, *, seq_dim: int, head_dim: int, mesh: Any) -> Any:
        number = len(self.flags)
        if number not in self.checked and not torch.is_grad_enabled() and bool(query.isfinite().all()):
            self.checked.add(number)
            if not _check_heads_alike(query, key, value, call, head_dim):
                self._check_at_full_length(query, key, value, call, seq_dim, head_dim)
        beside = map(Argument, getattr(call, "others", ()))
        return self._attention(query, key, value, seq_dim, head_dim, ("declared", seq_dim, head_dim, *beside))

    def _check_at_full_length(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Any, seq_dim: int, head_dim: int
    ) -> None:
        """Checks what cannot be run on a few tokens, beside a mask or a bias of all, on as many random ones as there are."""
        tokens, seq_len = self.lengths
        if not query.shape[seq_dim] == key.shape[seq_dim] == tokens or query.shape[head_dim] * seq_len**2 > _MAX_SCORES:
            return
        generator = torch.Generator().manual_seed(0)

        def made(x: torch.Tensor) -> torch.Tensor:
            shape = list(x.shape)
            shape[seq_dim] = seq_len
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(x)

        _check_heads_alike(made(query), made(key), made(value), call, head_dim)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        seq_dim: int,
        head_dim: int,
        flags: tuple[Any, ...],
    ) -> torch.Tensor:
        repeats, rest = divmod(query.shape[head_dim], max(1, key.shape[head_dim]))
        if rest:
            raise PlanError(
                f"its attention has {query.shape[head_dim]} query heads, no multiple of {key.shape[head_dim]} kv heads"
            )
        another = self.others.setdefault(len(self.flags), key.shape[seq_dim] != query.shape[seq_dim])
        self.flags.append((*flags, query.shape[head_dim], key.shape[head_dim], query.shape[-1], value.shape[-1]))
        q, k, v = (x.detach().clone() for x in (query, key, value))
        self.attentions.append(Attention(q, k, v, seq_dim % query.ndim))
        # Weights that differ along the head size: a rotation of query and key must not cancel.
        score = (query * _ramp(query)).sum(-1, keepdim=True)
        if another:  # sequence's: proven apart by what was recorded
            used = (0 * key).nan_to_num().sum() + (0 * value).nan_to_num().sum()
            return (score / query.shape[-1] + used).expand(*score.shape[:-1], value.shape[-1]).clone()
        score = score + (key * _ramp(key).flip(-1)).sum(-1, keepdim=True).repeat_interleave(repeats, head_dim)
        return value.repeat_interleave(repeats, head_dim) + score / query.shape[-1]


def _check_heads_alike(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Any, head_dim: int) -> bool:
    """Refuses a declared attention whose result for the heads of a rank differs when it is given those heads alone.

    Returns whether it could be run at all on these tensors.
    """
    num_heads, num_kv_heads = query.shape[head_dim], key.shape[head_dim]
    if num_heads < 2 or num_heads % max(1, num_kv_heads):
        return True
    ranks, left_out = getattr(call, "ranks", 2), getattr(call, "leaves_a_rank_out", False)
    before, mask_heads = kernel_state(query.device), getattr(call, "mask_heads", [])
    buffers = [(buffer, buffer._version) for buffer in call.module.buffers()] if hasattr(call, "module") else []
    mask_heads.clear()
    expected = _without_dropout(query, key, value, call, heads_of(num_heads, num_kv_heads, 1, 0))
    expected_mask_heads = list(mask_heads)
    if kernels_drew(query.device, before):
        if left_out:
            raise PlanError(IDLE)
        return True
    if expected is None:
        return False
    if left_out and expected.dtype != query.dtype:
        raise PlanError(
            f"its declared attention returns {expected.dtype} for a query of {query.dtype}, which a rank without heads cannot "
            "know. Cast the result, or use as many ranks as heads"
        )
    if left_out and any(buffer._version != version for buffer, version in buffers):
        raise PlanError(
            "its declared attention writes a buffer, and a rank without heads would not. Use as many ranks as heads, or write it "
            "outside the attention"
        )
    # A norm in float32 inside a float64 model rounds as float32 does.
    largest = float(expected.nan_to_num().abs().max())  # NaN where a mask leaves a token nothing to look at
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-3}.get(query.dtype, 5e-2) * max(1.0, largest)
    for share in {heads_of(num_heads, num_kv_heads, ranks, rank) for rank in range(ranks)}:
        if not share.num_query:
            continue
        mask_heads.clear()
        of_query = query.narrow(head_dim, share.query[0], share.num_query)
        of_key, of_value = (x.narrow(head_dim, share.kv[0], share.num_kv) for x in (key, value))
        found = _without_dropout(of_query, of_key, of_value, call, share)
        wanted = expected.narrow(head_dim, share.query[0], share.num_query)
        if (
            found is None
            or found.shape != wanted.shape
            or not torch.allclose(found, wanted, rtol=0, atol=tolerance, equal_nan=True)
        ):
            raise PlanError(
                "its declared attention gives a head another result when it is given some of the heads, or cannot take some: it "
                "depends on their numbers or on each other (ALiBi slopes, a bias for each head, a norm over heads). Name what has "
                "a part for each head in UlyssesAttention(..., per_head={...}), but for what a score_mod or mask_mod indexes by "
                "head: these see global numbers"
            )
        if mask_heads != expected_mask_heads:
            raise PlanError(
                "its declared attention makes a BlockMask for the heads that it is called with, where mask_mod sees global "
                "numbers. Make it with H=None, or before the blocks"
            )
    return True


def _without_dropout(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Any, heads: Heads
) -> torch.Tensor | None:
    """Returns what a declared attention gives, None where that tells nothing.

    It may not run on a few tokens, with a mask of all at hand, or draw numbers other than a dropout of torch's.
    """
    undropped = _NoDropout(refused=getattr(call, "leaves_a_rank_out", False))
    try:
        with undropped:
            out = call(query, key, value, heads)
        return None if undropped.drew else out
    except PlanError:
        raise
    except Exception:
        return None


class _NoDropout(TorchFunctionMode):
    """Drops nothing; refuses all that draws where not every rank runs the attention."""

    def __init__(self, *, refused: bool) -> None:
        super().__init__()
        self.refused, self.drew = refused, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.refused and draws(func, args, kwargs):
            raise PlanError(IDLE)
        if func in DROPOUTS and drops(func, args, kwargs):
            return undropped(func, args[0])
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {name: 0.0 if name == "dropout_p" else x for name, x in kwargs.items()}
        self.drew = self.drew or draws(func, args, kwargs)
        return func(*args, **kwargs)


def undropped(func: Any, x: torch.Tensor) -> Any:
    """Returns what a dropout returns that drops nothing."""
    return (x.clone(), torch.ones_like(x, dtype=torch.bool)) if func is torch.native_dropout else x.clone()


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


class Argument:
    """What a declared attention is given beside query, key and value: equal where sizes and values are."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Argument):
            return NotImplemented
        a, b = self.value, other.value
        if a is b:
            return True
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return close(a.detach(), b.detach())
        return type(a) is type(b) and a == b

    __hash__ = None  # type: ignore[assignment] - compared by values that change

    def __repr__(self) -> str:
        return f"a tensor {tuple(self.value.shape)}" if isinstance(self.value, torch.Tensor) else repr(self.value)


def _ramp(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, like.shape[-1], device=like.device, dtype=torch.float32).to(like.dtype)
