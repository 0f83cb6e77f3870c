"""What each of torch's operators does to tensors that are recorded: views, copies, moves; all else is
something computed, of which only the sources are known."""
from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from .probe import probe
from .provenance import (HERE, MOST_CODES, Book, Codes, Computed, Fill, Piece, Rect, Step, Store, codes_of)
from .rectangles import Place, contiguous, inside
from .tensors import NotRecorded, Recorded, place_of, tensors_among

COPIES = {"clone", "_to_copy", "contiguous", "lift_fresh_copy", "_pin_memory"}
NEW = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
       "new_zeros", "new_ones", "new_full", "new_empty_strided"}
# Operators that move elements and look at none: run once more on codes, they say where all went.
MOVES = {"index_select", "index", "_unsafe_index", "gather", "repeat", "roll", "flip", "take",
         "take_along_dim", "repeat_interleave", "tril", "triu", "rot90", "unsqueeze_copy", "expand_copy",
         "select_scatter", "slice_scatter", "view_copy", "permute_copy", "constant_pad_nd", "block_diag",
         "_reshape_copy", "_unsafe_view", "reshape_copy", "transpose_copy", "index_put", "unbind_copy",
         "split_copy", "split_with_sizes_copy", "pixel_shuffle", "channel_shuffle"}
# Operators that compute each element of itself and of numbers: run once more on real elements, they make the same.
STEPS = {"add", "sub", "rsub", "mul", "div", "neg", "exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal",
         "abs", "square", "pow", "sigmoid", "tanh", "softplus", "clamp", "clamp_min", "clamp_max", "relu", "exp2",
         "bitwise_not", "bitwise_and", "logical_not", "sign", "floor", "ceil", "round", "trunc"}
WHERE = {"index", "indices", "repeats"}  # arguments of these that say where elements go
INTO = {"index_put_", "scatter_", "index_copy_", "_index_put_impl_"}
ASKS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "allclose", "item", "is_same_size"}
UNWRITTEN = "memory that load_weights has not written"
MARK, MARKS = 1.2345e30, 1e18  # a number that stands for an element: MARK + its number * MARKS


class _Mode(TorchDispatchMode):
    """Sees what has no recorded tensor among its arguments: constants written into an engine's memory,
    and what was filled from recorded ones."""

    def __init__(self, recording):
        super().__init__()
        self.recording = recording

    @classmethod
    def _should_skip_dynamo(cls):
        """What it asks of torch would import its compiler."""
        return False

    def __enter__(self):
        self.recording.inside.depth = getattr(self.recording.inside, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error):
        self.recording.inside.depth -= 1
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return self.recording.run(function, arguments, keywords or {})


