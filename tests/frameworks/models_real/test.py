"""transformers' own modules, sharded by FSDP2 over two ranks, published as modules and received by modules: vision towers with
Conv3d, packed experts with biases of routers, tied and untied heads. All tensors of a state dict by their bytes, and what the
received module computes, against the same numbers in a module that nobody sent."""
import json
import os
import pathlib
import subprocess
import sys

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
import dray
import fsdp2

WORK, VERSIONS, RANKS = pathlib.Path(os.environ["DRAY_WORK"]), 3, 2
TEXT = dict(vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
SEES = dict(depth=2, hidden_size=32, num_heads=2, patch_size=4, temporal_patch_size=2, spatial_merge_size=2)
SPECIAL = dict(image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def qwen2(tied):
    return transformers.Qwen2Config(**TEXT, tie_word_embeddings=tied)


def deepseek(tied):
    return transformers.DeepseekV3Config(
        **TEXT | {"num_key_value_heads": 4}, tie_word_embeddings=tied, moe_intermediate_size=16, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, n_group=2, topk_group=1, kv_lora_rank=16,
        q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)


def qwen25_vl(tied):
    return transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE}, tie_word_embeddings=tied, **SPECIAL,
        vision_config=SEES | {"intermediate_size": 48, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16})


def qwen3_vl(tied):
    return transformers.Qwen3VLConfig(
        text_config=TEXT | {"head_dim": 8, "rope_parameters": ROPE | {"mrope_interleaved": True}}, tie_word_embeddings=tied, **SPECIAL,
        vision_config=SEES | {"intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 16,
                              "deepstack_visual_indexes": [0, 1]})


MODELS = {
    "qwen2": (transformers.Qwen2ForCausalLM, qwen2, False),
    "qwen2_tied": (transformers.Qwen2ForCausalLM, qwen2, True),
    "deepseek_v3": (transformers.DeepseekV3ForCausalLM, deepseek, False),
    "deepseek_v3_tied": (transformers.DeepseekV3ForCausalLM, deepseek, True),
    "qwen2_5_vl": (transformers.Qwen2_5_VLForConditionalGeneration, qwen25_vl, False),
    "qwen2_5_vl_tied": (transformers.Qwen2_5_VLForConditionalGeneration, qwen25_vl, True),
    "qwen3_vl": (transformers.Qwen3VLForConditionalGeneration, qwen3_vl, False),
    "qwen3_vl_tied": (transformers.Qwen3VLForConditionalGeneration, qwen3_vl, True),
}


def made(name):
    kind, config, tied = MODELS[name]
    model = kind(config(tied)).eval()
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied, name
    return model


@torch.no_grad()
def computed(model):
    """Of tokens and, where it sees, of an image."""
    outputs = [model(input_ids=torch.arange(3, 40)[None]).logits]
    if hasattr(model.model, "visual"):
        grid = torch.tensor([[1, 4, 4]])
        outputs.append(model.model.visual(torch.linspace(-1, 1, 16 * 3 * 2 * 4 * 4).view(16, -1), grid_thw=grid)[0])
    return outputs


def trainer():
    """A rank: the next version's numbers are written when the engine has the last one."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{WORK}/ranks", rank=rank, world_size=RANKS)
    for name in MODELS:
        model = made(name)
        for each in model.modules():
            if isinstance(each, torch.nn.ModuleList) and len(each) == 2:
                for layer in each:
                    fsdp2.fully_shard(layer)
        fsdp2.fully_shard(model)
        fsdp2.DTensor.full_tensor = fsdp2.no_gather
        with dray.Publisher(model, name, buffers=True) as publisher:
            for version in range(1, VERSIONS + 1):
                fsdp2.write(model, None, version)
                publisher.publish(version)
                publisher.deliver()
                publisher.wait()
    dist.destroy_process_group()


def received(name):
    """Versions, one after the other, into a module that held other numbers."""
    reference, engine, copies = made(name), made(name), 0
    tied = MODELS[name][2]
    with dray.Subscriber(engine, name, buffers=True, timeout=110) as subscriber:  # the ranks import transformers meanwhile
        for version in range(1, VERSIONS + 1):
            fsdp2.write(reference, None, version)
            wanted = reference.state_dict()
            assert not all(torch.equal(t, wanted[n]) for n, t in engine.state_dict().items()), name
            report = subscriber.update(min_version=version)
            assert report["version"] == version
            found = engine.state_dict()
            assert found.keys() == wanted.keys(), name
            for each, tensor in wanted.items():
                assert torch.equal(found[each], tensor), f"{name}, version {version}: {each}"
            assert (engine.lm_head.weight is engine.get_input_embeddings().weight) == tied
            for one, other in zip(computed(engine), computed(reference), strict=True):
                assert torch.isfinite(one).all() and torch.equal(one, other), f"{name}, version {version}: it computes something else"
            copies += 1
    biases = sum(n.endswith("e_score_correction_bias") for n in wanted)
    five = sum(t.dim() == 5 for t in wanted.values())
    assert biases > 0 or "deepseek" not in name
    assert five > 0 or "_vl" not in name
    return {"model": name, "tensors": len(wanted), "of 5 dimensions": five, "biases of routers": biases, "versions": copies}


def from_checkpoint():
    """The same module as save_pretrained names its tensors: experts apart."""
    model, folder = made("deepseek_v3"), WORK / "checkpoint"
    fsdp2.write(model, None, 9)
    model.save_pretrained(folder)
    wanted = load_file(folder / "model.safetensors")
    taken = {n: torch.zeros_like(t) for n, t in wanted.items()}
    with dray.Publisher(model, "saved", 0, 1, config=str(folder)) as publisher, dray.Subscriber(taken, "saved") as subscriber:
        publisher.publish(1)
        subscriber.update()
    for name, tensor in wanted.items():
        assert torch.equal(taken[name], tensor), name
    return len(wanted)


def main():
    with dray.serve():
        ranks = [subprocess.Popen([sys.executable, __file__, "trainer"], env=os.environ | {"RANK": str(r), "OMP_NUM_THREADS": "1"})
                 for r in range(RANKS)]
        try:
            for name in MODELS:
                print(json.dumps(received(name)), flush=True)
            assert [r.wait(60) for r in ranks] == [0] * RANKS
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        saved = from_checkpoint()
    print(f"{len(MODELS)} modules of {RANKS} ranks received by modules, {VERSIONS} versions each: all bytes and what they compute are "
          f"equal; {saved} tensors as save_pretrained has them")


trainer() if sys.argv[1:] == ["trainer"] else main()
