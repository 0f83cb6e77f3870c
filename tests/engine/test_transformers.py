"""The engine's distributions, log-probs and greedy continuations are those that transformers computes for
the same checkpoint, and transformers reads what the trainer writes."""

import json
import os
import tempfile

from engine import *

CASES = [
    # family, changes, dtype, shard size
    ("llama", dict(), torch.float32, None),
    ("llama", dict(tie_word_embeddings=True, num_key_value_heads=6), torch.bfloat16, None),
    ("llama", dict(head_dim=12, rope_theta=500000.0, rms_norm_eps=1e-5), torch.float32, "40KB"),
    ("qwen2", dict(tie_word_embeddings=True), torch.float32, "40KB"),
    ("qwen2", dict(num_key_value_heads=1), torch.bfloat16, "40KB"),
    ("qwen2", dict(vocab_size=30), torch.float32, None),  # one of two ranks has padding alone
    ("qwen3", dict(tie_word_embeddings=True), torch.float32, None),
    ("qwen3", dict(), torch.bfloat16, "40KB"),
]


def check_next(what, model, folder, vocabulary, ranks=(0, 1, 2)):
    for count in (1, 23, 100):
        tokens = random_tokens(count, vocabulary)
        with torch.no_grad():
            expected = torch.log_softmax(logits_of(model, tokens)[-1], 0)
        for world in ranks:
            found = call({"do": "next", "model": folder, "ranks": world, "tokens": tokens, "vocabulary": vocabulary})
            expect_close(f"{what}, {count} tokens, {world} ranks", found["logprobs"], expected, 1e-4)


def distributions_agree_both_ways():
    for family, changes, dtype, shard in CASES:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(family, **changes)
            options = {"max_shard_size": shard} if shard else {}
            model = save(model, f"{folder}/theirs", dtype, **options)
            vocabulary = model.config.vocab_size
            what = f"{family} {changes} {dtype}"
            assert os.path.exists(f"{folder}/theirs/model.safetensors.index.json") == bool(shard)
            check_next(what, model, f"{folder}/theirs", vocabulary)

            world = rng.choice((0, 2, 3))
            call({"do": "train", "model": f"{folder}/theirs", "ranks": world, "steps": [],
                  "out": f"{folder}/ours"})
            back = load(f"{folder}/ours")
            assert type(back) is type(model)
            assert json.load(open(f"{folder}/ours/config.json"))["torch_dtype"] == "float32"
            tokens = random_tokens(50, vocabulary)
            with torch.no_grad():
                expect_close(f"{what} written", logits_of(back, tokens), logits_of(model, tokens),
                             1e-6)


def a_model_from_scratch_is_one_of_transformers():
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            save(make_model(family, tie_word_embeddings=True), f"{folder}/like")
            for world in (0, 3):
                call({"do": "init", "like": f"{folder}/like", "seed": 5, "ranks": world,
                      "steps": [], "out": f"{folder}/{world}"})
            one = load_file(f"{folder}/0/model.safetensors")
            three = load_file(f"{folder}/3/model.safetensors")
            for name, value in one.items():
                assert torch.equal(value, three[name]), f"{name} depends on the world"
                deviation = 0.02 if "norm" not in name and "bias" not in name else 0
                assert abs(value.std().item() - deviation) < 0.002, name
            model = load(f"{folder}/0")
            check_next(f"{family} from scratch", model, f"{folder}/0", 259, (2,))


def scores_agree():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("qwen2", tie_word_embeddings=True), folder)
        prompts, responses = random_rows(150)
        for temperature in (1.0, 0.6):
            with torch.no_grad():
                logprobs, entropy = response_logprobs(model, prompts, responses, temperature)
            for who, world in (("generator", 0), ("generator", 2), ("trainer", 0), ("trainer", 3)):
                found = call({"do": "logprobs", "with": who, "ranks": world, "model": folder,
                              "prompts": prompts, "responses": responses,
                              "temperature": temperature})
                expect_close(f"log-probs, {who} {world}", found["logprobs"], logprobs, 1e-4)
                expect_close(f"entropy, {who} {world}", found["entropy"], entropy, 1e-4)