class Recording:
    """One run of a loader."""

    def __init__(self):
        self.book, self.inside, self.lock = Book(), threading.local(), threading.RLock()
        self.stores, self._kept = {}, []  # of plain memory: {its storage's address: Store}
        self.marks, self.numbers = [], set()  # numbers that stand for elements; sources of such
        self.done = False

    def mode(self):
        return _Mode(self)

    def is_inside(self):
        return getattr(self.inside, "depth", 0) > 0

    # ---- tensors -----------------------------------------------------------------------------

    def source(self, name, shape, dtype, device="cpu"):
        variant = self.book.add(name, shape, dtype)
        shadow = torch.empty(shape, dtype=dtype, device="meta")
        store = Store(self.book, shadow.numel(), dtype)
        place = place_of(shadow)
        store.write(place, Rect(variant, 0, place.strides))
        return Recorded(self, store, shadow, device)

    def target(self, tensor):
        """Memory of the engine: written to in the book alone."""
        return self._plain(tensor, target=True)

    def _plain(self, tensor, target=False):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.stores:
            count, own = storage.nbytes() // tensor.element_size(), None
            if not target:
                own = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                    storage, 0, (count,), (1,)) if tensor.device.type != "meta" else None
            self.stores[storage._cdata] = Store(self.book, count, tensor.dtype, own, target)
            self._kept.append(storage)
        return self.stores[storage._cdata]

    def store_of(self, tensor):
        """None: nothing of it is recorded."""
        if isinstance(tensor, Recorded):
            return tensor.store
        if tensor.layout != torch.strided:
            return None
        try:
            return self.stores.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):
            return None

    def _made(self, shadow, device):
        count = 0 if not shadow.numel() else place_of(shadow).last + 1
        return Recorded(self, Store(self.book, count, shadow.dtype), shadow, device)

    # ---- reading and writing -----------------------------------------------------------------

    def read(self, tensor, place=None):
        """Pieces of a tensor, as its dtype sees them."""
        place, store = place or place_of(tensor), self.store_of(tensor)
        if not place.count:  # the places of what was written are no parts of it
            return []
        if store is None:
            return self._literal(tensor, place)
        if tensor.dtype.itemsize != store.dtype.itemsize:
            return [self._computed("bytes seen as another dtype", [tensor], place.sizes)]
        pieces = store.read(place)
        if pieces is None:
            codes = store.codes(place)
            if codes is None:
                return [self._computed("pieces of too large a tensor", [tensor], place.sizes)]
            rest = self.book.entry(Computed(UNWRITTEN))
            pieces = [Piece(None, place.sizes, Codes(torch.where(codes == 0, rest, codes)))]
        elif store.own is None and sum(Place(0, p.sizes, ()).count for p in pieces) < place.count:
            pieces = [Piece(None, place.sizes, Computed(UNWRITTEN)), *pieces]
        if tensor.dtype != store.dtype:
            return self._each(pieces, lambda i: self.book.seen_as(i, tensor.dtype), "bits of another dtype")
        return pieces

    def _literal(self, tensor, place):
        flat = tensor.detach()
        if flat.device.type == "meta":
            return [Piece(None, place.sizes, Computed("memory that is not there"))]
        values, which = torch.unique(flat.double(), return_inverse=True)
        if len(values) == 1:
            return [Piece(None, place.sizes, Fill(values.item()))]
        if len(values) > 1024 or flat.numel() > MOST_CODES:
            return [Piece(None, place.sizes, Computed("data of the loader's own"))]
        entries = torch.tensor([self.book.entry(Fill(v)) for v in values.tolist()])
        return [Piece(None, place.sizes, Codes(entries[which].expand(place.sizes)))]

    def _each(self, pieces, change, why, constant=None):
        """Pieces with their variants changed; what no layout says becomes something computed. constant:
        the number that becomes of a constant."""
        made = []
        for piece in pieces:
            value = piece.value
            if not isinstance(value, Computed):
                value = self.book.map(value, change, constant)
                if value is None:
                    value = Computed(why, frozenset(self.book.sources_of(piece.value)))
            made.append(piece._replace(value=value))
        return made

    def cast(self, pieces, before, after):
        if before == after:
            return pieces
        return self._each(pieces, lambda i: self.book.cast(i, before, after), f"rounded to {after} on its way",
                          lambda value: torch.tensor(value, dtype=before).to(after).item())

    def _stepped(self, function, name, arguments, keywords, shadow):
        """Pieces of what an operator computes element by element of one recorded tensor; None: it does not."""
        tensors = tensors_among(arguments, keywords)
        if name.rstrip("_") not in STEPS or len(tensors) != 1 or tensors[0].shape != shadow.shape or \
                any(isinstance(a, (list, tuple)) for a in arguments):
            return None
        of = tensors[0]
        step = Step(function, tuple(HERE if a is of else (type(a), a) for a in arguments),
                    tuple((n, (type(a), a)) for n, a in keywords.items()), of.dtype, shadow.dtype)
        return self._each(self.read(of), lambda i: self.book.step(i, step), _named(name, arguments),
                          lambda value: step(torch.tensor(value, dtype=of.dtype)).item())

    def write(self, tensor, pieces):
        place, store = place_of(tensor), self.store_of(tensor)
        if tensor.dtype.itemsize != store.dtype.itemsize:
            sources = frozenset().union(*(self.book.sources_of(p.value) for p in pieces))
            store.write(Place(0, (store.count,), (1,)), Computed("bytes seen as another dtype", sources))
            return
        if tensor.dtype != store.dtype:
            pieces = self._each(pieces, lambda i: self.book.seen_as(i, store.dtype), "bits of another dtype")
        for piece in pieces:
            store.write(place if piece.found is None else inside(place, piece.found, piece.sizes),
                        piece.value)

    def sources(self, tensor):
        store = self.store_of(tensor)
        if store is None:
            return set()
        return set().union(*(self.book.sources_of(p.value) for p in self.read(tensor)))

    def _computed(self, how, tensors, sizes):
        sources = set()
        for t in tensors:
            store = self.store_of(t)
            for write in store.writes if store else ():
                sources |= self.book.sources_of(write.value)
        return Piece(None, tuple(sizes), Computed(how, frozenset(sources)))

    def codes(self, tensor):
        """A number for each element of a tensor; None: too many of them."""
        if tensor.numel() > MOST_CODES:
            return None
        made = torch.zeros(tuple(tensor.shape), dtype=torch.int64)
        for piece in self.read(tensor):
            place = Place(0, tuple(made.shape), contiguous(tuple(made.shape)))
            if piece.found is not None:
                place = inside(place, piece.found, piece.sizes)
            made.as_strided(place.sizes, place.strides, place.offset).copy_(
                codes_of(self.book, piece.value, piece.sizes))
        return made

    # ---- operators ---------------------------------------------------------------------------

    def run(self, function, arguments, keywords):
        if self.done:
            return function(*arguments, **keywords)
        kind = _kind(function)
        flat = tensors_among(arguments, keywords)
        known = [a for a in flat if isinstance(a, Recorded) or self._is_written(a)]
        into = _written(kind, arguments, keywords)
        targets = [t for t in into if isinstance(t, Recorded) or self.store_of(t) is not None]
        if not known and not targets:  # without the lock: modules that other threads import compute, too
            return function(*arguments, **keywords)
        with self.lock:
            return self._run(kind, function, arguments, keywords, flat, into, known)

    def _run(self, kind, function, arguments, keywords, flat, into, known):
        name = kind.name
        if into:
            return self._writes(kind, function, arguments, keywords, into, known)
        if name in ASKS:
            return self._asked(name, function, arguments, keywords, known)
        if kind.is_view:
            return self._view(function, arguments, keywords, flat[0])
        if name in NEW:
            return function(*_changed(arguments, _bare), **_changed(keywords, _bare))
        return self._makes(kind, function, arguments, keywords, known)

    def _is_written(self, tensor):
        store = self.store_of(tensor)
        return store is not None and bool(store.writes)

    def _view(self, function, arguments, keywords, of):
        if not isinstance(of, Recorded):
            return function(*arguments, **keywords)
        out = function(*_changed(arguments, _shadow), **_changed(keywords, _shadow))
        return _changed(out, lambda s: Recorded(self, of.store, s, of.device))

    def _writes(self, kind, function, arguments, keywords, into, known):
        """Operators that write into what they are given."""
        name = kind.name
        for t in into:
            if self.store_of(t) is None:  # memory of the loader's own
                if not self.is_inside():
                    raise NotRecorded(f"a thread that is not recorded writes to memory of its own ({name})",
                                      set().union(*(self.sources(k) for k in known)))
                if t.device.type == "meta":
                    continue
                self._plain(t)
        if name == "copy_":
            self._copy(into[0], arguments[1])
        elif name in ("fill_", "zero_", "full_"):
            self.write(into[0], self._filled(into[0], arguments[1] if name == "fill_" else 0))
        elif name in ("uniform_", "normal_", "random_", "exponential_", "bernoulli_"):
            self.write(into[0], [self._computed(f"random numbers ({name})", [], into[0].shape)])
        elif name in INTO and (codes := self._on_codes(function, arguments, keywords)) is not None:
            self.write(into[0], [Piece(None, tuple(into[0].shape), Codes(codes))])
        elif name in ("set_", "resize_", "set_data", "as_strided_"):
            raise NotRecorded(f"load_weights gives memory another owner ({name})")
        elif not kind.is_torchs:
            self._custom(name, function, arguments, keywords, into, known)
        elif len(into) == 1 and (pieces := self._stepped(function, name, arguments, keywords, into[0])) is not None:
            self.write(into[0], pieces)
        else:
            for t in into:
                self.write(t, [self._computed(_named(name, arguments), known, t.shape)])
        return None if not kind.returns else into[0] if kind.returns == 1 else tuple(into)

    def _copy(self, into, values):
        place = place_of(values)
        ahead = into.dim() - values.dim()
        if ahead < 0:  # leading ones
            place = Place(place.offset, place.sizes[-ahead:], place.strides[-ahead:])
            ahead = 0
        strides = (0,) * ahead + tuple(0 if n == 1 else s for n, s in zip(place.sizes, place.strides))
        if self.store_of(values) is None:
            pieces = self._literal(values.expand(into.shape), Place(0, tuple(into.shape), ()))
        else:
            pieces = self.read(values, Place(place.offset, tuple(into.shape), strides))
        pieces = self._spread(pieces, into.shape)
        self.write(into, self.cast(pieces, values.dtype, into.dtype))

    @staticmethod
    def _spread(pieces, shape):
        return [p._replace(sizes=tuple(shape)) if p.found is None else p for p in pieces]

    def _filled(self, tensor, value):
        sizes = tuple(tensor.shape)
        if isinstance(value, torch.Tensor):
            if self.store_of(value) is not None and self._is_written(value) or isinstance(value, Recorded):
                pieces = self.read(value, Place(value.storage_offset(), sizes, (0,) * len(sizes)))
                return self.cast(self._spread(pieces, sizes), value.dtype, tensor.dtype)
            value = value.item()
        if isinstance(value, float) and abs(value) > MARK / 2 and value not in (float("inf"), -float("inf")):
            mark = round((value - MARK) / MARKS)
            if 0 <= mark < len(self.marks) and value == MARK + mark * MARKS:
                variant, offset, dtype = self.marks[mark]
                piece = Piece(None, sizes, Rect(variant, offset, (0,) * len(sizes)))
                return self.cast([piece], dtype, tensor.dtype)
            return [Piece(None, sizes, Computed("a number computed from elements", frozenset(
                self.book.variants[v].source for v, _, _ in self.marks)))]
        return [Piece(None, sizes, Fill(value))]

    def _asked(self, name, function, arguments, keywords, known):
        """The loader asks for values, which it is not told: but a number that stands for an element."""
        tensor = known[0]
        if name == "_local_scalar_dense" and tensor.dtype.is_floating_point:
            pieces = self.read(tensor)
            if len(pieces) == 1 and isinstance(pieces[0].value, Rect):
                rect = pieces[0].value
                self.marks.append((rect.variant, rect.offset, tensor.dtype))
                self.numbers.add(self.book.variants[rect.variant].source)
                return MARK + (len(self.marks) - 1) * MARKS
            if len(pieces) == 1 and isinstance(pieces[0].value, Fill):
                return pieces[0].value.value
        raise NotRecorded(f"load_weights asks for values ({name})",
                          set().union(*(self.sources(k) for k in known)))

    def _makes(self, kind, function, arguments, keywords, known):
        """Operators that make tensors."""
        name = kind.name
        if name in COPIES:
            of = arguments[0]
            out = _shadow(of).clone() if name == "_pin_memory" else _on_shadows(function, arguments, keywords)
            made = self._made(out, keywords.get("device") or of.device)
            self.write(made, self.cast(self.read(of), of.dtype, made.dtype))
            return made
        if name in ("cat", "stack"):
            return self._joined(name, function, arguments, keywords)
        device = known[0].device
        if name in MOVES and (codes := self._on_codes(function, arguments, keywords)) is not None:
            dtype = tensors_among(arguments[:1], {})[0].dtype if arguments else known[0].dtype
            return _changed(codes, lambda c: self._of_codes(c, dtype, device))
        if not kind.is_torchs:
            return self._custom(name, function, arguments, keywords, (), known)
        try:
            out = _on_shadows(function, arguments, keywords)
        except Exception as failure:
            raise NotRecorded(f"load_weights computes {name}: {failure}",
                              set().union(*(self.sources(k) for k in known))) from failure
        if isinstance(out, torch.Tensor) and \
                (pieces := self._stepped(function, name, arguments, keywords, out)) is not None:
            made = self._made(out, device)
            self.write(made, pieces)
            return made
        return _changed(out, lambda s: self._of_computed(_named(name, arguments), s, known, device))

    def _of_computed(self, how, shadow, known, device):
        made = self._made(shadow, device)
        self.write(made, [self._computed(how, known, shadow.shape)])
        return made

    def _of_codes(self, codes, dtype, device):
        made = self._made(torch.empty(codes.shape, dtype=dtype, device="meta"), device)
        self.write(made, [Piece(None, tuple(codes.shape), Codes(codes.contiguous()))])
        return made

    def _joined(self, name, function, arguments, keywords):
        out = _on_shadows(function, arguments, keywords)
        tensors = arguments[0]
        made = self._made(out, tensors[0].device)
        d = keywords.get("dim", arguments[1] if len(arguments) > 1 else 0) % max(1, out.dim())
        at = 0
        for t in tensors:
            if name == "cat" and t.dim() == 1 and not t.numel():
                continue
            part = made.shadow.select(d, at) if name == "stack" else made.shadow.narrow(d, at, t.shape[d])
            at += 1 if name == "stack" else t.shape[d]
            view = Recorded(self, made.store, part, made.device)
            self._copy(view, t)
        return made

    def _on_codes(self, function, arguments, keywords):
        """The operator's result, of codes in the place of elements; None: they are too many, or it is not known where they
        go."""
        names = [a.name for a in function._schema.arguments]
        given = {**dict(zip(names, arguments)), **keywords}
        elements = tensors_among([a for name, a in given.items() if name not in WHERE], {})
        where = tensors_among([a for name, a in given.items() if name in WHERE], {})
        if given.get("accumulate") or given.get("reduce") is not None or len({t.dtype for t in elements}) > 1 or \
                any(isinstance(t, Recorded) or self._is_written(t) for t in where):
            return None
        codes = {id(t): self.codes(t) for t in elements}
        if None in codes.values():
            return None

        def coded(name, value):
            if name == "value":  # a number that is written, or the padding
                return self.book.entry(Fill(value))
            return _changed(value, lambda t: t.detach().cpu() if name in WHERE else codes[id(t)])
        if function._schema.name == "aten::constant_pad_nd" and "value" not in given:
            keywords = {**keywords, "value": 0}
        return function(*map(coded, names, arguments), **{name: coded(name, a) for name, a in keywords.items()})

    def _custom(self, name, function, arguments, keywords, into, known):
        """An operator that torch does not have: tried with digits, to see whether it only moves."""
        codes = probe(self, function, arguments, keywords, into)
        if into:
            for t, c in zip(into, codes or [None] * len(into)):
                self.write(t, [self._computed(name, known, t.shape) if c is None else
                               Piece(None, tuple(t.shape), Codes(c))])
            return None
        if codes is not None:
            made = [self._of_codes(c, dtype, known[0].device) for c, dtype in codes]
            return made[0] if len(made) == 1 else tuple(made)
        try:  # what shape comes of it
            out = function(*_changed(arguments, _zeros), **_changed(keywords, _zeros))
        except Exception as failure:
            raise NotRecorded(f"load_weights calls {name}, of which nothing is known",
                              set().union(*(self.sources(k) for k in known))) from failure
        if not tensors_among([out], {}):  # a handle, of what is no tensor
            self.numbers.update(*(self.sources(k) for k in known))
        return _changed(out, lambda s: self._of_computed(name, s.to("meta"), known, known[0].device))


