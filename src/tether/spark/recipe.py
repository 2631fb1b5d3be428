"""Recipes: how an object is made, as plain values. A recipe has the name of a class or function, and its arguments.

A saved model is more than its weights. Pickle saves the rest as code, so the author of the file can run any code on the
machine that loads it. A recipe only names a class or a function of a module that can be imported, and the numbers and
texts that it is called with. It must be defined under that name, and be a class of the expected kind or a function
annotated to return one. From torch itself, only `torch.nn` and `torch.optim` are allowed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
import typing
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from tether.core.wire import pack_tree, unpack_tree
from tether.errors import UsageError, WireError

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
#: the allowed parts of torch: others can make modules from code that is given as text
_OF_TORCH = ("torch.nn.", "torch.optim.")


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an object is made; `name` is module:qualname of a class or function."""

    name: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    #: the modules in a torch.nn.Sequential
    parts: dict[str, Recipe] = {}

    def maker(self, kind: type) -> Callable[..., Any]:
        """A function that makes the object. This imports its module, and calls nothing."""
        found = resolve(self.name, kind)
        args, kwargs = ([_plain(value) for value in self.args], {k: _plain(v) for k, v in self.kwargs.items()})
        return functools.partial(found, *args, **kwargs) if args or kwargs else found

    def make(self, kind: type) -> Any:
        """Make the object."""
        if self.parts:
            return nn.Sequential(OrderedDict((name, part.make(nn.Module)) for name, part in self.parts.items()))
        try:
            made = self.maker(kind)()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{self.name} does not accept the arguments that it was saved with: {error}") from error
        if not isinstance(made, kind):
            raise UsageError(f"{self.name} makes a {type(made).__name__}; expected a {kind.__name__}")
        return made


def recipe_of(maker: Callable[..., Any], kind: type) -> Recipe | None:
    """The recipe of a class or function that makes objects of a kind, or of a `functools.partial` of one; or None."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(maker, functools.partial):
        args, kwargs = maker.args, maker.keywords
        maker = maker.func
    name = f"{getattr(maker, '__module__', '')}:{getattr(maker, '__qualname__', '')}"
    try:
        found = Recipe(name, [_packed(value) for value in args], {key: _packed(value) for key, value in kwargs.items()})
        return found if resolve(name, kind) is maker else None
    except (UsageError, WireError):
        return None


def recipe_of_module(module: nn.Module) -> Recipe | None:
    """The recipe of an existing module without its weights; None if no recipe makes an equal module."""
    if type(module) is nn.Sequential and len(module):
        parts = {name: recipe_of_module(part) for name, part in module.named_children()}
        found = Recipe("torch.nn.modules.container:Sequential", parts={k: v for k, v in parts.items() if v is not None})
        return found if len(found.parts) == len(parts) and not _has_hooks(module) else None
    found_by_name = recipe_of(functools.partial(type(module), **_arguments(module)), nn.Module)
    try:
        same = found_by_name is not None and _is_same(module, found_by_name.make(nn.Module))
    except Exception:  # the constructor is the user's, and may need other arguments
        same = False
    return found_by_name if same else None


def resolve(name: str, kind: type) -> Callable[..., Any]:
    """The class of this kind, or the function annotated to return one, that is defined under a name."""
    module_name, _, qualname = name.partition(":")
    if not _NAME.fullmatch(name) or module_name == "__main__":
        raise UsageError(f"{name!r} is not the name of something that can be imported, such as package.module:Class")
    if module_name.partition(".")[0] == "torch" and not f"{module_name}.".startswith(_OF_TORCH):
        raise UsageError(f"{name!r} is neither in torch.nn nor in torch.optim")
    try:
        found: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"there is no {name}: {error}; install or import what it was saved with") from error
    if not isinstance(found, type | types.FunctionType) or (found.__module__, found.__qualname__) != (
        module_name,
        qualname,
    ):
        raise UsageError(f"{name!r} is not a class or a function that is defined there")
    made = found if isinstance(found, type) else _returned(found)
    if not (isinstance(made, type) and issubclass(made, kind)):
        raise UsageError(
            f"{name!r} is neither a {kind.__name__} nor a function that is annotated to return one (-> {kind.__name__})"
        )
    return found


def _returned(function: Callable[..., Any]) -> Any:
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:  # annotations are the user's, and may name something undefined
        return None


def _packed(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    packed = pack_tree(value, tensors)
    if tensors or _has_dict(value):
        raise WireError("an argument that is not a number, a text or a list of those")
    return packed


def _plain(packed: Any) -> Any:
    try:
        value = unpack_tree(packed, [])
    except WireError as error:
        raise UsageError(f"malformed argument {packed!r}") from error
    if _has_dict(value):
        raise UsageError(f"an argument must be a number, a text or a list of those, not {value!r}")
    return value


def _has_dict(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple) and any(map(_has_dict, value)))


# ---- recipes of existing modules ------------------------------------------------------------------------------------


def _arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments that a module may have been made with: attributes named like the constructor's parameters."""
    found: dict[str, Any] = {}
    for name in inspect.signature(type(module)).parameters:
        value = getattr(module, name, inspect.Parameter.empty)
        if name == "bias" and (value is None or isinstance(value, torch.Tensor)):
            value = value is not None
        if _is_plain(value):
            found[name] = value
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules differ at most in their weights."""
    if type(one) is not type(other) or _has_hooks(one) or _shapes(one) != _shapes(other):
        return False
    own, others = _attributes(one), _attributes(other)
    if not all(map(_is_plain, own.values())) or own != others or not _same_constants(one, other):
        return False
    parts = dict(one.named_children()), dict(other.named_children())
    return parts[0].keys() == parts[1].keys() and all(_is_same(parts[0][name], parts[1][name]) for name in parts[0])


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module other than parameters, buffers and child modules."""
    every_module_has = vars(nn.Module())
    return {name: value for name, value in vars(module).items() if name not in every_module_has}


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()]


def _same_constants(one: nn.Module, other: nn.Module) -> bool:
    """Whether the buffers are equal that are not saved with the weights."""
    buffers = dict(one.named_buffers(recurse=False)), dict(other.named_buffers(recurse=False))
    kept = one.state_dict().keys()
    return buffers[0].keys() == buffers[1].keys() and all(
        torch.equal(buffer.cpu(), buffers[1][name]) for name, buffer in buffers[0].items() if name not in kept
    )


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[name] for name in vars(module) if name.endswith("_hooks"))
