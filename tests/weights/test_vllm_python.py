"""The vLLM plug-in against what vLLM 0.32.0 asks of a backend, without vLLM: versions, and one behind that which was asked for
where it will do; TRL's WeightTransferProtocol through a server's routes; a WeightSource of a trainer of two ranks, as SkyRL's.
With vLLM itself: tests/frameworks/vllm_real."""
import http.server
import json
import os
import sys
import threading
import unittest.mock

from begin import needs

with needs:
    import torch
    import torch.distributed as dist

import vllm_names as names

names.install()
import dray
from dray.integrations import vllm
from dray.integrations.published import Options, Published
from dray.integrations.trl import WeightTransfer
from served import ranks, refused
from sglang_stand_in import Model

RANKS = 2


def numbers(version):
    generator = torch.Generator().manual_seed(version)
    return {f"layers.{i}.{n}": torch.randn(shape, generator=generator) for i in range(2)
            for n, shape in (("self_attn.q_proj.weight", (64, 32)), ("self_attn.k_proj.weight", (16, 32)),
                             ("self_attn.v_proj.weight", (16, 32)), ("mlp.down_proj.weight", (32, 7)), ("norm.weight", (1,)))}


def one_by_one(version):
    """As a trainer gathers them: one tensor is gone when the next one comes."""
    for name, tensor in numbers(version).items():
        yield name, tensor
        tensor.fill_(torch.nan)


