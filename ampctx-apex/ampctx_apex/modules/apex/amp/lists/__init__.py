"""apex.amp.lists: which functions apex cast at O1, as data to look at. torch's autocast has tables of its own."""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
