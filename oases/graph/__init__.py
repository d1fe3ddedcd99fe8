"""Old path of modules that have moved (oases/moved.py)."""

from oases.moved import forward

__getattr__ = forward(__name__)
