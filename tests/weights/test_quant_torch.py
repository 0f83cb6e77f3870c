"""Updates of quantised tensors against PyTorch: random tensors, cut at random among publishers and
engine ranks, on one host and across hosts; every rank's memory must be what PyTorch makes of the
gathered tensors, bit for bit, by every strategy and with a ceiling that no tensor fits. So must
what a whole model's layouts make of each other, and what becomes smaller must before the wire."""
import ctypes as c
import os
import random
import subprocess
import sys
import tempfile
import threading

from begin import needs, scale as SCALE, seed as SEED

with needs:
    import numpy as np
    import torch
    from safetensors import safe_open

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "model"))
import dray

ROUNDS = 6 * SCALE
SMALL_ROUNDS, SMALL = 8 * SCALE, 64  # 512 placements

SHARED, CUDA = 2, 4
KIND = CUDA if os.environ.get("DRAY_TEST_KIND") == "cuda" else SHARED

DTYPES = {2: torch.float32, 3: torch.bfloat16, 4: torch.float16, 5: torch.float8_e4m3fn,
          6: torch.float8_e5m2}
F32, BF16, F16, E4M3, E5M2 = DTYPES
NONE, BLOCK, TENSOR = 0, 1, 2
DIRECT, BUCKET, PARAMETER = 0, 1, 2
SECOND = 10 ** 9
NCCL = 8 << 20  # bytes that it may take besides a bucket
lib = dray.lib
lib.dray_region_base.restype = c.c_void_p
lib.dray_region_device_address.restype = c.c_uint64
lib.dray_region_device_address.argtypes = [c.c_void_p]


class Driver:
    """The driver's own copies, by which tests look at GPU memory; a member is on either GPU."""

    def __init__(self):
        self.cuda = c.CDLL(os.environ.get("DRAY_CUDA_LIBRARY") or "libcuda.so.1")
        count = c.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGetCount", c.byref(count))
        self.contexts = [c.c_void_p() for _ in range(min(count.value, 2))]
        for i, context in enumerate(self.contexts):
            self.call("cuDevicePrimaryCtxRetain", c.byref(context), i)
        self.turn = 0

    def call(self, name, *arguments):
        result = getattr(self.cuda, name)(*arguments)
        assert result == 0, (name, result)

    def next(self):
        self.turn += 1
        self.enter(self.turn)
        return self.turn

    def enter(self, turn):
        self.call("cuCtxSetCurrent", self.contexts[turn % len(self.contexts)])

    def copy(self, name, turn, *arguments):
        self.enter(turn)
        self.call(name, *arguments)
        self.call("cuCtxSynchronize")


driver = Driver() if KIND == CUDA else None


def power_of_two(scale):
    """DeepGEMM's ceil_to_ue8m0."""
    bits = scale.abs().float().view(torch.int)
    exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
    return (exponent.clamp(1, 254) << 23).view(torch.float)


