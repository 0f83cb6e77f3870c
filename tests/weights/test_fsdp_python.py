"""PyTorch processes by way of python/dray: FSDP2 ranks (fully_shard) publish the parameters that their
optimizer writes, ranks of a tensor-parallel engine with fused weights receive them, and every update
is compared, bit for bit, with what gather-and-slice gives. With GPUs (as many as ranks, by default
two) on GPUs, each process seeing them in an order of its own, and parameters in an arena that is
released and resumed between; elsewhere on the CPU.

    DRAY_TEST_STEPS   updates (6; on GPUs 200)
    DRAY_TEST_RANKS   of the trainer, and of the engine (2)
    DRAY_TEST_ENGINES engines that share the ranks' number between them (1); more than one: every
                      process sees one GPU alone
    DRAY_TEST_MOVES   the trainer's memory goes and comes back before every so manieth update (5)
    DRAY_TEST_FSDP    1: FullyShardedDataParallel's flat parameters, in f32 (2)
    DRAY_TEST_MEMORY  "arena" (with GPUs the default), or "torch": PyTorch's own allocator, and
                      parameters moved to the CPU and back"""
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.device_mesh import init_device_mesh
except ImportError as missing:
    print(missing)
    sys.exit(77)

sys.path.insert(0, os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))
import dray  # noqa: E402
from dray.weights import Block, Context, Publisher, Subscriber, fsdp1_parameters  # noqa: E402

RANKS = int(os.environ.get("DRAY_TEST_RANKS", "2"))
GROUPS = int(os.environ.get("DRAY_TEST_ENGINES", "1"))
TP = RANKS // GROUPS  # of each engine
ON_GPU = torch.cuda.is_available() and (len(sys.argv) == 4 or
                                        torch.cuda.device_count() >= RANKS)
STEPS = int(os.environ.get("DRAY_TEST_STEPS", "200" if ON_GPU else "6"))
MOVES = int(os.environ.get("DRAY_TEST_MOVES", "5"))
MEMORY = os.environ.get("DRAY_TEST_MEMORY", "arena")
HIDDEN, HEADS, KV, HEAD, FFN = (1024, 16, 4, 64, 2816) if ON_GPU else (48, 6, 2, 8, 88)
LAYERS = 2
FSDP1 = os.environ.get("DRAY_TEST_FSDP") == "1"
DTYPE = torch.bfloat16  # of engines
TRAINED = torch.float32 if FSDP1 else DTYPE


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in shapes().items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=TRAINED)))

    def forward(self, x):
        y = torch.nn.functional.rms_norm(x, (HIDDEN,), self.norm)
        k, v = y @ self.k.T, y @ self.v.T
        y = y @ self.q.T + (k * v).mean(-1, keepdim=True)  # no attention: every parameter counts
        return x + (torch.sigmoid(y @ self.gate.T) * (y @ self.up.T)) @ self.down.T


def shapes():
    return {"q": (HEADS * HEAD, HIDDEN), "k": (KV * HEAD, HIDDEN), "v": (KV * HEAD, HIDDEN),
            "gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN), "norm": (HIDDEN,)}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def wait_for(path, seconds=120):
    deadline = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.0005)


def touch(path):
    open(path, "w").close()


# ---- trainer -------------------------------------------------------------------------------------

def gpu_of(rank):
    """By this process's own count."""
    return rank if GROUPS == 1 else 0


def footprint(tag, device):
    """What this process has of the GPU, what all processes have, descriptors, mappings."""
    own = free = total = 0
    if ON_GPU:
        own = torch.cuda.memory_reserved()
        if MEMORY == "arena" or tag == "engine":
            own = dray.gpu.arena_status(tag, device)["resident_bytes"]
        free, total = torch.cuda.mem_get_info()
    with open("/proc/self/maps") as maps:
        lines = sum(1 for _ in maps)
    return own, total - free, len(os.listdir("/proc/self/fd")), lines


def growth(start, end):
    own, everybody, fds, maps = (b - a for a, b in zip(start, end))
    assert own <= 8 << 20 and fds <= 2 and maps <= 64, (start, end)
    return (f"from update {STEPS // 2} to {STEPS} this process's device memory {own:+d} bytes, all "
            f"processes' {everybody:+d}; descriptors {fds:+d}; mappings {maps:+d}")


