"""Python calls every public function that has a use there. The others are listed with the reason, and no longer than
it holds."""
import os
import re
import unittest
from pathlib import Path

PACKAGE = Path(os.environ["DRAY_SOURCE_DIR"]) / "python/dray"
UNBOUND = {  # a function, or the beginning of several: why Python does without
    "dray_arena_": "torch allocates through dray_torch_malloc, within dray.gpu.use_arena",
    "dray_batch_commit_claim": "StreamDataLoader claims ahead, which costs no round trip either",
    "dray_batch_gather": "dray_batch_gather_rows has the same for some rows",
    "dray_batch_micro": "StreamDataLoader hands out micro-batches",
    "dray_batch_micros": "StreamDataLoader hands out micro-batches",
    "dray_batch_set_tag": "dray_batch_set_tags sets those of all rows",
    "dray_batch_split": "built-in engines commit single rows; a Python program claims as many as it finishes together",
    "dray_batch_tag": "dray_batch_tags reads those of all rows",
    "dray_batch_waited_for": "the library records it in the claim's span",
    "dray_batch_weight": "dray_batch_weights reads those of all rows",
    "dray_checkpoint_write": "dray.checkpoint.save gives each rank's part to dray_checkpoint_save",
    "dray_checksums_": "Subscriber.verify compares, and the program `dray verify` too",
    "dray_context_": "a Role has its epoch from the environment",
    "dray_dtype_size": "torch and numpy know it",
    "dray_engine_quant_": "engine_blocks refuses quantised engines: record() finds their layouts",
    "dray_error_name": "DrayError.name comes from the same constants",
    "dray_gpu_get_link": "`dray doctor` and `dray bench gpu` measure and print links",
    "dray_gpu_library": "`dray doctor` prints it",
    "dray_gpu_measure": "`dray bench gpu` measures",
    "dray_gpu_memory": "torch.cuda.mem_get_info",
    "dray_layout_add_flat": "FlatPart adds ranges of FSDP1's flat parameters",
    "dray_layout_bytes": "a report has bytes",
    "dray_layout_fsdp": "plans without a model: `dray plan`",
    "dray_layout_fsdp1": "plans without a model: `dray plan`",
    "dray_layout_megatron": "plans without a model: `dray plan`",
    "dray_layout_quant": "engine_blocks refuses quantised engines: record() finds their layouts",
    "dray_layout_region": "Layout makes its regions itself",
    "dray_layout_region_count": "Layout makes its regions itself",
    "dray_layout_safetensors": "update(path=...) and dray.checkpoint read files",
    "dray_layout_set_quant": "engine_blocks refuses quantised engines: record() finds their layouts",
    "dray_layout_unpack": "a packed layout is compared, never read",
    "dray_layouts_from_spec": "plans without a model: `dray plan`",
    "dray_link_name": "`dray doctor` prints it",
    "dray_model_name": "`dray plan --model` says the nearest ones",
    "dray_plan_": "`dray plan --json` plans without memory; an update makes its own plan",
    "dray_prefetch_start": "Subscriber.prefetch_async waits in a thread",
    "dray_queue_backend_built": "`dray doctor` prints it",
    "dray_queue_claim": "dray_queue_claim_any takes one, too",
    "dray_region_": "regions lie over torch's storages, which have names and devices of their own",
    "dray_regions_for_layout": "regions lie over torch's storages",
    "dray_safetensors_": "dray.checkpoint.save writes files",
    "dray_set_log": "without it the library says nothing by itself",
    "dray_strerror": "DrayError has the library's own message",
    "dray_task_": "dray.Role is the same for Python",
    "dray_tensor_list_": "handles go through the coordinator; a list of them is for C programs that have a channel of their own",
    "dray_trace_queued": "the library's own calls say so",
    "dray_trace_samples": "the queue's calls say so of their spans",
    "dray_trace_wait_briefly": "a Python span takes longer than what it would leave out",
    "dray_trace_waited_for": "dray.trace.wait_and_transfer says it",
    "dray_store_find": "`dray doctor` prints it",
    "dray_transport_find": "`dray doctor` prints it"}


class Bound(unittest.TestCase):
    def test_bound(self):
        named = re.findall(r'^    "(dray_\w+)": \(', (PACKAGE / "_declared.py").read_text(), re.M)
        code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "_declared.py")
        called = set(re.findall(r"\bdray_\w+", code))
        self.assertGreater(len(named), 200)
        known = set()
        for name in named:
            if name in called:
                self.assertNotIn(name, UNBOUND, f"{name} is bound: its reason goes")
                continue
            reasons = [start for start in UNBOUND if name == start or start[-1] == "_" and name.startswith(start)]
            self.assertTrue(reasons, f"{name} is called nowhere in python/dray: bind it, or say in UNBOUND why not")
            known.update(reasons)
        self.assertEqual(known, set(UNBOUND), "reasons for functions that are not there any more")


if __name__ == "__main__":
    unittest.main()
