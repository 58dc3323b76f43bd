"""Names of a package that load on first use (PEP 562), so that importing the package costs next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], packages: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, by the names in each of `modules`."""
    homes = {name: module for module, names in modules.items() for name in names.split()}
    names = sorted(homes)

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
        return vars(import_module(f"dream_trainer.{homes[name]}"))[name]

    return load, lambda: names, names
