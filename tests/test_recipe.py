"""What can be kept by name is made again the same, and nothing else is ever called."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tether.errors import UsageError
from tether.spark.recipe import Recipe, recipe_of, recipe_of_module, resolve


class Net(nn.Module):
    """Has a plain attribute that is no argument's name, a part, and a buffer that is not among its weights."""

    def __init__(self, width: int, factor: float = 1.0) -> None:
        super().__init__()
        self.width = width
        self._scale = factor
        self.part = nn.Linear(width, 2)
        self.register_buffer("constant", torch.full((2,), factor), persistent=False)


class Plain(nn.Module):
    """Forgets what it was made with."""

    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.twice = 2 * depth


class Private(nn.Module):
    """Keeps what it was made with to itself."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self._factor = factor


def make_net(width: int) -> nn.Module:
    return Net(width)


def make_anything(width: int):  # type: ignore[no-untyped-def]
    return Net(width)


def make_text() -> str:
    return "no module"


class Outer:
    """Something to look in."""

    Inner = os.system
    net = staticmethod(make_net)

    class Net(nn.Module):
        """A class in a class."""


MAKERS: dict[str, Callable[..., Any]] = {
    "a class with arguments": functools.partial(nn.Linear, 4, 3),
    "keywords and tuples": functools.partial(nn.Conv2d, 1, 2, kernel_size=(3, 1), padding_mode="zeros"),
    "a class of one's own": functools.partial(Net, 3, factor=2.0),
    "an annotated function": functools.partial(make_net, 3),
    "a class in a class": Outer.Net,
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_what_has_a_name_and_plain_arguments_is_made_again(maker: Callable[..., Any]) -> None:
    recipe = recipe_of(maker, nn.Module)
    assert recipe is not None
    again = recipe.make(nn.Module)
    assert str(again) == str(maker())
    if isinstance(maker, functools.partial):
        made = recipe.maker(nn.Module)
        assert (made.func, made.args, made.keywords) == (maker.func, maker.args, maker.keywords)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "maker",
    [
        lambda: nn.Linear(2, 2),
        make_anything,
        make_text,
        functools.partial(nn.Sequential, nn.ReLU()),
        functools.partial(Net, 3, factor=torch.ones(())),
        functools.partial(functools.partial(nn.Linear, bias=object()), 2, 2),
        os.system,
        os.getpid,
    ],
)
def test_what_has_no_name_or_other_arguments_has_no_recipe(maker: Callable[..., Any]) -> None:
    assert recipe_of(maker, nn.Module) is None


MODULES: dict[str, nn.Module] = {
    "layers": nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=(1, 0), bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.ReLU(inplace=True),
        nn.Dropout(0.25),
        nn.Sequential(nn.Flatten(), nn.Linear(8, 3)),
    ),
    "named layers": nn.Sequential(OrderedDict(words=nn.Embedding(5, 4, padding_idx=0), rest=nn.LayerNorm((4,)))),
    "one of one's own": Net(3),
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_a_module_that_there_is_is_made_again_but_for_its_weights(module: nn.Module) -> None:
    recipe = recipe_of_module(module)
    assert recipe is not None
    again = recipe.make(nn.Module)
    assert str(again) == str(module)
    again.load_state_dict(module.state_dict())


def changed(module: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "module",
    [
        Plain(depth=3),
        Net(3, factor=2.0),
        nn.Sequential(nn.Linear(2, 2), Plain(depth=3)),
        changed(nn.ReLU(), forward=torch.tanh),
        changed(nn.Linear(2, 2), note="another"),
        hooked(nn.Linear(2, 2)),
        hooked(nn.Sequential(nn.Linear(2, 2))),
        nn.TransformerEncoderLayer(8, 2, 16, activation=nn.functional.gelu),
        nn.ModuleList([nn.ReLU()]),
        nn.LSTM(3, 4),  # its constructor does not say what it takes
        Private(factor=3.0),
    ],
    ids=str,
)
def test_a_module_that_would_come_out_another_has_no_recipe(module: nn.Module) -> None:
    assert recipe_of_module(module) is None


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "posix:system",
        "builtins:exec",
        "builtins:eval",
        "subprocess:run",
        f"{__name__}:os.system",
        f"{__name__}:Outer.Inner",
        f"{__name__}:Outer.net",
        f"{__name__}:make_anything",
        f"{__name__}:make_text",
        f"{__name__}:make_net.__call__",
        f"{__name__}:make_net.__globals__",
        f"{__name__}:nothing",
        f"{__name__}:nn.Linear",
        "torch.nn:Linear.__init__",
        "torch.fx.graph_module:reduce_graph_module",
        "torch.jit:load",
        "torch.hub:load",
        "torch:load",
        "__main__:Net",
        "no.such.package:Net",
        "torch.nn.modules.linear:Linear()",
        "torch.nn.modules.linear",
        "../evil:Net",
        ":",
        "",
    ],
)
def test_a_name_that_is_no_maker_of_modules_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        resolve(name, nn.Module)
    with pytest.raises(UsageError):
        Recipe(name, ["true"]).make(nn.Module)


@pytest.mark.parametrize(
    "argument", [{"$": "dict", "items": []}, {"code": "text"}, {"$": "tensor", "at": 0}, [{"a": 1}]]
)
def test_arguments_are_numbers_and_texts(argument: Any) -> None:
    with pytest.raises(UsageError):
        Recipe("torch.nn.modules.linear:Linear", [argument, 3]).make(nn.Module)


def test_arguments_that_a_class_does_not_take_are_told() -> None:
    with pytest.raises(UsageError, match=r"Linear does not accept the arguments that it was saved with"):
        Recipe("torch.nn.modules.linear:Linear", [1]).make(nn.Module)
