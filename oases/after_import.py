"""Functions that run once a module of another package is loaded, without loading it: most runs need few of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AfterImport(MetaPathFinder, Loader):
    """Finder and loader of one module that calls a function on it once it is loaded."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self._name, self._function = name, function
        self._loader: Any = None
        self._looking = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Spec of the module with this object as its loader; who asks for it may never load it."""
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the module's own loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, whose loader is its own from now on, then call the function."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        self._function(module)


def after_import(name: str, function: Callable[[Any], None]) -> None:
    """Call a function on a module: now if it is loaded, else as soon as it is."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, function))
