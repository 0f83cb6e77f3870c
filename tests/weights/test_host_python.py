"""dray.weights on the CPU: parameters in shared and in private memory, cut in ways of one's own, modules
that pack experts, engines' fused parameters from a configuration, load_weights, prefetch and disk.
Everything is compared with slices that are written out here."""
import contextlib
import gc
import json
import multiprocessing
import os
import subprocess
import time

from begin import coordinator, needs, seed

with needs:
    import torch
    from safetensors.torch import save_file

import dray
from dray.weights import (Block, Context, Publisher, Subscriber, empty, engine_blocks,
                          share, tensors)
from served import refused

torch.manual_seed(seed)
H, HEADS, KV, D, FFN, VOCAB, EXPERTS, TP = 32, 4, 2, 8, 48, 128, 4, 2
SMALL = {"vocab_size": VOCAB, "hidden_size": H, "intermediate_size": FFN, "num_hidden_layers": 1,
         "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
         "tie_word_embeddings": True, "torch_dtype": "float32"}
DENSE = dict(SMALL, model_type="qwen2")
EXPERT = dict(SMALL, model_type="qwen3_moe", num_experts=EXPERTS, moe_intermediate_size=16,
              num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[])
LAYER = "model.layers.0."


def config(folder, name, values):
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(values, file)
    return path


def random_checkpoint(path):
    return {name: torch.randn(shape, dtype=dtype) for name, (shape, dtype) in tensors(path).items()}


def together(subscribers, **options):
    """All ranks of a group, in this thread."""
    for s in subscribers:
        s.start(**options)
    deadline = time.monotonic() + 60
    left = list(subscribers)
    while left:
        assert time.monotonic() < deadline
        left = [s for s in left if not s.poll()]
    return [s.finish() for s in subscribers]


def trains(pipe):
    """Another process: shared parameters are read where they lie, and stay what they were for the
    module; private ones come through staging."""
    assert pipe.recv() == "begin"
    with Context(role="trainer", timeout=20) as trainer:
        for shared in (True, False):
            model = torch.nn.Sequential(torch.nn.Linear(H, FFN), torch.nn.BatchNorm1d(FFN))
            model.tied = model[0].weight
            before = {n: p.clone() for n, p in model.state_dict().items()}
            if shared:
                assert share(model) is model and share(model) is model
                assert dray.host.find(model[0].weight.data_ptr())
                assert model.tied.data_ptr() == model[0].weight.data_ptr()
            assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with Publisher(model, f"shared-{shared}", context=trainer) as publisher:
                assert publisher._layout.private == (not shared)
                publisher.attach(optimizer, groups=f"group-{shared}")
                refused(ValueError, "no version", publisher.deliver)
                for version in range(1, 4):
                    model(torch.randn(4, H)).square().sum().backward()
                    optimizer.step()
                    publisher.publish(version)
                    pipe.send({n: p.detach().numpy() for n, p in model.named_parameters()})
                    publisher.deliver(version, [f"group-{shared}"])
                    publisher.deliver(version)
                    missing = [f"group-{shared}", "nobody"]
                    refused(dray.DrayTimeout, "missing: nobody", publisher.deliver, version, missing, 0.05)
                    refused(ValueError, "at least 1", publisher.deliver, version, 0)
                    refused(ValueError, "at least 1", publisher.deliver, version, [])
                    assert pipe.recv() == version
        base = empty(3).data_ptr()
        assert not dray.host.find(base)  # it went with its last tensor
    pipe.send("end")


def share_and_stage(pipe, engine):
    """A copy in bf16 and one as it is."""
    pipe.send("begin")
    for shared in (True, False):
        taken = {n: torch.empty(shape, dtype=torch.bfloat16 if len(shape) == 2 else torch.float32)
                 for n, shape in (("tied", (FFN, H)), ("0.bias", (FFN,)), ("1.weight", (FFN,)),
                                  ("1.bias", (FFN,)))}
        with Subscriber(taken, f"shared-{shared}", f"group-{shared}", context=engine) as subscriber:
            for version in range(1, 4):
                there = pipe.recv()
                report = subscriber.update_weights_from_tensor(min_version=version)
                assert report["version"] == subscriber.version == version
                assert report["verified_tensors"] == len(taken) == len(there), report
                assert (report["peak_extra_bytes"] == 0) == shared, report
                for name, p in there.items():
                    assert torch.equal(taken[name], torch.from_numpy(p).to(taken[name].dtype)), name
                if version == 3:
                    taken["tied"][0, 0] += 1
                    assert refused(dray.DrayError, "tied", subscriber.verify).name == "ECHECKSUM"
                    refused(ValueError, "mode", subscriber.update, mode="rdma")
                    refused(dray.DrayTimeout, "version", subscriber.update, min_version=9, timeout=0.05)
                pipe.send(version)
    assert pipe.recv() == "end"