class _Kind(NamedTuple):
    """What an operator's schema says of it."""
    name: str
    is_torchs: bool
    is_view: bool
    writes: tuple   # (position, name) of the arguments that it writes into
    returns: int


@functools.lru_cache(maxsize=None)
def _kind(function):
    schema = function._schema
    space, name = schema.name.split("::")
    writes = tuple((i, a.name) for i, a in enumerate(schema.arguments)
                   if a.alias_info is not None and a.alias_info.is_write)
    view = bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write
                                        for r in schema.returns)
    return _Kind(name, space == "aten", view, writes, len(schema.returns))


def _written(kind, arguments, keywords):
    return tensors_among([arguments[i] if i < len(arguments) else keywords.get(name)
                          for i, name in kind.writes], {}) if kind.writes else ()


def _changed(value, change):
    """A value, or a container of them, with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_changed(v, change) for v in value)
    if isinstance(value, dict):
        return {k: _changed(v, change) for k, v in value.items()}
    return value


def _shadow(tensor):
    return tensor.shadow if isinstance(tensor, Recorded) else \
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_shadows(function, arguments, keywords):
    keywords = _changed(keywords, _shadow)
    if keywords.get("device") is not None:
        keywords["device"] = torch.device("meta")
    return function(*_changed(arguments, _shadow), **keywords)


def _bare(tensor):
    """In the place of what is recorded: memory that is as large, and that nobody has touched."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) \
        if isinstance(tensor, Recorded) else tensor


def _zeros(tensor):
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if isinstance(tensor, Recorded) else \
        tensor.detach().clone()


def _named(name, arguments):
    numbers = [repr(a) for a in arguments if isinstance(a, (int, float))]
    return f"{name}({', '.join(numbers)})" if numbers else name
