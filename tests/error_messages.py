"""Every error message in the package's source, with `…` for the values that are filled in.

They are read from the syntax trees: our own errors, built-in exceptions with a message of ours,
HTTP and command-line refusals, and the doctor's findings. A message that only passes on another
one's text is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import xinference_xavier
from xinference_xavier import errors

ROOT = Path(xinference_xavier.__file__).parent
FILLED_IN = "…"
FINDING = "Finding"
ECHO = "echo"  # a command's output to standard error
FOREIGN = {"HTTPException", "UsageError", "ClickException"}
PLAIN = {"ValueError", "TypeError", "RuntimeError", "TimeoutError", "OSError", "KeyError"}
POSITION = {"HTTPException": 1, FINDING: 1}
"""The position of the text among the arguments, where it is not the first."""

_Tree = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


def messages(root: Path = ROOT) -> dict[str, str]:
    """Each message, and a place that makes it (there may be others)."""
    trees = {file: ast.parse(file.read_text()) for file in sorted(root.rglob("*.py"))}
    ours = _error_classes(list(trees.values()))
    constants = _constants(list(trees.values()))
    found: dict[str, str] = {}
    for file, tree in trees.items():
        for scope, call in _calls(tree, tree):
            for text in _texts(call, scope, constants, ours):
                plain = normal(text)
                if re.sub(rf"[{FILLED_IN}\W]", "", plain):
                    found.setdefault(plain, f"{file.relative_to(root)}:{call.lineno}")
    return found


def normal(text: str) -> str:
    """The text without quotes around filled-in values; adjacent ones become one."""
    text = re.sub(rf"(['\"]?){FILLED_IN}\1", FILLED_IN, " ".join(text.split()))
    return re.sub(rf"{FILLED_IN}(?:[ ,]*{FILLED_IN})+", FILLED_IN, text)


def _error_classes(trees: Sequence[ast.Module]) -> set[str]:
    return {
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    }


def _constants(trees: Sequence[ast.Module]) -> dict[str, str]:
    """Texts of module-level names that have one meaning in the whole package."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = node.value
                text = value.value if isinstance(value, ast.Constant) else FILLED_IN
                name = node.targets[0].id
                found.setdefault(name, set()).add(text if isinstance(text, str) else FILLED_IN)
    return {name: texts.pop() for name, texts in found.items() if len(texts) == 1}


def _calls(node: ast.AST, scope: _Tree) -> Iterator[tuple[_Tree, ast.Call]]:
    """Every call, with the innermost function that it is in."""
    for child in ast.iter_child_nodes(node):
        inside = child if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else scope
        if isinstance(child, ast.Call):
            yield scope, child
        yield from _calls(child, inside)


def _texts(
    call: ast.Call, scope: _Tree, constants: Mapping[str, str], ours: set[str]
) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name == ECHO and not any(keyword.arg == "err" for keyword in call.keywords):
        return
    if name not in ours | FOREIGN | PLAIN | {FINDING, ECHO}:
        return
    alternatives = [list(_written(argument, scope, constants)) for argument in call.args]
    for arguments in product(*alternatives):
        yield _said(name, arguments)


def _said(name: str, arguments: tuple[str, ...]) -> str:
    """The error's text; the classes of `errors` compose their own."""
    made = getattr(errors, name, None)
    if made is not None:
        return str(made(*arguments))
    position = POSITION.get(name, 0)
    return arguments[position] if position < len(arguments) else ""


def _written(node: ast.expr, scope: _Tree, constants: Mapping[str, str]) -> Iterator[str]:
    """The possible texts of an expression, as far as the source has them."""
    if isinstance(node, ast.Constant):
        yield node.value if isinstance(node.value, str) else FILLED_IN
    elif isinstance(node, ast.JoinedStr):
        parts = [list(_written(part, scope, constants)) for part in node.values]
        yield from map("".join, product(*parts))
    elif isinstance(node, ast.FormattedValue):
        yield constants.get(ast.unparse(node.value), FILLED_IN)
    elif isinstance(node, ast.IfExp):
        yield from _written(node.body, scope, constants)
        yield from _written(node.orelse, scope, constants)
    elif isinstance(node, ast.Name):
        assigned = list(_assigned(node.id, scope))
        for value in assigned:
            yield from _written(value, scope, constants)
        if not assigned:
            yield constants.get(node.id, FILLED_IN)
    else:
        yield FILLED_IN


def _assigned(name: str, scope: _Tree) -> Iterator[ast.expr]:
    """The texts that are assigned to a local name."""
    for node in ast.walk(scope):
        match node:
            case ast.Assign(
                targets=[ast.Name(id)], value=ast.Constant() | ast.JoinedStr() as value
            ) if id == name:
                yield value
