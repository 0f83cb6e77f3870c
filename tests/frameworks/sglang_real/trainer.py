"""A rank of a trainer of SGLang's engines: transformers' module, sharded by FSDP2 over gloo, and engines beside it,
which rank 0 starts. trainer.py FOLDER TP VERSIONS DTYPE IN_PLACE, with torchrun's names in the environment."""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import unittest.mock
from multiprocessing.connection import Listener

import torch
import torch.distributed as dist

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import fsdp2
from fsdp2 import refused

from dray.integrations.sglang import LOADER, DrayTrainer, Server, message

folder, tp, versions, dtype, in_place = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1"
PAUSE = {"qwen2": "retract", "qwen3_moe": "in_place", "loader": "abort"}[pathlib.Path(folder).name]
DRAFT = PAUSE == "retract"


class Engine(fsdp2.Spoken):
    """An engine's ranks in processes of their own. client: its server."""

    def __init__(self, number):
        path = f"{folder}/engine{number}"
        others = [self._rank(path, rank, stdout=subprocess.PIPE, text=True) for rank in range(1, tp)]
        listener = Listener(path)
        first = self._rank(path, 0, stdin=subprocess.PIPE, text=True)
        self._processes = [first, *others]
        for each in others:
            while each.stdout.readline().strip() != "ready":
                assert each.poll() is None, "a rank of the engine ended"
            first.stdin.write("\n")
        first.stdin.close()
        listener._listener._socket.settimeout(240)
        super().__init__(listener.accept())
        listener.close()
        self.client = Server(f"http://127.0.0.1:{self._there.recv()}", draft=DRAFT, timeout=120)

    @staticmethod
    def _rank(path, rank, **options):
        return subprocess.Popen([sys.executable, HERE / "engine.py", folder, path, str(tp), str(rank)], **options)

    def kill(self):
        for each in self._processes:
            each.kill()
            each.wait()
        self.close()


def errors(engine, trainer):
    """What is wrong is answered, with its name; SGLang goes on, and no byte has changed."""
    tell, client = trainer._tell, engine.client
    refused(RuntimeError, ["no handshake", "init_engine"],
            lambda: tell(client, "in_place", message(version=1), flush_cache=False))
    refused(RuntimeError, ["what dray's trainer sends expected, found the tensor lm_head.weight"],
            lambda: tell(client, "in_place", [("lm_head.weight", torch.empty(0))], flush_cache=False))
    handshake = trainer.handshake()
    bad = {**handshake, "in_place": True, "tensors": [["model.norm.weight", "float32", [3]]]}
    refused(RuntimeError, ["SGLang's load_weights does not take", "model.norm.weight", "(3,)"],
            lambda: tell(client, "in_place", message(handshake=bad), flush_cache=False))
    for change, words in (({"tensors": []}, ["tensors expected"]), ({"group": None}, ["group expected"])):
        refused(RuntimeError, words, lambda: tell(client, "in_place", message(handshake={**handshake, **change}),
                                                  flush_cache=False))
    late = {**handshake, "timeout": 0.5}
    tell(client, "in_place", message(handshake=late), flush_cache=False)
    engine.taken()
    refused(RuntimeError, ["no version >= 99"], lambda: tell(client, "abort", message(version=99), flush_cache=True))
    assert engine.taken() == ["pause abort", "begin_weight_update", "update_weights_from_tensor", "end_weight_update",
                              "continue"]
    refused(RuntimeError, ["is already open"], lambda: (client.begin_weight_update(), trainer.init_engine(client)))
    client.end_weight_update()
    refused(RuntimeError, ["Input should be 'abort', 'retract'"], lambda: tell(client, "never", [], flush_cache=False))
    engine.taken()


def changed():
    """Another SGLang than the one that was tried is told apart from it, before anything is written."""
    sys.path.insert(0, str(HERE.parent / "record_real"))
    sys.modules["torchvision"] = None
    import sglang_engine  # noqa: F401: stand-ins
    from sglang.srt.model_executor.model_runner_components import weight_updater

    import dray.integrations.sglang as integration
    assert integration.UPSTREAM.differences() == []
    with unittest.mock.patch.object(weight_updater.WeightUpdater, "update_weights_from_tensor",
                                    lambda self, payload: None):
        refused(RuntimeError, ["tried with SGLang 0.5.23", "update_weights_from_tensor takes self, payload, expected self, "
                               "named_tensors, load_format"], integration.UPSTREAM.check)