def dense_oracle(w, rank):
    """What SGLang's rank has of it."""
    rows = lambda t, n=TP: t.chunk(n)[rank]  # noqa: E731
    attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
    expected = {"model.embed_tokens.weight": rows(w["model.embed_tokens.weight"]),
                "model.norm.weight": w["model.norm.weight"],
                attention + "o_proj.weight": w[attention + "o_proj.weight"].chunk(TP, 1)[rank],
                mlp + "down_proj.weight": w[mlp + "down_proj.weight"].chunk(TP, 1)[rank],
                mlp + "gate_up_proj.weight": torch.cat([rows(w[mlp + f"{p}_proj.weight"])
                                                        for p in ("gate", "up")])}
    for kind in ("weight", "bias"):
        expected[attention + f"qkv_proj.{kind}"] = torch.cat(
            [rows(w[attention + f"{p}_proj.{kind}"]) for p in "qkv"])
    for norm in ("input_layernorm", "post_attention_layernorm"):
        expected[LAYER + norm + ".weight"] = w[LAYER + norm + ".weight"]
    return expected


def fused(folder, trainer, engines):
    """Two trainer ranks that cut rows unevenly, in numpy, to an engine of two with fused parameters."""
    path = config(folder, "dense.json", DENSE)
    w = random_checkpoint(path)
    publishers, kept = [], []
    for rank in range(2):
        blocks = []
        for name, t in w.items():
            cut = [0, len(t) // 3, len(t)][rank:rank + 2]
            mine = t[cut[0]:cut[1]].numpy().copy()
            kept.append(mine)
            blocks.append(Block(name, tuple(t.shape), mine, (cut[0],) + (0,) * (t.dim() - 1)))
        publishers.append(Publisher(blocks, "fused", rank, 2, context=trainer))
    expected = [dense_oracle(w, rank) for rank in range(TP)]
    parameters = [{n: torch.zeros_like(t) for n, t in e.items()} for e in expected]
    extra = {"model.rotary.cos": torch.zeros(3)}
    subscribers = [Subscriber(engine_blocks(path, {**parameters[r], **extra}, tp=TP, tp_rank=r,
                                            checkpoint=False), "fused", "fused", r, TP, context=engines[r])
                   for r in range(TP)]
    for p in publishers:
        p.publish(1)
    for rank, report in enumerate(together(subscribers)):
        assert report["verified_tensors"] == len(w), report
        for name, t in expected[rank].items():
            assert torch.equal(parameters[rank][name], t), (rank, name)
    missing = dict(parameters[0])
    del missing[LAYER + "mlp.down_proj.weight"]
    refused(ValueError, "down_proj", engine_blocks, path, missing, tp=TP)
    refused(ValueError, "tp=1 would have", engine_blocks, path, parameters[0], tp=1)
    refused(ValueError, "none of 1", engine_blocks, path, extra)
    refused(TypeError, "etp", engine_blocks, path, parameters[0], etp=2)

    # A prefetch changes nothing before the commit.
    for array in kept:
        array += 1
    for p in publishers:
        p.wait()
        p.publish(2)
    taken = {n: torch.zeros_like(t) for n, t in w.items()}
    with Subscriber(taken, "fused", "swap", context=engines[0]) as swap:
        swap.prefetch(min_version=2, prefetch_seconds=0.1)
        assert not any(t.any() for t in taken.values())
        swap.start_commit(min_version=2)
        while not swap.poll():
            pass
        assert swap.finish()["source"] == "staging"
        assert all(torch.equal(taken[n], w[n] + 1) for n in w)
    for one in subscribers + publishers:
        one.close()
    for function, *arguments in ((publishers[0].publish, 9), (publishers[0].wait, 2),
                                 (subscribers[0].update,), (subscribers[0].poll,)):
        assert refused(dray.DrayError, "is closed", function, *arguments).name == "ECLOSED"
    refused(TypeError, "Tensor", Subscriber, torch.zeros(2), "fused", context=engines[0])


def packed(folder, trainer, engine):
    """One gate_up_proj of all experts, as transformers 5 has it, to load_weights; then from disk."""
    path = config(folder, "moe.json", EXPERT)
    w = random_checkpoint(path)
    experts = LAYER + "mlp.experts."
    module = {n: t for n, t in w.items() if not n.startswith(experts)}
    one = lambda p: torch.stack([w[f"{experts}{e}.{p}.weight"] for e in range(EXPERTS)])  # noqa: E731
    module[experts + "gate_up_proj"] = torch.cat([one("gate_proj"), one("up_proj")], 1)
    module[experts + "down_proj"] = one("down_proj")
    got = {}

    def load(named):
        got.update((name, t.clone()) for name, t in named)

    with Publisher(module, "packed", context=trainer, config=path) as publisher:
        publisher.publish(1)
        with Subscriber(model="packed", context=engine, load=load, tensors=w, group="load",
                        bucket_bytes=1 << 20) as subscriber:
            assert subscriber.update()["verified_tensors"] == len(w)
            assert all(torch.equal(got[n], w[n]) for n in w) and len(got) == len(w)
            got.clear()
            changed = {n: t + 1 for n, t in w.items()}
            save_file(changed, os.path.join(folder, "model.safetensors"))
            report = subscriber.update_weights_from_disk(os.path.join(folder, "model.safetensors"), 5)
            assert report["version"] == 5 and all(torch.equal(got[n], changed[n]) for n in w)

        def broken(named):
            raise KeyError("no such parameter")

        with Subscriber(model="packed", context=engine, load=broken, tensors=w, group="broken") as subscriber:
            error = refused(dray.DrayError, "no such parameter", subscriber.update)
            assert isinstance(error.__cause__, KeyError) and error.name == "ETORN", error.name
            assert refused(dray.DrayError, "torn", lambda: subscriber.version).name == "ETORN"
    refused(ValueError, "tensors", Subscriber, model="packed", context=engine, load=load)


def collected_meanwhile():
    """Memory is freed where Python collects garbage, which it may do while this thread looks for other memory."""
    class Collecting(list):
        def insert(self, *arguments):
            gc.collect()
            super().insert(*arguments)

    kept, dray.host._bases = dray.host._bases, Collecting(dray.host._bases)
    try:
        circle = [empty(3)]
        base = circle[0].data_ptr()
        circle.append(circle)
        del circle
        other = empty(3)
        assert not dray.host.find(base) and dray.host.find(other.data_ptr())
    finally:
        kept[:] = dray.host._bases
        dray.host._bases = kept


@contextlib.contextmanager
def serve(folder):
    """A coordinator that is killed at the end, and leaves what the next one needs."""
    server = subprocess.Popen([os.environ["DRAY_PROGRAM"], "serve", "--listen", f"unix:{folder}/again"],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline().startswith("listening")
        yield
    finally:
        server.kill()
        server.communicate()


def delivered_once(folder):
    """A group that has ended had the version: another step asks nobody, also where the coordinator is a later one."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with serve(folder):
        trainer = Context(f"unix:{folder}/again", role="trainer", timeout=20)
        publisher = Publisher(model, "again", context=trainer, timeout=20)
        publisher.attach(optimizer, groups=1)
        publisher.publish(1)
        with Context(f"unix:{folder}/again", role="engine", timeout=20) as engine, \
                Subscriber(torch.nn.Linear(2, 1), "again", "gone", context=engine) as subscriber:
            assert subscriber.update()["version"] == 1
        optimizer.step()
    with serve(folder):
        optimizer.step()
        publisher.publish(2)
        publisher._timeout = 1
        refused(dray.DrayTimeout, "0 of 1 groups", optimizer.step)  # nobody has this one
        publisher.close()
        trainer.close()


with coordinator() as folder:
    ours, theirs = multiprocessing.Pipe()  # forked before anything of dray is open
    child = multiprocessing.get_context("fork").Process(target=trains, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    with Context(role="trainer", timeout=20) as trainer, \
            Context(role="engine", timeout=20) as engine, \
            Context(role="engine", rank=1, timeout=20) as second:
        share_and_stage(ours, engine)
        fused(folder, trainer, [engine, second])
        delivered_once(folder)
        os.mkdir(f"{folder}/trace")
        dray.trace.open(f"{folder}/trace/engine.spans", "engine 0")
        packed(folder, trainer, engine)
        with dray.trace.span("beside", step=3):
            pass
        dray.trace.close()
        dray.trace.merge(f"{folder}/trace", f"{folder}/trace.json")
        with open(f"{folder}/trace.json", encoding="utf-8") as file:
            events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        named = {e["name"]: e["args"].get("step") for e in events}
        assert named["weights publish"] == 1 and named["beside"] == 3, named
        # One of three failed: nobody knows whether it still waited.
        assert [e["name"] for e in events].count("weights update") == 2, events
        assert {e["args"].get("cause") for e in events if e["cat"] == "wait"} == {"weights"}, events
    context = Context(role="trainer", timeout=20)
    collected_meanwhile()
    left = Publisher({"a": torch.ones(2)}, "left", context=context)
    Publisher({"a": torch.ones(2)}, "dropped", context=context)  # closed at once: nobody has it
    Publisher({"a": torch.ones(2)}, "dropped", context=context).publish(1)
    context.close()
    refused(dray.DrayError, "is closed", left.publish, 1)
    child.join(60)
    assert child.exitcode == 0