class Tensor:
    """One tensor of the model: as floats, and as it looks quantised (if it is)."""

    def __init__(self, rng, index, large=330):
        self.name = "layer.%d.weight" % index
        self.ndim = rng.choice([2, 2, 2, 3])
        self.shape = [rng.randint(1, large), rng.randint(1, large)]
        if self.ndim == 3:
            self.shape = [rng.randint(1, 6), rng.randint(1, large // 2), rng.randint(1, large // 2)]
        self.dtype = rng.choice([F32, BF16, BF16, F16])
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
        self.x = (x * 10.0 ** rng.uniform(-5, 2)).to(DTYPES[self.dtype])
        self.kind = rng.choice([NONE, BLOCK, BLOCK, BLOCK, TENSOR])
        self.format = rng.randint(0, 1)
        self.qdtype = rng.choice([E4M3, E4M3, E5M2])
        size = rng.choice([128, 128, 32, 1000] if large > 128 else [4, 4, 1, 1000])
        most = 200 * large // 330
        self.block = [size, size] if rng.random() < 0.7 else [rng.randint(1, most),
                                                              rng.randint(1, most)]
        if self.kind:
            self.quantise()

    def quantise(self):
        self.cell = list(self.shape)
        if self.kind == BLOCK:
            self.cell = [1] * (self.ndim - 2) + self.block
        ends = [-(-n // k) for n, k in zip(self.shape, self.cell)]
        padded = torch.zeros([e * k for e, k in zip(ends, self.cell)], dtype=self.x.dtype)
        whole = tuple(slice(0, n) for n in self.shape)
        padded[whole] = self.x
        view = padded.view([n for pair in zip(ends, self.cell) for n in pair])
        amax = view.abs().float().amax(dim=tuple(range(1, view.ndim, 2)), keepdim=True)
        scale = amax.clamp(1e-4) / torch.finfo(DTYPES[self.qdtype]).max
        if self.format:
            scale = power_of_two(scale)
        q = (view * (1.0 / scale)).to(DTYPES[self.qdtype])
        self.q = q.view(padded.shape)[whole].contiguous()
        self.y = (q.float() * scale).view(padded.shape)[whole]  # before it is narrowed
        self.scales = scale.view(ends if self.kind == BLOCK else [])


def bits(tensor):
    view = tensor.contiguous()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]
    return view.view(integer).numpy()


def cuts(rng, n, parts):
    """n elements in at most `parts` ranges."""
    ends = sorted(rng.sample(range(1, n), min(parts, n) - 1)) + [n] if n > 1 else [n]
    return list(zip([0] + ends[:-1], ends))


class Member:
    """A layout, its memory, and what must lie in it: (view, expected)."""

    def __init__(self, room=1 << 24):
        self.layout = dray.Layout()
        self.blocks, self.size = [], 0
        self.room = room
        self.region = self.layout.add_region(self.room, KIND)

    def add(self, name, dtype, shape):
        index = c.c_uint32()
        if lib.dray_layout_find(self.layout.handle, name.encode(), c.byref(index), None) == 0:
            return index.value
        return self.layout.add_tensor(name, dtype, shape)

    def hold(self, rng, name, dtype, tensor, ranges, turned=False):
        """ranges: (start, end) of each dimension."""
        shape = list(tensor.shape)
        index = self.add(name, dtype, shape)
        extent = [e - s for s, e in ranges]
        size = tensor.element_size()
        order = list(range(len(shape)))
        if turned:
            rng.shuffle(order)
        stride, step = [0] * len(shape), size
        for d in reversed(order):
            stride[d] = step
            step *= extent[d]
            if rng.random() < 0.2:
                step += size * rng.randint(0, 9)
        self.size = (self.size + 63) // 64 * 64
        block = dray.Block(tensor=index, region=self.region, offset=self.size)
        for d, (s, e) in enumerate(ranges):
            block.start[d], block.extent[d], block.stride[d] = s, e - s, stride[d]
        dray.call(lib.dray_layout_add_block, self.layout.handle, c.byref(block))
        want = bits(tensor)[tuple(slice(s, e) for s, e in ranges)]
        self.blocks.append((self.size, stride, want, name, ranges))
        self.size += step
        return index

    def quant(self, tensor, scales, t):
        q = dray.Quant(t.kind, t.format, scales, (c.c_int64 * 2)(*t.block))
        dray.call(lib.dray_layout_set_quant, self.layout.handle, tensor, c.byref(q))

    def allocate(self):
        self.memory = (c.c_void_p * 1)()
        handle = c.c_void_p()
        assert self.size <= self.room
        self.gpu = driver.next() if driver else None
        dray.call(lib.dray_region_alloc, KIND, c.c_uint64(self.room), b"r", c.byref(handle))
        self.memory[0] = handle
        if driver:
            self.raw = np.zeros(self.room, np.uint8)
        else:
            base = lib.dray_region_base(handle)
            self.raw = np.frombuffer((c.c_uint8 * self.room).from_address(base), np.uint8)
        self.poison()

    def poison(self):
        self.raw[:] = 0xA5
        self.put()

    def put(self):
        if driver:
            driver.copy("cuMemcpyHtoD_v2", self.gpu, self.address(), self.host(), self.size_t())

    def get(self):
        if driver:
            driver.copy("cuMemcpyDtoH_v2", self.gpu, self.host(), self.address(), self.size_t())

    def address(self):
        return c.c_uint64(lib.dray_region_device_address(self.memory[0]))

    def host(self):
        return self.raw.ctypes.data_as(c.c_void_p)

    def size_t(self):
        return c.c_size_t(self.room)

    def views(self):
        for offset, stride, want, name, ranges in self.blocks:
            at = self.raw[offset:].view(np.uint8)
            typed = np.frombuffer(at.data, want.dtype, 1)
            yield np.lib.stride_tricks.as_strided(typed, want.shape, stride), want, name, ranges

    def fill(self):
        for view, want, _, _ in self.views():
            view[...] = want
        self.put()

    def check(self, what):
        self.get()
        expected = np.full_like(self.raw, 0xA5)
        for (view, want, name, ranges), (offset, stride, _, _, _) in zip(self.views(), self.blocks):
            same = view == want
            assert same.all(), "%d of %d elements are wrong, first at %s: %s, not %s: %s %s: %s" % (
                (~same).sum(), same.size,
                [int(i) for i in np.unravel_index(np.argmin(same), same.shape)],
                view.flat[np.argmin(same)], want.flat[np.argmin(same)], name, ranges, what)
            typed = np.frombuffer(expected[offset:].data, want.dtype, 1)
            np.lib.stride_tricks.as_strided(typed, want.shape, stride, writeable=True)[...] = want
        assert (expected == self.raw).all(), "bytes outside all blocks were written: %s" % what


class Rank(Member):
    """The layout of a whole model's rank, of `tensors`: by name what it holds, as a whole."""

    def __init__(self, layout, tensors):
        self.layout = layout
        self.room = self.size = layout.region(0).bytes
        self.blocks = []
        for tensor, _, start, extent, offset, stride in layout.blocks():
            name = layout.tensor(tensor).name.decode()
            ranges = [(s, s + e) for s, e in zip(start, extent)]
            want = bits(tensors[name])[tuple(slice(s, e) for s, e in ranges)]
            self.blocks.append((offset, stride, want, name, ranges))


def hold_floats(rng, members, t, x, dtype, turned):
    """Cut among the members along random dimensions; some pieces twice."""
    d = rng.randrange(t.ndim)
    for i, (s, e) in enumerate(cuts(rng, t.shape[d], len(members))):
        other = rng.randrange(t.ndim)
        for s2, e2 in cuts(rng, t.shape[other], 2) if other != d else [(0, t.shape[other])]:
            ranges = [(0, n) for n in t.shape]
            ranges[other] = (s2, e2)
            ranges[d] = (s, e)
            members[i].hold(rng, t.name, dtype, x, ranges, turned)
            if rng.random() < 0.1:
                members[(i + 1) % len(members)].hold(rng, t.name, dtype, x, ranges)


def hold_quantised(rng, members, t, turned):
    d = rng.randrange(t.ndim)
    pieces = cuts(rng, t.shape[d], len(members))
    if d == 0 and rng.random() < 0.3:
        pieces = [(0, t.shape[d])] * len(members)  # replicas
    for i, (s, e) in enumerate(pieces):
        ranges = [(0, n) for n in t.shape]
        ranges[d] = (s, e)
        weight = members[i].hold(rng, t.name, t.qdtype, t.q, ranges, turned and rng.random() < 0.5)
        cells = [(0, n) for n in t.scales.shape]
        if t.kind == BLOCK and rng.random() < 0.7:  # those of its own elements
            cells[d] = (s // t.cell[d], -(-e // t.cell[d]))
        scales = members[i].hold(rng, t.name + "_scale_inv", F32, t.scales, cells)
        members[i].quant(weight, scales, t)


def start_session(folder):
    address = "unix:" + os.path.join(folder, "socket")
    server = subprocess.Popen([os.environ["DRAY_PROGRAM"], "serve", "--listen", address],
                              stdout=subprocess.DEVNULL)
    return server, address


def open_context(address, name, role, rank, host):
    options = dray.Options(c.sizeof(dray.Options), address.encode(), name.encode(), role, host, rank,
                      60 * SECOND)
    context = c.c_void_p()
    dray.call(lib.dray_open, c.byref(options), c.byref(context))
    return context


def together(functions):
    errors = []

    def run(function):
        try:
            function()
        except Exception as error:
            errors.append(error)
    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def run_update(address, model, sources, group, hosts, runs, what, most_wire=None, path=None):
    contexts, publishers, subscribers = [], [], []
    for i, m in enumerate(sources + group):
        m.allocate()
        role, rank = (b"trainer", i) if i < len(sources) else (b"engine", i - len(sources))
        host = None if hosts == 1 else b"host-%d" % (i % hosts)
        contexts.append(open_context(address, "%s-%d" % (role.decode(), rank), role, rank, host))
    for i, m in enumerate(sources):
        m.fill()
        o = dray.PublisherOptions(c.sizeof(dray.PublisherOptions), m.memory, i, len(sources))
        p = c.c_void_p()
        dray.call(lib.dray_publisher_open, contexts[i], model, m.layout.handle, c.byref(o),
                  c.byref(p))
        publishers.append(p)
    for i, m in enumerate(group):
        o = dray.SubscriberOptions(c.sizeof(dray.SubscriberOptions), m.memory, b"engine", i,
                              len(group), 60 * SECOND)
        s = c.c_void_p()
        dray.call(lib.dray_subscriber_open, contexts[len(sources) + i], model, m.layout.handle,
                  c.byref(o), c.byref(s))
        subscribers.append(s)
    reports = [dray.UpdateReport(c.sizeof(dray.UpdateReport)) for _ in group]
    for version, (strategy, bucket, verify) in enumerate(runs, 1):
        together([lambda p=p: dray.call(lib.dray_publisher_publish, p, c.c_uint64(version), None)
                  for p in publishers])
        for m in group:
            m.poison()
        options = dray.UpdateOptions(c.sizeof(dray.UpdateOptions), 3 if path else 0, strategy, version,
                                path and os.fsencode(path), version if path else 0, bucket, verify,
                                60 * SECOND, nccl_bytes=NCCL)
        together([lambda s=s, r=r: dray.call(lib.dray_update_weights, s, c.byref(options),
                                             c.byref(r)) for s, r in zip(subscribers, reports)])
        for m, r in zip(group, reports):
            m.check("%s, strategy %d, %d bytes" % (what, strategy, bucket))
            if strategy != DIRECT:
                most = bucket + (NCCL if r.nccl_bytes else 0)
                assert r.peak_extra_bytes <= most, (r.peak_extra_bytes, most, r.nccl_bytes, what)
        wire = sum(r.wire_bytes for r in reports)
        assert most_wire is None or wire <= most_wire, (what, strategy, wire, most_wire)
    for s in subscribers:
        dray.call(lib.dray_subscriber_verify, s)
        lib.dray_subscriber_close(s)
    for p in publishers:
        lib.dray_publisher_close(p)
    for x in contexts:
        lib.dray_close(x)
    for m in sources + group:
        lib.dray_region_free(c.c_void_p(m.memory[0]))
    return reports


def round_of(rng, address, number, small=False):
    """small: placements matter more than sizes: many small tensors, each cut in a way of its own."""
    hosts = rng.choice([1, 1, 3])
    room = 1 << (22 if small else 24)
    sources = [Member(room) for _ in range(rng.randint(1, 4))]
    group = [Member(room) for _ in range(rng.randint(1, 3))]
    tensors = [Tensor(rng, i) for i in range(rng.randint(3, 7))]
    if small:
        tensors = [Tensor(rng, i, 40) for i in range(SMALL)]
    for t in tensors:
        backwards = rng.random() < 0.25  # quantised there, floats here
        alike = rng.random() < 0.15      # quantised on both sides
        if not t.kind:
            hold_floats(rng, sources, t, t.x, t.dtype, True)
            hold_floats(rng, group, t, t.x, t.dtype, True)
        elif alike:
            hold_quantised(rng, sources, t, True)
            hold_quantised(rng, group, t, True)
        elif backwards:
            hold_quantised(rng, sources, t, True)
            hold_floats(rng, group, t, t.y.to(DTYPES[t.dtype]), t.dtype, True)
        else:
            hold_floats(rng, sources, t, t.x, t.dtype, True)
            hold_quantised(rng, group, t, True)
    runs = [(PARAMETER, 4 << 20, -1), (DIRECT, 0, 0), (BUCKET, 2 << 20, 0)]
    if hosts == 1:
        runs += [(BUCKET, 128 << 10, 0)]
    what = "round %d, %d -> %d ranks on %d hosts, tensors %s" % (
        number, len(sources), len(group), hosts,
        ["%s %d %s" % (t.shape, t.kind, t.block) for t in tensors[:8]])
    if small:
        runs = runs[1:3]
    run_update(address, b"model-%d" % number, sources, group, hosts, runs, what)


def before_the_wire(rng, address):
    """What is cut along cells crosses the wire as it is wanted."""
    sources, group = [Member() for _ in range(3)], [Member() for _ in range(2)]
    elements = 0
    for i, (rows, columns) in enumerate([(768, 640), (1536, 200), (2304, 130), (130, 64)]):
        t = Tensor(rng, i)
        while (t.ndim, t.kind) != (2, BLOCK):
            t = Tensor(rng, i)
        t.shape, t.block, t.dtype = [rows, columns], [128, 128], BF16
        x = torch.randn(t.shape, generator=torch.Generator().manual_seed(i))
        t.x = (x * 10.0 ** rng.uniform(-5, 2)).to(torch.bfloat16)
        t.quantise()
        elements += rows * columns
        for members in (sources, group):
            whole = rows < 128 * len(members)
            parts = 1 if whole else len(members)
            for k in range(parts):
                m, ranges = members[k], [(rows // parts * k, rows // parts * (k + 1)), (0, columns)]
                if members is sources:
                    m.hold(rng, t.name, t.dtype, t.x, ranges)
                    continue
                weight = m.hold(rng, t.name, t.qdtype, t.q, ranges)
                cells = [(ranges[0][0] // 128, -(-ranges[0][1] // 128)), (0, t.scales.shape[1])]
                scales = m.hold(rng, t.name + "_scale_inv", F32, t.scales, cells)
                m.quant(weight, scales, t)
    runs = [(DIRECT, 0, -1), (BUCKET, 4 << 20, 0), (PARAMETER, 4 << 20, 0), (DIRECT, 0, 0)]
    run_update(address, b"wire", sources, group, 5, runs, "quantised before the wire",
               0.65 * 2 * elements)


def moe_config():
    """A small Qwen3-MoE, as block FP8 can be cut over two ranks."""
    return dray.ModelConfig(family=b"qwen3_moe", vocab_size=320, hidden_size=256,
                            intermediate_size=512, layers=2, heads=4, kv_heads=4, head_dim=64,
                            max_positions=64, rms_norm_eps=1e-6, rope_theta=1e4, qk_norm=1,
                            dtype=BF16, experts=4, moe_intermediate_size=128)


def moe_rank(cf, tp, ep, rank):
    quant = dray.EngineQuant(c.sizeof(dray.EngineQuant), BLOCK, 0, (c.c_int64 * 2)(128, 128))
    spec = dray.EngineSpec(size=c.sizeof(dray.EngineSpec), tp=tp, tp_rank=rank, ep=ep, kind=KIND,
                           quant=c.pointer(quant))
    return dray.model_layout(lib.dray_layout_engine, cf, c.byref(spec))


def moe_tensors(rng, whole, engine):
    """Random ones, and those that the engine holds quantised as PyTorch quantises them."""
    floats, held = {}, {}
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    for t in whole.tensors():
        x = torch.randn(list(t.shape)[:t.ndim], generator=generator)
        floats[t.name.decode()] = held[t.name.decode()] = (x * 0.02).to(torch.bfloat16)
    for i, t in enumerate(engine.tensors()):
        quant = lib.dray_layout_quant(engine.handle, i)
        if t.alias_of >= 0 or not quant:
            continue
        name = t.name.decode()
        q = Tensor.__new__(Tensor)
        q.x, q.kind, q.format, q.qdtype, q.block = floats[name], BLOCK, 0, E4M3, [128, 128]
        q.shape = list(q.x.shape)
        q.ndim = len(q.shape)
        q.quantise()
        held[name] = q.q
        held[engine.tensor(quant.contents.scales).name.decode()] = q.scales
    return floats, held


def real_model(rng, address, folder):
    """Layouts of the builders: FSDP to tensor and expert parallelism with FP8 blocks, from memory
    and from disk; a checkpoint of an FP8 engine has weights and scales, and is read back as it is."""
    cf = moe_config()
    whole = dray.model_layout(lib.dray_layout_fsdp, cf, BF16, 0, 1, KIND)
    alone = moe_rank(cf, 1, 1, 0)
    floats, held = moe_tensors(rng, whole, alone)
    assert sum(t.dtype == E4M3 for t in alone.tensors()) == 2 * (4 + 3 * 4)

    def group():
        return [Rank(moe_rank(cf, 2, 2, i), held) for i in range(2)]

    runs = [(PARAMETER, 4 << 20, -1), (BUCKET, 2 << 20, 0), (DIRECT, 0, 0)]
    for hosts in (1, 5):
        sources = [Rank(dray.model_layout(lib.dray_layout_fsdp, cf, BF16, i, 3, KIND), floats)
                   for i in range(3)]
        run_update(address, b"moe-%d" % hosts, sources, group(), hosts, runs,
                   "qwen3-moe over %d hosts" % hosts)
    source, engine = Rank(whole, floats), Rank(alone, held)
    for member, name in ((source, "floats"), (engine, "fp8")):
        path = os.path.join(folder, name)
        member.allocate()
        member.fill()
        dray.call(lib.dray_checkpoint_write, os.fsencode(path), member.layout.handle, member.memory,
                  None)
        run_update(address, name.encode(), [], group(), 1, runs, "qwen3-moe from " + name,
                   path=path)
    check_checkpoint(path, alone, held)
    engine.poison()
    dray.call(lib.dray_checkpoint_read, os.fsencode(path), alone.handle, engine.memory)
    engine.check("an FP8 checkpoint read back")


def flat_masters(rng, address):
    """FSDP1's flat f32 parameters, whose ranges end within rows, to a bf16 engine elsewhere."""
    cf = moe_config()
    whole = dray.model_layout(lib.dray_layout_fsdp, cf, F32, 0, 1, KIND)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    floats = {t.name.decode(): torch.randn(list(t.shape)[:t.ndim], generator=generator)
              for t in whole.tensors()}
    held = {name: x.to(torch.bfloat16) for name, x in floats.items()}
    sources, group = [], []
    for i in range(3):
        spec = dray.Fsdp1Spec(c.sizeof(dray.Fsdp1Spec), i, 3, F32, 0, 0, KIND)
        sources.append(Rank(dray.model_layout(lib.dray_layout_fsdp1, cf, c.byref(spec)), floats))
    spec = dray.EngineSpec(size=c.sizeof(dray.EngineSpec), tp=2, ep=2, kind=KIND)
    for i in range(2):
        spec.tp_rank = i
        group.append(Rank(dray.model_layout(lib.dray_layout_engine, cf, c.byref(spec)), held))
    cut = [e - s for m in sources for _, _, _, _, ranges in m.blocks for s, e in ranges[-1:]]
    assert any(n % 64 for n in cut), cut
    elements = sum(want.size for m in group for _, _, want, _, _ in m.blocks)
    runs = [(PARAMETER, 1 << 20, 0), (BUCKET, 1 << 20, 0), (DIRECT, 0, 0)]
    run_update(address, b"flat", sources, group, 5, runs, "flat f32 to bf16", 2.02 * elements)


def check_checkpoint(path, layout, held):
    found = {}
    for name in os.listdir(path):
        if name.endswith(".safetensors"):
            with safe_open(os.path.join(path, name), "pt") as file:
                found.update({key: file.get_tensor(key) for key in file.keys()})
    assert set(found) == {t.name.decode() for t in layout.tensors() if t.alias_of < 0}
    for name, tensor in found.items():
        assert tensor.dtype == held[name].dtype and (bits(tensor) == bits(held[name])).all(), name
    scales = [name for name in found if name.endswith(".weight_scale_inv")]
    assert len(scales) == sum(t.dtype == torch.float8_e4m3fn for t in found.values())


def main():
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        server, address = start_session(folder)
        try:
            before_the_wire(rng, address)
            real_model(rng, address, folder)
            flat_masters(rng, address)
            for number in range(ROUNDS):
                round_of(rng, address, number)
            for number in range(ROUNDS, ROUNDS + SMALL_ROUNDS):
                round_of(rng, address, number, small=True)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
