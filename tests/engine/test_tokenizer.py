"""Byte-level BPE gives the tokens that Hugging Face's `tokenizers` gives, on random and real strings, for
the three shapes of tokenizer.json that matter: GPT-2's, Qwen2's and Llama 3's."""

import copy
import glob
import json
import os
import subprocess
import tempfile
import unicodedata

from begin import needs, rng, scale as SCALE

with needs:
    import tokenizers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers, processors, trainers

HELPER = os.path.join(os.environ["DRAY_BUILD_DIR"], "engine_helper_tokenizer")
SOURCE = os.environ["DRAY_SOURCE_DIR"]

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def real_strings():
    """Lines of this project, and, where they are at hand, the questions and answers of GSM8K."""
    lines = []
    for pattern in ("*.md", "docs/*.md", "src/**/*.c", "python/dray/*.py"):
        for path in sorted(glob.glob(os.path.join(SOURCE, pattern), recursive=True)):
            with open(path, encoding="utf-8") as file:
                text = file.read()
            lines += text.splitlines() + [text[:5000]]
    for path in glob.glob(os.path.join(os.environ.get("DRAY_GSM8K", "/nowhere"), "**/*.jsonl"), recursive=True):
        with open(path, encoding="utf-8") as file:
            lines += [text for line in file for text in json.loads(line).values() if isinstance(text, str)]
    return lines


# What patterns, case folding and normal forms look at; then everything that Unicode has, as far as Debian
# 12's PCRE2 (Unicode 14) and `tokenizers` know the same characters.
ODD = list(" \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u180e\u2000\u2028\u2029\u202f\u205f\u3000\ufeff\u200b\u200d"
           "'stSTrReEvVmMlLdD\u017f\u212a\u0130\u0131\u00df0123456789²½Ⅷ①٣\u0301\u0327e\u0065\u00e9ﬁ\u1e9b\u0323"
           "\uac00\u1100\u1161\u11a8\u0344\u2126\u0958\ufb1d日本語中文ไทย🙂👩🏽\U0001f1e9\U00020000_-+=<|>#.,!?\x00\x7f")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "<tool><tool>", "Ω"]


def character():
    if rng.random() < 0.6:
        return rng.choice(ODD)
    if rng.random() < 0.5:
        return chr(rng.randrange(32, 127))
    while True:
        c = chr(rng.randrange(0x30000))
        if unicodedata.category(c) not in ("Cn", "Cs", "Co") and not 0x2EBF0 <= ord(c) < 0x2F800:
            return c


def random_string():
    length = int(2 ** rng.uniform(0, 7))
    kind = rng.random()
    if kind < 0.1:  # long words
        return rng.choice("aA 0\n.é") * rng.randrange(1, 3000)
    parts = [rng.choice(SPECIAL) if rng.random() < 0.05 else character() for _ in range(length)]
    return "".join(parts)


def make(shape):
    """A tokenizer of the shape, its merges learned from real strings and from some random ones."""
    t = Tokenizer(models.BPE(ignore_merges=shape == "llama3"))
    level = pre_tokenizers.ByteLevel
    if shape in ("gpt2", "prefixed"):
        t.pre_tokenizer = level(add_prefix_space=shape == "prefixed")
    else:
        pattern = Regex(QWEN2 if shape == "qwen2" else LLAMA3)
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"),
                                                   level(add_prefix_space=False, use_regex=False)])
    if shape == "qwen2":
        t.normalizer = normalizers.NFC()
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=3000, show_progress=False, initial_alphabet=level.alphabet())
    sample = rng.sample(REAL, min(len(REAL), 4000)) + [random_string() for _ in range(300)]
    t.train_from_iterator(sample, trainer)
    t.add_special_tokens(SPECIAL[:3])
    t.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<tool><tool>", normalized=False),
                  AddedToken("Ω", normalized=True)])  # NFC makes one character of two
    if shape == "llama3":
        start = t.token_to_id("<|im_start|>")
        t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A <|im_start|> $B", special_tokens=[("<|im_start|>", start)])])
    return t


