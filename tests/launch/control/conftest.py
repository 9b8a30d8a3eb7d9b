"""The machine of these tests."""

from tests.launch.control.runs import home

__all__ = ["home"]
