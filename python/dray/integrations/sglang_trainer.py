"""A rank of a trainer that hands its weights to engines of SGLang as they lie: nothing is gathered. Needs no SGLang."""
from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

from .. import weights
from ..sessions import place
from .published import Options, Published
from .sglang import LOADER, message, packed


class Server:
    """An engine behind SGLang's HTTP server, as DrayTrainer speaks to it. draft: its draft model is updated, too.
    timeout: seconds of each answer."""

    def __init__(self, url: str, api_key: Optional[str] = None, draft: bool = False, timeout: float = 300.0):
        self.url, self._timeout, self._ranks = url.rstrip("/"), timeout, None
        self._selector = "all" if draft else "target"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __str__(self):
        return self.url

    def _ask(self, path, body=None):
        """The answer, as a dict. A body makes it a POST."""
        request = urllib.request.Request(f"{self.url}/{path}", None if body is None else json.dumps(body).encode(),
                                         self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                said, answered = answer.read(), {}
        except urllib.error.HTTPError as error:
            said = error.read()
            answered = {"success": False, "message": f"{error.code} {said[:300].decode(errors='replace')}"}
        with contextlib.suppress(ValueError):
            answered.update(json.loads(said))
        return answered

    def pause_generation(self, mode: str):
        return self._ask("pause_generation", {"mode": mode})

    def continue_generation(self):
        return self._ask("continue_generation", {})

    def begin_weight_update(self):
        return self._ask("begin_weight_update", {"selector": self._selector})

    def end_weight_update(self):
        return self._ask("end_weight_update", {})

    def load_lora_adapter(self, revision) -> str:
        """A Revision of dray.adapters, by SGLang's own path for adapters; the name that requests give as lora_path."""
        _done(self, "load_lora_adapter", self._ask("load_lora_adapter", {"lora_name": revision.label,
                                                                        "lora_path": str(revision.folder)}))
        return revision.label

    def unload_lora_adapter(self, revision) -> None:
        _done(self, "unload_lora_adapter", self._ask("unload_lora_adapter", {"lora_name": revision.label}))

    def update_weights_from_tensor(self, named_tensors, load_format: str, flush_cache: bool, weight_version=None,
                                   selector: Optional[str] = None):
        if self._ranks is None:
            self._ranks = self._ask("server_info")["tp_size"]
        body = {"serialized_named_tensors": [packed(named_tensors)] * self._ranks,
                "load_format": load_format, "flush_cache": flush_cache, "selector": selector or self._selector}
        if weight_version is not None:
            body["weight_version"] = weight_version
        return self._ask("update_weights_from_tensor", body)


def _done(client, what, answer) -> None:
    """Raises where an answer of SGLang's says that something failed: (success, message), a dict of both, or None."""
    success, said = (answer.get("success", True), answer.get("message", "")) if isinstance(answer, dict) else \
        answer if isinstance(answer, tuple) else (True, "")
    if not success:
        raise RuntimeError(f"SGLang at {client}, {what}: {said}")


class DrayTrainer:
    """source: a module (FSDP2's, with its shards), or anything else that dray.Publisher takes. client: Server(url), or
    SGLang's own Engine, or a list of them; rank 0 alone speaks to them, the others may leave it out. rank: of the
    trainer, None: torch.distributed's. pause: how a Server's engine pauses while it takes weights: "retract" begins
    running requests again on the new weights' cache, "abort" ends them, "in_place" goes on with the old ones' cache.
    options: published.Options. version: the last that was sent."""

    def __init__(self, source, client=(), *, rank: Optional[int] = None, pause: str = "retract", **options: Any):
        if pause not in ("retract", "abort", "in_place"):
            raise ValueError(f"pause: retract, abort or in_place expected, found {pause}")
        options = Options(**options)
        rank, options.world = place(rank, options.world)
        self.version, self.clients = 0, list(client) if isinstance(client, (list, tuple)) else [client]
        self._pause, self._group = pause, options.group
        self._published = Published(source, rank, options, "sglang")
        try:
            for each in self.clients:
                self.init_engine(each)
        except BaseException:
            self._published.close()
            raise

    def handshake(self) -> dict:
        """What an engine is told once; JSON can hold it. Each time of another group, where none was named."""
        return {**self._published.handshake(), "group": self._group or f"sglang-{uuid.uuid4().hex[:16]}"}

    def init_engine(self, client) -> None:
        """Tells an engine what is published: each that joins later, or has started anew, once."""
        if self._published.rank == 0:
            self._tell(client, "in_place", message(handshake=self.handshake()), flush_cache=False)

    def send_weights(self, version: Optional[int] = None) -> None:
        """On every rank: publishes (version: the last one's successor), has the engines take it, and returns when
        nobody reads any more: the weights may be changed. Where an engine fails, rank 0 raises once all have
        answered, and that engine goes on with what it holds."""
        self.version = version = self.version + 1 if version is None else version
        self._published.send(version, lambda: self._update(version))

    def _update(self, version):
        def one(client):
            more = {"weight_version": str(version)} if isinstance(client, Server) else {}
            self._tell(client, self._pause, message(version=version), flush_cache=self._pause != "in_place", **more)

        if len(self.clients) == 1:
            one(self.clients[0])
            return
        with ThreadPoolExecutor(max(1, len(self.clients))) as pool:
            failures = [done.exception() for done in [pool.submit(one, each) for each in self.clients]]
        failures = [failure for failure in failures if failure is not None]
        if failures:
            raise RuntimeError("; ".join(map(str, failures))) from failures[0]

    def _tell(self, client, pause, told, **options):
        """pause, begin, load and flush, end, continue: what was begun is ended in any case. SGLang's own Engine has no
        pause: nothing of it runs meanwhile."""
        with contextlib.ExitStack() as undo:
            if hasattr(client, "pause_generation"):
                undo.callback(lambda: _done(client, "continue_generation", client.continue_generation()))
                _done(client, "pause_generation", client.pause_generation(pause))
            _done(client, "begin_weight_update", client.begin_weight_update())
            undo.callback(lambda: _done(client, "end_weight_update", client.end_weight_update()))
            _done(client, "update_weights_from_tensor",
                  client.update_weights_from_tensor(told, load_format=LOADER, **options))

    def shutdown(self) -> None:
        self._published.close()
