"""The slime plug-in against the contract that slime 624b824 has with what updates weights, without slime and Megatron; with the
repository in $DRAY_UPSTREAM/slime, against its own modules and its own conversion (tests/frameworks/slime_contract). Two ranks
of a trainer, TP2 and EP2, and engines that speak SGLang's protocol: every tensor by its bits."""
import base64
import contextlib
import io
import json
import pickle
import sys
import types
import unittest.mock

import slime_names as names  # first: it skips the test without PyTorch, and finds the package
import torch.distributed as dist

import dray
from served import ranks, refused


def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=names.TP)
    actor, convert = names.install(rank)
    from dray.integrations import sglang, slime
    sglang._has_updater = lambda: False
    from sglang_stand_in import Engine

    # ---- what is replaced, and what is refused first
    old = actor.UpdateWeightFromDistributed
    for changed in ({"update_weight_mode": "delta"}, {"update_weight_transport": "disk"}):
        refused(ValueError, ["--" + next(iter(changed)).replace("_", "-"), "expected with dray"],
                lambda: slime.init(type(names.ARGS)(**{**vars(names.ARGS), **changed})))
    with unittest.mock.patch.object(old, "__init__", lambda self, args, model, getter, *, model_name: None):
        refused(RuntimeError, ["624b824", "getter"], slime.init, names.ARGS)
    with unittest.mock.patch.object(slime.inspect, "getsource", lambda what: "self.weight_updater = Another()"):
        refused(RuntimeError, ["does not name UpdateWeightFromDistributed"], slime.init, names.ARGS)
    assert actor.UpdateWeightFromDistributed is old
    slime.init(names.ARGS)
    assert actor.UpdateWeightFromDistributed is actor.UpdateWeightFromTensor is slime.DrayWeightUpdater

    from dray.integrations import slime_trainer

    # ---- as slime's actor uses it
    chunk = names.Chunk(rank)
    of = dict(model_name="qwen3moe", quantization_config=None)
    refused(NotImplementedError, ["fp8"], lambda: actor.UpdateWeightFromDistributed(
        names.ARGS, [chunk], dict, model_name="qwen3moe", quantization_config={"quant_method": "fp8"}))
    updater = actor.UpdateWeightFromDistributed(names.ARGS, [chunk], dict, **of)
    updater.weight_version = 4  # a run that goes on
    named = names.checkpoint(0, convert)
    engines = [Engine(named), Engine(named)] if rank == 0 else [None, None]
    updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1, 1])
    for version in range(5, 9):
        chunk.write(version)
        if version == 7:  # another engine in the place of one
            engines[1] = Engine(named) if rank == 0 else None
            updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1, 1])
        updater.update_weights()
        assert updater.weight_version == version and updater.pop_metrics()["dray/update_seconds"] > 0
        assert updater.pop_metrics() == {}
        for engine in engines if rank == 0 else ():
            assert engine.calls[-4:] == ["pause_generation", "flush_cache", "update_weights_from_tensor", "continue_generation"]
            assert engine.model.differs(names.checkpoint(version, convert)) == [], version
    if rank == 0:  # in place, once it was proven
        found = [each._recorded for _, each in sglang._ranks.values()]
        assert all(each.certified and not each.by_loader for each in found), [each.by_loader for each in found]

    # ---- an engine fails: all ranks are told, the other one has the version, and so have both with the next
    if rank == 0:
        engines[1].fails = "out of memory"
    chunk.write(9)
    refused(RuntimeError, ["engine 1", "out of memory"], updater.update_weights)
    if rank == 0:
        assert engines[0].model.differs(names.checkpoint(9, convert)) == []
        assert engines[1].model.differs(names.checkpoint(8, convert)) == []
        assert engines[1].calls[-1] == "continue_generation"
        engines[1].fails = None
    assert updater.weight_version == 9
    chunk.write(10)
    updater.update_weights()
    assert updater.weight_version == 10
    for engine in engines if rank == 0 else ():
        assert engine.model.differs(names.checkpoint(10, convert)) == []
    # ---- one rank does not publish: no other waits for it, and nothing is taken
    chunk.write(11)
    publisher = updater._published.publisher
    with unittest.mock.patch.object(publisher, "publish", side_effect=dray.DrayError(-20, "no room")) \
            if rank == 1 else contextlib.nullcontext():
        refused(RuntimeError, ["version 11", "rank 1: DrayError: no room"], updater.update_weights)
    for engine in engines if rank == 0 else ():
        assert engine.model.differs(names.checkpoint(10, convert)) == []
    chunk.write(12)
    updater.update_weights()
    for engine in engines if rank == 0 else ():
        assert engine.model.differs(names.checkpoint(12, convert)) == []
    dist.barrier()
    updater._published.close()
    with unittest.mock.patch.object(slime_trainer, "Published", side_effect=dray.DrayError(-20, "no session")) \
            if rank == 1 else contextlib.nullcontext():
        another = actor.UpdateWeightFromDistributed(names.ARGS, [chunk], dict, **of)
        refused(RuntimeError, ["rank 1: DrayError: no session"], another.connect_rollout_engines, [None, None])
    assert another._published is None

    # ---- parameters that leave the GPU in turns are read where slime keeps them
    names.ARGS.colocate = True
    chunk.write(11)
    backups = {name: p.data.clone() for name, p in names_of([chunk])}
    chunk.write(12)
    other = actor.UpdateWeightFromTensor(names.ARGS, [chunk], lambda: backups, **of)
    one = [Engine(named)] if rank == 0 else [None]
    other.connect_rollout_engines(one, None, engine_gpu_counts=[1])
    other.update_weights()
    if rank == 0:
        assert one[0].model.differs(names.checkpoint(11, convert)) == []
    dist.barrier()
    other._published.close()
    dist.destroy_process_group()


