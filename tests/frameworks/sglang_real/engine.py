"""A rank of an engine of SGLang on the CPU: a model, its WeightUpdater and the scheduler's session of updates, and on
rank 0 SGLang's routes over HTTP; another model of the same kind is loaded as SGLang does it. Nothing is generated, as
that takes kernels. engine.py FOLDER SOCKET TP RANK"""
import asyncio
import functools
import pathlib
import socket
import sys
import threading
import types
from multiprocessing.connection import Client, Listener

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "record_real")]
sys.modules["torchvision"] = None
import sglang_engine  # first of all: stand-ins for packages that only computing needs
import torch
import uvicorn
from fsdp2 import Spoken, serve
from safetensors.torch import load_file

sglang_engine._StandIns.NAMES += ("soundfile",)
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import io_struct
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.managers.tp_worker import BaseTpWorker
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins import load_plugins
from sglang.srt.utils.aio_rwlock import RWLock
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

import dray.integrations.sglang as integration

folder, path, tp, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
load_plugins()  # dray's among them, by its entry point
events = []     # in the order in which SGLang came to them


def updater(model):
    return WeightUpdater(tp_rank=rank, device="cpu", gpu_id=0, model_config=None, custom_weight_loaders=[],
                         get_model=lambda: model, update_model_fields=None, recapture_cuda_graph=None,
                         get_model_runner=None)


class Worker:
    """The scheduler's worker, as far as updates ask for it."""
    deserialize_own_rank = BaseTpWorker.deserialize_own_rank

    def __init__(self, role, model):
        self._role, self.model_runner = role, types.SimpleNamespace(weight_updater=updater(model), model=model)

    def weight_update_runners(self):
        return [(self._role, self.model_runner)]


ranks = sglang_engine.Ranks(tp, rank)
(reference, _), (served, _), (draft, _) = [ranks.model(folder) for _ in range(3)]  # the draft is of the target's kind
loads = 0


def counted(named, of=served.load_weights):
    global loads
    loads += 1
    return of(named)


served.load_weights = counted
manager = SchedulerWeightUpdaterManager(
    tp_worker=Worker("target", served), draft_worker=Worker("draft", draft), memory_saver_adapter=None,
    is_fully_idle=lambda **_: True, flush_cache=lambda **_: events.append("flush") or True,
    scheduler=types.SimpleNamespace(record_weight_version_change=lambda new_version: None))


def ask(request):
    """A request of SGLang's, as its scheduler does it."""
    names = {"BeginWeightUpdateReqInput": "begin_weight_update", "EndWeightUpdateReqInput": "end_weight_update",
             "UpdateWeightsFromTensorReqInput": "update_weights_from_tensor"}
    name = names[type(request).__name__]
    events.append(name)
    try:
        return getattr(manager, name)(request)
    except Exception as failure:
        events.append(f"the scheduler ends: {failure!r}")
        raise


def tensors(model):
    return dict([*model.named_parameters(), *model.named_buffers()])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def compare(checkpoint):
    """Names of what differs from what SGLang makes of a checkpoint by itself, in FlattenedTensorBuckets: of the model,
    and of the draft."""
    named = [pair for file in sorted(pathlib.Path(checkpoint).glob("*.safetensors")) for pair in load_file(file).items()]
    for half in (named[:len(named) // 2], named[len(named) // 2:]):
        bucket = FlattenedTensorBucket(named_tensors=half)
        done, said = updater(reference).update_weights_from_tensor(
            {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()},
            load_format="flattened_bucket")
        assert done, said
    wanted = tensors(reference)
    assert wanted and all(wanted.keys() == tensors(model).keys() for model in (served, draft))
    return [[name for name, tensor in tensors(model).items() if not torch.equal(bits(tensor), bits(wanted[name]))]
            for model in (served, draft)]


def receive(handshake, version):
    """As --weight-update-receivers has it, which this SGLang has not: a stand-in of its context."""
    receiver = integration.receiver(types.SimpleNamespace(model=served, device=torch.device("cpu"), tp_rank=rank,
                                                          tp_size=tp, group_name="receivers", init_payload=handshake))
    try:
        receiver.receive({"version": version})
        try:
            receiver.receive({})
        except ValueError as failure:
            assert "expected, found {}" in str(failure)
            return
        raise AssertionError("a payload without a version was taken")
    finally:
        receiver.destroy()


def report():
    """(the last update's, why tensors went by load_weights, calls of load_weights so far)"""
    last = integration._ranks[id(served)][1]
    return last.report, last.left, loads


known = {"ask": ask, "compare": compare, "receive": receive, "report": report}


class Manager(TokenizerControlMixin):
    """The main process's manager: SGLang's own, as far as updates ask for it. What it tells the scheduler, all ranks
    do."""
    pause_generation, continue_generation = TokenizerManager.pause_generation, TokenizerManager.continue_generation
    mm_processor = event_loop = None

    def __init__(self, others):
        self._others = others
        self.is_pause, self.is_pause_cond, self.model_update_lock = False, asyncio.Condition(), RWLock()
        self.begin_weight_update_communicator = self.end_weight_update_communicator = \
            self.update_weights_from_tensor_communicator = self._all
        self.update_weight_version_communicator = self._told
        self.server_args = ranks.arguments(folder)
        self.startup_time = 0

    def auto_create_handle_loop(self):
        pass

    def abort_request(self, abort_all):
        events.append("pause abort")

    async def get_internal_state(self):
        return []

    async def _async_dispatch_to_scheduler(self, request):
        events.append(f"pause {request.mode}" if isinstance(request, io_struct.PauseGenerationReqInput) else "continue")

    def _update_weight_version_if_provided(self, version):
        events.append(f"weights {version}")

    async def _told(self, request):
        """The scheduler counts tokens from here on as of another version: there are none."""

    async def _all(self, request):
        return await asyncio.get_running_loop().run_in_executor(None, self.all, "ask", request)

    def all(self, name, *arguments):
        """What every rank answers."""
        answers = [None] * len(self._others)

        def one(i):
            try:
                answers[i] = getattr(self._others[i], name)(*arguments)
            except (RuntimeError, OSError, EOFError) as failure:
                answers[i] = failure

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(self._others))]
        for each in threads:
            each.start()
        answer = known[name](*arguments)
        for each in threads:
            each.join()
        for each in answers:
            if isinstance(each, Exception):
                raise each
        return [answer, *answers]


def main():
    if rank:
        with Listener(f"{path}-{rank}") as listener:
            print("ready", flush=True)
            serve(listener.accept(), known)
        return
    for _ in range(1, tp):
        sys.stdin.readline()  # the others listen
    main_process = Manager([Spoken(Client(f"{path}-{other}")) for other in range(1, tp)])
    http_server.set_global_state(http_server._GlobalState(tokenizer_manager=main_process, template_manager=None,
                                                          scheduler_info={}))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(http_server.app, lifespan="off", log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()

    def taken():
        """Events since the last call."""
        found, events[:] = list(events), []
        return found

    with Client(path) as trainer:
        trainer.send(listening.getsockname()[1])
        serve(trainer, {"taken": taken, **{name: functools.partial(main_process.all, name) for name in
                                              ("compare", "receive", "report")}})


main()
