"""apex.contrib.xentropy: the cross entropy with label smoothing and a padding label."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from .softmax_xentropy import SoftmaxCrossEntropyLoss

__all__ = ["SoftmaxCrossEntropyLoss"]