class Server:
    """vLLM's routes, and the worker behind them."""

    def __init__(self):
        self.worker, self.calls, self.fails, self.older = names.Worker(Model(numbers(0)), "one"), [], None, None
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_): ...

            def do_GET(self):
                self.say(200, "")

            def do_POST(self):
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)))
                route = self.path[1:]
                server.calls.append(route)
                try:
                    if route == "update_weights":
                        if server.fails:
                            raise MemoryError(server.fails)
                        if server.older is not None:
                            told["update_info"] = {**server.older, "version": told["update_info"]["version"] - 1}
                    if hasattr(server.worker, route):
                        getattr(server.worker, route)(**told)
                except Exception as failure:
                    return self.say(500, f"{type(failure).__name__}: {failure}")
                self.say(200, "{}")

            def say(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

        self.http = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


def by_trl():
    server = Server()
    transfer = WeightTransfer(server.url + "/", timeout=60)
    assert all(callable(getattr(transfer, each)) for each in ("init_weight_transfer", "pause", "send_weights", "resume", "destroy"))

    def synchronise(version):
        """What AsyncGRPOTrainer does."""
        transfer.pause()
        transfer.send_weights(one_by_one(version))
        transfer.resume()
        assert transfer.version == version and server.worker.model.differs(numbers(version)) == []

    transfer.init_weight_transfer()
    update = ["start_weight_update", "update_weights", "finish_weight_update"]
    for version in range(1, 4):
        server.calls.clear()
        synchronise(version)
        told = ["init_weight_transfer_engine"] * (version == 1)
        assert server.calls == ["pause?mode=keep", *told, *update, "resume"], server.calls
        assert server.worker.versions[-1] == str(version) and server.worker.engine.left == {}

    # The worker is asked for an older version than there is.
    server.older = {}
    refused(RuntimeError, ["version 3 expected", "is at 4"], transfer.send_weights, one_by_one(4))
    server.older = {"newer": True}
    synchronise(5)
    assert server.worker.engine.report["version"] == 5
    server.older = None

    # A module that vLLM's reload loses what load_weights wrote into: once more, with memory for it.
    server.worker = names.Worker(Model(numbers(0)), "lost")
    names.miss(server.worker.model)
    transfer.init_weight_transfer()
    synchronise(6)
    assert names.CALLS == ["materialise", "process"], names.CALLS

    # A server that fails, and one that has started anew.
    server.fails = "no memory left"
    refused(RuntimeError, [server.url, "update_weights", "found 500", "no memory left"], transfer.send_weights, one_by_one(7))
    server.fails, server.worker = None, names.Worker(Model(numbers(0)), "two")
    refused(RuntimeError, ["init_weight_transfer_engine is to be called"], transfer.send_weights, one_by_one(8))
    transfer.init_weight_transfer()
    synchronise(9)
    transfer.destroy()
    transfer.destroy()

    server.http.shutdown()
    server.http.server_close()
    refused(TimeoutError, [server.url, "within 0.3 s"], WeightTransfer(server.url, timeout=0.3).init_weight_transfer)
    address = os.environ.pop("DRAY_ADDRESS")
    refused(ValueError, ["DRAY_ADDRESS"], lambda: WeightTransfer(server.url).send_weights(one_by_one(1)))
    os.environ["DRAY_ADDRESS"] = address


class Source(names.WeightSource):
    """Each rank holds every second tensor; all gather them, and the sender alone has what is meant."""

    def __init__(self, rank):
        self.version, self._rank = 0, rank

    def metadata(self):
        raise AssertionError("may be dear, and is not needed")

    def __iter__(self):
        for number, (name, tensor) in enumerate(numbers(self.version).items()):
            if number % RANKS != self._rank:
                tensor.fill_(torch.nan)
            dist.broadcast(tensor, number % RANKS)
            yield name, tensor if self._rank == 0 else torch.empty(0)
            tensor.fill_(torch.nan)


def rank_main(rank, folder):
    """A trainer as SkyRL's: a WeightSource of its own, and a client with vLLM's four methods."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    worker, source = names.Worker(Model(numbers(0)), "skyrl") if rank == 0 else None, Source(rank)
    trainer = vllm.DrayTrainer.trainer_init(vllm.DrayTrainerInitInfo(rank=rank, timeout=60), client=worker, source=source)
    for version in range(1, 4):  # the first has other numbers than there were at the handshake
        source.version = version
        trainer.send_weights()
        assert trainer.version == version
        if rank == 0:
            assert worker.model.differs(numbers(version)) == [] and worker.versions[-1] == str(version)
    trainer.shutdown()
    by_stages(rank)
    dist.destroy_process_group()


def by_stages(rank):
    """Pipeline stages of one engine, of which one alone has a module that the reload loses: all update once more."""
    told, worker = [None], names.Worker(Model(numbers(0)), "stages", rank, RANKS)
    if rank == 0:
        published = Published(numbers(1), 0, Options(world=1, model="stages", timeout=20), "test")
        published.publisher.publish(1)
        told = [published.handshake()]
        names.miss(worker.model)
    dist.broadcast_object_list(told)
    worker.init_weight_transfer_engine(told[0])
    worker.start_weight_update()
    with unittest.mock.patch.object(worker.engine._rank, "update", wraps=worker.engine._rank.update) as updated:
        worker.update_weights({"version": 1})
    assert updated.call_count == 2 and worker.model.differs(numbers(1)) == []
    with unittest.mock.patch.object(worker.engine._rank, "update", side_effect=MemoryError if rank else None):
        if rank:
            refused(MemoryError, "", worker.update_weights, {"version": 1})
        else:  # and what fails on one of them does not hold the others up
            worker.update_weights({"version": 1})
    dist.barrier()
    worker.engine.shutdown()
    if rank == 0:
        published.close()


def by_wrapped_modules():
    """Engines know the checkpoint's names, which torch.compile() and checkpoint_wrapper() change in a module."""
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self._checkpoint_wrapped_module = module

    class Client:
        def init_weight_transfer_engine(self, told):
            self.tensors = told["tensors"]

    whole, client = torch.nn.Module(), Client()
    whole._orig_mod = torch.nn.Sequential(Wrapper(torch.nn.Linear(2, 3)))
    told = vllm.DrayTrainerInitInfo(rank=0, world=1, model="wrapped", timeout=60)
    trainer = vllm.DrayTrainer.trainer_init(told, client=client, source=names.ModuleSource(whole))
    assert client.tensors == [["0.weight", "float32", [3, 2]], ["0.bias", "float32", [3]]], client.tensors
    trainer.shutdown()


def alone():
    """A rank whose others do not come withdraws what it has published all the same."""
    published, other = (Published({name: torch.ones(2)}, rank, Options(world=2, model="alone", timeout=2.0), "test")
                        for rank, name in enumerate("ab"))
    publisher = published.publisher
    with unittest.mock.patch.object(publisher, "wait", wraps=publisher.wait) as waited:
        refused(dray.DrayTimeout, "test-alone-1", published.send, 1, lambda: None)
    waited.assert_called_once_with(1)
    published.close()
    other.close()


def main():
    if len(sys.argv) > 1:
        return rank_main(int(sys.argv[1]), sys.argv[2])
    with dray.serve():
        by_trl()
        by_wrapped_modules()
        alone()
        with ranks(RANKS, 110):
            pass


main()
