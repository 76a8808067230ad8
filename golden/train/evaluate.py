"""Judge the exported demo model on held-out text, beside a 5-gram model of the same tokens.

    python evaluate.py --work DIR --demo DEMO_DIR [--prompt TEXT] [--limit TOKENS]

The model reads windows of 512 tokens, 256 new ones each, and only the new ones count. The 5-gram model is interpolated
Kneser-Ney (one discount per order from its counts of counts, continuation counts below the top order, uniform at the
bottom), trained on the same training text. Both are scored on the same tokens; special tokens are left out.
"""
import argparse
import json
import math
import pathlib

import numpy
import torch
import torch.nn.functional as F

import bpe
import native
from export import load_released
from model import PLAIN

ORDER, BITS = 5, 11
CONTEXT, NEW = 256, 256
assert 1 << BITS >= bpe.VOCABULARY and BITS * ORDER < 64


class KneserNey:
    def __init__(self, ids):
        self.levels = []  # from the top order down: (keys, counts, contexts, totals, types, discount)
        packed = self.pack(ids, ORDER)
        for order in range(ORDER, 0, -1):
            keys, counts = numpy.unique(packed, return_counts=True)
            contexts, where = numpy.unique(keys >> BITS, return_inverse=True)
            totals, types = numpy.bincount(where, counts), numpy.bincount(where)
            once, twice = (counts == 1).sum(), (counts == 2).sum()
            self.levels.append((keys, counts, contexts, totals, types, once / (once + 2 * twice) if once else 0.5))
            packed = keys & ((1 << BITS * (order - 1)) - 1)  # each distinct gram counts once for its tail

    @staticmethod
    def pack(ids, order):
        ids, out = ids.astype(numpy.int64), 0
        for i in range(order):
            out = out << BITS | ids[i:len(ids) - order + 1 + i]
        return out

    @staticmethod
    def find(keys, values, wanted):
        at = numpy.minimum(numpy.searchsorted(keys, wanted), len(keys) - 1)
        return numpy.where(keys[at] == wanted, values[at], 0)

    def nats(self, ids):
        """-> the loss at each position from ORDER - 1 on."""
        grams, p = self.pack(ids, ORDER), 1 / bpe.VOCABULARY
        for order, (keys, counts, contexts, totals, types, d) in zip(range(1, ORDER + 1), reversed(self.levels)):
            gram = grams & ((1 << BITS * order) - 1)
            total = self.find(contexts, totals, gram >> BITS)
            seen, safe = total > 0, numpy.maximum(total, 1)
            here = numpy.maximum(self.find(keys, counts, gram) - d, 0) / safe + d * self.find(contexts, types, gram >> BITS) / safe * p
            p = numpy.where(seen, here, p)
        return -numpy.log(p)


def model_nats(model, ids, rows=4):
    """-> the loss at each position from 1 on."""
    out = []
    first = torch.from_numpy(ids[:CONTEXT + 1].astype(numpy.int64))[None]
    out.append(F.cross_entropy(model(first[:, :-1])[0], first[0, 1:], reduction="none"))
    starts = list(range(0, len(ids) - CONTEXT - 1, NEW))
    for i in range(0, len(starts), rows):
        parts = [ids[s:s + CONTEXT + NEW + 1].astype(numpy.int64) for s in starts[i:i + rows]]
        size = max(map(len, parts))
        batch = torch.from_numpy(numpy.stack([numpy.pad(p, (0, size - len(p))) for p in parts]))
        loss = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none")
        out += [loss[row, CONTEXT:len(p) - 1] for row, p in enumerate(parts)]
    return torch.cat(out).numpy()


def sample(model, tokenizer, text, count, temperature, seed):
    gen, cache = torch.Generator().manual_seed(seed), {}
    ids = tokenizer.encode(text)
    fresh = ids
    for _ in range(count):
        row = model(torch.tensor([fresh]), cache)[0, -1] / temperature
        row[bpe.RANKS:] = -math.inf
        fresh = [int(torch.multinomial(torch.softmax(row, -1), 1, generator=gen))]
        ids = ids + fresh
    return tokenizer.decode(ids)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--demo", type=pathlib.Path, required=True)
    parser.add_argument("--prompt", default="Shall I")
    parser.add_argument("--limit", type=int, default=1 << 30, help="tokens of each held-out text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, tokenizer = load_released(args.demo, torch.float32), bpe.Tokenizer(args.demo / "tiktoken.model")
    model.ops = native
    grams = KneserNey(numpy.load(args.work / "data/train.npy"))
    total = numpy.zeros(5)
    for name in ("shakespeare", "kjv"):
        ids = numpy.load(args.work / f"data/valid_{name}.npy")[:args.limit]
        score = ids[ORDER - 1:] < bpe.RANKS
        size = sum(len(tokenizer.bytes[int(i)]) for i in ids[ORDER - 1:][score])
        model.routed = True
        ours = model_nats(model, ids)[ORDER - 2:][score].sum()
        model.routed = False
        off = model_nats(model, ids)[ORDER - 2:][score].sum()
        row = numpy.array([ours, off, grams.nats(ids)[score].sum(), score.sum(), size])
        total += row
        report(name, row)
    report("both", total)
    model.ops, model.routed = PLAIN, True
    for temperature in (0.7, 0.9):
        print(f"--- temperature {temperature}, seed 1\n{sample(model, tokenizer, args.prompt, 160, temperature, 1)}")


def report(name, row):
    ours, off, grams, tokens, size = row
    line = {"text": name, "tokens": int(tokens), "bytes": int(size)}
    for key, nats in (("model", ours), ("without_routed_experts", off), ("5-gram", grams)):
        line[key] = {"nats_per_token": round(nats / tokens, 4), "bits_per_byte": round(nats / size / math.log(2), 4)}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
