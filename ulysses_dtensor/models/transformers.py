"""Hugging Face Transformers: its attention functions, caches, layers that checkpoint themselves, what its hooks record."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.utils.generic import ModelOutput
from transformers.utils.output_capturing import _active_collector

from ulysses_dtensor.errors import PlanError
from ulysses_dtensor.models.attention_functions import seen_attention
from ulysses_dtensor.reading import Reading, readings
from ulysses_dtensor.world import World

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past", "cache_params", "mems")
_MIXERS = re.compile(
    "Mamba|SSM(?!LP)|LinearAttention|GatedDelta|ShortConv|Rwkv|RWKV|Recurrent|TimeMix|Lightning|Retention|Hyena|KimiDelta"
)
_PER_TOKEN = re.compile("(Norm|NormGated|Embeddings?|Mlp|MLP)$")  # of families named for their mixer
_SHOWN = 8


def is_transformers(module: nn.Module) -> bool:
    """Whether this is a model of the library."""
    return isinstance(module, PreTrainedModel)


class Transformers(World):
    """The library's models, alone or inside others (PEFT, a model of one's own)."""

    def calls_attention(self, module: nn.Module) -> bool:
        """Whether this module's own forward takes a function from the registry."""
        return any(
            isinstance(each.target, AttentionInterface) for reading in readings(module) for each in reading.references
        )

    def problems(self, model: nn.Module, blocks: dict[str, tuple[str, ...]]) -> list[str]:
        """Returns a line with the modules whose class says that they mix tokens outside attention."""
        found = [
            f"{block}.{name} ({type(part).__name__})".replace(". (", " (")
            for block in blocks
            for name, part in _mixers(model.get_submodule(block))
        ]
        counting = [
            f"{name} ({type(part).__name__})"
            for name, part in model.named_modules()
            if getattr(part, "has_relative_attention_bias", False) is True
            and any(_inside(name, block) for block in blocks)
        ]
        problems = []
        if found:
            problems.append(
                f"these mix tokens outside attention, which needs the tokens in order on one rank: {_some(found)}."
            )
        if counting:
            problems.append(
                f"these make a bias from positions counted at the tokens at hand, from zero on each rank: {_some(counting)}."
            )
        return problems

    def nothing_found(self, model: nn.Module) -> str:
        """Says what the model has in place of the library's attention functions."""
        said = (
            "no module takes its attention from the library's AttentionInterface, nor calls "
            "torch.nn.functional.scaled_dot_product_attention or flex_attention"
        )
        mixers = [f"{name} ({type(part).__name__})" for name, part in _mixers(model)]
        if mixers:
            return f"{said}. These mix tokens by other means: {_some(mixers)}."
        attentions = [f"{name} ({type(part).__name__})" for name, part in model.named_modules() if _is_own(part)]
        if attentions:
            return f"{said}. These compute it in code of their own, which cannot be given the heads of a rank: {_some(attentions)}."
        return f"{said}, so nothing matches."

    def show_attention(self, model: nn.Module) -> None:
        """Puts stand-ins into the registry, and in place of the files' own eager functions; they act on converted modules."""
        for part in model.modules():
            for reading in readings(part):
                _show(reading)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Switches the cache off where it is on by default; refuses what is asked for and cannot be given."""
        if not is_transformers(module):
            return kwargs
        given = _bound(module, args, kwargs)
        who = f"UlyssesPlan on {type(module).__name__}"
        caches = [name for name in _CACHES if given.get(name) is not None]
        if given.get("use_cache") or caches:
            what = "use_cache=True" if given.get("use_cache") else caches[0]
            raise PlanError(
                f"{who}: {what} is not supported, as the keys and values of a token would be on other ranks. Pass use_cache=False, "
                "or generate under ulysses_dtensor.bypass(model)."
            )
        if _flag(module, given, "output_attentions"):
            raise PlanError(
                f"{who}: output_attentions=True is not supported: the weights of a head lie on one rank. Run under bypass(model)."
            )
        if "use_cache" in given or not _takes(module, "use_cache"):
            return kwargs
        if getattr(module.config, "use_cache", False) and given.get("attention_mask") is None:
            positions = given.get("position_ids")
            packed = isinstance(positions, torch.Tensor) and bool((positions.diff(dim=-1) != 1).any())
            if packed and not _looks_for_documents_itself(module):
                raise PlanError(
                    f"{who}: position_ids hold several documents. With a cache, which is on by default, the library does not look "
                    "for them, without one it keeps them apart. Pass use_cache=False, to have that on one device too."
                )
        return {**kwargs, "use_cache": False}

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Puts what raises when it is used where one device returns the cache that nobody asked for."""
        if (
            not is_transformers(module)
            or not _takes(module, "use_cache")
            or "use_cache" in _bound(module, args, kwargs)
        ):
            return result
        if getattr(module.config, "use_cache", False) and isinstance(result, ModelOutput):
            fields = {field.name for field in dataclasses.fields(result)}  # type: ignore[arg-type] - each is a dataclass
            for name in _CACHES:
                if name in fields and result.get(name) is None:
                    result[name] = NoCache()
        return result

    def stays_in_shards(self, result: Any) -> list[Any]:
        """Returns the logits beside a loss: S x vocabulary is gathered for nobody."""
        if isinstance(result, ModelOutput) and result.get("loss") is not None:
            return [x for x in (result.get("logits"),) if isinstance(x, DTensor)]
        return []

    def checkpoint(self, module: nn.Module) -> Callable[..., Any] | None:
        """Returns the function by which a `GradientCheckpointingLayer` would checkpoint its forward."""
        if (
            _checkpoints_itself(module)
            and module.gradient_checkpointing
            and module.training
            and torch.is_grad_enabled()
        ):
            return module._gradient_checkpointing_func  # type: ignore[return-value] - set by gradient_checkpointing_enable
        return None

    def forward(self, module: nn.Module) -> Callable[..., Any]:
        """Returns the forward inside the checkpoint, which has to be around what is proven, not inside it."""
        forward = type(module).forward
        if _checkpoints_itself(module):
            forward = getattr(forward, "__wrapped__", forward)
        return partial(forward, module)

    def recorded(self) -> dict[str, list[Any]] | None:
        """Returns the library's collected outputs, without hidden states, which hooks on blocks record outside of them."""
        collected = None if torch.compiler.is_compiling() else _active_collector.get()
        if not collected:
            return None
        lists = {
            name: values for name, values in collected.items() if isinstance(values, list) and name != "hidden_states"
        }
        return lists or None


