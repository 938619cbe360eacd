"""apex.mlp: a chain of linear layers, each followed by the same activation."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from .mlp import MLP, MlpFunction, mlp_function

__all__ = ["MLP", "MlpFunction", "mlp_function"]
