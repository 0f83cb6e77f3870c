"""The dtensor builder against PyTorch: shapes and offsets against compute_local_shape_and_global_offset,
every element against torch's own splitting, and real distribute_tensor and fully_shard shards over
gloo. Meshes of 1 to 4 dimensions; uneven, empty and repeated shards; _StridedShard."""

import os
import random
import sys
import tempfile
import warnings

from begin import end_well, forked, needs, scale as SCALE, seed as SEED

with needs:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, \
        parallelize_module
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

import dray

RANKS = 4
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


def ours(placement):
    """A torch placement as dray's (kind, dim, split_factor)."""
    if isinstance(placement, _StridedShard):
        return 2, placement.dim, placement.split_factor
    if isinstance(placement, Shard):
        return 1, placement.dim, 0
    return (3 if isinstance(placement, Partial) else 0), 0, 0


def local_of(full, mesh_shape, placements, coordinate):
    """(local shape, local array) of this coordinate, from dray's blocks."""
    layout = dray.Layout()
    region = layout.add_region(full.size * 8 + 64)
    tensor = layout.add_tensor("t", 7, full.shape)
    shape = layout.add_dtensor(tensor, region, 64, mesh_shape, [ours(p) for p in placements],
                               coordinate)
    local = np.full(int(np.prod(shape)), -1, dtype=np.int64)
    seen = 0
    for _, _, start, extent, offset, stride in layout.blocks():
        piece = full[tuple(slice(s, s + e) for s, e in zip(start, extent))]
        view = np.lib.stride_tricks.as_strided(local[(offset - 64) // 8:], extent, stride)
        assert (view == -1).all(), "two blocks in one place"
        view[...] = piece
        seen += piece.size
    assert seen == local.size, "a hole in the local shard"
    return shape, local.reshape(shape), layout.blocks()


def runs(full, local):
    """How many rectangles a shard needs: the product of the runs of indices along each dimension."""
    count = 1
    for d in range(full.ndim):
        line = local[tuple(slice(None) if k == d else 0 for k in range(full.ndim))]
        line = line // int(np.prod(full.shape[d + 1:])) % full.shape[d]
        count *= 1 + int((np.diff(line) != 1).sum())
    return count


def random_case(rng, world=None):
    """Mesh shape, placements, global shape."""
    if world:
        mesh_shape, left = [], world
        while left > 1 and len(mesh_shape) < 3:
            n = rng.choice([d for d in range(1, left + 1) if left % d == 0])
            mesh_shape.append(n)
            left //= n
        mesh_shape.append(left)
    else:
        mesh_shape = [rng.choice([1, 2, 2, 3, 3, 4, 5]) for _ in range(rng.randrange(1, 5))]
    shape = [rng.choice([0, 1, 2, 3, 5, 7, 8, 10, 12, 13, 16, 17, 24, 31])
             for _ in range(rng.randrange(1, 5))]
    favourite = rng.randrange(len(shape))  # so that one dimension is often cut several times
    placements = []
    for _ in mesh_shape:
        dim = favourite if rng.random() < 0.5 else rng.randrange(len(shape))
        kind = rng.random()
        if kind < 0.15:
            placements.append(Replicate())
        elif kind < 0.65:
            placements.append(Shard(dim))
        else:
            placements.append(_StridedShard(dim, split_factor=rng.choice([1, 2, 2, 3, 4, 6, 40])))
    return mesh_shape, placements, shape


def coordinates(mesh_shape, rank):
    out = []
    for n in reversed(mesh_shape):
        out.append(rank % n)
        rank //= n
    return out[::-1]


def split_by_torch(full, mesh_shape, placements, coordinate):
    """What distribute_tensor does on one rank: torch's own _split_tensor, left to right."""
    t = torch.from_numpy(full)
    for n, p, i in zip(mesh_shape, placements, coordinate):
        if not isinstance(p, Replicate):
            t = p._split_tensor(t, n, with_padding=False, contiguous=True)[0][i]
    return t.numpy()


def against_the_formulas(count):
    rng = random.Random(SEED)
    excepthook = sys.excepthook
    empty = strided = pieces = 0
    for i in range(count):
        mesh_shape, placements, shape = random_case(rng)
        world = int(np.prod(mesh_shape))
        rank = rng.randrange(world)
        say = f"case {i}: mesh {mesh_shape}, {placements}, shape {shape}, rank {rank}"
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(mesh_shape), _init_backend=False)
        want, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
        coordinate = list(mesh.get_coordinate())
        dist.destroy_process_group()
        sys.excepthook = excepthook  # every group puts its rank in front of every line
        assert coordinate == coordinates(mesh_shape, rank)
        full = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        got, local, blocks = local_of(full, mesh_shape, placements, coordinate)
        assert tuple(got) == tuple(want), f"{say}: {got}, torch {want}"
        if local.size:
            assert tuple(blocks[0][2]) == tuple(offset), f"{say}: {blocks[0][2]}, torch {offset}"
            assert (local == split_by_torch(full, mesh_shape, placements, coordinate)).all(), say
            assert len(blocks) == runs(full, local), f"{say}: {len(blocks)} blocks"
        else:
            assert not blocks, say
        empty += local.size == 0 and full.size > 0
        strided += any(isinstance(p, _StridedShard) for p in placements)
        pieces += len(blocks) > 1
    assert min(empty, strided, pieces) > count // 50, (empty, strided, pieces)
    print(f"ok {count} formulas: {empty} empty, {strided} strided, {pieces} of several pieces")


def together_they_are_the_tensor(count):
    """Over all ranks of a mesh without replicas every element appears exactly once."""
    rng = random.Random(SEED + 1)
    for i in range(count):
        mesh_shape, placements, shape = random_case(rng)
        placements = [Shard(0) if isinstance(p, Replicate) else p for p in placements]
        full = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        parts = [local_of(full, mesh_shape, placements, coordinates(mesh_shape, r))[1].ravel()
                 for r in range(int(np.prod(mesh_shape)))]
        assert (np.sort(np.concatenate(parts)) == full.ravel()).all(), \
            f"case {i}: {mesh_shape}, {placements}, {shape}"
    print(f"ok {count} partitions")


def real_shards(rank, count):
    """The values that distribute_tensor gives a rank (rank 0 scatters them) are those that our blocks
    index."""
    rng = random.Random(SEED + 2)
    meshes = {}
    for i in range(count):
        mesh_shape, placements, shape = random_case(rng, RANKS)
        key = tuple(mesh_shape)
        if key not in meshes:
            meshes[key] = init_device_mesh("cpu", key)
        full = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        # torch's scatter refuses uneven strided shards; without it each rank splits its own copy.
        strided = any(isinstance(p, _StridedShard) for p in placements)
        real = distribute_tensor(torch.from_numpy(full), meshes[key], placements,
                                 src_data_rank=None if strided else 0)
        got, local, _ = local_of(full, mesh_shape, placements, list(meshes[key].get_coordinate()))
        theirs = real.to_local().numpy()
        assert tuple(got) == theirs.shape and (local == theirs).all(), \
            f"rank {rank}, case {i}: mesh {mesh_shape}, {placements}, shape {shape}"


def real_fsdp_and_tp(rank):
    """fully_shard over tensor parallelism: the placements that make _StridedShard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for hidden, inner in ((8, 12), (6, 10), (4, 4)):
        torch.manual_seed(SEED)
        model = torch.nn.Sequential(torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, hidden))
        whole = {n: p.detach().clone() for n, p in model.named_parameters()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        strided = 0
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            strided += any(isinstance(q, _StridedShard) for q in p.placements)
            ids = np.arange(p.numel(), dtype=np.int64).reshape(p.shape)
            _, local, _ = local_of(ids, list(p.device_mesh.shape), p.placements,
                                   list(p.device_mesh.get_coordinate()))
            want = whole[name].numpy().ravel()[local.ravel()].reshape(local.shape)
            assert (p.to_local().detach().numpy() == want).all(), (rank, name, p.placements)
        assert strided >= 2


def one_rank(rank, folder, count):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=RANKS)
    real_shards(rank, count)
    real_fsdp_and_tp(rank)
    dist.destroy_process_group()


def over_gloo(count):
    with tempfile.TemporaryDirectory() as folder:
        end_well([forked(one_rank, rank, folder, count) for rank in range(RANKS)])
    print(f"ok {count} real shardings and fully_shard with tensor parallelism, {RANKS} processes")


def what_is_refused():
    def refused(shape, mesh_shape, placements, coordinate, says):
        layout = dray.Layout()
        region = layout.add_region(1000)
        tensor = layout.add_tensor("t", 7, shape)
        try:
            layout.add_dtensor(tensor, region, 0, mesh_shape, placements, coordinate)
        except dray.DrayError as error:
            assert says in str(error), error
            assert not layout.blocks()
            return
        raise AssertionError(f"{placements} was accepted")

    refused([4], [2], [(3, 0, 0)], [0], "Partial on mesh dimension 0")
    refused([4], [2], [(9, 0, 0)], [0], "unknown placement 9")
    refused([4], [2], [(1, 1, 0)], [0], "shards dimension 1")
    refused([4], [2], [(1, -1, 0)], [0], "shards dimension -1")
    refused([], [2], [(1, 0, 0)], [0], "has 0 dimensions")
    refused([4], [2], [(2, 0, 0)], [0], "split factor 0")
    refused([4], [2], [(1, 0, 0)], [2], "coordinate 2 of 2")
    refused([4], [2], [(1, 0, 0)], [-1], "coordinate -1 of 2")
    refused([4], [0], [(1, 0, 0)], [0], "coordinate 0 of 0")
    refused([4], [], [], [], "mesh of 0 dimensions")
    refused([400], [2], [(1, 0, 0)], [0], "ends outside region")
    print("ok refusals")


if __name__ == "__main__":
    print("seed", SEED)
    over_gloo(60 * SCALE)
    what_is_refused()
    together_they_are_the_tensor(300 * SCALE)
    against_the_formulas(2500 * SCALE)
