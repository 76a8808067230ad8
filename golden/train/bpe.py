"""Byte-pair vocabulary in the released tiktoken format: trainer, encoder, decoder.

    python bpe.py --work DIR --out DEMO_DIR

Writes DEMO_DIR/tiktoken.model and DEMO_DIR/tokenizer_config.json, then DIR/data/*.npy (the encoded texts).
Text is split with the release's own pattern. Ranks 0..255 are the single bytes (printable ones first, as in the release);
each later rank is the most frequent pair at its time, ties going to the smaller pair of byte strings.
The special tokens follow the ranks without a gap, in the order in which the release has them.
"""
import argparse
import base64
import collections
import json
import pathlib

import numpy
import regex

PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT = regex.compile(PATTERN, regex.V1)
RANKS = 2032
SPECIAL = ["[BOS]", "[EOS]", "<|end_of_msg|>", None, None, None, "[start_header_id]", "[end_header_id]", None, "[EOT]",
           "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "[UNK]", "[PAD]"]
VOCABULARY = RANKS + len(SPECIAL)


def special(name):
    return RANKS + SPECIAL.index(name)


def first_bytes():
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    return [bytes([b]) for b in printable + [b for b in range(256) if b not in printable]]


def train(text, ranks):
    counts = collections.Counter(piece.encode() for piece in SPLIT.findall(text) if piece != "\f")
    words = [([bytes([b]) for b in word], n) for word, n in sorted(counts.items())]
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for i, (parts, n) in enumerate(words):
        for pair in zip(parts, parts[1:]):
            pairs[pair] += n
            where[pair].add(i)
    vocabulary = first_bytes()
    while len(vocabulary) < ranks:
        best = min(pairs, key=lambda p: (-pairs[p], p))
        vocabulary.append(best[0] + best[1])
        for i in sorted(where[best]):
            parts, n = words[i]
            for pair in zip(parts, parts[1:]):
                pairs[pair] -= n
                if pairs[pair] <= 0:
                    del pairs[pair]
                where[pair].discard(i)
            merged, at = [], 0
            while at < len(parts):
                hit = at + 1 < len(parts) and (parts[at], parts[at + 1]) == best
                merged.append(parts[at] + parts[at + 1] if hit else parts[at])
                at += 2 if hit else 1
            words[i] = (merged, n)
            for pair in zip(merged, merged[1:]):
                pairs[pair] += n
                where[pair].add(i)
    return vocabulary


class Tokenizer:
    """Ordinary text only; special tokens are added by number."""

    def __init__(self, path):
        lines = pathlib.Path(path).read_bytes().splitlines()
        self.ranks = {base64.b64decode(word): int(rank) for word, rank in (line.split() for line in lines)}
        self.bytes = {rank: word for word, rank in self.ranks.items()}
        self.known = {}

    def piece(self, word):
        if word not in self.known:
            parts = [bytes([b]) for b in word]
            while len(parts) > 1:
                best = min(range(len(parts) - 1), key=lambda i: self.ranks.get(parts[i] + parts[i + 1], 1 << 30))
                if parts[best] + parts[best + 1] not in self.ranks:
                    break
                parts[best:best + 2] = [parts[best] + parts[best + 1]]
            self.known[word] = [self.ranks[part] for part in parts]
        return self.known[word]

    def encode(self, text):
        return [rank for piece in SPLIT.findall(text) for rank in self.piece(piece.encode())]

    def decode(self, ids):
        return b"".join(self.bytes.get(i, (SPECIAL[i - RANKS] or "<|reserved|>").encode() if i >= RANKS else b"") for i in ids).decode("utf-8", "replace")


def write_config(path):
    decoder = {str(RANKS + i): {"content": name or f"<|reserved_token_{RANKS + i}|>", "special": True} for i, name in enumerate(SPECIAL)}
    config = {"added_tokens_decoder": decoder, "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
              "model_max_length": 1048576}
    path.write_text(json.dumps(config, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.work / "data"
    vocabulary = train((data / "train.txt").read_text(), RANKS)
    model = args.out / "tiktoken.model"
    model.write_bytes(b"".join(base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(vocabulary)))
    write_config(args.out / "tokenizer_config.json")
    tokenizer = Tokenizer(model)
    for path in sorted(data.glob("*.txt")):
        ids, size = [], 0
        for document in path.read_text().split("\f"):
            ids += [special("[BOS]"), *tokenizer.encode(document), special("<|end_of_msg|>")]
            size += len(document.encode())
        numpy.save(path.with_suffix(".npy"), numpy.array(ids, numpy.uint16))
        print(f"{path.name}: {len(ids)} tokens, {size / len(ids):.3f} bytes a token")


if __name__ == "__main__":
    main()
