"""Recipes: training tasks by name, each with its model, data, metric and default settings.

This module does not import torch, so that commands can list the names at once.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from thinwire.errors import RecipeError

if TYPE_CHECKING:
    from thinwire.tools.recipes.recipe import Recipe


# The functions that return the recipes; they take no arguments.
_MODULES = {
    "digits": ("digits", "mnist", "mnist-conv", "fashion-mnist", "fashion-mnist-conv"),
    "cifar10": ("cifar10",),
    "gpt": ("gpt", "gpt-10m"),
    "translate": ("translate", "translate-layernorm", "translate-transformer"),
}
_BUILT_IN = {
    name: f"thinwire.tools.recipes.{module}:{name.replace('-', '_')}"
    for module, names in _MODULES.items()
    for name in names
}


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with thinwire, simplest first."""
    return list(_BUILT_IN)


def get_recipe(name: str) -> "Recipe":
    """Return a recipe by its name, or the result of `module:function` or `folder/file.py:function`."""
    from thinwire.tools.recipes.recipe import Recipe

    where, colon, function_name = _BUILT_IN.get(name, name).rpartition(":")
    if not (colon and where and function_name):
        known = ", ".join([*_BUILT_IN, "or module:function or file.py:function for your own."])
        raise RecipeError(f"unknown recipe {name!r}: give one of {known}")
    module = _import_file(name, Path(where)) if where.endswith(".py") else _import_module(name, where)
    function = getattr(module, function_name, None)
    if not callable(function):
        kind = "file" if where.endswith(".py") else "module"
        raise RecipeError(f"recipe {name!r}: the {kind} {where!r} has no function {function_name!r}.")
    recipe = function()
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise RecipeError(f"recipe {name!r}: {function_name}() returned {kind}, but it must return a Recipe.")
    return recipe


def _import_module(name: str, module_name: str) -> ModuleType:
    if "" not in sys.path:  # an installed command, unlike python -m, does not search the current folder
        sys.path.append("")
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        raise RecipeError(f"recipe {name!r}: cannot import {error.name!r}; is it on PYTHONPATH?") from error


def _import_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise RecipeError(f"recipe {name!r}: there is no file {str(path)!r}.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # the file may import its neighbours
        sys.path.insert(0, folder)
    module = _import_module(name, path.stem)
    if module.__file__ is None or Path(module.__file__).resolve() != path.resolve():
        raise RecipeError(f"recipe {name!r}: another module is named {path.stem!r}, so rename the file.")
    return module
