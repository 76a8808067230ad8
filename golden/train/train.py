"""Train the demo model on a CPU within a given wall time.

    nice -n 19 python train.py --work DIR --until 18:10 [--threads 2] [--seed 1]

Everything is scheduled by the share of the wall time that has passed (warm-up, cosine, quantisation in the last quarter),
so the run ends on time whatever else the machine does. DIR/checkpoint.pt is written every few minutes and on SIGTERM; the
same command goes on from it. The batches follow from the seed and the step number alone; how many steps fit depends on
the machine, so two runs agree bit for bit only when they make the same steps at the same shares (`--steps` fixes that).
"""
import argparse
import datetime
import json
import math
import os
import pathlib
import signal
import time

import numpy
import torch
import torch.nn.functional as F

import native
from model import CONFIG, K3

PEAK, FLOOR, WARMUP, QUANTISE_FROM = 3e-3, 0.02, 0.02, 0.75
SHAPES = [(8, 128), (4, 256), (8, 128), (2, 512)]  # batches x tokens, in turn: the long ones teach the model to go on
# An expert sees an eighth of the tokens, so its gradient is the noisiest; at the full rate the model learns to ignore the
# routed path. A router at the full rate saturates before the selection bias can even the loads out.
EXPERT_RATE, ROUTER_RATE, BALANCE = 0.3, 0.1, 5e-3
SKIPPED_AT_MOST = 20


def batch(data, seed, step):
    rng = numpy.random.default_rng([seed, step])
    n, length = SHAPES[step % len(SHAPES)]
    at = rng.integers(0, len(data) - length - 1, n)
    rows = numpy.stack([data[i:i + length + 1] for i in at]).astype(numpy.int64)
    return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


def loss_on(model, data, tokens, window=256, rows=8):
    """Mean nats a token over the first `tokens` tokens, in windows that start afresh."""
    total = count = 0
    with torch.no_grad():
        starts = list(range(0, min(tokens, len(data) - 1) - window + 1, window))
        for i in range(0, len(starts), rows):
            ids = torch.from_numpy(numpy.stack([data[s:s + window + 1] for s in starts[i:i + rows]]).astype(numpy.int64))
            total += F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
            count += ids[:, 1:].numel()
    return total / count


def optimiser(model):
    """Weight decay on the dense matrices only: not on experts, router, embedding, norms, biases; `scale` is a group's share of the rate."""
    groups = {}
    for name, t in model.named():
        if not t.requires_grad:
            continue
        expert, router = ".experts." in name, name.endswith(".gate.weight")
        routed = expert or router or ".routed_expert_" in name
        decay = 0.1 if t.dim() == 2 and not routed and "embed" not in name and "_res_" not in name else 0.0
        groups.setdefault((decay, EXPERT_RATE if expert else ROUTER_RATE if router else 1.0), []).append(t)
    groups = [{"params": tensors, "weight_decay": decay, "scale": scale} for (decay, scale), tensors in groups.items()]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-9, fused=True)


def learning_rate(share):
    if share < WARMUP:
        return PEAK * max(share, 1e-4) / WARMUP
    return PEAK * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1, (share - WARMUP) / (1 - WARMUP)))))


def balance(model, rate):
    """Move the selection bias towards even expert loads (no gradient, no extra loss)."""
    with torch.no_grad():
        for layer, load in model.loads.items():
            load = load.float()
            bias = model.w(f"layers.{layer}.block_sparse_moe.gate.e_score_correction_bias")
            bias += rate * torch.sign(load.mean() - load)
            bias -= bias.mean()


class Clock:
    """The share of the run that has passed: by wall time, or by steps when their number is fixed."""

    def __init__(self, until, begun, steps):
        self.until, self.begun, self.steps = until, begun, steps

    def share(self, step):
        return step / self.steps if self.steps else (time.time() - self.begun) / (self.until - self.begun)


def save(path, model, opt, state):
    torch.save({"model": dict(model.named()), "optimiser": opt.state_dict(), "state": state}, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def report(model, valid, line, log):
    model.routed = False
    off = {name: loss_on(model, data, 4096) for name, data in valid.items()}
    model.routed = True
    on = {name: loss_on(model, data, 4096) for name, data in valid.items()}
    line |= {"valid": on, "without_routed_experts": {k: off[k] - on[k] for k in on}}
    line["expert_load_max_over_mean"] = round(max((l.max() / l.float().mean()).item() for l in model.loads.values()), 2)
    print(json.dumps(line), file=log, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--until", help="HH:MM, the time of day at which the run must be over")
    parser.add_argument("--steps", type=int, help="a fixed number of steps in place of --until")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if bool(args.until) == bool(args.steps):
        parser.error("one of --until and --steps is needed")
    torch.set_num_threads(args.threads)
    now = datetime.datetime.now()
    until = now.replace(hour=int(args.until[:2]), minute=int(args.until[3:]), second=0).timestamp() if args.until else None
    train = numpy.load(args.work / "data/train.npy")
    valid = {name: numpy.load(args.work / f"data/valid_{name}.npy") for name in ("shakespeare", "kjv")}
    model = K3(CONFIG, args.seed)
    model.ops = native
    opt, path = optimiser(model), args.work / "checkpoint.pt"
    state = {"step": 0, "tokens": 0, "begun": time.time()}
    if path.exists():
        kept = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, t in model.named():
                t.copy_(kept["model"][name])
        opt.load_state_dict(kept["optimiser"])
        state = kept["state"]
    clock = Clock(until, state["begun"], args.steps)
    stop, skipped = [], 0
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    log = open(args.work / "log.jsonl", "a")
    saved = reported = time.time()
    since = (time.time(), state["tokens"], 0.0, 0)
    while not stop and (share := clock.share(state["step"])) < 1:
        rate = learning_rate(share)
        for group in opt.param_groups:
            group["lr"] = rate * group["scale"]
        model.quantise = share >= QUANTISE_FROM
        x, y = batch(train, args.seed, state["step"])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([t for t in model.parameters() if t.requires_grad], 1.0)
        if torch.isfinite(norm):
            opt.step()
            balance(model, BALANCE * rate / PEAK)
        else:
            skipped += 1
            if skipped > SKIPPED_AT_MOST:
                raise SystemExit(f"step {state['step']}: the gradient is not finite for the {skipped}th time")
        state["step"] += 1
        state["tokens"] += x.numel()
        since = (since[0], since[1], since[2] + (loss.item() if torch.isfinite(norm) else 0.0), since[3] + 1)
        if state["step"] % 100 == 0:
            spent = time.time() - since[0]
            line = {"step": state["step"], "tokens": state["tokens"], "share": round(share, 4), "lr": round(rate, 6), "loss": round(since[2] / since[3], 4),
                    "tokens_per_second": round((state["tokens"] - since[1]) / spent), "skipped": skipped, "gradient": round(norm.item(), 3), "load": os.getloadavg()[0]}
            print(json.dumps(line), file=log, flush=True)
            since = (time.time(), state["tokens"], 0.0, 0)
            if time.time() - reported > 300:
                report(model, valid, {"step": state["step"], "share": round(share, 4)}, log)
                reported = time.time()
        if time.time() - saved > 150:
            save(path, model, opt, state)
            saved = time.time()
    save(path, model, opt, state)
    model.quantise = True
    report(model, valid, {"step": state["step"], "tokens": state["tokens"], "end": not stop}, log)


if __name__ == "__main__":
    main()
