"""TRL's weight updates by dray, to a server of vLLM with backend "dray": AsyncGRPOTrainer(weight_transfer=WeightTransfer(URL)).
docs/vllm.md shows how it is used. Needs neither TRL nor vLLM."""
from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

from ..parameters import Copies
from .published import Options, Published


class WeightTransfer:
    """TRL's WeightTransferProtocol, which its main process calls. TRL gathers parameter by parameter; each is kept in
    shared memory, from where vLLM's workers read the parts that they keep. url: of the server. options: published.Options.
    version: the last that was sent."""

    def __init__(self, url: str, **options: Any):
        self.url, self.version, self._options = url.rstrip("/"), 0, Options(**{**options, "world": 1})
        self._published, self._told = None, False

    def _ask(self, path, body=None):
        """body: of a POST; None: a GET."""
        request = urllib.request.Request(f"{self.url}/{path}", None if body is None else json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._options.timeout) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            said = error.read()[:500].decode(errors="replace")
            raise RuntimeError(f"vLLM at {self.url}, /{path}: status 200 expected, found {error.code}: {said}") from None

    def init_weight_transfer(self) -> None:
        """Waits for the server. To be called again for one that has started anew."""
        end = time.monotonic() + self._options.timeout
        while True:
            try:
                self._ask("health")
                break
            except (OSError, RuntimeError) as failure:
                if time.monotonic() > end:
                    raise TimeoutError(f"vLLM at {self.url}: an answer expected within {self._options.timeout:g} s, found "
                                       f"{failure}") from failure
            time.sleep(0.2)
        self._told = False

    def pause(self) -> None:
        self._ask("pause?mode=keep", {})

    def resume(self) -> None:
        self._ask("resume", {})

    def send_weights(self, iterator) -> None:
        """(name, whole tensor), which may be gone when the next one comes."""
        tensors = iterator
        if self._published is None:
            self._published, tensors = Published(Copies(iterator, 0, 1), 0, self._options, "trl"), None
        self.version = version = self.version + 1

        def take():
            if not self._told:
                self._ask("init_weight_transfer_engine", {"init_info": self._published.handshake()})
                self._told = True
            self._ask("start_weight_update", {})
            self._ask("update_weights", {"update_info": {"version": version}})
            self._ask("finish_weight_update", {"weight_version": str(version)})

        self._published.send(version, take, tensors)

    def destroy(self) -> None:
        """Engines keep what they hold."""
        if self._published is not None:
            self._published.close()
            self._published = None
