"""The miles plug-in against the contract that miles 0274e4f has with a transfer protocol, without miles; with the file in
$DRAY_UPSTREAM/miles, against miles' own WeightTransferProtocol (tests/frameworks/miles_contract). Two ranks of a trainer that
are given the same buckets, two that are another pipeline stage, and an engine that speaks SGLang's protocol."""
import abc
import argparse
import importlib.util
import os
import pathlib
import pkgutil
import sys
import types

from slime_names import module  # first: it skips the test without PyTorch, and finds the package
import torch
import torch.distributed as dist

import dray
from served import ranks, refused

RANKS, STAGES = 4, 2
AT = "miles.backends.training_utils.weight_update.protocol"
FILE = pathlib.Path(os.environ.get("DRAY_UPSTREAM", "/nowhere"), "miles", AT.replace(".", "/") + ".py")


class Protocol(abc.ABC):
    """As miles declares it."""
    use_weight_update_session, supports_lora = True, False

    def __init__(self, args):
        self.args, self.rollout_engines, self.is_sender, self.update_weight_metrics = args, None, None, {}

    @abc.abstractmethod
    def connect(self, rollout_engines, engine_gpu_counts, engine_gpu_offsets, engine_cell_ids, parallel_state, placement,
                selector): ...

    def begin_sync(self, weight_version, iter_buckets):
        return True

    @abc.abstractmethod
    def send_bucket(self, bucket): ...
    def after_base_weights(self): ...
    def finalize(self, weight_version): ...

    def pop_metrics(self):
        metrics, self.update_weight_metrics = self.update_weight_metrics, {}
        return metrics


def install():
    module("miles.utils.distributed_utils", get_gloo_group=lambda: dist.group.WORLD)
    module("sglang.srt.distributed", get_tensor_model_parallel_world_size=lambda: 1, get_tensor_model_parallel_rank=lambda: 0,
           get_pp_group=lambda: types.SimpleNamespace(world_size=1, rank_in_group=0))
    if not FILE.is_file():
        return module(AT, WeightTransferProtocol=Protocol)
    module("miles.backends.sglang_utils.sglang_api_client", SGLangApiClient=object)
    module("miles.backends.training_utils.parallel", ParallelState=object)
    module("miles.backends.training_utils.weight_update.hf_weight_iterator", WeightUpdatePlacement=argparse.Namespace)
    module("miles.utils.function_registry", function_registry={}, load_function=pkgutil.resolve_name)
    spec = importlib.util.spec_from_file_location(AT, FILE)
    made = module(AT)
    spec.loader.exec_module(made)
    return made


def numbers(version, stage=None):
    generator = torch.Generator().manual_seed(version)
    whole = {f"layers.{i}.{n}": torch.randn(shape, generator=generator) for i in range(STAGES)
             for n, shape in (("self_attn.q_proj.weight", (64, 32)), ("self_attn.k_proj.weight", (16, 32)),
                              ("self_attn.v_proj.weight", (16, 32)), ("mlp.gate_proj.weight", (7, 32)), ("mlp.up_proj.weight", (7, 32)),
                              ("norm", (1,)))}
    return {name: t for name, t in whole.items() if stage is None or name.startswith(f"layers.{stage}.")}