def ask(path, whole, requests):
    text = "".join(json.dumps(r) + "\n" for r in requests)
    done = subprocess.run([HELPER, path, whole], input=text, stdout=subprocess.PIPE, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode in (0, 1), done.returncode
    return [json.loads(line) for line in lines]


def compare(shape, folder, strings):
    theirs = make(shape)
    path = os.path.join(folder, f"{shape}.json")
    theirs.save(path)
    for whole in "01":
        wanted = [theirs.encode(s, add_special_tokens=whole == "1").ids for s in strings]
        about, *found = ask(path, whole, [[s] for s in strings])
        assert about == {"size": theirs.get_vocab_size(), "end": -1}, about
        assert len(found) == len(strings), (len(found), found[-1:])
        for s, mine, other in zip(strings, found, wanted):
            assert mine == other, f"{shape}: {s!r}: found {mine}, `tokenizers` gives {other}"
    ids = [[rng.randrange(theirs.get_vocab_size()) for _ in range(rng.randrange(1, 40))] for _ in range(500)]
    lists = ids + [w for w in wanted if w][:500]
    for tokens, mine in zip(lists, ask(path, "0", lists)[1:]):
        text = bytes.fromhex(mine).decode("utf-8", errors="replace")
        assert text == theirs.decode(tokens), f"{shape}: {tokens}: found {text!r}"
    return path


def check_refusals(path, folder):
    """Whatever would change tokens and is not done is named; so is what is no tokenizer."""
    with open(path, encoding="utf-8") as file:
        good = json.load(file)
    changes = [("model.type WordPiece", lambda j: j["model"].update(type="WordPiece")),
               ("dropout", lambda j: j["model"].update(dropout=0.1)),
               ("byte_fallback", lambda j: j["model"].update(byte_fallback=True)),
               ("normalizer Lowercase", lambda j: j.update(normalizer={"type": "Lowercase"})),
               ("pre_tokenizer Metaspace", lambda j: j.update(pre_tokenizer={"type": "Metaspace"})),
               ("ByteLevel", lambda j: j["pre_tokenizer"]["pretokenizers"].pop()),
               ("post_processor BertProcessing", lambda j: j.update(post_processor={"type": "BertProcessing"})),
               ("Removed", lambda j: j["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed")),
               ("pattern", lambda j: j["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "("})),
               ("pattern \\C", lambda j: j["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "\\C"})),
               ("truncation", lambda j: j.update(truncation={"max_length": 8})),
               ("lstrip", lambda j: j["added_tokens"][0].update(lstrip=True)),
               ("no token for byte 33", lambda j: j["model"]["vocab"].pop("!")),
               ("merge 0", lambda j: j["model"]["merges"].insert(0, ["a", "no such token"])),
               ("its id", lambda j: j["model"]["vocab"].update(x=-1)),
               ("model.merges", lambda j: j["model"].pop("merges"))]
    for named, change in changes:
        bad = copy.deepcopy(good)
        change(bad)
        where = os.path.join(folder, "bad.json")
        with open(where, "w", encoding="utf-8") as file:
            json.dump(bad, file)
        found = ask(where, "0", [])
        assert "message" in found[0] and named in found[0]["message"] and where in found[0]["message"], (named, found)
    with open(os.path.join(folder, "bad.json"), "w", encoding="utf-8") as file:
        file.write("{")
    assert ask(file.name, "0", [])[0]["error"] == "EFORMAT"
    assert ask(os.path.join(folder, "none"), "0", [])[0]["error"] == "ENOENT"


def check_folder(path, folder):
    """A folder is its tokenizer.json, with the end token of tokenizer_config.json, in both of its forms."""
    model = os.path.join(folder, "model")
    os.mkdir(model)
    os.rename(path, os.path.join(model, "tokenizer.json"))
    for end in ("<|im_end|>", {"content": "<|im_end|>", "special": True}):
        with open(os.path.join(model, "tokenizer_config.json"), "w", encoding="utf-8") as file:
            json.dump({"eos_token": end}, file)
        theirs = Tokenizer.from_file(os.path.join(model, "tokenizer.json"))
        assert ask(model, "0", [])[0]["end"] == theirs.token_to_id("<|im_end|>")
    with open(os.path.join(model, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump({"eos_token": "<|gone|>"}, file)
    assert "'<|gone|>' is no token" in ask(model, "0", [])[0]["message"]


REAL = real_strings()
STRINGS = [random_string() for _ in range(1500 * SCALE)] + rng.sample(REAL, min(len(REAL), 1000)) + [""] + SPECIAL
with tempfile.TemporaryDirectory() as work:
    for kind in ("gpt2", "prefixed", "qwen2", "llama3"):
        last = compare(kind, work, STRINGS)
    check_refusals(last, work)
    check_folder(last, work)
print(f"{len(STRINGS)} strings, four tokenizers, `tokenizers` {tokenizers.__version__}")
