"""The container walk of the input and output casts."""

import collections
import dataclasses
import enum
import types
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ampctx import AmpTypeError
from ampctx.casts.arguments import map_floating

HALF, FLOAT = torch.float16, torch.float32


def T(*shape):
    return torch.ones(shape or (2,))


class Point(NamedTuple):
    x: object
    y: object = 1


class NamedPlus(Point):
    def norm(self):
        return self.x


MyDict, MyList, MySet = type("MyDict", (dict,), {}), type("MyList", (list,), {}), type("MySet", (set,), {})
MyTuple = type("MyTuple", (tuple,), {"__slots__": ()})


class ModelOutput(collections.OrderedDict):
    """Like transformers': items and attributes are the same values, and the constructor takes fields."""

    def __init__(self, logits=None, hidden=None, **kwargs):
        super().__init__(logits=logits, hidden=hidden, **kwargs)
        for k, v in self.items():
            super().__setattr__(k, v)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class Batch:
    x: object
    label: object = None
    cache: object = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object
    n: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: object


@dataclasses.dataclass(eq=False)
class Listed(list):
    """A list whose elements stay, with a field."""

    x: object


class Movable:
    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return Movable(self.x.to(dtype))


def test_tensors():
    for t in (torch.arange(2), torch.ones(2, dtype=torch.complex64), torch.tensor([True]), torch.ones(2).half()):
        assert map_floating(t, HALF) is t
    for t in (torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)):
        assert map_floating(t, HALF).dtype == HALF
    assert map_floating(nn.Parameter(T()), HALF).grad_fn is not None
    sparse = map_floating(torch.eye(2).to_sparse(), HALF)
    assert (sparse.layout, sparse.dtype) == (torch.sparse_coo, HALF)


SAMPLES = {
    "list": [T(), 1, None],
    "tuple": (T(), "a"),
    "list-subclass": MyList([T()]),
    "tuple-subclass": MyTuple([T()]),
    "namedtuple": Point(T()),
    "namedtuple-subclass": NamedPlus(T(), 2),
    "torch-return-type": torch.return_types.max((T(), torch.arange(2))),
    "deque": collections.deque([T()], maxlen=5),
    "set": {T()},
    "set-subclass": MySet([T(), 1]),
    "frozenset": frozenset([T()]),
    "dict": {"x": T(), "y": [T()]},
    "dict-subclass": MyDict(x=T()),
    "OrderedDict": collections.OrderedDict(x=T()),
    "defaultdict": collections.defaultdict(list, x=T()),
    "UserDict": collections.UserDict(x=T()),
    "mappingproxy": types.MappingProxyType({"x": T()}),
    "ModelOutput": ModelOutput(T(), hidden=(T(), T())),
    "dataclass": Batch(T(), "label"),
    "frozen-dataclass": Frozen(T()),
    "slotted-dataclass": Slotted(T()),
    "dataclass-of-a-list": Listed(T()),
    "nested": {"a": [(Point(T()), Batch({"k": T()}))]},
    "Movable": Movable(T()),
}


def leaves(value):
    """Every tensor in a value, found without the code under test."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, collections.abc.Mapping):
        return [t for v in value.values() for t in leaves(v)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in leaves(getattr(value, f.name))]
    if isinstance(value, Movable):
        return [value.x]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return [t for v in value for t in leaves(v)]
    return []


def test_what_travels_with_a_container():
    d = collections.defaultdict(list, x=T(), n=3)
    result = map_floating(d, HALF)
    assert result["missing"] == []
    assert result["n"] == 3
    assert "missing" not in d
    assert map_floating(collections.deque([T()], maxlen=5), HALF).maxlen == 5
    out = map_floating(ModelOutput(T(), hidden=(T(),)), HALF)
    assert out.logits is out["logits"]
    assert out.hidden[0].dtype == HALF
    assert list(out) == ["logits", "hidden"]
    tagged = MyDict(x=T())
    tagged.note = "kept"
    assert map_floating(tagged, HALF).note == "kept"
    assert map_floating(NamedPlus(T(), 2), HALF).norm().dtype == HALF
    batch = Batch(T())
    batch.cache = T()
    assert map_floating(batch, HALF).cache.dtype == HALF
    assert map_floating(Frozen(T()), HALF).n == 3


class Colour(enum.Enum):
    RED = 1


PLAIN = [None, 3, 2.5, 1j, True, "text", b"bytes", bytearray(b"ab"), range(3), slice(1), Colour.RED, len, object()]
OF_LIBRARIES = [torch.float32, torch.device("cpu"), torch.Size([2]), np.ones(2, dtype=np.float32), np.float32(1)]
CLASSES_AND_MODULES = [nn.Linear, Movable, Batch, nn.Linear(2, 2)]
ITERATORS = [(T() for _ in range(2)), iter([T()])]


@pytest.mark.parametrize(
    "value", PLAIN + OF_LIBRARIES + CLASSES_AND_MODULES + ITERATORS, ids=lambda v: type(v).__name__
)
def test_left_alone(value):
    assert map_floating(value, HALF) is value


def test_packed_sequences():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    result = map_floating(packed, HALF)
    assert type(result) is type(packed)
    assert result.data.dtype == HALF
    assert result.batch_sizes is packed.batch_sizes
    tokens = nn.utils.rnn.pack_sequence([torch.arange(3)])
    assert map_floating(tokens, HALF) is tokens


def test_a_container_that_cannot_be_rebuilt_is_named():
    class Stubborn(dict):
        def __init__(self, token):
            super().__init__(x=token)

        def __copy__(self):
            raise NotImplementedError("no copies")

    with pytest.raises(AmpTypeError, match=r"cannot rebuild a .*Stubborn.*no copies.*method to\(dtype\)"):
        map_floating([Stubborn(T())], HALF)
    same = Stubborn(torch.arange(2))
    assert map_floating(same, HALF) is same
