"""Recipes: a model, its data, its metric and good defaults under one name.

This module loads no torch, so that commands can list the names at once.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from thinwire.errors import RecipeError

if TYPE_CHECKING:
    from thinwire.tools.recipes.recipe import Recipe


# Where each recipe is made: the function is called without arguments and returns a Recipe.
_BUILT_IN = {
    "digits": "thinwire.tools.recipes.digits:digits",
    "mnist": "thinwire.tools.recipes.mnist:mnist",
    "mnist-conv": "thinwire.tools.recipes.mnist:mnist_conv",
    "fashion-mnist": "thinwire.tools.recipes.mnist:fashion_mnist",
    "fashion-mnist-conv": "thinwire.tools.recipes.mnist:fashion_mnist_conv",
    "cifar10": "thinwire.tools.recipes.cifar10:cifar10",
    "translate": "thinwire.tools.recipes.translate:translate",
    "translate-layernorm": "thinwire.tools.recipes.translate:translate_layernorm",
    "translate-transformer": "thinwire.tools.recipes.translate:translate_transformer",
}


def recipe_names() -> list[str]:
    """The names of the recipes that come with thinwire, simplest first."""
    return list(_BUILT_IN)


def get_recipe(name: str) -> "Recipe":
    """Return the recipe of that name, or call `module:function` for a user's own."""
    from thinwire.tools.recipes.recipe import Recipe

    where = _BUILT_IN.get(name, name)
    module_name, colon, function_name = where.partition(":")
    if not (colon and module_name and function_name):
        known = ", ".join(_BUILT_IN)
        raise RecipeError(f"unknown recipe {name!r}: give one of {known}, or module:function for your own.")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if "" not in sys.path:  # an installed command, unlike python -m, does not look in the current folder
            sys.path.insert(0, "")
            return get_recipe(name)
        raise RecipeError(f"recipe {name!r}: cannot import {error.name!r}; is it on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RecipeError(f"recipe {name!r}: module {module_name!r} has no function {function_name!r}.")
    recipe = function()
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise RecipeError(f"recipe {name!r}: {function_name}() returned {kind}, a Recipe is needed.")
    return recipe


__all__ = ["get_recipe", "recipe_names"]
