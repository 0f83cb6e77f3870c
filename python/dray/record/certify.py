"""Whether a recording is true, by bytes: an engine's loader runs as it always did, and what Blocks would
have put where is compared with what it left there."""
from __future__ import annotations

import hashlib

import torch

from .module import tensors_of

_CHUNK, _SUMMED = 64 << 20, 8 << 20  # bytes; a sum takes eight times as many for a while


def _pieces(tensor, size):
    """A tensor's bytes in the order of its indices: rows of about `size` bytes together."""
    rows = max(1, size // max(1, tensor.numel() * tensor.element_size() // max(1, len(tensor)))) \
        if tensor.dim() else 1
    for part in tensor.detach().split(rows) if tensor.dim() else [tensor.detach().reshape(1)]:
        if part.numel():
            here = part.contiguous()  # of one element its stride may be any number
            yield here.as_strided((here.numel(),), (1,), here.storage_offset()).view(torch.uint8)


def digest(tensor):
    """Of a tensor's bytes, in the order of its indices."""
    made = hashlib.blake2b(digest_size=16)
    for piece in _pieces(tensor, _CHUNK):
        made.update(piece.cpu().numpy())
    return made.digest()


def mark(tensor):
    """The sum of a tensor's bytes, in little memory beside it."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in _pieces(tensor, _SUMMED):
        for part in piece.split(_SUMMED):
            total += part.sum(dtype=torch.int64)
    return int(total)


class Certificate:
    """One load of the whole checkpoint, compared. Call it with (name, tensor) pairs, or use it as the
    `load=` of a Subscriber, in a `with` block that ends when the engine is ready (behind all that it does
    after loading): then `recorded.certified` is true, and what differed is by_loader. A load that changed nothing
    shows nothing of what is derived from it: `recorded.certified` stays what it was then, and it takes another one."""

    def __init__(self, recorded, load=None):
        self._recorded, self._load = recorded, load or recorded._load
        self._parts, self._wanted, self._seen = {}, {}, set()
        for name, p in recorded._found.items():
            for i, part in enumerate(p.parts):
                self._parts.setdefault(part.name, []).append((name, i, part))
        self._before, self._begun = None, False

    def _others(self):
        """Digests of the engine's tensors that the recording says nothing of."""
        return {n: digest(t) for n, t in tensors_of(self._recorded._into).items()
                if n not in self._recorded._found and t.device.type != "meta" and
                t.layout == torch.strided}

    def _rest(self):
        """Digests of what the recording leaves as it is of the tensors that it knows."""
        now, found = tensors_of(self._recorded._into), {}
        for name, p in self._recorded._found.items():
            tensor = now.get(name)
            if p.reason or tensor is None or tensor.shape != p.shape:
                continue
            rest = torch.empty_strided(p.shape, p.strides, dtype=torch.bool, device=tensor.device).fill_(True)
            for part in p.parts:
                rest.as_strided(part.extent, part.strides, part.offset).fill_(False)
            for offset, sizes, strides, _ in p.fills:
                rest.as_strided(sizes, strides, offset).fill_(False)
            if rest.any():
                found[name] = digest(tensor.detach()[rest])
        return found

    def _marks(self):
        """Numbers that say whether the recorded tensors have changed: mostly, which is enough of one among all."""
        now, found = tensors_of(self._recorded._into), self._recorded._found
        return {n: mark(now[n]) for n, p in found.items()
                if p.parts and not p.reason and n in now and now[n].device.type != "meta"}

    def _digest(self, name, part, box):
        """Of what an update in place would make of a rectangle of the checkpoint's."""
        return digest(part.made(box) if part.steps is None else part.made(box).to(self._recorded._found[name].dtype))

    def __enter__(self):
        if not self._begun:  # else a load has failed, and memory holds what that has brought and derived
            self._before, self._before_rest, self._before_marks = self._others(), self._rest(), self._marks()
        self._wanted, self._seen = {}, set()
        return self

    def __call__(self, named):
        """Gives copies of them to the engine's loader."""
        self._begun = True

        def copies():
            for name, tensor in named:
                self._seen.add(name)
                for at, i, part in self._parts.get(name, ()):
                    box = tensor[tuple(slice(s, s + n) for s, n in zip(part.start, part.extent))]
                    self._wanted[at, i] = self._digest(at, part, box)
                yield name, tensor.clone()
        self._load(copies())

    def __exit__(self, kind, *_):
        if kind is not None:
            return
        recorded = self._recorded
        missing = [n for n in recorded.tensors if n not in self._seen]
        if missing:
            raise ValueError(f"certify: {missing[0]} and {len(missing) - 1} others were not loaded")
        now, rest, marks = tensors_of(recorded._into), self._rest(), self._marks()
        for name, p in list(recorded._found.items()):
            if not p.reason:
                why = self._differs(name, p, now)
                if not why and rest.get(name) != self._before_rest.get(name):
                    why = "differs from what load_weights made of it, where the recording saw no write"
                if why:
                    recorded.leave(name, why)
        after = self._others()
        for name in after:
            if after[name] != self._before.get(name):
                self._derived(name)
        self._begun = False
        if not self._before_marks or marks != self._before_marks:
            recorded.certified = True

    def _differs(self, name, p, now):
        try:
            tensor = self._recorded._now(name, now)
        except Exception as error:  # it is another tensor after loading
            return str(error)
        for i, part in enumerate(p.parts):
            if digest(part.view(tensor)) != self._wanted[name, i]:
                return f"differs from what load_weights made of it, in {part.name} from {part.start} on"
        for offset, sizes, strides, value in p.fills:
            view = tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)
            if not torch.equal(view, torch.full_like(view, value)):
                return f"differs from what load_weights made of it: {value} was expected in its padding"
        return ""

    def _derived(self, name):
        """A tensor that the recording has not seen written has changed: its module, or the nearest one around it that
        has tensors which were, is the loader's."""
        owner, found = name, self._recorded._found
        while owner:
            owner = owner.rpartition(".")[0]
            around = [n for n in found if not owner or n.startswith(f"{owner}.")]
            if around:
                break
        for other in around:
            if not found[other].reason:
                self._recorded.leave(other, f"its module makes {name} of it")
