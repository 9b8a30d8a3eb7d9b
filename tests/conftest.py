"""Shared by all tests: a cuda test without a GPU is skipped with its reason, never passed silently."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device (torch {torch.__version__})"))
