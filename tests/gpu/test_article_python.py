"""The article's example, [1024, 1024] from FSDP 4 to TP 2, against gather-and-slice by numpy."""
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    sys.exit(77)

N, TRAINERS, ENGINES = 1024, 4, 2

seed = int(os.environ.get("DRAY_TEST_SEED", int.from_bytes(os.urandom(4), "little")))
print(f"DRAY_TEST_SEED={seed}", flush=True)
whole = np.random.default_rng(seed).integers(0, 1 << 16, (N, N), dtype=np.uint16)
program = os.path.join(os.environ["DRAY_BUILD_DIR"], "gpu_test_article")
with tempfile.TemporaryDirectory() as folder:
    names = [os.path.join(folder, name) for name in ("in", "out0", "out1")]
    whole.tofile(names[0])
    status = subprocess.run([program] + names, timeout=120).returncode
    if status == 77:
        sys.exit(77)
    assert status == 0, status
    shards = np.split(whole, TRAINERS, axis=0)  # what the trainers hold
    full = np.concatenate(shards, axis=0)  # gather
    for rank in range(ENGINES):
        found = np.fromfile(names[1 + rank], dtype=np.uint16)
        half = N * N // ENGINES
        rows = np.split(full, ENGINES, axis=0)[rank]  # slice
        columns = np.split(full, ENGINES, axis=1)[rank]
        assert np.array_equal(found[:half].reshape(rows.shape), rows), rank
        assert np.array_equal(found[half:].reshape(columns.shape), columns), rank
print("bits equal")
