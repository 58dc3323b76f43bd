"""Names of a package that load on first use (PEP 562), so that importing the package costs next to nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package: the names that its `if TYPE_CHECKING:` imports."""
    module = sys.modules[package]
    loader: Any = module.__loader__  # which also reads from a zip file
    blocks = [node for node in ast.parse(loader.get_data(module.__file__)).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    packages = [name for name, home in homes.items() if home == package]
    names = sorted(homes.keys() - packages)

    def load(name: str) -> Any:
        if name in packages:
            return import_module(f"{package}.{name}")
        if name not in homes:
            inside = () if name.startswith("_") else packages
            places = [place for place in inside if name in dir(import_module(f"{package}.{place}"))]
            hint = "".join(f". It is {package}.{place}.{name}" for place in places[:1])
            # Given these, Python names what is spelled alike.
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[package]
            )
        return vars(import_module(homes[name]))[name]

    return load, lambda: names, names
