"""FlexAttention in converted modules: its calls made visible to function modes, and run over the whole sequence.

`flex_attention` is a Python function, which a function mode does not see before it has looked at its tensors. A
stand-in, put where the code of converted modules refers to it, hands itself to the mode that is open and otherwise
calls what it stands in for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import flex_attention as torch_flex
from torch.overrides import TorchFunctionMode, handle_torch_function

from ulysses_dtensor.attend import attend, pair_kv
from ulysses_dtensor.contents import held_tensors
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.heads import Heads
from ulysses_dtensor.mods import Mod, block_mask_of, check_block_mask, described, score_mod_of
from ulysses_dtensor.reading import Reading, readings
from ulysses_dtensor.tokens import Tokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def seen_flex(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `original`, torch's `flex_attention` or a compiled one, by way of the function mode that is open."""
    if mode_is_open():
        return handle_torch_function(seen_flex, (), original, *args, **kwargs)
    return original(*args, **kwargs)


def mode_is_open() -> bool:
    """Whether a function mode is open; also while torch.compile traces, where `has_torch_function` sees tensors alone."""
    # Private; torch has no public name that its compiler traces. If torch moves it, tests/test_compile.py says so.
    return torch.overrides._is_torch_function_mode_enabled()  # pyright: ignore[reportPrivateImportUsage] - see above


def show_flex(module: nn.Module) -> None:
    """Makes the calls of `flex_attention` in the code of `module` and its parts visible to function modes.

    References by name change for every user of that name; outside converted modules they do what they did.
    """
    for part in module.modules():
        for reading in readings(part):
            for each in reading.references:
                if each.put is not None and _is_flex(each.target) and not _is_stand_in(each.target):
                    each.put(_stand_in(each.target))


def calls_flex(reading: Reading) -> bool:
    """Whether a function refers to `flex_attention`, compiled or not, or to a stand-in for it."""
    return any(_is_flex(each.target) for each in reading.references) or _is_out_of_reach(reading)


def out_of_reach(module: nn.Module) -> str:
    """Returns a sentence on calls of `flex_attention` in `module` that cannot be seen; empty without such."""
    if not any(_is_out_of_reach(reading) for part in module.modules() for reading in readings(part)):
        return ""
    return (
        " It reaches flex_attention through its module, or imports it inside a function, where its calls are not seen: import "
        "it by name at the top of the file, or declare the module that calls it with UlyssesAttention."
    )


def _is_out_of_reach(reading: Reading) -> bool:
    names = reading.names
    return "flex_attention" in names and (
        torch_flex.__name__ in names
        or any(each.target is torch_flex for each in reading.references)
        or {"torch", "nn", "attention"} <= names
    )


def _is_flex(target: Any) -> bool:
    if isinstance(target, functools.partial):
        return target.func is seen_flex or _is_flex(target.func)
    return _uncompiled(target) is torch_flex.flex_attention


def _is_stand_in(target: Any) -> bool:
    return isinstance(target, functools.partial) and target.func is seen_flex


def _stand_in(target: Any) -> functools.partial[Any]:
    if isinstance(target, functools.partial):  # options bound to it stay in sight
        return functools.partial(_stand_in(target.func), *target.args, **target.keywords)
    return functools.partial(seen_flex, target)


def _uncompiled(function: Any) -> Any:
    """Returns the function that `torch.compile` wrapped; torch has no public name for it (a test says so if it moves)."""
    return getattr(function, "_torchdynamo_orig_callable", function)


