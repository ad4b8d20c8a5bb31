"""Changes the class of a module that exists."""

from __future__ import annotations

from typing import Any


def become(part: Any, kind: type, *, prefix: str = "", home: str = "") -> Any:
    """Put the class `kind` before the class of a module, so that its methods run first, and return the module.

    Modules of one class share the new class. prefix: begins the new class's name, before the name of the module's class.
    home: the Python module that the new class states as its own; by default, that of `kind`.
    """
    cls = type(part)
    # Python keeps the subclasses of a class weakly, so nothing keeps a class whose modules are gone.
    existing = (subclass for subclass in cls.__subclasses__() if subclass.__bases__ == (kind, cls))
    part.__class__ = next(existing, None) or type(
        prefix + cls.__name__, (kind, cls), {"__module__": home or kind.__module__}
    )
    return part
