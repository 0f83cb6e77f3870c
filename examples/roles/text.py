"""The demo's vocabulary: 256 bytes, and three tokens of its own."""
PAD, BEGIN, END = 256, 257, 258


def encode(text):
    return list(text.encode())


def decode(tokens):
    """Up to the end token; what is no byte is left out."""
    tokens = list(tokens)
    tokens = tokens[:tokens.index(END)] if END in tokens else tokens
    return bytes(t for t in tokens if t < PAD).decode(errors="replace")


def _random(seed, stream, index):
    """Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011)."""
    c0, c1, c2, c3, k0, k1 = index, 0, stream, 0, seed, 0
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xffffffff, p0 >> 32 ^ c3 ^ k1, p0 & 0xffffffff
        k0, k1 = k0 + 0x9E3779B9 & 0xffffffff, k1 + 0xBB67AE85 & 0xffffffff
    return c1 << 32 | c0


def held_out(number):
    """One number in eight, by the rule of `data.source: reverse`: training never sees its prompt."""
    return _random(1, 14, number) % 8 == 0
