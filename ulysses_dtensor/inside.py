"""What the code of a block sees while it runs on this rank's tokens: attention over the whole sequence, dropout of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function

from ulysses_dtensor.attend import attend
from ulysses_dtensor.boundary import holds_dtensor, holds_unannounced
from ulysses_dtensor.collectives import all_reduce_max
from ulysses_dtensor.contents import held_tensors
from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.flex import FlexCall, mode_is_open, seen_flex, sharded_flex
from ulysses_dtensor.heads import Heads, heads_of
from ulysses_dtensor.multihead import multi_head_attention
from ulysses_dtensor.randomness import DRAWS, own_random_state, refuse_draw
from ulysses_dtensor.sdpa import SdpaCall, sharded_sdpa
from ulysses_dtensor.strategy import ULYSSES, Strategy
from ulysses_dtensor.tokens import Held, Tokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DROPOUTS = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
) | frozenset(
    {torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.native_dropout}
)


Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Heads], torch.Tensor]
Operands = tuple[Held, Held]
"""What the probe found of an attention call: of its query, and of its key and value."""


class Inside(TorchFunctionMode):
    """Open while a block, or a module that keeps tokens apart, runs on its local tokens.

    Args:
        group: the ranks among which tokens are cut.
        attentions: of each attention call of the module, in order, which tokens its operands hold.
        dropouts: of each dropout call, in order, the dim at which its tensor is cut and the tokens that it holds.
        lengths: whole lengths of the cut arguments, by leaf number.
        sizes: global sizes of all arguments, by leaf number; of those that are no tensors none.
        strategy: how self-attentions are shared out.
        seeded_alike: whether the ranks' generators stood at the same state.
    """

    def __init__(
        self,
        group: ProcessGroup,
        attentions: Sequence[Operands],
        dropouts: Sequence[tuple[int, Held] | None],
        lengths: dict[int, int],
        sizes: Sequence[Sequence[int]],
        *,
        strategy: Strategy = ULYSSES,
        seeded_alike: bool = True,
    ) -> None:
        super().__init__()
        self.group, self.strategy, self.seeded_alike = group, strategy, seeded_alike
        self.attentions, self.dropouts, self.lengths, self.sizes = attentions, dropouts, lengths, sizes
        self.calls, self.drops = 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if holds_dtensor((args, list(kwargs.values()))):
            raise PlanError(UNANNOUNCED)
        if func is F.scaled_dot_product_attention:
            return self.sdpa(*args, **kwargs)
        if func is seen_flex:
            return self.flex(FlexCall(*args, **kwargs))
        if func is declared_attention:
            return self.declared(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return multi_head_attention(self.sdpa, *args, **kwargs)
        if func in DROPOUTS:
            return self.drop(func, args, kwargs)
        if not self.seeded_alike:
            refuse_draw(func, kwargs)
        return func(*args, **kwargs)

    def check(self) -> None:
        """Refuses a run with fewer attention calls than were proven: those that ran may have been taken for others.

        Raises:
            PlanError: there were fewer.
        """
        if self.calls < len(self.attentions):
            raise PlanError(
                f"UlyssesPlan: attention was called {self.calls} times, {len(self.attentions)} when the block was proven. Which "
                "attentions run must be decided by the module's own switches or by arguments of Python, not by a tensor's value."
            )

    def sdpa(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Runs `scaled_dot_product_attention`, its arguments as torch has them."""
        tokens = self.next_tokens(query, key, -2)
        if tokens is None:
            if draws(F.scaled_dot_product_attention, (query, key, value, *args), kwargs) and not self.seeded_alike:
                raise PlanError(ALIKE)
            return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        call = SdpaCall(query, key, value, *args, **kwargs).written_out()
        return sharded_sdpa(*call, tokens=tokens, group=self.group, strategy=self.strategy)

    def flex(self, call: FlexCall) -> Any:
        """Runs `flex_attention`."""
        if any(map(holds_unannounced, held_tensors((call.score_mod, call.block_mask)))):
            raise PlanError(UNANNOUNCED)
        tokens = self.next_tokens(call.query, call.key, -2)
        if tokens is None:
            return call.run()
        return sharded_flex(call, tokens=tokens, group=self.group)

    def declared(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: Call,
        *,
        seq_dim: int,
        head_dim: int,
        mesh: Any,
    ) -> torch.Tensor:
        """Runs an attention that was declared by layout."""
        tokens = self.next_tokens(query, key, seq_dim)
        if tokens is None:
            refused = nullcontext() if self.seeded_alike else OwnDraws(query.device, self.group, refused=ALIKE)
            with refused:
                return call(query, key, value, heads_of(query.shape[head_dim], key.shape[head_dim], 1, 0))

        def on_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads) -> torch.Tensor:
            try:
                return call(query, key, value, heads)
            except PlanError:
                raise
            except Exception as error:
                raise PlanError(
                    f"UlyssesAttention: a declared attention failed on the {heads.num_query} heads of a rank: {error} If it is "
                    "given, or has, a tensor with a part for each head, name it in per_head={...}."
                ) from error

        return attend(
            query,
            key,
            value,
            on_heads,
            seq_dim=seq_dim,
            head_dim=head_dim,
            tokens=tokens,
            group=self.group,
            trained=getattr(call, "trained", ()),
        )

    def drop(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Drops this rank's tokens by numbers of its own, and what every rank holds alike on all."""
        at, self.drops = self.drops, self.drops + 1
        if not drops(func, args, kwargs):
            return func(*args, **kwargs)
        dim, held = self.dropouts[at] or (0, None) if at < len(self.dropouts) else (0, Held(0))
        if held is not None and held.others == "none":
            with own_random_state(args[0].device, self.group):
                return func(*args, **kwargs)
        if not self.seeded_alike:
            raise PlanError(ALIKE)
        if held is None or held.of is None:
            return func(*args, **kwargs)
        x, ranks, rank = args[0], dist.get_world_size(self.group), dist.get_rank(self.group)
        own = Tokens(self.lengths[held.of]).local(ranks, rank)
        rest, own_first = x.shape[dim] - own, held.others == "after"
        pieces = x.split([own, rest] if own_first else [rest, own], dim)
        parts = []
        for piece, is_own in zip(pieces, (own_first, not own_first), strict=True):
            with own_random_state(x.device, self.group) if is_own else nullcontext():
                parts.append(func(piece, *args[1:], **kwargs))
        return torch.cat(parts, dim)

    def next_tokens(self, query: torch.Tensor, key: torch.Tensor, seq_dim: int) -> tuple[Tokens, Tokens] | None:
        """Returns what the next attention call's query and keys hold; None when every rank holds all of both.

        Raises:
            PlanError: there are more attention calls than when the block was proven.
        """
        if self.calls >= len(self.attentions):
            raise PlanError(
                f"UlyssesPlan: attention is called more often than the {len(self.attentions)} times when the block was proven."
            )
        held = self.attentions[self.calls]
        self.calls += 1
        if held[0].of is None and held[1].of is None:
            return None
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        lengths = (query.shape[seq_dim], key.shape[seq_dim])
        of_query, of_key = (
            each.tokens(local, self.lengths, self.sizes, ranks, rank) for each, local in zip(held, lengths, strict=True)
        )
        return of_query, of_key


ALIKE = (
    "UlyssesPlan: a dropout of what every rank holds, or of whole features, must be the same on all ranks. Seed the ranks of a "
    "sequence group alike."
)
UNANNOUNCED = (
    "UlyssesPlan: a block uses a hidden state that it was not given as an argument (an attribute, an object of one's own). Pass it "
    "as an argument, or in a tuple, list or dictionary."
)


def declared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Call,
    *,
    seq_dim: int,
    head_dim: int,
    mesh: DeviceMesh | None,
) -> torch.Tensor:
    """Hands an attention that was declared by layout to whichever mode its block runs in; runs it alone without one.

    Args:
        query: local.
        key: local.
        value: local.
        call: the attention itself.
        seq_dim: dim of the tokens.
        head_dim: dim of the heads.
        mesh: where plain tensors are shards of equal length when no block is running; None: they are whole then.

    Raises:
        PlanError: no block is running, and the ranks' tensors differ in length.
    """
    tensors, dims = (query, key, value), {"seq_dim": seq_dim, "head_dim": head_dim, "mesh": mesh}
    if mode_is_open():
        return handle_torch_function(declared_attention, tensors, *tensors, call, **dims)
    if mesh is None:
        return call(query, key, value, heads_of(query.shape[head_dim], key.shape[head_dim], 1, 0))
    local = query.shape[seq_dim]
    lengths = torch.tensor([local, -local], device=query.device)
    all_reduce_max(lengths, mesh.get_group())
    longest, shortest = lengths.tolist()
    if longest != -shortest:
        raise PlanError(
            f"UlyssesAttention: plain tensors of {-shortest} to {longest} tokens on the ranks of {mesh}. Plain tensors "
            "cannot say how an uneven sequence is cut; pass DTensors in the attention's layout."
        )
    whole = Tokens(local * mesh.size())
    trained = getattr(call, "trained", ())
    return attend(
        *tensors,
        call,
        seq_dim=seq_dim,
        head_dim=head_dim,
        tokens=(whole, whole),
        group=mesh.get_group(),
        trained=trained,
    )


def drops(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this dropout call draws random numbers."""
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", func is F.dropout))
    return bool(p) and bool(training)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call, a dropout or any other, draws from the default generator."""
    if func is F.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))
    name = getattr(func, "__name__", "")
    return drops(func, args, kwargs) if func in DROPOUTS else name in DRAWS and kwargs.get("generator") is None


class OwnDraws(TorchFunctionMode):
    """Open while a declared attention runs on some of the heads: each rank draws numbers of its own, or is `refused` to."""

    def __init__(self, device: torch.device, group: ProcessGroup, *, refused: str = "") -> None:
        super().__init__()
        self.device, self.group, self.refused = device, group, refused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        if self.refused:
            raise PlanError(self.refused)
        with own_random_state(self.device, self.group):
            return func(*args, **kwargs)