def greedy_continuations_agree():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("llama"), folder)
        prompts, _ = random_rows(12, prompt=(1, 20))
        expected = []
        for prompt in prompts:
            row = list(prompt)
            with torch.no_grad():
                for _ in range(15):
                    row.append(int(logits_of(model, row)[-1].argmax()))
            expected.append(row[len(prompt):])
        eos = expected[0][5]
        for world in (0, 2):
            request = {"do": "generate", "model": folder, "ranks": world, "prompts": prompts,
                       "temperature": 0, "max_new_tokens": 15}
            found = call(request)
            assert found["responses"] == expected, f"seed {SEED}: {world} ranks"
            assert set(found["finish"]) == {0}
            found = call(dict(request, eos=eos))
            for i, row in enumerate(expected):
                end = row.index(eos) + 1 if eos in row else len(row)
                assert found["responses"][i] == row[:end], f"seed {SEED}: row {i}"
                assert found["finish"][i] == (eos in row)


def samples_do_not_depend_on_the_world():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("qwen3"), folder)
        prompts, _ = random_rows(40)
        request = {"do": "generate", "model": folder, "prompts": prompts, "seed": 11,
                   "max_new_tokens": 10, "temperature": 0.8, "eos": 3}
        found = call(dict(request, ranks=0))
        assert call(dict(request, ranks=2))["responses"] == found["responses"]
        assert call(dict(request, ranks=0, seed=12))["responses"] != found["responses"]
        with torch.no_grad():
            logprobs, _ = response_logprobs(model, prompts, found["responses"], 0.8)
        expect_close("log-probs of samples", found["logprobs"], logprobs, 1e-4)


def samples_follow_the_distribution():
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model("llama", vocab_size=30), folder)
        prompt, rows = random_tokens(4, 30), 20000
        with torch.no_grad():
            p = torch.softmax(logits_of(model, prompt)[-1] / 1.3, 0)
        found = call({"do": "generate", "model": folder, "ranks": 2, "prompts": [prompt] * rows,
                      "seed": SEED, "temperature": 1.3, "max_new_tokens": 1})
        counts = torch.bincount(torch.tensor([r[0] for r in found["responses"]]), minlength=30)
        # chi-square of 29 degrees of freedom is above 80 once in a million
        chi = ((counts - rows * p) ** 2 / (rows * p)).sum().item()
        assert chi < 80, f"seed {SEED}: chi-square {chi}"


def rows_that_weights_change_under_go_on_with_the_new_ones():
    with tempfile.TemporaryDirectory() as folder:
        names = ("old", "new")
        models = [save(make_model("qwen2"), f"{folder}/{name}") for name in names]
        prompts, _ = random_rows(30)
        before, count = 4, 11
        for world in (0, 2):
            found = call({"do": "update", "model": f"{folder}/old", "then": f"{folder}/new",
                          "ranks": world, "prompts": prompts, "seed": SEED, "before": before,
                          "max_new_tokens": count})
            logprobs = torch.tensor(found["logprobs"])
            with torch.no_grad():
                old, new = (response_logprobs(model, prompts, found["responses"])[0]
                            .reshape(-1, count) for model in models)
            what = f"{world} ranks"
            expect_close(f"before, {what}", logprobs[:, :before], old[:, :before], 1e-4)
            expect_close(f"after, {what}", logprobs[:, before:], new[:, before:], 1e-4)


REFUSED = [
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
    ("hidden_act", "gelu"),
    ("use_sliding_window", True),
    ("sliding_window", 128),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("attention_dropout", 0.1),
    ("quantization_config", {"quant_method": "fp8"}),
    ("partial_rotary_factor", 0.5),
]


def what_is_not_computed_is_refused_by_name():
    with tempfile.TemporaryDirectory() as folder:
        save(make_model("llama"), folder)
        with open(f"{folder}/config.json") as file:
            plain = json.load(file)
        for key, value in REFUSED:
            with open(f"{folder}/config.json", "w") as file:
                json.dump({**plain, key: value}, file)
            found = call({"do": "next", "model": folder, "ranks": 0, "tokens": [1], "vocabulary": 2}, fails=True)
            assert found["error"] == "EUNSUPPORTED" and key in found["message"], (key, found)


main([distributions_agree_both_ways, a_model_from_scratch_is_one_of_transformers, scores_agree,
      greedy_continuations_agree, samples_do_not_depend_on_the_world,
      samples_follow_the_distribution, rows_that_weights_change_under_go_on_with_the_new_ones,
      what_is_not_computed_is_refused_by_name])
