"""miles' weight updates by dray: `--update-weight-transfer-mode external --custom-weight-transfer-protocol-path
dray.integrations.miles.protocol`. docs/miles.md shows how it is used.

miles gathers a parameter along tensor and expert parallelism and converts it, and hands all ranks the same buckets of whole
tensors, of their pipeline stage. Each rank keeps its share of the rows in shared memory, from where the engines read."""
from __future__ import annotations

import inspect
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from .. import weights
from ..parameters import Copies, stale
from .upstream import Upstream

_PROTOCOL = "miles.backends.training_utils.weight_update.protocol"
TIMEOUT = 600.0
UPSTREAM = Upstream(
    "miles", "miles", "0274e4f, and later ones (its protocol since August 2026)",
    methods={
        (_PROTOCOL, "WeightTransferProtocol.__init__"): ["self", "args"],
        (_PROTOCOL, "WeightTransferProtocol.begin_sync"): ["self", "weight_version", "iter_buckets"],
        (_PROTOCOL, "WeightTransferProtocol.send_bucket"): ["self", "bucket"],
        (_PROTOCOL, "WeightTransferProtocol.after_base_weights"): ["self"],
        (_PROTOCOL, "WeightTransferProtocol.finalize"): ["self", "weight_version"],
        (_PROTOCOL, "WeightTransferProtocol.pop_metrics"): ["self"],
    },
    abstract={(_PROTOCOL, "WeightTransferProtocol"): {"connect", "send_bucket"}})
# What connect is given, by the names that miles has had for it.
_ENGINES = {"rollout_engines": lambda client: client, "engines": lambda engine: engine.api_client}
_CONNECT = {"self", *_ENGINES, "rollout_engine_lock", "engine_gpu_counts", "engine_gpu_offsets", "engine_cell_ids",
            "parallel_state", "placement", "selector"}


class Buckets(Copies):
    """What a rank keeps of the tensors that come bucket by bucket: of each its share of the rows."""

    def __init__(self, rank, world):
        self._rank, self._world, self._held, self._whole, self._came = rank, world, {}, False, set()

    def take(self, bucket) -> None:
        for name, tensor in bucket:
            if name in self._came:
                raise ValueError(f"{name}: came twice")
            self._came.add(name)
            (self._known if self._whole else self._add)(name, tensor)
            self._keep(name, tensor.detach())

    def end(self) -> None:
        """All buckets of a version came."""
        if missing := self._held.keys() - self._came:
            raise stale(min(missing), f"and {len(missing) - 1} others did not come")
        self._whole, self._came = True, set()

    def begin(self) -> None:
        self._came = set()

    def refresh(self, tensors=None) -> None:
        """Nothing: take has brought them."""


def _share(state) -> tuple:
    """(which of the ranks of its pipeline stage this one is, how many they are)."""
    if getattr(getattr(state, "indep_dp", None), "size", 1) > 1:
        raise NotImplementedError(f"dray: one cell of the trainer expected, found {state.indep_dp.size} (indep_dp)")
    return state.intra_dp_cp.rank * state.tp.size + state.tp.rank, state.intra_dp_cp.size * state.tp.size


def _gloo():
    from miles.utils.distributed_utils import get_gloo_group
    return get_gloo_group()