def names_of(model):
    return sys.modules["slime.backends.megatron_utils.update_weight.common"].named_params_and_buffers(names.ARGS, model)


class Actor:
    """An engine as an actor of Ray. calls: their names; groups: of its handshakes. fails: the calls that raise."""

    def __init__(self, *fails):
        self.calls, self.groups, self._fails = [], [], fails

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return types.SimpleNamespace(remote=lambda **given: self._call(name, **given))

    def _call(self, name, serialized_named_tensors=(), **_):
        self.calls.append(name)
        for packed in serialized_named_tensors:
            for told, _ in pickle.load(io.BytesIO(base64.b64decode(packed))):
                self.groups += [json.loads(told.partition(" ")[2])["handshake"]["group"]]
        return RuntimeError(f"{name} failed") if name in self._fails else {"success": True}


def engines_that_fail():
    """No two engines are told one group, also where another one's handshake has failed; and an engine whose pause
    failed leaves no other one paused."""
    from dray.integrations import ray_engines

    def get(found):
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, Exception):
                raise each
        return found

    with unittest.mock.patch.object(ray_engines, "_wait", get):
        engines, good, new = ray_engines.RayEngines("it"), Actor(), Actor()
        refused(RuntimeError, ["engine 1", "failed"], engines.connect, [good, Actor("update_weights_from_tensor")],
                [1, 1], dict)
        engines.connect([new, good], [1, 1], dict)
        assert len(good.groups) == 2 and not {*new.groups} & {*good.groups}, (new.groups, good.groups)
        other = Actor("pause_generation")
        engines.connect([good, other], [1, 1], dict)
        refused(RuntimeError, ["pause_generation failed"], engines.update, 1)
        assert good.calls[-1] == "continue_generation", good.calls


def main():
    if len(sys.argv) > 1:
        return rank_main(int(sys.argv[1]), sys.argv[2])
    engines_that_fail()
    with dray.serve(), ranks(names.TP, 240):
        pass


main()
