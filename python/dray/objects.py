"""Objects of Python as bytes, without pickle: reading them runs no code of whoever wrote them.

What is kept: None, bool, int, float, str, bytes, lists, tuples, dicts, sets, numpy's arrays and numbers, torch's tensors
and dtypes, TensorDicts; each comes back as what it was, arrays and tensors writable. Anything else is refused, or, where
the caller asks for it, pickled."""
from __future__ import annotations

import json
import re
import struct
import sys
from typing import Any

import numpy as np

_TEXT, _TREE, _PICKLE = b"s", b"j", b"p"  # the first byte says how the rest is read
_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,6}(\[[0-9A-Za-z]{1,8}\])?")  # of an array, as numpy writes it
_PLAIN = (type(None), bool, int, float, str)


def dumps(value: Any, pickle: bool = False) -> bytes:
    """TypeError: it holds something that is not kept. pickle: then the whole value is pickled."""
    if type(value) is str:
        return _TEXT + value.encode("utf-8", "surrogatepass")
    parts: list = []
    try:
        tree = json.dumps(_tree(value, parts), separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        if not pickle:
            raise TypeError(str(error)) from None
        import pickle as p
        return _PICKLE + p.dumps(value, protocol=p.HIGHEST_PROTOCOL)
    return b"".join([_TREE, struct.pack("<I", len(tree)), tree, *parts])


def loads(data: Any, pickle: bool = False) -> Any:
    """What dumps was given. ValueError: this is none of its bytes, or pickled, which was not asked for."""
    data = memoryview(data).cast("B")
    kind, rest = bytes(data[:1]), data[1:]
    if kind == _TEXT:
        return str(rest, "utf-8", "surrogatepass")
    if kind == _PICKLE and pickle:
        import pickle as p
        return p.loads(rest)
    if kind == _PICKLE:
        raise ValueError("the object is pickled: expected to be read with pickle allowed, which runs the code that it names")
    try:
        if kind != _TREE:
            raise ValueError(f"the first byte is {kind!r}")
        size, = struct.unpack_from("<I", rest)
        return _value(json.loads(bytes(rest[4:4 + size])), _Parts(rest[4 + size:]))
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, struct.error) as error:
        raise ValueError(f"these are no bytes of dray.objects: {error}") from None


class _Parts:
    """The bytes behind the tree, one part after the other."""

    def __init__(self, data):
        self._data = data

    def take(self, size):
        if size < 0 or size > len(self._data):
            raise ValueError(f"{size} bytes expected, found {len(self._data)}")
        taken, self._data = self._data[:size], self._data[size:]
        return bytearray(taken)


def _torch():
    """None where this process has not imported it: then no value is of it."""
    return sys.modules.get("torch")