def trainer(folder, rank):
    device = "cuda" if ON_GPU else "cpu"
    if ON_GPU:
        torch.cuda.set_device(gpu_of(rank))
    dist.init_process_group("nccl" if ON_GPU else "gloo", init_method=f"file://{folder}/init",
                            rank=rank, world_size=RANKS)
    mesh = init_device_mesh(device, (RANKS,))
    torch.manual_seed(int(os.environ["DRAY_TEST_SEED"]))
    arena = ON_GPU and MEMORY == "arena"

    def build():
        model = Model().to(device)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.05)
        if FSDP1:
            of = dict(use_orig_params=True, device_id=torch.device(device, gpu_of(rank)) if ON_GPU else torch.device("cpu"))
            for i, layer in enumerate(model.layers):
                model.layers[i] = FullyShardedDataParallel(layer, **of)
            return FullyShardedDataParallel(model, **of)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    if arena:
        with dray.gpu.use_arena("weights"):
            model = build()
        torch.cuda.empty_cache()
    else:
        model = build()
    with Context(f"unix:{folder}/s", role="trainer", rank=rank) as context:
        published = fsdp1_parameters(model) if FSDP1 else model.named_parameters()
        publisher = Publisher(published, "model", rank, RANKS, context=context,
                              staging_bytes=0 if ON_GPU else 8 << 20)
        if not FSDP1 and not arena:  # a checkpoint is loaded: all parameters are others now
            model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        hook = publisher.attach(optimizer)
        start = fds = None
        for step in range(1, STEPS + 1):
            x = torch.randn(64, HIDDEN, dtype=TRAINED, device=device)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % MOVES == 0:
                move(publisher, model, arena)
            full = gather(model)
            if rank == 0:
                torch.save(full, f"{folder}/{step}.tmp")
                os.rename(f"{folder}/{step}.tmp", f"{folder}/{step}.pt")
            dist.barrier()
            publisher.publish(step)
            for e in range(TP * GROUPS):
                wait_for(f"{folder}/done.{step}.{e}")
            dist.barrier()
            if rank == 0:
                os.remove(f"{folder}/{step}.pt")
            if step == STEPS // 2:
                start = footprint("weights", gpu_of(rank))
        said = growth(start, footprint("weights", gpu_of(rank)))
        print(f"trainer {rank}: {said}; regions {len(publisher._layout.regions)}", flush=True)
        assert not arena or len(publisher._layout.regions) == 1  # one handle
        hook.remove()
        publisher.close()
    dist.destroy_process_group()


def gather(model):
    """What an engine would be given today, in its dtype."""
    if not FSDP1:
        return {n: p.full_tensor().cpu() for n, p in model.named_parameters()}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {n.replace("_fsdp_wrapped_module.", ""): p.detach().to(DTYPE).cpu().clone()
                for n, p in model.named_parameters()}


def move(publisher, model, arena):
    """Between updates memory comes and goes, as when the engine has the GPU."""
    if arena:
        publisher.release()
        torch.cuda.current_stream().synchronize()
        report = dray.gpu.release("weights")
        assert report["arenas"] == 1 and report["copied_bytes"], report
        assert dray.gpu.arena_status("weights", torch.cuda.current_device())["resident_bytes"] == 0
        dray.gpu.resume("weights")
        return
    publisher.wait()
    if FSDP1:  # its parameters are views of the flat ones
        return
    for p in model.parameters():
        local = p._local_tensor if hasattr(p, "_local_tensor") else p
        storage = local.untyped_storage()
        if ON_GPU:  # off the GPU and back: other addresses, same tensors
            host = storage.cpu()
            fresh = torch.empty(storage.nbytes(), dtype=torch.uint8, device=local.device)
            fresh.untyped_storage().copy_(host)
        else:
            fresh = torch.empty(storage.nbytes(), dtype=torch.uint8)
            fresh.untyped_storage().copy_(storage)
        local.data = fresh.view(local.dtype).as_strided(local.shape, local.stride(),
                                                        local.storage_offset())
    if ON_GPU:
        torch.cuda.empty_cache()


# ---- engine --------------------------------------------------------------------------------------

def cut(size, rank):
    n = size // TP
    return rank * n, n


