#!/usr/bin/env python3
"""Compares three ways in which a step's weights reach an engine. PyTorch's FSDP2 trains on half of the GPUs, and a
tensor-parallel engine on the other half decodes all the time. Model and trainer are the same in all three:

  gather     as frameworks do today: each parameter is gathered (full_tensor), trainer 0 broadcasts it over NCCL to the
             engine's ranks, bucket by bucket, and each copies out its part. The engine does not decode meanwhile.
  update     dray: the engine's ranks read their parts from the trainers' shards. The engine does not decode meanwhile.
  prefetch   dray: the same into spare memory, while the engine decodes. It only stops for the commit.

    PYTHONPATH=python python3 bench/peers/fsdp2_tp.py [--model qwen2.5-3b] [--repeats 5] [--json OUT.json]
    PYTHONPATH=python python3 bench/peers/fsdp2_tp.py --cpu 4 --model tiny

The figures are medians of REPEATS steps after one that is not timed. The flows are interleaved, step by step, in one
run.

  ready   the seconds from the end of the optimizer's step (its GPU has finished, on all ranks) until all ranks of the
          engine have the version (their GPUs have finished)
  pause   the seconds in which the engine does not decode
  slow    the time of a decoding step while weights arrive, divided by that of one before
  extra   the largest GiB that a rank used in addition to its parameters, in PyTorch's allocator and outside of it: the
          maximum over the trainer ranks, and that over the engine's ranks
  limit   the bytes that a rank of the engine receives, divided by the rate at which one GPU reads from another in the
          same run

dray verifies checksums before it commits a version; NCCL's flow verifies nothing. After the last step of each flow, all
parameters of all ranks are compared with the trainers', bit by bit."""
import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary
MODELS = {
    "tiny": (2, 64, 4, 2, 16, 128, 512),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 128, 8960, 151936),
    "qwen2.5-3b": (36, 2048, 16, 2, 128, 11008, 151936),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064),
}
FLOWS = ("gather", "update", "prefetch")
BUCKET = 512 << 20
SEQUENCES, CONTEXT = 32, 512  # of the engine's decoding
DECODED = 20                  # steps before each update


def norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


