"""Adapters alone, of PEFT's own module, to vLLM's own path for adapters (CPU): a random Qwen2, two revisions alive at once, greedy
tokens of each as PEFT's and transformers'; one for another base is refused; and the same adapter merged on the way, by the
plain checkpoint's names."""
import json
import os
import pathlib
import subprocess
import sys

import torch

HERE = pathlib.Path(__file__).resolve()
WORK = pathlib.Path(os.environ["DRAY_WORK"])
SIZES = dict(vocab_size=199, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=256, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
             pad_token_id=0)
PROMPTS, TOKENS, REVISIONS = [[5, 17, 99, 3], [42, 7, 7, 150, 11]], 8, 3


@torch.no_grad()
def greedy(model):
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt):])
    return found


def trainer(folder):
    """Says PEFT's tokens of each revision, and goes on when the engine has it."""
    import dray
    import peft
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(json.dumps(greedy(model)), flush=True)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=[
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))
    with dray.adapters.Publisher(model, "math") as adapter, dray.Publisher(dray.adapters.merged(model), "merged") as merged:
        for revision in range(1, REVISIONS + 1):
            generator = torch.Generator().manual_seed(revision)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if "lora_" in name:
                        p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
            print(json.dumps(greedy(model)), flush=True)
            adapter.publish(revision, base_version=7)
            merged.publish(revision)
            adapter.deliver(groups="engine")
            merged.deliver(groups="merged")
            adapter.wait()
            merged.wait()
    merged_model = model.merge_and_unload()
    torch.save(merged_model.state_dict(), f"{folder}/merged.pt")


def main():
    import dray
    import transformers
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_KVCACHE_SPACE="1")
    folder = WORK / "model"
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("qwen2", architectures=["Qwen2ForCausalLM"], **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape) * 0.2)
    model.save_pretrained(folder)
    with dray.serve():
        process = subprocess.Popen([sys.executable, HERE, folder], stdout=subprocess.PIPE, text=True)
        try:
            from vllm import LLM, SamplingParams
            llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=4,
                      enable_lora=True, max_loras=2, max_lora_rank=8)

            def tokens(request=None):
                done = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], SamplingParams(
                    temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False), use_tqdm=False, lora_request=request)
                return [list(each.outputs[0].token_ids) for each in done]

            def said():
                return json.loads(process.stdout.readline())
            base = said()
            assert tokens() == base
            plain = {n: torch.zeros_like(t) for n, t in model.state_dict().items()}
            wanted = []
            with dray.adapters.Adapters(timeout=200) as adapters, dray.Subscriber(plain, "merged", group="merged",
                                                                                  timeout=200) as merged:
                for revision in range(1, REVISIONS + 1):
                    wanted.append(said())
                    if revision == REVISIONS:
                        try:
                            adapters.take("math", revision, base_version=8)
                            raise SystemExit("an adapter of another base was taken")
                        except dray.DrayError as error:
                            assert error.name == "ESTALE", error
                    taken = adapters.take("math", revision, base_version=7)
                    assert taken.revision == revision and wanted[-1] != base
                    merged.update(min_version=revision, timeout=200)
                    for each in adapters.alive("math"):  # the last two, each as itself
                        assert tokens(each.vllm()) == wanted[each.revision - 1], each.label
                    assert tokens() == base
                assert [each.revision for each in adapters.alive("math")] == [REVISIONS - 1, REVISIONS]
            assert process.wait(120) == 0
        finally:
            process.kill()
    peft_merged = torch.load(folder / "merged.pt")
    assert peft_merged.keys() == plain.keys() and all(torch.equal(plain[n], t) for n, t in peft_merged.items())
    print(f"{REVISIONS} revisions by vLLM's lora_request, two alive at once: tokens as PEFT's; merged on the way: {len(plain)} tensors "
          "as PEFT's merge_and_unload")


if len(sys.argv) > 1:
    trainer(sys.argv[1])
else:
    main()