class FlexCall(NamedTuple):
    """The arguments of one call of `flex_attention`, as torch has them, behind the function to call."""

    original: Callable[..., Any]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    score_mod: Mod | None = None
    block_mask: Any = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Any = None
    return_aux: Any = None

    @property
    def wanted(self) -> list[str]:
        """The names of what is returned beside the output, in order."""
        if self.return_aux is None:
            return ["lse"] if self.return_lse else []
        return [name for name in ("lse", "max_scores") if getattr(self.return_aux, name)]

    @property
    def statistics(self) -> torch.dtype:
        """The dtype in which torch gives what it returns beside the output."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def check(self) -> None:
        """Refuses a call that cannot be cut by heads.

        Raises:
            PlanError: there is no head axis, heads do not fit, or the block mask cannot be cut to some of them.
        """
        query, key = self.query, self.key
        if query.ndim != 4:
            raise PlanError(f"flex_attention: query has {query.ndim} dims. Give (batch, heads, tokens, head size).")
        if query.shape[1] != key.shape[1] and not self.enable_gqa:
            raise PlanError(
                f"flex_attention: {query.shape[1]} query heads and {key.shape[1]} kv heads. Pass enable_gqa=True, or repeat the "
                "kv heads."
            )
        if self.block_mask is not None:
            check_block_mask(self.block_mask, query, query.shape[1])

    def run(self) -> Any:
        """Returns what the function gives for these arguments as they are."""
        return self.original(*self[1:-1], **self._more)

    def on_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads) -> Any:
        """Returns the output, and what is wanted beside it in one tuple, of whole sequences of some heads."""
        key, value = pair_kv(key, value, heads, head_dim=1)
        mods = (score_mod_of(self.score_mod, heads), block_mask_of(self.block_mask, heads))
        gqa = query.shape[1] != key.shape[1]
        result = self.original(
            query, key, value, *mods, self.scale, gqa, self.return_lse, self.kernel_options, **self._more
        )
        if self.return_aux is None:
            return result
        return (result[0], *(getattr(result[1], name) for name in self.wanted)) if self.wanted else result[0]

    @property
    def _more(self) -> dict[str, Any]:
        return {} if self.return_aux is None else {"return_aux": self.return_aux}

    def returned(self, out: torch.Tensor, others: Sequence[torch.Tensor]) -> Any:
        """Returns the output and what is wanted beside it in the form that torch has for this call."""
        if self.return_aux is not None:
            return out, torch_flex.AuxOutput(**dict(zip(self.wanted, others, strict=True)))
        return (out, *others) if self.return_lse else out


def sharded_flex(call: FlexCall, *, tokens: tuple[Tokens, Tokens], group: ProcessGroup) -> Any:
    """Returns this rank's tokens of `flex_attention` over the whole sequence.

    Args:
        call: query local (B, H, S/P, D), key and value local with H_kv heads. `score_mod` and `mask_mod` see global numbers of
            heads and tokens; `block_mask` is of the whole sequence, with one head or with all, of which each rank takes its
            own. What is returned beside the output is (B, H, S/P).
        tokens: of the query, and of key and value.
        group: the ranks among which the sequence is cut.

    Raises:
        PlanError: the block mask is not of the whole sequence, or the call cannot be cut by heads.
    """
    call.check()
    lengths = (tokens[0].total, tokens[1].total)
    if call.block_mask is not None and tuple(call.block_mask.seq_lengths) != lengths:
        raise PlanError(
            f"flex_attention: block_mask is of {tuple(call.block_mask.seq_lengths)} tokens, the whole sequence of {lengths}. Make "
            "it from the whole sequence before the blocks."
        )
    operands, wanted = (call.query, call.key, call.value), call.wanted
    if _uncompiled(call.original) is torch_flex.flex_attention and call.query.device.type == "cpu":
        problem = _problem_on_cpu(any(x.requires_grad for x in operands), "max_scores" in wanted)
        if problem:
            raise PlanError(f"flex_attention: {problem}")

    def without_heads(query: torch.Tensor, value: torch.Tensor) -> Any:
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        others = [query.new_zeros(query.shape[:-1], dtype=call.statistics) for _ in wanted]
        return (out, *others) if wanted else out

    dims = {"seq_dim": 2, "head_dim": 1}
    trained = list(held_tensors((call.score_mod, call.block_mask)))
    result = attend(
        *operands, call.on_heads, tokens=tokens, group=group, without_heads=without_heads, trained=trained, **dims
    )
    out, *others = result if wanted else (result,)
    return call.returned(out, others)


class GlobalHeads(TorchFunctionMode):
    """Open while a module declared by layout runs on some of the heads: `flex_attention` in it numbers them globally.

    `mask_heads` gets the number of heads of each block mask.
    """

    def __init__(self, heads: Heads, num_heads: int, mask_heads: list[int]) -> None:
        super().__init__()
        self.heads, self.num_heads, self.mask_heads = heads, num_heads, mask_heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._flex(*args, **kwargs) if func is seen_flex else func(*args, **kwargs)

    def _flex(
        self,
        original: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Mod | None = None,
        block_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if score_mod is None and block_mask is None:
            return original(query, key, value, None, None, *args, **kwargs)
        if query.shape[1] != self.heads.num_query:
            raise PlanError(
                f"flex_attention: a declared attention calls it with {query.shape[1]} heads where it was given "
                f"{self.heads.num_query}: score_mod and block_mask cannot tell which heads these are."
            )
        if block_mask is not None:
            check_block_mask(block_mask, query, self.num_heads)
            self.mask_heads.append(block_mask.kv_num_blocks.shape[1])
        score_mod, block_mask = score_mod_of(score_mod, self.heads), block_mask_of(block_mask, self.heads)
        return original(query, key, value, score_mod, block_mask, *args, **kwargs)


def stub_flex(attention: Callable[..., torch.Tensor], call: FlexCall) -> Any:
    """Returns what the probe sees of a call: `attention(query, key, value, seq_dim, head_dim, flags)`, of each token alone.

    The flags hold what must not depend on the tokens at hand, also what score_mod and block_mask hold in their closures.

    Raises:
        PlanError: the block mask is made from the tokens at hand, or the call cannot be cut by heads.
    """
    call.check()
    seen = call.query.shape[2]
    if call.block_mask is not None and seen in call.block_mask.seq_lengths:
        raise PlanError(
            f"its block_mask {tuple(call.block_mask.shape)} is made from the tokens at hand ({seen}), not from the whole "
            "sequence. Make it before the blocks and pass it to them"
        )
    mods = (described("score_mod", call.score_mod), described("block_mask", call.block_mask))
    flags = ("flex_attention", call.scale, bool(call.enable_gqa), *mods)
    out = attention(call.query, call.key, call.value, -2, -3, flags)
    return call.returned(out, [out.sum(-1).to(call.statistics) for _ in call.wanted])


def empty_flex(call: FlexCall) -> Any:
    """Returns what a call of `flex_attention` would return, not computed: for dry runs on fake tensors."""
    query, value = call.query, call.value
    others = [query.new_empty(query.shape[:-1], dtype=call.statistics) for _ in call.wanted]
    return call.returned(query.new_empty((*query.shape[:-1], value.shape[-1])), others)


@functools.lru_cache(maxsize=4)
def _problem_on_cpu(requires_grad: bool, max_scores: bool) -> str:
    """Returns with which words torch refuses such a call on a CPU; asked of one token, as another torch may not refuse."""
    if not requires_grad and not max_scores:
        return ""
    x = torch.zeros(1, 1, 1, 16, requires_grad=requires_grad)
    try:
        torch_flex.flex_attention(x, x, x, return_aux=torch_flex.AuxRequest(max_scores=max_scores))
    except NotImplementedError as error:
        return str(error)
    return ""
