"""Adapters (LoRA) alone: their tensors are a layout of their own, published and committed beside the weights that they are for,
bound to a version of these. Or merged into the weights on the way.

    adapter = dray.adapters.Publisher(peft_model, "math")           # each rank of the trainer
    adapter.publish(revision, base_version=step)

    adapters = dray.adapters.Adapters(group="engine0")              # a process of the engine
    taken = adapters.take("math", base_version=subscriber.version)
    llm.generate(prompts, lora_request=taken.vllm())                # or sglang's: server.load_lora_adapter(taken)

    dray.Publisher(dray.adapters.merged(peft_model))                # the engine knows of no adapter

Several revisions of an adapter may be alive in an engine; each is a folder as PEFT writes it."""
from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional

import torch

from . import _library as _l
from . import listed
from . import weights as _w
from .merged import merged
from .parameters import is_module
from .sessions import place

__all__ = ["Adapters", "Publisher", "Revision", "merged"]

BASE = "dray.base_version"  # a tensor of the layout: the adapter and what it is for are committed in one step


def _model(model, name):
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"an adapter's name, which is a folder's, too, expected, found {name!r}")
    return f"{model}.adapter.{name}"


def _of_peft(module, adapter):
    """(named tensors, config) of a module of PEFT's, as its own files have them."""
    if adapter not in getattr(module, "peft_config", {}):
        raise ValueError(f"a module of PEFT's with the adapter {adapter} expected, found {type(module).__name__} with "
                         f"{', '.join(getattr(module, 'peft_config', {})) or 'none'}")
    config = module.peft_config[adapter]
    if getattr(config, "peft_type", None) not in (None, "LORA") and str(config.peft_type).rpartition(".")[2] != "LORA":
        raise _l.DrayError(_l.EUNSUPPORTED, f"adapter {adapter}: LoRA expected, found {config.peft_type}")
    for setting in ("bias", "trainable_token_indices"):  # for these PEFT's files have tensors without the adapter's name
        value = getattr(config, setting, None)
        if value and value != "none":
            raise _l.DrayError(_l.EUNSUPPORTED, f"adapter {adapter}: tensors of LoRA and modules_to_save expected, "
                               f"found {setting}={value!r}, which trains others, too")
    found, place = {}, re.compile(rf"(\.modules_to_save|\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)")
    for name, parameter in module.named_parameters():
        if match := place.search(name):
            own = "" if match[1] == ".modules_to_save" else match[1]
            found[name[:match.start()] + own + name[match.end():]] = parameter
    return found, config.to_dict()


def _plain(config):
    """As JSON holds it: PEFT's settings have sets and enumerations."""
    return json.loads(json.dumps(config, default=lambda each: sorted(each) if isinstance(each, (set, frozenset)) else
                                 getattr(each, "value", str(each))))


class Publisher:
    """This rank's part of an adapter. given: a module of PEFT's (FSDP2's parameters go as they are cut), or (name, tensor)
    pairs or a mapping, with the names of adapter_model.safetensors. config: of adapter_config.json; None: the module's.
    adapter: its name in the module. Others: as of dray.Publisher."""

    def __init__(self, given: Any, name: str, model: str = _w.MODEL, rank: Optional[int] = None, world: Optional[int] = None, *,
                 config: Optional[Mapping] = None, adapter: str = "default", context: Optional[_w.Context] = None,
                 timeout: float = 60.0):
        if is_module(given):
            tensors, found = _of_peft(given, adapter)
            config = found if config is None else config
        else:
            tensors = dict(given.items() if hasattr(given, "items") else given)
        if not tensors:
            raise ValueError(f"adapter {name}: tensors expected, found none")
        if config is None:
            raise ValueError(f"adapter {name}: config expected, what adapter_config.json has")
        rank, world = place(rank, world)
        of = _model(model, name)
        self._base, self._publisher = _w.empty(1, dtype=torch.int64), None
        options = dict(context=context, timeout=timeout)
        own = {BASE: self._base} if rank == 0 else {}
        self._publisher = _w.Publisher({**tensors, **own}, of, rank, world, **options)
        self._list = None
        if rank == 0:
            room = _w.empty(listed.BYTES, dtype=torch.uint8)
            room.copy_(listed.pack({n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}, _plain(config)))
            self._list = _w.Publisher({"list": room}, f"{of}.list", 0, 1, **options)
            self._list.publish(1)

    def publish(self, revision: int, base_version: int, stream: Any = None) -> None:
        """This rank's part holds `revision` (greater than the last), which is for base_version of the weights. Returns at
        once, once nobody reads the last one."""
        revision, base_version = _l.number("revision", revision), _l.number("base_version", base_version)
        self._publisher.wait()
        self._base[0] = base_version
        self._publisher.publish(revision, stream)

    def deliver(self, revision: Optional[int] = None, groups: Any = 1, timeout: Optional[float] = None) -> None:
        """As dray.Publisher's."""
        self._publisher.deliver(revision, groups, timeout)

    def wait(self, revision: Optional[int] = None, timeout: Optional[float] = None) -> int:
        """Before the next write to the adapter: as dray.Publisher's."""
        return self._publisher.wait(revision, timeout)

    def close(self) -> None:
        for each in (self._list, self._publisher):
            if each is not None:
                each.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@dataclass(frozen=True)
class Revision:
    """Of an adapter: its number, the version of the weights that it is for, adapter_config.json, the tensors by their names, a
    folder as PEFT writes it, a number that no other revision of this process has, and the trainer's incarnation: one that was
    started again may give a number anew, to other tensors."""
    name: str
    revision: int
    base_version: int
    config: dict = field(repr=False)
    tensors: dict = field(repr=False)
    folder: pathlib.Path
    number: int
    incarnation: int = 0

    @property
    def label(self) -> str:
        """The name by which an engine tells revisions apart."""
        return self.folder.name

    def vllm(self):
        """For vLLM's lora_request=."""
        from vllm.lora.request import LoRARequest
        return LoRARequest(self.label, self.number, str(self.folder))