class Run:
    """Versions of the weights, of which each is looked at before and behind its update."""

    def __init__(self, rank, model, reference):
        self.rank, self.model, self.reference = rank, model, reference
        self.engine = Engine(0) if rank == 0 else None
        self.version, self.calls, self.seconds = 0, [], []

    def step(self):
        """An optimizer's: the next version's numbers."""
        self.version += 1
        fsdp2.write(self.model, self.reference, self.version)
        if self.rank == 0:
            self.checkpoint = f"{folder}/{self.version}"
            self.reference.save_pretrained(self.checkpoint)
            assert all(map(all, self.engine.compare(self.checkpoint))), "these were its bytes before the update"
            self.engine.taken()

    def look(self, draft, pause):
        if self.rank:
            return
        taken, differ = self.engine.taken(), self.engine.compare(self.checkpoint)
        for served, of_draft in differ:
            assert served == [] and (of_draft == []) == draft, \
                f"version {self.version}: {differ} differ from what SGLang makes of the checkpoint"
        updates = ["update_weights_from_tensor", *([] if pause == "in_place" else ["flush"]), f"weights {self.version}"]
        wanted = [f"pause {pause}", "begin_weight_update", *updates, "end_weight_update", "continue"]
        assert taken[-len(wanted):] == wanted, taken
        said = self.engine.report()
        assert all(report["version"] == self.version for report, _, _ in said)
        self.report, self.left, calls = said[0]
        self.calls.append(calls)
        self.seconds.append(round(self.report["total_seconds"], 4))
        shutil.rmtree(self.checkpoint)

    def of_the_page(self):
        """What docs/sglang.md says, as it stands there; the trainer that it made."""
        page = pathlib.Path(os.environ["DRAY_SOURCE_DIR"], "docs/sglang.md").read_text(encoding="utf-8")
        code = re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1]
        assert "http://127.0.0.1:30000" in code
        known = {"model": self.model, "optimizer": self}
        exec(code.replace("http://127.0.0.1:30000", self.engine.client.url if self.engine else ""), known)
        self.look(False, "retract")
        return known["trainer"]

    def of_the_example(self, trainer):
        """A version behind the one that is asked for will do, and the server is told which came."""
        sys.path.append(str(pathlib.Path(os.environ["DRAY_SOURCE_DIR"], "examples/gpu")))
        from served import Gone, Sglang
        server = Sglang(self.engine.client.url, 120)
        refused(Gone, ["http://127.0.0.1:9", "refused"], lambda: Sglang("http://127.0.0.1:9", 5).go_on())
        server.handshake({**trainer.handshake(), "group": "served", "timeout": 120})
        refused(RuntimeError, ["status 200 expected", f"version {self.version - 1} expected"],
                lambda: server.take(self.version - 1, newer=False))
        self.engine.taken()
        server.pause(abort=True)
        report = server.take(self.version - 1, newer=True)
        server.go_on()
        assert report["version"] == self.version, report
        taken = self.engine.taken()
        assert taken == ["pause abort", "begin_weight_update", "update_weights_from_tensor", "flush", "end_weight_update",
                         f"weights {self.version}", "continue"], taken
        assert all(served == [] for served, _ in self.engine.compare(self.checkpoint))


def main():
    run = Run(*fsdp2.trainer(folder, getattr(torch, dtype)))
    rank, model = run.rank, run.model
    config = folder if model.config.model_type == "qwen3_moe" else None
    trainer = DrayTrainer(model, pause=PAUSE, config=config, in_place=in_place, timeout=120)
    if rank == 0:
        errors(run.engine, trainer)
    if DRAFT:
        dist.barrier()
        trainer.shutdown()
        dist.barrier()  # a rank that comes again before another has left is not told apart from it
        trainer = run.of_the_page()
    if rank == 0:
        trainer.clients = [run.engine.client]
        trainer.init_engine(run.engine.client)
        assert run.engine.taken() == ["pause in_place", "begin_weight_update", "update_weights_from_tensor",
                                      "end_weight_update", "continue"]
    while run.version < versions:
        if rank == 0 and run.version == 3:  # an engine dies, and another one joins
            run.engine.kill()
            run.engine = Engine(1)
            trainer.clients = [run.engine.client]
            trainer.init_engine(run.engine.client)
        run.step()
        trainer.send_weights()
        run.look(DRAFT, PAUSE)
    if rank == 0:
        assert (run.calls[-1] == run.calls[-2]) == (not run.left), (run.calls, run.left)  # in place: it is not called
    run.step()  # by a receiver
    trainer._published.send(run.version, lambda: run.engine.receive({**trainer.handshake(), "group": None}, run.version))
    if rank == 0:
        assert all(served == [] for served, _ in run.engine.compare(run.checkpoint))
    run.step()  # as the rollout of examples/gpu has its server take it
    trainer._published.send(run.version, lambda: run.of_the_example(trainer))
    if rank == 0:
        run.engine.kill()
        print(json.dumps({"versions": len(run.seconds), "left": run.left, "calls": run.calls,
                          "bytes": run.report["bytes"], "seconds": run.seconds}), flush=True)
    dist.barrier()
    trainer.shutdown()
    dist.destroy_process_group()
    if rank == 0:
        changed()


main()