def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    upstream = install()
    from dray.integrations import miles, sglang
    sglang._has_updater = lambda: False
    from sglang_stand_in import Engine

    stage, share = rank % STAGES, rank // STAGES
    args = argparse.Namespace(colocate=False, update_weight_transfer_mode="external",
                              custom_weight_transfer_protocol_path="dray.integrations.miles.protocol")
    make = upstream.get_weight_transfer_protocol if hasattr(upstream, "_load_external_protocol") else miles.protocol
    protocol = make(args)
    assert isinstance(protocol, upstream.WeightTransferProtocol)
    engines = {"http://a": Engine(numbers(0)), "http://b": Engine(numbers(0))}

    class Server:  # what miles' engines are behind
        def __init__(self, url, timeout):
            self.engine = engines[url]

        def update_weights_from_tensor(self, told, load_format, flush_cache, selector):
            return self.engine.update_weights_from_tensor.here(
                serialized_named_tensors=[sglang.packed(told)], load_format=load_format, flush_cache=flush_cache, selector=selector)
    miles._server = lambda url: Server(url, 0)

    one = argparse.Namespace(rank=0, size=1)
    state = argparse.Namespace(intra_dp_cp=argparse.Namespace(rank=share, size=2), tp=one, indep_dp=one)
    told = [argparse.Namespace(server_url=url) for url in engines]

    def connect():
        given = dict(rollout_engines=told, engine_gpu_counts=[1, 1], engine_gpu_offsets=[0, 1], engine_cell_ids=["0", "1"],
                     parallel_state=state, placement=None, selector="all", rollout_engine_lock=None,
                     engines=[argparse.Namespace(api_client=each) for each in told])
        import inspect
        names = list(inspect.signature(upstream.WeightTransferProtocol.connect).parameters)[1:]
        protocol.connect(*(given[name] for name in names))  # by position, as miles does

    def synchronise(version, leave_out=0):
        """What miles' updater does."""
        assert protocol.begin_sync(version, None)
        named = list(numbers(version, stage).items())
        for at in range(0, len(named) - leave_out, 2):
            protocol.send_bucket([(n, t.clone()) for n, t in named[at:at + 2]])
        protocol.after_base_weights()
        dist.barrier()
        protocol.finalize(version)

    connect()
    assert protocol.is_sender is True
    for version in range(1, 5):
        if version == 3 and rank == 0:  # an engine has started anew
            engines["http://b"] = Engine(numbers(0))
            protocol._clients["http://b"] = None
        synchronise(version)
        assert protocol.pop_metrics()["dray/update_seconds"] > 0
        for engine in engines.values() if rank == 0 else ():
            assert engine.model.differs(numbers(version)) == [], version
    held = sum(block.tensor.numel() for _, block in protocol._buckets.pairs())
    whole = sum(t.numel() for t in numbers(0, stage).values())
    assert held < 0.6 * whole, (held, whole)  # of the stage's, its share

    if rank == 0:
        engines["http://b"].fails = "out of memory"
    refused(RuntimeError, ["version 5", "http://b", "out of memory"], synchronise, 5)
    if rank == 0:
        engines["http://b"].fails = None
        assert engines["http://a"].model.differs(numbers(5)) == [] and engines["http://b"].model.differs(numbers(4)) == []
    if rank == 2:  # one rank does not publish: no other waits for it
        def fails(*_):
            raise dray.DrayError(-20, "no room")
        protocol._publisher.publish = fails
    refused(RuntimeError, ["version 6", "rank 2: DrayError: no room"], synchronise, 6)
    protocol._publisher.__dict__.pop("publish", None)
    for engine in engines.values() if rank == 0 else ():
        assert engine.model.differs(numbers(5)) == [] or engine.model.differs(numbers(4)) == []
    refused(dray.DrayError, ["did not come"], synchronise, 6, leave_out=2)
    dist.barrier()
    kept = upstream.WeightTransferProtocol.connect
    upstream.WeightTransferProtocol.connect = lambda self, engines, parallel_state, placement, selector: None
    connect()  # as versions have it that describe their engines
    upstream.WeightTransferProtocol.connect = kept
    synchronise(7)
    for engine in engines.values() if rank == 0 else ():
        assert engine.model.differs(numbers(7)) == []

    # What is wrong is said.
    refused(ValueError, ["came twice"], lambda: (protocol.begin_sync(8, None), protocol.send_bucket(
        [(n, t) for n, t in [*numbers(8, stage).items()][:1] * 2])))
    state.indep_dp = argparse.Namespace(rank=0, size=2)
    refused(NotImplementedError, ["indep_dp"], connect)
    told[0] = object()
    state.indep_dp = one
    refused(RuntimeError, ["server_url", "object"], connect)
    upstream.WeightTransferProtocol.connect = lambda self, engines, state: None
    refused(RuntimeError, ["connect takes engines"], miles.protocol, args)
    upstream.WeightTransferProtocol.connect = kept
    address = os.environ.pop("DRAY_ADDRESS")
    refused(ValueError, ["DRAY_ADDRESS"], miles.protocol, args)
    os.environ["DRAY_ADDRESS"] = address
    dist.barrier()
    protocol._context.close()
    dist.destroy_process_group()


def main():
    if len(sys.argv) > 1:
        return rank_main(int(sys.argv[1]), sys.argv[2])
    with dray.serve(), ranks(RANKS, 240):
        pass


main()