def engine_memory(rank, device):
    """Fused weights as engines have them: this rank's rows of q, k and v in one tensor, gate and up in
    another, columns of down; and which rectangle of which checkpoint tensor each part is."""
    blocks, parts = [], []
    for i in range(LAYERS):
        name = f"layers.{i}."
        rows = {n: cut(shapes()[n][0], rank) for n in ("q", "k", "v", "gate", "up")}
        for group in (("q", "k", "v"), ("gate", "up")):
            fused = torch.zeros(sum(rows[n][1] for n in group), HIDDEN, dtype=DTYPE, device=device)
            at = 0
            for n in group:
                first, count = rows[n]
                view = fused[at:at + count]
                blocks.append(Block(name + n, shapes()[n], view, (first, 0)))
                parts.append((name + n, view, slice(first, first + count), slice(None)))
                at += count
        first, count = cut(FFN, rank)
        down = torch.zeros(HIDDEN, count, dtype=DTYPE, device=device)
        norm = torch.zeros(HIDDEN, dtype=DTYPE, device=device)
        blocks += [Block(name + "down", shapes()["down"], down, (0, first)),
                   Block(name + "norm", shapes()["norm"], norm)]
        parts += [(name + "down", down, slice(None), slice(first, first + count)),
                  (name + "norm", norm, slice(None), None)]
    return blocks, parts


def engine(folder, number):
    group, rank, device = number // TP, number % TP, "cpu"
    if ON_GPU:  # this process counts the GPUs from the other end
        device = "cuda:0"
        torch.cuda.set_device(0)
        with dray.gpu.use_arena("engine"):
            blocks, parts = engine_memory(rank, device)
    else:
        blocks, parts = engine_memory(rank, device)
    pauses = []
    with Context(f"unix:{folder}/s", role="engine", rank=number) as context:
        subscriber = Subscriber(blocks, "model", f"engine{group}", rank, TP, context=context)
        for step in range(1, STEPS + 1):
            for _, view, _, _ in parts:
                view.fill_(float("nan"))
            if ON_GPU:
                torch.cuda.synchronize()
            while not os.path.exists(f"{folder}/{step}.pt"):
                subscriber.release_mappings()  # the trainer may want its memory back
                time.sleep(0.002)
            report = subscriber.update(min_version=step, ctas=step % 2 * 16)
            pauses.append(report["total_seconds"])
            assert report["version"] == step, report
            want = torch.load(f"{folder}/{step}.pt")
            for name, view, rows, columns in parts:
                whole = want[name][rows] if columns is None else want[name][rows, columns]
                same = torch.equal(view.cpu().view(torch.int16), whole.contiguous().view(torch.int16))
                assert same, f"update {step}: {name} differs"
            if step == STEPS // 2:
                start = footprint("engine", 0)
            if step == STEPS:
                said = growth(start, footprint("engine", 0))
            touch(f"{folder}/done.{step}.{number}")
        subscriber.close()
    pauses.sort()
    print(f"engine {group}, rank {rank}: {STEPS} updates, pause median "
          f"{1e3 * pauses[len(pauses) // 2]:.2f} ms, longest {1e3 * pauses[-1]:.2f} ms; "
          f"{json.dumps(report['link_bytes'])}; {said}", flush=True)


# ---- all -----------------------------------------------------------------------------------------

def run(role, folder, rank):
    torch.set_num_threads(1)
    {"trainer": trainer, "engine": engine}[role](folder, rank)


def begin(role, folder, rank, seed):
    """A process of that role, its pid: with GPUs a new one that sees its own of them, else a fork, which has
    PyTorch already."""
    os.environ["DRAY_TEST_SEED"] = str(seed)
    if not ON_GPU:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(role, folder, rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        return pid
    env = dict(os.environ)
    if GROUPS > 1:
        env["CUDA_VISIBLE_DEVICES"] = str(rank)
    elif role == "engine":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str((RANKS - 1 - rank + i) % RANKS) for i in range(RANKS))
    return os.posix_spawn(sys.executable, [sys.executable, os.path.abspath(__file__), role, folder, str(rank)], env)


def main():
    seed = int(os.environ.get("DRAY_TEST_SEED", random.randrange(1 << 32)))
    print("DRAY_TEST_SEED=%d, %s" % (seed, "GPUs" if ON_GPU else "CPU"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen([os.environ["DRAY_PROGRAM"], "serve", "--listen",
                                   f"unix:{folder}/s"], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline().startswith("listening")
        children = {}  # pid: what it is
        try:
            for role, count in (("trainer", RANKS), ("engine", TP * GROUPS)):
                for rank in range(count):
                    children[begin(role, folder, rank, seed)] = f"{role} {rank}"
            while children:
                for pid in list(children):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        child, code = children.pop(pid), os.waitstatus_to_exitcode(status)
                        assert code == 0, f"{child} ended with {code}"
                time.sleep(0.05)
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            server.terminate()
            server.wait(20)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
