"""The native operators against their plain twins in float64: values and every gradient.

    python test_native.py
"""
import torch

import native
from model import CONFIG, PLAIN, K3

B, T, H, D, E = 2, 37, 3, 32, 96


def leaves(*shapes):
    return [torch.randn(*s).requires_grad_() for s in shapes]


def compare(name, fast, plain, inputs):
    exact = [t.detach().double().requires_grad_() for t in inputs]
    a, b = fast(*inputs), plain(*exact)
    grad = torch.randn_like(a)
    a.backward(grad)
    b.backward(grad.double())
    pairs = [(a, b)] + [(x.grad, y.grad) for x, y in zip(inputs, exact)]
    worst = max(((x.double() - y).abs().max() / y.abs().max()).item() for x, y in pairs)
    print(f"{name}: worst relative difference of value and gradients {worst:.1e}")
    assert worst < 2e-5, name


def main():
    torch.manual_seed(0)
    compare("norm", lambda x, w: native.rmsnorm(x, w, 1e-5), lambda x, w: PLAIN.rmsnorm(x, w, 1e-5), leaves((T, E), (E,)))
    compare("gated norm", lambda x, w, g: native.rmsnorm(x, w, 1e-5, g), lambda x, w, g: PLAIN.rmsnorm(x, w, 1e-5, g), leaves((T, E), (E,), (T, E)))
    compare("situ", lambda g, u: native.situ(g, u, 4.0, 25.0), lambda g, u: PLAIN.situ(g, u, 4.0, 25.0), leaves((T, E), (T, E)))
    compare("mix", lambda k, *v: native.mix(v, k, 1e-5), lambda k, *v: PLAIN.mix(v, k, 1e-5), leaves((E,), *[(B, T, E)] * 4))
    shapes = [(B, T, H * D)] * 3 + [(H * D, 4)] * 3 + [(B, T, H * D), (H * D,), (H,), (B, T, H)]
    compare("kda", lambda *a: native.kda(*a, -5.0), lambda *a: PLAIN.kda(*a, -5.0), leaves(*shapes))
    model, ids = K3(CONFIG), torch.randint(0, CONFIG["vocab_size"], (2, 50))
    plain = model(ids)
    model.ops = native
    worst = ((model(ids) - plain).abs().max() / plain.abs().max()).item()
    print(f"whole model: {worst:.1e}")
    assert worst < 2e-4
    cache = {}
    model.ops = PLAIN
    pieces = torch.cat([model(ids[:, :20], cache), model(ids[:, 20:21], cache), model(ids[:, 21:], cache)], 1)
    worst = ((pieces - plain).abs().max() / plain.abs().max()).item()
    print(f"in pieces through the cache: {worst:.1e}")
    assert worst < 2e-4


if __name__ == "__main__":
    main()