class Layer(nn.Module):
    def __init__(self, size, dtype):
        super().__init__()
        _, h, heads, kv, d, inner, _ = size
        self.heads, self.kv, self.d = heads, kv, d
        for name, rows, columns in (("q", heads * d, h), ("k", kv * d, h), ("v", kv * d, h), ("o", h, heads * d),
                                    ("gate", inner, h), ("up", inner, h), ("down", h, inner)):
            setattr(self, name, nn.Linear(columns, rows, bias=False, dtype=dtype))
        self.norm1, self.norm2 = nn.Parameter(torch.ones(h, dtype=dtype)), nn.Parameter(torch.ones(h, dtype=dtype))

    def forward(self, x):
        n = norm(x, self.norm1)
        q, k, v = (part(n).unflatten(-1, (-1, self.d)).transpose(1, 2) for part in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        n = norm(x, self.norm2)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self, size, dtype):
        super().__init__()
        layers, h, *_, vocabulary = size
        self.embed = nn.Embedding(vocabulary, h, dtype=dtype)
        self.layers = nn.ModuleList(Layer(size, dtype) for _ in range(layers))
        self.norm, self.head = nn.Parameter(torch.ones(h, dtype=dtype)), nn.Linear(h, vocabulary, bias=False, dtype=dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(norm(x, self.norm))


class Engine:
    """A tensor-parallel rank, whose parameters are fused as in SGLang and vLLM. `parts` has (name, shape of the whole
    tensor, this rank's view, the view's start in the tensor)."""

    def __init__(self, size, dtype, device, rank, world, group):
        layers, h, heads, kv, d, inner, vocabulary = size
        assert heads % world == 0 and inner % world == 0 and vocabulary % world == 0, (size, world)
        self.group, self.d, self.parts, self.size = group, d, [], size
        kv_parts = min(world, kv)
        q_rows, k_rows, i_rows, v_rows = heads // world * d, kv // kv_parts * d, inner // world, vocabulary // world
        k_at = rank * kv_parts // world * k_rows
        self.q_rows, self.k_rows, self.i_rows, self.v_rows, self.v_at = q_rows, k_rows, i_rows, v_rows, rank * v_rows

        def parameter(*shape):
            return torch.zeros(*shape, dtype=dtype, device=device)

        def part(name, shape, view, *start):
            self.parts.append((name, shape, view, start))

        self.embed, self.head, self.norm = parameter(v_rows, h), parameter(v_rows, h), parameter(h)
        part("embed.weight", (vocabulary, h), self.embed, rank * v_rows, 0)
        part("head.weight", (vocabulary, h), self.head, rank * v_rows, 0)
        part("norm", (h,), self.norm, 0)
        self.layers = []
        for i in range(layers):
            qkv, o = parameter(q_rows + 2 * k_rows, h), parameter(h, q_rows)
            gate_up, down, n1, n2 = parameter(2 * i_rows, h), parameter(h, i_rows), parameter(h), parameter(h)
            at = f"layers.{i}"
            part(f"{at}.q.weight", (heads * d, h), qkv[:q_rows], rank * q_rows, 0)
            part(f"{at}.k.weight", (kv * d, h), qkv[q_rows:q_rows + k_rows], k_at, 0)
            part(f"{at}.v.weight", (kv * d, h), qkv[q_rows + k_rows:], k_at, 0)
            part(f"{at}.o.weight", (h, heads * d), o, 0, rank * q_rows)
            part(f"{at}.gate.weight", (inner, h), gate_up[:i_rows], rank * i_rows, 0)
            part(f"{at}.up.weight", (inner, h), gate_up[i_rows:], rank * i_rows, 0)
            part(f"{at}.down.weight", (h, inner), down, 0, rank * i_rows)
            part(f"{at}.norm1", (h,), n1, 0)
            part(f"{at}.norm2", (h,), n2, 0)
            cache = parameter(2, SEQUENCES, k_rows // d, CONTEXT, d)
            self.layers.append((qkv, o, gate_up, down, n1, n2, cache))
        self.tokens, self.at = torch.zeros(SEQUENCES, 1, dtype=torch.long, device=device), 0

    def sum_up(self, x):
        dist.all_reduce(x, group=self.group)
        return x

    @torch.no_grad()
    def decode(self):
        """Decodes one token for each sequence."""
        local = self.tokens - self.v_at
        here = (local >= 0) & (local < self.v_rows)
        x = self.sum_up(F.embedding(local.clamp(0, self.v_rows - 1), self.embed) * here.unsqueeze(-1))
        for qkv, o, gate_up, down, n1, n2, cache in self.layers:
            q, k, v = F.linear(norm(x, n1), qkv).split([self.q_rows, self.k_rows, self.k_rows], -1)
            q, k, v = (t.unflatten(-1, (-1, self.d)).transpose(1, 2) for t in (q, k, v))
            cache[0, :, :, self.at:self.at + 1], cache[1, :, :, self.at:self.at + 1] = k, v
            a = F.scaled_dot_product_attention(q, cache[0, :, :, :self.at + 1], cache[1, :, :, :self.at + 1], enable_gqa=True)
            x = x + self.sum_up(F.linear(a.transpose(1, 2).flatten(2), o))
            gate, up = F.linear(norm(x, n2), gate_up).chunk(2, -1)
            x = x + self.sum_up(F.linear(F.silu(gate) * up, down))
        best, which = F.linear(norm(x, self.norm), self.head).float().max(-1)
        both = torch.stack([best, (which + self.v_at).float()])
        ranks = [torch.empty_like(both) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(ranks, both, group=self.group)
        ranks = torch.stack(ranks)
        winner = ranks[:, 0].argmax(0, keepdim=True)
        self.tokens = ranks[:, 1].gather(0, winner)[0].long()
        self.at = (self.at + 1) % CONTEXT


class Memory:
    """The largest number of GiB that this rank's GPU used in addition to those in use at the start: in PyTorch's
    allocator, and outside of it."""

    def __init__(self, device):
        self._device, self._over, self.extra = device, threading.Event(), 0.0

    def _outside(self):
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def __enter__(self):
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._inside, self._before, self._most = torch.cuda.memory_allocated(self._device), self._outside(), 0
            self._thread = threading.Thread(target=self._watch)
            self._thread.start()
        return self

    def _watch(self):
        torch.cuda.set_device(self._device)
        while not self._over.wait(0.002):
            self._most = max(self._most, self._outside() - self._before)

    def __exit__(self, *_):
        if self._device.type == "cuda":
            self._over.set()
            self._thread.join()
            most = max(self._most, self._outside() - self._before)
            self.extra = (torch.cuda.max_memory_allocated(self._device) - self._inside + max(0, most)) / (1 << 30)


class Rank:
    """The state that both sides have. The first half of the ranks are trainers."""

    def __init__(self, rank, options, folder, told):
        self.rank, self.options, self.told, self.half = rank, options, told, options.ranks // 2
        self.cpu = bool(options.cpu)
        self.device = torch.device("cpu") if self.cpu else torch.device("cuda", rank)
        self.size = MODELS[options.model]
        self.dtype = torch.float32 if self.cpu else torch.bfloat16
        if self.cpu:
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(self.device)
        backend = "gloo" if self.cpu else "nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=options.ranks)
        self.engines = list(range(self.half, options.ranks))
        self.mesh = init_device_mesh(self.device.type, (2, self.half), mesh_dim_names=("side", "rank"))["rank"]
        self.control = dist.new_group(backend="gloo")
        self.engine_control = dist.new_group(self.engines, backend="gloo")
        self.engine_group = dist.new_group(self.engines, backend=backend)
        self.transfer = dist.new_group([0, *self.engines], backend=backend)

    def finish(self):
        if not self.cpu:
            torch.cuda.synchronize()

    def all(self, value):
        found = [None] * self.options.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def buckets(self):
        """Yields lists of (name, shape) of the model's tensors."""
        with torch.device("meta"):
            tensors = Model(self.size, self.dtype).named_parameters()
        bucket, size = [], 0
        for name, p in tensors:
            if bucket and size + p.numel() * p.element_size() > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tuple(p.shape)))
            size += p.numel() * p.element_size()
        yield bucket


class TrainerRank(Rank):
    def run(self):
        import dray
        torch.manual_seed(0)
        model = Model(self.size, self.dtype).to(self.device)
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        self.model = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.publisher = dray.Publisher(model, rank=self.rank, world=self.half)
        for version in range(1, self.options.versions + 1):
            tokens = torch.randint(self.size[-1], (2, 256), device=self.device)
            F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            self.finish()
            flow = FLOWS[version % len(FLOWS)]
            self.all("trained")
            self.all("decoding")          # after the steps that are timed before the update
            with Memory(self.device) as memory:
                begun = time.monotonic()
                if self.rank == 0:
                    self.told.value = version
                getattr(self, flow)(version)
                self.finish()
                found = self.all({"begun": begun})
            self.all({"side": "trainer", "extra": memory.extra})
            if version > self.options.versions - len(FLOWS):
                self.gather(version)      # the engine compares its parameters with these
                self.all(None)
        self.publisher.close()

    def gather(self, version):
        parameters = dict(self.model.named_parameters())
        for bucket in self.buckets():
            whole = [parameters[name].full_tensor().detach() for name, _ in bucket]
            if self.rank == 0:
                for work in [dist.broadcast(t, 0, group=self.transfer, async_op=True) for t in whole]:
                    work.wait()

    def update(self, version):
        self.publisher.publish(version)
        self.publisher.deliver(version)
        self.publisher.wait(version)

    prefetch = update


class EngineRank(Rank):
    def run(self):
        import dray
        self.engine = Engine(self.size, self.dtype, self.device, self.rank - self.half, self.half, self.engine_group)
        blocks = [dray.weights.Block(name, shape, view, start) for name, shape, view, start in self.engine.parts]
        self.subscriber = dray.Subscriber(blocks, rank=self.rank - self.half, world=self.half)
        rows = {flow: [] for flow in FLOWS}
        for version in range(1, self.options.versions + 1):
            flow = FLOWS[version % len(FLOWS)]
            self.all("trained")
            before = [self.step() for _ in range(DECODED)]
            self.all("decoding")
            with Memory(self.device) as memory:
                while not self.agreed(self.told.value >= version):
                    self.step()
                pause, during = getattr(self, flow)(version)
                ready = time.monotonic()
                found = self.all({"ready": ready, "pause": pause})
            extra = self.all({"side": "engine", "extra": memory.extra})
            begun = max(each["begun"] for each in found[:self.half])
            rows[flow].append({
                "ready": max(each["ready"] for each in found[self.half:]) - begun,
                "pause": max(each["pause"] for each in found[self.half:]),
                "slow": statistics.median(during) / statistics.median(before) if during else None,
                "extra_trainer": max(each["extra"] for each in extra if each["side"] == "trainer"),
                "extra_engine": max(each["extra"] for each in extra if each["side"] == "engine"),
                "step": statistics.median(before)})
            if version > self.options.versions - len(FLOWS):
                self.receive(self.compare)
                self.all(None)
        self.subscriber.close()
        if self.rank == self.half:
            with open(f"{self.options.folder}/rows.json", "w", encoding="utf-8") as file:
                json.dump({"rows": rows, "bytes": sum(v.numel() * v.element_size() for _, _, v, _ in self.engine.parts)},
                          file)

    def step(self):
        begun = time.monotonic()
        self.engine.decode()
        self.finish()
        return time.monotonic() - begun

    def agreed(self, seen):
        """Returns whether all ranks of the engine have seen it, so that they stop after the same step."""
        flag = torch.tensor([int(seen)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self.engine_control)
        return bool(flag.item())

    def receive(self, put):
        views = {}
        for name, _, view, start in self.engine.parts:
            views[name] = view, start
        for bucket in self.buckets():
            whole = [torch.empty(shape, dtype=self.dtype, device=self.device) for _, shape in bucket]
            for work in [dist.broadcast(t, 0, group=self.transfer, async_op=True) for t in whole]:
                work.wait()
            for (name, _), t in zip(bucket, whole):
                view, start = views[name]
                put(name, view, t[tuple(slice(s, s + n) for s, n in zip(start, view.shape))])

    @staticmethod
    def compare(name, view, wanted):
        if not torch.equal(view, wanted):
            raise SystemExit(f"{name}: differs")

    def gather(self, version):
        begun = time.monotonic()
        self.receive(lambda name, view, wanted: view.copy_(wanted))
        self.finish()
        return time.monotonic() - begun, []

    def update(self, version):
        begun = time.monotonic()
        self.subscriber.update(min_version=version)
        self.finish()
        return time.monotonic() - begun, []

    def prefetch(self, version):
        failure, during = [], []

        def bring():
            try:
                if not self.cpu:
                    torch.cuda.set_device(self.device)
                self.subscriber.prefetch(min_version=version, copy_engines=not self.cpu)
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=bring)
        thread.start()
        while not self.agreed(not thread.is_alive()):
            during.append(self.step())
        thread.join()
        if failure:
            raise failure[0]
        begun = time.monotonic()
        self.subscriber.commit(min_version=version)
        self.finish()
        pause = time.monotonic() - begun
        self.subscriber.drop_prefetched()
        return pause, during


def speed(repeats=5, size=1 << 30):
    """Returns the bytes per second at which one GPU reads from another."""
    here, there = (torch.empty(size, dtype=torch.uint8, device=f"cuda:{i}") for i in (0, 1))
    found = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        begun = time.monotonic()
        here.copy_(there)
        torch.cuda.synchronize(0)
        found.append(size / (time.monotonic() - begun))
    del here, there
    torch.cuda.empty_cache()
    return statistics.median(found[1:])


def rank_main(rank, options, folder, told):
    (TrainerRank if rank < options.ranks // 2 else EngineRank)(rank, options, folder, told).run()
    dist.destroy_process_group()


def table(found, options, limit):
    rows = [("flow", "ready", "pause", "slow", "extra trainer", "extra engine")]
    figures = {}
    for flow in FLOWS:
        timed = found["rows"][flow][1:]

        def median(key):
            return statistics.median(each[key] for each in timed)
        figures[flow] = {key: median(key) for key in ("ready", "pause", "extra_trainer", "extra_engine", "step")}
        figures[flow]["slow"] = median("slow") if timed[0]["slow"] else None
        f = figures[flow]
        rows.append((flow, f"{f['ready'] * 1e3:.1f} ms", f"{f['pause'] * 1e3:.1f} ms",
                     f"{f['slow']:.2f} x" if f["slow"] else "stands still", f"{f['extra_trainer']:.2f} GiB",
                     f"{f['extra_engine']:.2f} GiB"))
    half = options.ranks // 2
    print(f"{options.model}, {found['bytes'] / 1e9:.2f} GB a rank of the engine; FSDP2 on {half}, TP{half} on {half}; a "
          f"decoding step takes {figures['gather']['step'] * 1e3:.1f} ms")
    for row in rows:
        print("".join(f"{cell:>16}" for cell in row))
    if limit:
        figures["limit"] = found["bytes"] / limit
        print(f"limit: {figures['limit'] * 1e3:.1f} ms ({limit / 1e9:.0f} GB/s from GPU to GPU): update takes "
              f"{figures['update']['ready'] / figures['limit']:.2f} of it")
    for flow in FLOWS[1:]:
        print(f"{flow}: ready {figures['gather']['ready'] / figures[flow]['ready']:.1f} x, pause "
              f"{figures['gather']['pause'] / figures[flow]['pause']:.1f} x faster than gather")
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-3b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu", type=int, default=0, metavar="RANKS", help="so many processes without GPUs: tries the script")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    options.ranks = options.cpu or torch.cuda.device_count() // 2 * 2
    if options.ranks < 2:
        print(f"fsdp2_tp.py: 2 GPUs or more are needed, {torch.cuda.device_count()} are there", file=sys.stderr)
        return 77
    import dray
    options.versions = len(FLOWS) * (1 + options.repeats)
    limit = None if options.cpu else speed()
    processes = mp.get_context("spawn")
    with dray.serve(), tempfile.TemporaryDirectory() as folder:
        options.folder, told = folder, processes.Value("q", 0)
        ranks = [processes.Process(target=rank_main, args=(rank, options, folder, told)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            for process in ranks:
                process.join(0.2)
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.kill()
        if any(process.exitcode for process in ranks):
            return 1
        with open(f"{folder}/rows.json", encoding="utf-8") as file:
            found = json.load(file)
    figures = table(found, options, limit)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"model": options.model, "gpus": options.ranks, "device": "cpu" if options.cpu else
                       torch.cuda.get_device_name(0), "torch": torch.__version__, "bytes": found["bytes"], **figures,
                       "rows": found["rows"]}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
