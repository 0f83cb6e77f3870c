#!/usr/bin/env python3
"""The weight updates of today's RL frameworks, in plain PyTorch and NCCL. bench/gpu.sh compares dray with them:

  broadcast   Half of the GPUs train (FSDP: dimension 0 is cut evenly), and the others infer (tensor-parallel).
              Bucket by bucket, the trainers all-gather the full tensors, trainer 0 broadcasts each to all
              engine ranks, and each engine rank copies out its part.
  packed      The same, but a bucket is sent as one flat tensor. Buckets alternate between two streams, so that
              one is packed or unpacked while the other is being sent. vLLM and NeMo-RL call these packed
              broadcasts; --bucket 1024 is their default.
  ipc         Each GPU has a trainer and an engine rank, each a process. Bucket by bucket, the trainers
              all-gather the full tensors, flatten them and give the flat tensor's CUDA IPC handle to the
              engine rank on the same GPU, which copies out its part.
  server      The flow of checkpoint-engine's ParameterServer (parameter_server.py), on the same GPUs.

The time counts from the last trainer rank's start to the last engine rank's end (its GPU has finished), as in `dray
bench weights`. It is the median of REPEATS updates after one that is not timed. The engines' memory is cleared before
each update. After the last one, every element of every engine rank is checked. The flows themselves verify nothing
during an update, and Ray, HTTP and loaders are not part of them."""
import argparse
import json
import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# layers, hidden, heads, kv_heads, head_dim, intermediate (of an expert), vocabulary, experts, bias, tied
MODELS = {
    "qwen3-4b": (36, 2560, 32, 8, 128, 9728, 151936, 0, False, True),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064, 0, True, False),
    "qwen2.5-32b": (64, 5120, 40, 8, 128, 27648, 152064, 0, True, False),
    "qwen2.5-72b": (80, 8192, 64, 8, 128, 29568, 152064, 0, True, False),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 768, 151936, 128, False, False),
}


