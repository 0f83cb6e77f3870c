"""The flow of checkpoint-engine's ParameterServer (github.com/MoonshotAI/checkpoint-engine, ps.py), rewritten in plain
PyTorch for flows.py. Weights are in pinned host memory of the GPUs' own hosts, and are sent from there to all engines
on all GPUs.

  register  Trainers all-gather the full tensors, bucket by bucket. Each bucket has an owner, which copies it into its
            pinned memory; the ranks own buckets in turn. That memory is pinned once, before the timed updates, as
            with use_shared_memory_pool.
  gather    Ranks tell each other which tensors they have (gather_metas).
  update    All owners upload their next bucket at the same time. Then one bucket after the other is broadcast into
            one half of a buffer on every GPU. The engine's process received that buffer's IPC handle at the beginning.
            While the next bucket is sent into the other half, the engine rank copies its part out of the first.

All three are timed: from weights on the trainers' GPUs to weights in the engines, as in the other flows. There are four
differences from the original, all in its favour. Trainer and server are one process. A pipe replaces ZeroMQ. The
process group and the buffers are kept from one update to the next. There is no HTTP request to an engine."""
import torch
import torch.distributed as dist

import flows

ALIGN = 256  # bytes


class Server:
    """The buffers that a rank keeps from one update to the next."""

    def __init__(self, me):
        self.sizes = [sum(-2 * tensor.count // ALIGN * -ALIGN for tensor in bucket) for bucket in me.buckets]
        self.owned = [i for i in range(len(me.buckets)) if i % me.world == me.rank]
        pin = me.device.type == "cuda"
        self.pool = {i: torch.empty(self.sizes[i], dtype=torch.uint8, pin_memory=pin) for i in self.owned}
        most = max(self.sizes)
        self.uploaded = torch.empty(most, dtype=torch.uint8, device=me.device)
        self.buffer = torch.empty(2 * most, dtype=torch.uint8, device=me.device)
        if not pin:
            self.buffer = self.buffer.share_memory_()
        self.failed = torch.zeros((), dtype=torch.int64, device=me.device)
        self.most = most


def pieces(bucket, buffer, start):
    """Returns views of the bucket's tensors at their places in the buffer."""
    out = []
    for tensor in bucket:
        out.append(buffer[start:start + 2 * tensor.count].view(torch.bfloat16).view(tensor.shape))
        start += -2 * tensor.count // ALIGN * -ALIGN
    return out


def synchronize(me):
    if me.device.type == "cuda":
        torch.cuda.synchronize()


def register(me, server):
    for index, bucket in enumerate(me.buckets):
        full = me.full_tensors(bucket, None)
        if index in server.pool:
            for to, values in zip(pieces(bucket, server.pool[index], 0), full):
                to.copy_(values, non_blocking=True)
        del full
    synchronize(me)
    metas = [None] * me.world
    dist.all_gather_object(metas, {i: [(t.name, tuple(t.shape)) for t in me.buckets[i]] for i in server.owned})


def update(me, pipe):
    """Updates from a trainer rank, which is the server's rank as well. Returns the time at which the engine rank
    ended."""
    first = not hasattr(me, "server")
    if first:
        me.server = Server(me)
    server = me.server
    register(me, server)
    pipe.send(("buffer", server.buffer))  # sends an IPC handle, or a shared mapping of host memory
    pipe.recv()
    waits = False
    for turn in range(0, len(me.buckets), me.world):
        own = turn + me.rank
        if own in server.pool:
            server.uploaded[:server.sizes[own]].copy_(server.pool[own], non_blocking=True)
            synchronize(me)
        for index in range(turn, min(turn + me.world, len(me.buckets))):
            start, size, owner = index % 2 * server.most, server.sizes[index], index % me.world
            half = server.buffer[start:start + size]
            if owner == me.rank:
                half.copy_(server.uploaded[:size])
            dist.broadcast(half, owner)
            if waits:
                pipe.recv()  # the engine has copied out the previous bucket
            dist.all_reduce(server.failed)
            synchronize(me)
            if int(server.failed):
                raise RuntimeError("an engine failed")
            pipe.send((index, start))
            waits = True
    pipe.recv()
    pipe.send(("release", None))
    return pipe.recv()


def engine(me, pipe):
    """Answers the requests of the server on the same GPU, until it sends "end"."""
    buffer = None
    while True:
        what, value = pipe.recv()
        if what == "end":
            return
        if what == "check":
            pipe.send(me.wrong())
            continue
        if what == "clear":
            me.clear()
        elif what == "buffer":
            buffer = value
        elif what == "release":
            buffer = None
        else:
            me.load(me.buckets[what], pieces(me.buckets[what], buffer, value))
        del value
        pipe.send(me.finish())
