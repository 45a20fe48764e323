"""What a model does with the keys and values that a cache returns: decided once a model, from its own source."""

import ast
import functools
import inspect
import textwrap

from torch import nn


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The attention module that updates each cache layer, by layer index."""
    modules = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and _updates_cache(type(module)):
            modules[index] = module
    return modules


@functools.cache
def _forward_tree(cls: type) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):
        return None


def _update_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update"


@functools.cache
def _updates_cache(cls: type) -> bool:
    tree = _forward_tree(cls)
    return tree is not None and any(_update_call(node) and len(node.args) >= 3 for node in ast.walk(tree))


@functools.cache
def passes_straight_through(cls: type) -> bool:
    """Whether `cls.forward` hands the result of `cache.update` unchanged to its attention function.

    Only then may a layer return less than all keys and values. Anything that cannot be shown from the source (keys
    expanded from a latent, concatenated, stored for other layers; no source) counts as no.
    """
    tree = _forward_tree(cls)
    if tree is None:
        return False
    updates = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _update_call(n.value)]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _name(n.func) == "attention_interface"]
    if len(updates) != 1 or len(calls) != 1 or not isinstance(updates[0].targets[0], ast.Tuple):
        return False
    names = [_name(target) for target in updates[0].targets[0].elts]
    passed = [_name(argument) for argument in calls[0].args[2:4]]
    if None in names or names != passed:
        return False
    begin, end = updates[0].end_lineno, calls[0].end_lineno
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in names and n.lineno > begin]
    return all(use in calls[0].args for use in uses if use.lineno <= end)


@functools.cache
def reshapes_keys(cls: type) -> bool:
    """Whether `cls` computes its attention in a method of its own that takes `key.view(...)`, for packed keys only."""
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name == "forward" or method.__qualname__.split(".")[0] != cls.__name__:
            continue
        arguments = set(inspect.signature(method).parameters) & {"key", "value"}
        if any(f"{argument}.view(" in inspect.getsource(method) for argument in arguments):
            return True
    return False


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None
