"""Leaves out what this machine cannot run: tests marked cuda without a GPU, tests marked large unless asked for."""

import torch


def pytest_collection_modifyitems(config, items):
    unwanted = set()
    if not torch.cuda.is_available():
        unwanted.add("cuda")
    if "large" not in config.getoption("markexpr"):
        unwanted.add("large")
    left_out = [item for item in items if unwanted.intersection(mark.name for mark in item.iter_markers())]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