def _tree(value, parts):
    """The value as JSON holds it: {"$": [kind, ...]} of what JSON lacks, whose bytes go into parts."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_tree(each, parts) for each in value]
    if kind is dict:
        if "$" not in value and all(type(key) is str for key in value):
            return {key: _tree(each, parts) for key, each in value.items()}
        return {"$": ["dict", [[_tree(key, parts), _tree(each, parts)] for key, each in value.items()]]}
    if kind in (tuple, set, frozenset):
        return {"$": [kind.__name__, [_tree(each, parts) for each in value]]}
    if kind in (bytes, bytearray):
        parts.append(bytes(value))
        return {"$": [kind.__name__, len(value)]}
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(value, parts)
    torch = _torch()
    if torch is not None:
        if isinstance(value, torch.Tensor):
            return _tensor(torch, value, parts)
        if kind is torch.dtype:
            return {"$": ["dtype", str(value)[6:]]}
        if kind is torch.Size:
            return {"$": ["Size", list(value)]}
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and tensordict.is_non_tensor(value):  # a NonTensorStack is a TensorDict, too, without fields
        return _tree(value.tolist(), parts)
    if tensordict is not None and isinstance(value, tensordict.LazyStackedTensorDict):  # each has fields of its own
        return {"$": ["stack", value.stack_dim, [_tree(each, parts) for each in value.tensordicts]]}
    if tensordict is not None and isinstance(value, tensordict.TensorDictBase):
        return {"$": ["tensordict", list(value.batch_size),
                      {name: _field(tensordict, value.get(name), parts) for name in value.keys()}]}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} is kept only where pickle is allowed")


def _field(tensordict, value, parts):
    """Of a TensorDict, which would make tensors of what is no tensor where it was given as it is."""
    if not tensordict.is_non_tensor(value):
        return _tree(value, parts)
    if isinstance(value, tensordict.NonTensorStack):
        return {"$": ["values", value.stack_dim, [_field(tensordict, each, parts) for each in value.tensordicts]]}
    return {"$": ["value", list(value.batch_size), _tree(value.data, parts)]}


def _array(value, parts):
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("a masked array, whose mask would be lost, is kept only where pickle is allowed")
    if value.dtype.hasobject and value.dtype.kind == "O" and isinstance(value, np.ndarray):
        return {"$": ["objects", list(value.shape), [_tree(each, parts) for each in value.reshape(-1).tolist()]]}
    if value.dtype.kind not in "biufcSUmM":
        raise TypeError(f"an array of {value.dtype} is kept only where pickle is allowed")
    parts.append(np.ascontiguousarray(value).tobytes())
    return {"$": ["array" if isinstance(value, np.ndarray) else "number", value.dtype.str, list(value.shape), len(parts[-1])]}


def _tensor(torch, value, parts):
    if value.is_nested:
        return {"$": ["nested", str(value.layout)[6:], [_tensor(torch, each, parts) for each in value.unbind()]]}
    if value.layout is not torch.strided or hasattr(value, "to_local") or value.is_quantized:
        raise TypeError(f"a tensor that is {'sharded' if hasattr(value, 'to_local') else value.layout} is kept only where "
                        "pickle is allowed")
    value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    parts.append(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return {"$": ["tensor", str(value.dtype)[6:], list(value.shape), len(parts[-1])]}


def _value(tree, parts):
    kind = type(tree)
    if kind is list:
        return [_value(each, parts) for each in tree]
    if kind is not dict:
        return tree
    if "$" not in tree:
        return {key: _value(each, parts) for key, each in tree.items()}
    name, *rest = tree["$"]
    return _KINDS[name](parts, *rest)


def _made_tensor(parts, dtype, shape, size):
    import torch
    dtype, raw = _of_torch(parts, dtype), parts.take(size)
    if not size and 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def _made_array(parts, dtype, shape, size):
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"an array of {dtype!r:.20}")
    kind, raw = np.dtype(dtype), parts.take(size)
    if not kind.itemsize and not shape:  # an empty string of numpy, of whose dtype frombuffer has no arrays
        return np.zeros((), kind)
    return np.frombuffer(raw, kind).reshape(shape)


def _made_objects(parts, shape, items):
    made = np.empty(len(items), dtype=object)
    for at, each in enumerate(items):
        made[at] = _value(each, parts)
    return made.reshape(shape)


def _made_nested(parts, layout, items):
    import torch
    layouts = {"jagged": torch.jagged, "strided": torch.strided}
    return torch.nested.as_nested_tensor([_value(each, parts) for each in items], layout=layouts[layout])


def _made_tensordict(parts, batch, columns):
    from tensordict import TensorDict
    return TensorDict({name: _value(each, parts) for name, each in columns.items()}, batch_size=batch)


def _made_stack(parts, dim, items):
    from tensordict import LazyStackedTensorDict
    return LazyStackedTensorDict(*(_value(each, parts) for each in items), stack_dim=dim)


def _made_value(parts, batch, tree):
    from tensordict import NonTensorData
    return NonTensorData(_value(tree, parts), batch_size=batch)


def _made_values(parts, dim, items):
    from tensordict import NonTensorStack
    return NonTensorStack(*(_value(each, parts) for each in items), stack_dim=dim)


def _of_torch(parts, name):
    import torch
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _size(parts, shape):
    import torch
    return torch.Size(shape)


_KINDS = {
    "dict": lambda parts, pairs: {_value(key, parts): _value(each, parts) for key, each in pairs},
    "tuple": lambda parts, items: tuple(_value(each, parts) for each in items),
    "set": lambda parts, items: {_value(each, parts) for each in items},
    "frozenset": lambda parts, items: frozenset(_value(each, parts) for each in items),
    "bytes": lambda parts, size: bytes(parts.take(size)),
    "bytearray": lambda parts, size: parts.take(size),
    "array": _made_array,
    "number": lambda parts, *of: _made_array(parts, *of)[()],
    "objects": _made_objects,
    "tensor": _made_tensor,
    "nested": _made_nested,
    "tensordict": _made_tensordict,
    "stack": _made_stack,
    "value": _made_value,
    "values": _made_values,
    "dtype": _of_torch,
    "Size": _size,
}
