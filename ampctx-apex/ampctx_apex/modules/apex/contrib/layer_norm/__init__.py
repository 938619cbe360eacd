"""apex.contrib.layer_norm: a LayerNorm over the last dimension."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
