"""Verification rules from single papers. Importing this package registers the rules."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.endswith("_training"):
        importlib.import_module(f"{__name__}.{_module.name}")
