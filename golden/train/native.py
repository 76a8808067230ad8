"""autograd wrappers of native.cpp (built once; needs a C++ compiler and ninja)."""
import functools
import pathlib

import torch


@functools.cache
def library():
    from torch.utils.cpp_extension import load
    source = pathlib.Path(__file__).parent / "native.cpp"
    return load("k3_native", [str(source)], extra_cflags=["-O3", "-march=native", "-ffast-math"])


class Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, yq, yk, yv, tq, tk, tv, z, dt_bias, A_log, b, lower):
        H = A_log.shape[0]
        taps = torch.stack([t.reshape(H, -1, t.shape[1]).transpose(1, 2) for t in (tq, tk, tv)])
        args = [t.contiguous() for t in (yq, yk, yv, taps, z, dt_bias, A_log, b)]
        o, kept = library().kda_forward(*args, lower)
        ctx.save_for_backward(*args, kept)
        ctx.lower = lower
        return o

    @staticmethod
    def backward(ctx, g):
        *args, kept = ctx.saved_tensors
        gq, gk, gv, taps, gz, gd, gA, gb = library().kda_backward(*args, ctx.lower, kept, g.contiguous())
        tq, tk, tv = (t.transpose(1, 2).reshape(-1, t.shape[1]) for t in taps)
        return gq, gk, gv, tq, tk, tv, gz, gd, gA, gb, None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps, gate=None):
        x, gate = x.contiguous(), None if gate is None else gate.contiguous()
        ctx.save_for_backward(x, w, gate)
        ctx.eps = eps
        return library().norm_forward(x, w, eps, gate)

    @staticmethod
    def backward(ctx, g):
        x, w, gate = ctx.saved_tensors
        gx, gw, gs = library().norm_backward(x, w, ctx.eps, gate, g.contiguous())
        return gx, gw, None, gs if gate is not None else None


class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, eps, *sources):
        sources = [v.contiguous() for v in sources]
        ctx.save_for_backward(key, *sources)
        ctx.eps = eps
        return library().mix_forward(sources, key, eps)

    @staticmethod
    def backward(ctx, g):
        key, *sources = ctx.saved_tensors
        *gv, gk = library().mix_backward(sources, key, ctx.eps, g.contiguous())
        return gk, None, *gv


class Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, u, b, l):
        g, u = g.contiguous(), u.contiguous()
        ctx.save_for_backward(g, u)
        ctx.limits = b, l
        return library().situ_forward(g, u, b, l)

    @staticmethod
    def backward(ctx, grad):
        return *library().situ_backward(*ctx.saved_tensors, *ctx.limits, grad.contiguous()), None, None


def kda(*args):
    return Kda.apply(*args)


def rmsnorm(x, w, eps, gate=None):
    return Norm.apply(x, w, eps, gate)


def mix(sources, key, eps):
    return Mix.apply(key, eps, *sources)


def situ(g, u, b, l):
    return Situ.apply(g, u, b, l)
