"""Parameters of five dimensions and more, as vision models' convolutions have them: published whole, as FSDP2's shards and as
Blocks, received whole, cut, by load= and from a checkpoint; what the library cannot say of them is refused by name."""
import tempfile

from begin import coordinator, needs, rng, seed

with needs:
    import torch
    import torch.distributed as dist
    import transformers
    from safetensors.torch import load_file, save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

import dray
from dray.weights import Block, Context, Publisher, Subscriber, record
from served import refused

torch.manual_seed(seed)


class Vision(torch.nn.Module):
    """What Qwen2-VL begins with, and a tensor of as many dimensions as there may be."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Conv3d(3, 8, (2, 5, 5), bias=False)
        self.wide = torch.nn.Parameter(torch.randn(2, 3, 1, 2, 2, 1, 3, 2))
        self.norm = torch.nn.LayerNorm(8)

    def load_weights(self, named):
        for name, tensor in named:
            self.get_parameter(name).data.copy_(tensor)


def same(model, tensors):
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name].to(tensor.dtype)), name


def by_all_ways():
    """A module; its own parameters, another dtype, load=, a recorded loader, a checkpoint's file."""
    model, whole, other, loaded, recorded = (Vision() for _ in range(5))
    given = []

    def load(named):
        given.extend((name, tuple(tensor.shape)) for name, tensor in named)
        loaded.load_weights((n, t.clone()) for n, t in named)
    recording = record(recorded.load_weights, model.state_dict())
    assert set(recording.in_place) == set(model.state_dict()), recording.by_loader
    publisher = Publisher(model, "m", context=trainer)
    takers = [Subscriber(whole, "m", "whole", context=engine), Subscriber(other.bfloat16(), "m", "other", context=engine),
              Subscriber(load=load, tensors=model.state_dict(), model="m", group="loaded", context=engine),
              Subscriber(recording, "m", "recorded", context=engine)]
    for version in (1, 2):
        publisher.wait()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape))
        publisher.publish(version)
        for taker in takers:
            assert taker.update(min_version=version)["version"] == version
        for taken in (whole, other, loaded, recorded):
            same(taken, model.state_dict())
    assert dict(given) == {n: tuple(t.shape) for n, t in model.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        tensors = {n: torch.randn(t.shape) for n, t in model.state_dict().items()}
        save_file(tensors, f"{folder}/model.safetensors")
        takers[0].update_weights_from_disk(f"{folder}/model.safetensors", version=3)
        same(whole, tensors)
    for each in (*takers, publisher):
        each.close()


def by_blocks():
    """Random rectangles that cut the first four dimensions, of a trainer of two ranks; an engine's in other strides."""
    for case in range(8):
        shape = [rng.randrange(1, 5) for _ in range(rng.randrange(5, 9))]
        tensor, cut = torch.randn(shape), rng.randrange(4)
        at = rng.randrange(shape[cut] + 1)
        parts = [Block("t", tuple(shape), tensor.narrow(cut, a, n).contiguous(), tuple(a if d == cut else 0 for d in range(len(shape))))
                 for a, n in ((0, at), (at, shape[cut] - at))]
        publishers = [Publisher([part], f"b{case}", rank, 2, context=trainer) for rank, part in enumerate(parts)]
        whole = torch.zeros([shape[1], shape[0], *shape[2:]]).transpose(0, 1)
        last = torch.zeros([*shape[:3], 1, *shape[4:]])
        taker = Subscriber([Block("t", tuple(shape), whole)], f"b{case}", "whole", context=engine)
        one = Subscriber([Block("t", tuple(shape), last, (0, 0, 0, shape[3] - 1, *[0] * (len(shape) - 4)))], f"b{case}", "one",
                         context=engine)
        for p in publishers:
            p.publish(1)
        taker.update()
        one.update()
        assert torch.equal(whole, tensor) and torch.equal(last, tensor[:, :, :, shape[3] - 1:]), (case, shape, cut, at)
        for each in (taker, one, *publishers):
            each.close()


def refusals():
    shape = (2, 2, 2, 2, 3, 2)
    tensor = torch.zeros(shape)
    error = refused(dray.DrayError, "whole expected", Publisher, [Block("t", shape, tensor[..., :1, :].contiguous())], "r", context=trainer)
    assert error.name == "EUNSUPPORTED"
    refused(dray.DrayError, "dense in memory", Publisher,
            [Block("t", shape, torch.zeros(2, 2, 2, 2, 2, 3).transpose(4, 5))], "r", context=trainer)
    refused(dray.DrayError, "at most 8", Publisher, {"t": torch.zeros([1] * 9)}, "r", context=trainer)
    refused(dray.DrayError, "at most 8", Subscriber, [("t", torch.zeros([1] * 9))], "r", context=engine)
    turned = torch.nn.Module()
    turned.w = torch.nn.Parameter(torch.zeros(2, 2, 2, 2, 2, 3), requires_grad=False)

    def load(named):
        for _, values in named:
            turned.w.copy_(values.transpose(4, 5))
    recorded = record(load, {"t": (shape, torch.float32)}, into=turned)
    assert "dense" in recorded.by_loader["w"] or "whole" in recorded.by_loader["w"], recorded.by_loader


def router_biases():
    """DeepSeek-V3's are buffers: with config= they go as the checkpoint has them, which save_pretrained writes."""
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1,
        topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = transformers.DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.copy_(torch.randn(t.shape))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        wanted = load_file(f"{folder}/model.safetensors")
        taken = {n: torch.zeros_like(t) for n, t in wanted.items()}
        assert any(name.endswith("e_score_correction_bias") for name in wanted)
        with Publisher(model, "d", context=trainer, config=folder) as publisher, \
                Subscriber(taken, "d", "d", context=engine) as taker:
            publisher.publish(1)
            taker.update()
    for name, tensor in wanted.items():
        assert torch.equal(taken[name], tensor), name


def another_family():
    """Whose config.json is none of dray's families is told of the way that needs none."""
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
            file.write('{"model_type": "surely_unknown", "architectures": ["SurelyUnknownForCausalLM"]}')
        refused(dray.DrayError, "'surely_unknown' is not supported", dray.weights.tensors, folder)
        refused(dray.DrayError, "dray.weights.record()", dray.weights.tensors, folder)


def by_shards():
    """A DTensor's shard of rank 1 of 2, beside a Block of rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh, tensor = init_device_mesh("cpu", (2,)), torch.randn(8, 3, 2, 4, 5)
    shard = lambda d: DTensor.from_local(tensor.chunk(2, d)[1].contiguous(), mesh, [Shard(d)], run_check=False,  # noqa: E731
                                         shape=tensor.shape, stride=tensor.stride())
    publishers = [Publisher([Block("t", tuple(tensor.shape), tensor[:4])], "s", 0, 2, context=trainer),
                  Publisher({"t": shard(0)}, "s", 1, 2, context=trainer)]
    whole = torch.zeros(tensor.shape)
    with Subscriber({"t": whole}, "s", "whole", 0, 1, context=engine) as taker:
        for p in publishers:
            p.publish(1)
        taker.update()
    assert torch.equal(whole, tensor)
    refused(dray.DrayError, "first 3 dimensions", Publisher, {"t": shard(3)}, "t", 1, 2, context=trainer)
    for p in publishers:
        p.close()


with coordinator() as folder:
    with Context(role="trainer", timeout=20) as trainer, Context(role="engine", timeout=20) as engine:
        for case in (by_all_ways, by_blocks, refusals, router_biases, another_family, by_shards):
            case()
            print(case.__name__)