class Tensor:
    """A tensor of the model, with its Hugging Face shape. `cut` is the dimension that tensor-parallel ranks share; with
    None each has the whole tensor. `parts` is the number of parts (heads) into which it can be cut; more ranks than
    that hold the same parts."""

    def __init__(self, name, shape, cut=None, parts=1 << 30):
        self.name, self.shape, self.cut, self.parts = name, shape, cut, parts
        self.count = torch.Size(shape).numel()

    def of_engine(self, full, rank, world):
        """Returns the part of the full tensor that an engine rank holds."""
        if self.cut is None:
            return full
        parts = min(world, self.parts)
        size = self.shape[self.cut] // parts
        return full.narrow(self.cut, rank * parts // world * size, size)

    def of_trainer(self, full, rank, world):
        size = self.shape[0] // world
        return full.narrow(0, rank * size, size)

    def values(self, device):
        """Returns the tensor's values, which have the same bits on every rank and device."""
        seed = 0
        for letter in self.name:
            seed = (seed * 131 + ord(letter)) % (1 << 31)
        bits = torch.arange(self.count, dtype=torch.int32, device=device)
        bits.mul_(1640531527).add_(seed).bitwise_right_shift_(13)
        return bits.to(torch.int16).view(torch.bfloat16).view(self.shape)


def dimensions(model):
    if model in MODELS:
        return MODELS[model]
    with open(model) as file:
        c = json.load(file)
    experts = c.get("num_experts", 0)
    heads = c["num_attention_heads"]
    return (c["num_hidden_layers"], c["hidden_size"], heads, c["num_key_value_heads"],
            c.get("head_dim", c["hidden_size"] // heads),
            c["moe_intermediate_size"] if experts else c["intermediate_size"], c["vocab_size"],
            experts, c["model_type"] == "qwen2", c.get("tie_word_embeddings", False))


def tensors(model):
    layers, hidden, heads, kv_heads, size, wide, words, experts, bias, tied = dimensions(model)
    out = [Tensor("embed_tokens", (words, hidden), 0)]
    for layer in range(layers):
        def add(name, *rest):
            out.append(Tensor(f"layers.{layer}.{name}", *rest))
        for name, count in ("q", heads), ("k", kv_heads), ("v", kv_heads):
            add(f"{name}_proj", (count * size, hidden), 0, count)
            if bias:
                add(f"{name}_proj.bias", (count * size,), 0, count)
            elif name != "v":
                add(f"{name}_norm", (size,))
        add("o_proj", (hidden, heads * size), 1, heads)
        for expert in range(experts or 1):
            add(f"{expert}.gate_proj", (wide, hidden), 0)
            add(f"{expert}.up_proj", (wide, hidden), 0)
            add(f"{expert}.down_proj", (hidden, wide), 1)
        if experts:
            add("gate", (experts, hidden))
        add("input_layernorm", (hidden,))
        add("post_attention_layernorm", (hidden,))
    out.append(Tensor("norm", (hidden,)))
    return out if tied else out + [Tensor("lm_head", (words, hidden), 0)]


def buckets(model, limit):
    out, size = [[]], 0
    for tensor in tensors(model):
        if out[-1] and size + 2 * tensor.count > limit:
            out, size = out + [[]], 0
        out[-1].append(tensor)
        size += 2 * tensor.count
    return out


class Rank:
    """The state of a process, which is one trainer or engine rank: its shards and its buckets."""

    def __init__(self, args, trainer, rank, world, number):
        self.trainer, self.rank, self.world, self.streams = trainer, rank, world, None
        self.device = torch.device("cpu")
        if args.device == "cuda":
            self.device = torch.device("cuda", number % args.ranks)
            torch.cuda.set_device(self.device)
        self.buckets = buckets(args.model, args.bucket << 20)
        self.shards = {}
        for tensor in self.tensors():
            full = tensor.values(self.device) if trainer else \
                torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta")
            part = (tensor.of_trainer if trainer else tensor.of_engine)(full, rank, world)
            self.shards[tensor.name] = part.clone() if trainer else \
                torch.zeros(part.shape, dtype=part.dtype, device=self.device)
            del full, part
        if args.device == "cuda":
            torch.cuda.empty_cache()

    def tensors(self):
        return [tensor for bucket in self.buckets for tensor in bucket]

    def finish(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def clear(self):
        for shard in self.shards.values():
            shard.zero_()

    def full_tensors(self, bucket, group):
        full = []
        for tensor in bucket:
            out = torch.empty(tensor.shape, dtype=torch.bfloat16, device=self.device)
            dist.all_gather_into_tensor(out, self.shards[tensor.name], group=group)
            full.append(out)
        return full

    def load(self, bucket, full):
        for tensor, values in zip(bucket, full):
            self.shards[tensor.name].copy_(tensor.of_engine(values, self.rank, self.world))

    def wrong(self):
        """Returns the number of elements that differ from the trainers', and the first tensor that has such an
        element."""
        count, first = 0, None
        for tensor in self.tensors():
            want = tensor.of_engine(tensor.values(self.device), self.rank, self.world)
            bad = int((self.shards[tensor.name].view(torch.int16) !=
                       want.contiguous().view(torch.int16)).sum())
            first = first or (tensor.name if bad else None)
            count += bad
        return count, first


def split(bucket, flat):
    """Returns views of a flat bucket as its tensors."""
    return [part.view(tensor.shape) for tensor, part in
            zip(bucket, flat.split([tensor.count for tensor in bucket]))]


def join(full):
    return torch.cat([values.view(-1) for values in full])


# ---- from some GPUs to others ---------------------------------------------------------------------

def broadcast_bucket(me, bucket, trainers, sync):
    full = me.full_tensors(bucket, trainers) if me.trainer else None
    if me.trainer and me.rank:
        return
    full = full or [torch.empty(tensor.shape, dtype=torch.bfloat16, device=me.device)
                    for tensor in bucket]
    for work in [dist.broadcast(values, 0, group=sync, async_op=True) for values in full]:
        work.wait()
    if not me.trainer:
        me.load(bucket, full)


def packed_bucket(me, bucket, trainers, sync):
    full = me.full_tensors(bucket, trainers) if me.trainer else None
    if me.trainer and me.rank:
        return
    flat = join(full) if me.trainer else torch.empty(
        sum(tensor.count for tensor in bucket), dtype=torch.bfloat16, device=me.device)
    dist.broadcast(flat, 0, group=sync)
    if not me.trainer:
        me.load(bucket, split(bucket, flat))


def packed_update(me, trainers, sync):
    """Updates by packed buckets. They alternate between two streams, and a bucket on a stream ends before the next one
    begins there."""
    if me.device.type != "cuda":
        for bucket in me.buckets:
            packed_bucket(me, bucket, trainers, sync)
        return
    me.streams = me.streams or [torch.cuda.Stream() for _ in range(2)]
    for index, bucket in enumerate(me.buckets):
        stream = me.streams[index % 2]
        stream.synchronize()
        with torch.cuda.stream(stream):
            packed_bucket(me, bucket, trainers, sync)


def broadcast_update(me, trainers, sync):
    for bucket in me.buckets:
        broadcast_bucket(me, bucket, trainers, sync)


def broadcast_rank(number, args, file, pipes):
    half = args.ranks // 2
    me = Rank(args, number < half, number % half, half, number)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", init_method=file,
                            rank=number, world_size=args.ranks)
    trainers = dist.new_group(list(range(half)))
    sync = dist.new_group([0] + list(range(half, args.ranks)))
    host = dist.new_group(backend="gloo")
    seconds, found = [], [None] * args.ranks
    for _ in range(args.repeat + 1):
        if not me.trainer:
            me.clear()
        me.finish()
        dist.barrier(group=host)
        begin = time.monotonic()
        (packed_update if args.flow == "packed" else broadcast_update)(me, trainers, sync)
        dist.all_gather_object(found, (begin, me.finish()), group=host)
        seconds.append(max(f[1] for f in found[half:]) - max(f[0] for f in found[:half]))
    dist.all_gather_object(found, (0, None) if me.trainer else me.wrong(), group=host)
    if number == 0:
        report(args, seconds[1:], found)
    dist.destroy_process_group()


# ---- on the same GPUs -----------------------------------------------------------------------------

def ipc_engine(me, pipe):
    """Answers the requests of the trainer on the same GPU, until it sends "end"."""
    while True:
        what, flat = pipe.recv()
        if what == "end":
            return
        if what == "clear":
            me.clear()
        elif what == "check":
            pipe.send(me.wrong())
            continue
        else:
            me.load(me.buckets[what], split(me.buckets[what], flat))
        del flat
        pipe.send(me.finish())


def ipc_update(me, pipe):
    """Returns the time at which the engine rank ended."""
    end = 0
    for index, bucket in enumerate(me.buckets):
        flat = join(me.full_tensors(bucket, None))
        me.finish()
        pipe.send((index, flat))  # sends an IPC handle, or a shared mapping of host memory
        end = pipe.recv()
        del flat
    return end


def ipc_rank(number, args, file, pipes):
    me = Rank(args, number < args.ranks, number % args.ranks, args.ranks, number)
    if args.flow == "server":
        import parameter_server
        update, engine = parameter_server.update, parameter_server.engine
    else:
        update, engine = ipc_update, ipc_engine
    if not me.trainer:
        engine(me, pipes[me.rank][1])
        return
    pipe = pipes[me.rank][0]
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", init_method=file,
                            rank=number, world_size=args.ranks)
    host = dist.new_group(backend="gloo")
    seconds, found = [], [None] * args.ranks

    def ask(what):
        pipe.send((what, None))
        return pipe.recv()
    for _ in range(args.repeat + 1):
        ask("clear")
        me.finish()
        dist.barrier(group=host)
        begin = time.monotonic()
        dist.all_gather_object(found, (begin, update(me, pipe)), group=host)
        seconds.append(max(f[1] for f in found) - max(f[0] for f in found))
    dist.all_gather_object(found, ask("check"), group=host)
    if number == 0:
        report(args, seconds[1:], found)
    pipe.send(("end", None))
    dist.destroy_process_group()


# ---- all of them ----------------------------------------------------------------------------------

def report(args, seconds, wrong):
    bad = sum(count for count, _ in wrong)
    if bad:
        first = next(name for _, name in wrong if name)
        sys.exit(f"flows.py {args.flow}: {bad} elements are wrong, first in {first}")
    median = sorted(seconds)[(len(seconds) - 1) // 2] if len(seconds) % 2 else \
        sum(sorted(seconds)[len(seconds) // 2 - 1:len(seconds) // 2 + 1]) / 2
    total = sum(2 * tensor.count for tensor in tensors(args.model))
    if args.json:
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if args.device == "cuda" else None
        print(json.dumps({"flow": args.flow, "model": args.model, "gpus": args.ranks, "bytes": total,
                          "bucket_bytes": args.bucket << 20, "median_seconds": median,
                          "seconds": seconds, "checked": True, "torch": torch.__version__,
                          "nccl": nccl}), flush=True)
    else:
        print(f"{args.flow}, {args.model}, {total / 1e9:.1f} GB on {args.ranks} GPUs: median "
              f"{median * 1e3:.1f} ms of {len(seconds)}, {min(seconds) * 1e3:.1f} to "
              f"{max(seconds) * 1e3:.1f}; every element checked", flush=True)


def main():
    warnings.simplefilter("ignore", FutureWarning)  # newer PyTorch has other names for the same calls
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flow", choices=["broadcast", "packed", "ipc", "server"])
    parser.add_argument("model", help=f"{', '.join(MODELS)}, or a config.json (qwen2, qwen3, qwen3_moe)")
    parser.add_argument("-n", "--repeat", type=int, default=5, help="timed updates (5)")
    parser.add_argument("-b", "--bucket", type=int, default=512, help="MiB of a bucket (512)")
    parser.add_argument("-r", "--ranks", type=int, default=0, help="GPUs (all that are visible)")
    parser.add_argument("-j", "--json", action="store_true", help="one JSON object")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda",
                        help="cpu: over gloo and shared memory, to see that the program works")
    args = parser.parse_args()
    args.ranks = args.ranks or torch.cuda.device_count()
    together = args.flow in ("ipc", "server")  # trainer and engine on each GPU
    if args.ranks < 1 or not together and args.ranks % 2:
        parser.error(f"{args.ranks} GPUs: {args.flow} needs "
                     + ("one or more" if together else "an even number of them"))
    sides = args.ranks if together else args.ranks // 2
    for tensor in tensors(args.model):
        if tensor.shape[0] % sides or tensor.cut is not None and \
                tensor.shape[tensor.cut] % min(sides, tensor.parts):
            parser.error(f"{tensor.name} {tensor.shape}: cannot be cut evenly for {sides} ranks")
    for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":
        os.environ.setdefault(name, "lo")
    pipes = [mp.get_context("spawn").Pipe() for _ in range(args.ranks)] if together else []
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(ipc_rank if together else broadcast_rank,
                           args=(args, f"file://{folder}/ranks", pipes), nprocs=args.ranks + len(pipes),
                           start_method="fork" if args.device == "cpu" else "spawn")


if __name__ == "__main__":
    main()