def _class(base):
    class DrayTransferProtocol(base):
        """required_placement is the base's: pipeline stages are not gathered."""

        def __init__(self, args):
            super().__init__(args)
            self._buckets = self._publisher = self._context = None
            self._clients, self._number, self._group, self._begun = {}, 0, f"miles-{uuid.uuid4().hex[:16]}", 0.0

        # ---- once, and when engines come

        def connect(self, *arguments, **named) -> None:
            told = inspect.signature(base.connect).bind(self, *arguments, **named).arguments
            self.rollout_engines = [client_of(each) for name, client_of in _ENGINES.items() for each in told.get(name, ())]
            self._selector = told["selector"]
            share, ranks = _share(told["parallel_state"])
            if self._buckets is None:
                self._buckets = Buckets(share, ranks)
            self.is_sender, self.group_name = True, self._group
            urls = [_url(engine) for engine in self.rollout_engines]
            self._clients = {url: self._clients.get(url) for url in urls}  # None: was not told yet

        # ---- a synchronisation

        def begin_sync(self, weight_version, iter_buckets) -> bool:
            self._begun = time.monotonic()
            self._buckets.begin()
            if self._publisher is not None:
                self._publisher.wait(timeout=TIMEOUT)
            return True

        def send_bucket(self, bucket) -> None:
            self._buckets.take(bucket)

        def after_base_weights(self) -> None:
            self._buckets.end()

        def finalize(self, weight_version) -> None:
            own, cause = None, None
            try:
                self._publish(weight_version)
            except Exception as error:  # told to all ranks, none of which waits for this one
                own, cause = f"rank {dist.get_rank()}: {type(error).__name__}: {error}", error
            told: list = [None] * dist.get_world_size()
            dist.all_gather_object(told, (own, self._buckets.listed()), group=_gloo())
            failure = ["; ".join(why for why, _ in told if why) or None]
            if dist.get_rank() == 0 and failure[0] is None:
                try:
                    tensors = {name: [name, *of] for _, each in told for name, *of in each}
                    self._take(weight_version, list(tensors.values()))
                except Exception as error:  # told to all ranks
                    failure = [f"{type(error).__name__}: {error}"]
            dist.broadcast_object_list(failure, src=0, group=_gloo())
            if self._publisher is not None:
                self._publisher.wait(timeout=TIMEOUT)  # for the last that this rank has published
            if failure[0] is not None:
                raise RuntimeError(f"dray, weight version {weight_version}: {failure[0]}") from cause
            self.update_weight_metrics["dray/update_seconds"] = time.monotonic() - self._begun

        def _publish(self, version) -> None:
            if self._publisher is None:
                self._context = self._context or weights.Context(role="trainer", rank=dist.get_rank(), timeout=TIMEOUT)
                self._publisher = weights.Publisher(self._buckets, weights.MODEL, dist.get_rank(),
                                                    dist.get_world_size(), context=self._context, timeout=TIMEOUT)
            self._publisher.publish(version)

        def _take(self, version, tensors) -> None:
            from .sglang import message
            told = {"tensors": tensors, "model": weights.MODEL, "address": os.environ["DRAY_ADDRESS"], "in_place": True, "timeout": TIMEOUT}

            def one(url):
                client = self._clients[url] or _server(url)
                more = {}
                if self._clients[url] is None:
                    more["handshake"] = {**told, "group": f"{self._group}-{url}"}
                try:
                    _load(client, message(version=version, **more), self._selector)
                except Exception:
                    self._clients[url] = None  # it may have started anew
                    raise
                self._clients[url] = client

            with ThreadPoolExecutor(max(1, len(self._clients))) as pool:
                done = [pool.submit(one, url) for url in self._clients]
            failures = [f"{url}: {each.exception()}" for url, each in zip(self._clients, done) if each.exception()]
            if failures:
                raise RuntimeError("; ".join(failures))

    return DrayTransferProtocol


def _url(engine) -> str:
    url = getattr(engine, "server_url", None)
    if not isinstance(url, str):
        raise RuntimeError(f"dray's plug-in was tried with miles {UPSTREAM.tried}, whose engines have a server_url; found "
                           f"{type(engine).__name__}")
    return url


def _server(url):
    from .sglang_trainer import Server
    return Server(url, timeout=TIMEOUT)


def _load(client, told, selector) -> None:
    """miles has paused the engine, and begun its update, and ends both."""
    from .sglang import LOADER
    from .sglang_trainer import _done
    _done(client, "update_weights_from_tensor", client.update_weights_from_tensor(told, load_format=LOADER, flush_cache=False,
                                                                                  selector=selector))


def protocol(args: Any):
    """--custom-weight-transfer-protocol-path: an instance of miles' WeightTransferProtocol."""
    UPSTREAM.check()
    from miles.backends.training_utils.weight_update.protocol import WeightTransferProtocol
    given = set(inspect.signature(WeightTransferProtocol.connect).parameters)
    if not given <= _CONNECT or not {"parallel_state", "selector"} <= given or not given & _ENGINES.keys():
        raise RuntimeError(f"dray's plug-in was tried with miles {UPSTREAM.tried}; here WeightTransferProtocol.connect takes "
                           f"{', '.join(sorted(given))}, expected are some of {', '.join(sorted(_CONNECT))}")
    if not os.environ.get("DRAY_ADDRESS"):
        raise ValueError("dray: no coordinator is named: start `dray serve`, and set DRAY_ADDRESS where Ray starts")
    return _class(WeightTransferProtocol)(args)
