"""TransferQueue's own tests, which are in its wheel: with its values in dray (storage_backend Dray), and with
dray.compat.transfer_queue in its place, where neither Ray nor TransferQueue is imported. Then our own, and the commands of
docs/transfer-queue.md. Where $DRAY_UPSTREAM has verl, its test of ReplayBuffer, too."""
import importlib.metadata
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET

HERE = pathlib.Path(__file__).resolve().parent
WORK = pathlib.Path(os.environ["DRAY_WORK"])
LIFECYCLE, KV, CHECKPOINT = ("e2e/test_e2e_lifecycle_consistency.py", "e2e/test_kv_interface_e2e.py",
                             "e2e/test_checkpoint_e2e.py")
UNIT = ("test_samplers.py", "test_metadata.py", "test_streaming_dataset.py")
_FILES = "it looks for files of SimpleStorage's checkpoints; dray's are its own, and no pickles"
_COUNT = "it changes SimpleStorage's file of storage units, which dray has none of"
EXCEPTIONS = {
    "with_shim": {
        "TestStorageUnitDataStrict.test_put_data_length_mismatch_raises": "it tests a class inside SimpleStorage",
        "TestCheckpointRoundtrip.test_tensor_fields": _FILES,
        "TestIncludeStorageFalse.test_storage_saved_is_true": _FILES,
        "TestCheckpointErrors.test_load_raises_on_storage_unit_count_mismatch": _COUNT,
    },
    "with_backend": {
        "TestCheckpointRoundtrip.test_tensor_fields": _FILES,
        "TestIncludeStorageFalse.test_storage_saved_is_true": _FILES + ", and include_storage=False is obeyed",
        "TestCheckpointErrors.test_load_raises_on_storage_unit_count_mismatch": _COUNT,
    },
}


def upstream():
    """The folder of TransferQueue's tests."""
    found = importlib.metadata.distribution("TransferQueue").locate_file("tests")
    assert (pathlib.Path(found) / LIFECYCLE).is_file(), found
    return pathlib.Path(found)


def run(name, folder, files, seconds, paths=(), options=()):
    """(passed, failed names, skipped) of pytest with the plug-in `name`."""
    result = WORK / f"{name}.xml"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HERE, *paths))), "PYTHONDONTWRITEBYTECODE": "1",
                 "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # on a busy machine workers would starve
    subprocess.run([sys.executable, "-m", "pytest", "-q", *options, "-p", name, "-p", "no:cacheprovider", f"--junitxml={result}",
                    *(str(folder / file) for file in files)], env=variables, cwd=WORK, timeout=seconds)
    passed, failed, skipped = 0, [], 0
    for case in ET.parse(result).iter("testcase"):
        outcome = {child.tag for child in case}
        if outcome & {"failure", "error"}:
            failed.append(f"{case.get('classname').rpartition('.')[2]}.{case.get('name')}")
        elif "skipped" in outcome:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def compare(name, files, seconds, paths=()):
    """The line of it; exits where others fail than those that are listed, or too many are."""
    passed, failed, skipped = run(name, upstream(), files, seconds, paths)
    expected, total = set(EXCEPTIONS[name]), passed + len(failed)
    if set(failed) != expected or len(failed) != len(expected):
        sys.exit(f"{name}: failed though not listed: {sorted(set(failed) - expected)}; listed, and passed or not run: "
                 f"{sorted(expected - set(failed))}")
    return passed, total, f"{passed} of {total} ({skipped} skipped, {len(failed)} exceptions)"


def of_verl():
    """verl's own test of what its trainers' loop keeps in TransferQueue, with dray in its place."""
    test = pathlib.Path(os.environ.get("DRAY_UPSTREAM", "/nowhere"), "verl/tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py")
    if not test.is_file():
        return "verl's ReplayBuffer skipped, $DRAY_UPSTREAM has no verl"
    os.environ["ABSENT"] = "transformers,peft,accelerate,ray"
    passed, failed, skipped = run("with_verl", test.parent, [test.name], 300, [HERE.parent, test.parents[4]],
                                  ["-p", "absent", "--noconftest"])
    if failed or not passed:
        sys.exit(f"verl's ReplayBuffer: {passed} tests passed, failed: {failed}")
    return f"verl's ReplayBuffer {passed} of {passed + len(failed)} ({skipped} skipped)"


def main():
    passed, total, shim = compare("with_shim", (*UNIT, LIFECYCLE, KV, CHECKPOINT), 300, [HERE / "no_ray"])
    assert total >= 200 and passed >= 0.98 * total, (passed, total)
    for name, reason in EXCEPTIONS["with_shim"].items():
        print(f"exception: {name}: {reason}")
    passed, total, backend = compare("with_backend", (*UNIT, LIFECYCLE, KV, CHECKPOINT), 400)
    for name, reason in EXCEPTIONS["with_backend"].items():
        print(f"exception with the backend: {name}: {reason}")
    assert total >= 200 and passed >= 0.98 * total, (passed, total)
    subprocess.run([sys.executable, HERE / "own.py"], check=True, timeout=400)
    print(f"dray.compat.transfer_queue {shim}; storage_backend Dray {backend}; {of_verl()}")


main()
