"""Functions as their source declares them: names and signatures without an import, for torch takes seconds to load."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cached_property, lru_cache, reduce
from operator import or_
from pathlib import Path
from types import NoneType
from typing import Any

from polytempo.spec.text.names import Names, names
from polytempo.spec.text.resolution import Function

_PACKAGE = Path(__file__).parents[2]
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "None": NoneType}


class Declaration:
    """A function of the package that can be asked for its signature. A call of it checks nothing more."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self.__name__ = module, name

    def __call__(self, *values: object, **more: object) -> Declaration:
        """A call's result is the declaration itself."""
        return self

    def __repr__(self) -> str:
        return self.__name__

    @cached_property
    def __signature__(self) -> inspect.Signature:
        given = self._source.args
        kinds = [
            *((each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in given.args),
            *((each, inspect.Parameter.VAR_POSITIONAL) for each in [given.vararg] if each),
            *((each, inspect.Parameter.KEYWORD_ONLY) for each in given.kwonlyargs),
        ]
        first = len(given.args) - len(given.defaults)
        defaults = dict(zip([each.arg for each in given.args[first:]], given.defaults, strict=True))
        defaults |= {each.arg: node for each, node in zip(given.kwonlyargs, given.kw_defaults, strict=True) if node}
        return inspect.Signature(
            [
                inspect.Parameter(
                    each.arg,
                    kind,
                    default=_default(defaults[each.arg]) if each.arg in defaults else inspect.Parameter.empty,
                    annotation=ast.unparse(each.annotation) if each.annotation else inspect.Parameter.empty,
                )
                for each, kind in kinds
            ]
        )

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: _hint(str(each.annotation)) for name, each in self.__signature__.parameters.items()}

    @cached_property
    def _source(self) -> ast.FunctionDef | ast.AsyncFunctionDef:
        found = _defined(self._module, self.__name__)
        if found is None:
            raise LookupError(f"{self._module} declares no function {self.__name__}")
        return found


def declared() -> Names:
    """All names that a call may use, with declarations in place of functions. `OSError` where there is no source."""
    return names(_declarations)


def _declarations(folder: str) -> Mapping[str, Function]:
    """The folder's public names."""
    for node in _parsed(folder).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {name: Declaration(folder, name) for name in ast.literal_eval(node.value)}
    raise LookupError(f"{folder} declares no __all__")


def _defined(module: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function's source, in `module` or where that imports it from."""
    for node in _parsed(module).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom):
            original = {alias.asname or alias.name: alias.name for alias in node.names}
            if name in original:
                return _defined(str(node.module).removeprefix("polytempo."), original[name])
    return None


@lru_cache(maxsize=128)
def _parsed(module: str) -> ast.Module:
    path = _PACKAGE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _default(node: ast.expr) -> object:
    """The default's value; a name stands for itself."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Declaration("", ast.unparse(node))


def _hint(annotation: str) -> Any:
    """The type of an annotation; a part that is not plain admits everything."""
    kinds = [_PLAIN.get(part.strip(), Declaration) for part in annotation.split("|")]
    return reduce(or_, kinds[1:], kinds[0])