@dataclass
class _Known:
    """An adapter that this process takes. incarnation: of the trainer whose list `packed` is; None: it is not known."""
    subscriber: Any
    memory: dict
    config: dict
    packed: bytes
    incarnation: Optional[int] = None


class Adapters:
    """What an engine has of adapters. group: its name. keep: how many revisions of an adapter are alive; of more, the oldest
    is dropped. folder: for their files; None: one of its own in the host's memory, which ends with this. Others: as of
    dray.Subscriber."""

    def __init__(self, model: str = _w.MODEL, group: str = "engine", *, keep: int = 2, folder: Optional[os.PathLike] = None,
                 context: Optional[_w.Context] = None, timeout: float = 60.0):
        if keep < 1:
            raise ValueError(f"keep: at least 1 expected, found {keep}")
        self._model, self._options, self._keep, self._timeout = model, dict(group=group, rank=0, world=1), keep, timeout
        self._context, self._known, self._alive, self._number = context, {}, {}, 0
        self._labels = {}  # label: the incarnation that had it
        self._own = folder is None
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="dray-adapters-", dir=shared) if self._own else folder)

    def _subscribe(self, tensors, of):
        return _w.Subscriber(tensors, of, **self._options, context=self._context, timeout=self._timeout)

    def _list(self, name):
        """Returns what the adapter's trainer says of its tensors, packed."""
        room = _w.empty(listed.BYTES, dtype=torch.uint8)
        with self._subscribe({"list": room}, f"{_model(self._model, name)}.list") as first:
            first.update(timeout=self._timeout)
        return listed.packed(room)

    def _subscriber(self, name):
        if name not in self._known:
            packed = self._list(name)
            tensors, config = listed.unpack(packed)
            memory = {n: _w.empty(*shape, dtype=dtype) for n, (shape, dtype) in tensors.items()}
            memory[BASE] = _w.empty(1, dtype=torch.int64)
            self._known[name] = _Known(self._subscribe(memory, _model(self._model, name)), memory, config, packed)
        return self._known[name]

    def _update(self, name, revision, timeout):
        """Returns (_Known, the revision that it holds, its trainer's incarnation). The list is that trainer's: another one may
        have other tensors, or the same ones and another config."""
        for left in (2, 1, 0):
            known, failure = self._subscriber(name), None
            try:
                found, incarnation, torn = known.subscriber._held()  # taken, and refused for its base
                if torn or not revision or found < revision:
                    known.subscriber.update(min_version=revision, timeout=timeout)
                    found, incarnation, _ = known.subscriber._held()
                if incarnation == known.incarnation:
                    return known, found, incarnation
            except _l.DrayError as error:
                if error.name not in ("ESHAPE", "EDTYPE", "EHOLE") or not left:
                    raise
                failure = error
            if self._list(name) != known.packed:
                self._forget(name)
            elif failure is not None:
                raise failure
            else:
                known.incarnation = incarnation
                return known, found, incarnation
        raise _l.DrayError(_l.ESTALE, f"adapter {name}: its trainer was started again more than once meanwhile")

    def take(self, name: str, revision: int = 0, *, base_version: Optional[int] = None,
             timeout: Optional[float] = None) -> Revision:
        """A revision of at least this number, waiting for it; 0: the newest. base_version: of the weights that the engine has:
        DrayError (ESTALE), where the adapter is for other ones, and nothing changes. A number alone does not tell trainers apart:
        where this process holds the one before's adapter under that number or a higher one, take without a number."""
        try:
            known, found, incarnation = self._update(name, revision, self._timeout if timeout is None else timeout)
        except _l.DrayError as error:
            if error.name == "EDEAD":  # the trainer's, which may come again with other tensors
                self._forget(name)
            raise
        memory, config = known.memory, known.config
        base = int(memory[BASE][0])
        if base_version is not None and base != base_version:
            raise _l.DrayError(_l.ESTALE, f"adapter {name}: revision {found} is for version {base} of {self._model}, the engine "
                               f"has {base_version}")
        alive, key = self._alive.setdefault(name, {}), (incarnation, found)
        if key not in alive:
            self._number += 1
            tensors = {n: t.clone() for n, t in memory.items() if n != BASE}
            label = f"{name}@{found}"
            if self._labels.setdefault(label, incarnation) != incarnation:
                label += f".{self._number}"
            folder = self._write(label, tensors, config)
            alive[key] = Revision(name, found, base, config, tensors, folder, self._number, incarnation)
            for old in list(alive.values())[:-self._keep]:
                self.drop(old)
        return alive[key]

    def _write(self, label, tensors, config):
        from safetensors.torch import save_file
        folder, new = self._folder / label, self._folder / f".{label}"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        save_file(tensors, new / "adapter_model.safetensors")
        (new / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
        return folder

    def alive(self, name: str) -> list:
        """The revisions, oldest first."""
        return list(self._alive.get(name, {}).values())

    def drop(self, revision: Revision) -> None:
        """Its files go; an engine that has loaded them keeps what it has until it is told to unload it."""
        if self._alive.get(revision.name, {}).pop((revision.incarnation, revision.revision), None) is not None:
            shutil.rmtree(revision.folder, ignore_errors=True)

    def _forget(self, name):
        if name in self._known:
            self._known.pop(name).subscriber.close()

    def close(self) -> None:
        for name in list(self._known):
            self._forget(name)
        if self._own:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._alive = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