class NoCache:
    """Stands for the cache that a model returns by default, which is not made where tokens are in shards; any use raises."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            "UlyssesPlan: no cache of keys and values is made where tokens are in shards. Generate under "
            "ulysses_dtensor.bypass(model)."
        )

    __getitem__ = __len__ = __iter__ = __bool__ = __call__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()


def _mixers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the innermost modules that mix tokens outside attention, by their class or by a convolution of theirs."""
    found = [
        (name, part)
        for name, part in module.named_modules()
        if (_MIXERS.search(type(part).__name__) and not _PER_TOKEN.search(type(part).__name__)) or _convolves(part)
    ]
    held = [name for name, _ in found]
    return [(name, part) for name, part in found if not any(_inside(other, name) for other in held)]


def _convolves(module: nn.Module) -> bool:
    """Whether it holds a depthwise convolution over more than one token, as state space models and linear attentions do."""
    return any(
        isinstance(part, nn.Conv1d) and part.groups == part.in_channels > 1 and part.kernel_size[0] > 1
        for part in module.children()
    )


def _inside(inner: str, outer: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _is_own(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ and bool(list(module.named_parameters()))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _checkpoints_itself(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _looks_for_documents_itself(module: nn.Module) -> bool:
    """Whether the attention's function is given the positions, as flash attention's is, and no mask made from them."""
    name = getattr(module.config, "_attn_implementation", None)
    return ALL_MASK_ATTENTION_FUNCTIONS.get(name) is flash_attention_mask


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name."""
    try:
        bound = inspect.signature(type(module).forward).bind_partial(None, *args, **kwargs).arguments
    except TypeError:
        return dict(kwargs)
    return {**bound, **bound.get("kwargs", {})}


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(type(module).forward).parameters


def _flag(module: nn.Module, given: dict[str, Any], name: str) -> bool:
    value = given.get(name)
    return bool(getattr(module.config, name, False) if value is None else value)


def _show(reading: Reading) -> None:
    for each in reading.references:
        target = each.target
        if isinstance(target, AttentionInterface):
            for name, function in list(target.items()):
                if _is_stand_in(function):
                    continue
                if name in target._local_mapping:
                    target[name] = partial(seen_attention, function)
                else:
                    target.register(name, partial(seen_attention, function))
        elif (
            each.put is not None
            and inspect.isfunction(target)
            and re.search(r"eager.*attention|attention.*eager", target.__name__)
        ):
            each.put(partial(seen_attention, target))


def _is_stand_in(function: Any) -> bool:
    return isinstance(function, partial) and function.func is seen_attention
