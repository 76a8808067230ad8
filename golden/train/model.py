"""The K3 text model in PyTorch, small: the same graph and the same tensor names as the release.

Parameter names are the released ones without `language_model.model.` (the head is `lm_head.weight`); the routed experts
of a layer are stacked as `layers.L.block_sparse_moe.experts.w1|w2|w3` [experts, out, in]. Everything runs in the dtype
of the parameters. The functions at the top are the plain mathematics and make the golden numbers; training (float32) puts
the native operators of native.py in their place (`model.ops`).
"""
import math
import types

import torch
import torch.nn.functional as F

CONFIG = dict(
    hidden_size=128, num_hidden_layers=9, vocab_size=2048, rms_norm_eps=1e-5, attn_res_block_size=4, intermediate_size=320,
    full_attn_layers=[4, 8, 9], kda_heads=4, kda_head_dim=32, short_conv_kernel_size=4, gate_lower_bound=-5.0,
    num_attention_heads=4, q_lora_rank=80, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    num_experts=16, num_experts_per_token=2, num_shared_experts=1, routed_expert_hidden_size=96, moe_intermediate_size=64,
    routed_scaling_factor=1.0, first_k_dense_replace=1, activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
)
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")  # all other dense tensors are BF16
LOW_RANK_EPS = 1e-6


def recurrence_loop(q, k, v, alpha, beta, state=None):
    """The KDA recurrence: q, k, v, alpha [B, T, H, D], beta [B, T, H] -> o [B, T, H, D] and the last state."""
    B, T, H, D = q.shape
    S = q.new_zeros(B, H, D, D) if state is None else state
    out = []
    for t in range(T):
        S = S * alpha[:, t, :, :, None]
        u = (S * k[:, t, :, :, None]).sum(2)
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - u))[:, :, None, :]
        out.append((S * q[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1), S


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_grid(w):
    """w [..., columns] -> (values in units of the scale, exponents [..., columns / 32]): nearest, ties to even.

    The scale is the smallest power of two whose range, counted to the rounding edge 7, holds the group's largest value."""
    g = w.reshape(*w.shape[:-1], -1, 32)
    top = g.abs().amax(-1, keepdim=True).clamp_min(2.0 ** -100)
    e = torch.ceil(torch.log2(top / 7))
    x = g * torch.exp2(-e)
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0)).to(x.dtype)
    return (torch.round(x / step) * step).clamp(-6, 6), e


def fake_mxfp4(w):
    """Straight-through: the value is the quantised one, the gradient passes as if it were not."""
    x, e = mxfp4_grid(w.detach())
    return w + ((x * torch.exp2(e)).reshape(w.shape) - w.detach())


def fake_bf16(w):
    return w + (w.detach().bfloat16().to(w.dtype) - w.detach())


def rmsnorm(x, w, eps, gate=None):
    y = F.rms_norm(x, (x.shape[-1],), w, eps)
    return y if gate is None else y * torch.sigmoid(gate)


def situ(g, u, b, l):
    return (b * torch.tanh(g / b) * torch.sigmoid(g)) * (l * torch.tanh(u / l))


def mix(sources, key, eps):
    scores = [(v * key).sum(-1, keepdim=True) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) for v in sources]
    return sum(p * v for p, v in zip(torch.softmax(torch.cat(scores, -1), -1).split(1, -1), sources))


def conv_silu(y, taps):
    """y [B, K - 1 + T, C] with the history in front, taps [C, K] oldest first -> [B, T, C]."""
    K = taps.shape[1]
    T = y.shape[1] - K + 1
    return F.silu(sum(y[:, j:j + T] * taps[:, j] for j in range(K)))


def unit(x, scale):
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * scale)


def kda(yq, yk, yv, tq, tk, tv, z, dt_bias, A_log, b, lower, cache=None):
    """What lies between the projections and the output norm. y* [B, T, H * D], z likewise, b [B, T, H] -> [B, T, H * D]."""
    (B, T, _), H, parts = z.shape, A_log.shape[0], []
    for name, y, taps in (("q", yq, tq), ("k", yk, tk), ("v", yv, tv)):
        past = cache.get(name) if cache else None
        y = torch.cat([y.new_zeros(B, taps.shape[1] - 1, y.shape[2]) if past is None else past, y], 1)
        if cache is not None:
            cache[name] = y[:, -(taps.shape[1] - 1):]
        parts.append(conv_silu(y, taps).view(B, T, H, -1))
    q, k, v = parts
    z = (z + dt_bias).view(B, T, H, -1) * torch.exp(A_log)[:, None]
    alpha, beta = torch.exp(lower * torch.sigmoid(z)), torch.sigmoid(b)
    o, state = recurrence_loop(unit(q, q.shape[-1] ** -0.5), unit(k, 1.0), v, alpha, beta, cache.get("state") if cache else None)
    if cache is not None:
        cache["state"] = state
    return o.reshape(B, T, -1)


PLAIN = types.SimpleNamespace(rmsnorm=rmsnorm, situ=situ, mix=mix, kda=kda)


class K3(torch.nn.Module):
    def __init__(self, config, seed=0):
        super().__init__()
        self.c = config
        self.ops = PLAIN           # or the module `native` (float32 training)
        self.limits = (config["activation_situ_beta"], config["activation_situ_linear_beta"])
        self.quantise = False      # train with MXFP4 experts and BF16 weights (straight-through)
        self.routed = True         # False: leave the routed experts out (to measure what they are worth)
        self.loads = {}            # layer -> tokens per expert of the last pass
        self.p = torch.nn.ParameterDict()
        self._make(torch.Generator().manual_seed(seed))

    def _make(self, gen):
        c = self.c
        E, L = c["hidden_size"], c["num_hidden_layers"]
        deep = 1 / math.sqrt(2 * L)

        def add(name, *shape, std=None, value=None):
            t = torch.full(shape, float(value)) if std is None else torch.randn(shape, generator=gen) * std
            self.p[name.replace(".", "/")] = torch.nn.Parameter(t)

        def linear(name, out, inn, scale=1.0):
            add(name + ".weight", out, inn, std=scale / math.sqrt(inn))

        add("embed_tokens.weight", c["vocab_size"], E, std=0.3)
        for i in range(L):
            n = f"layers.{i}."
            for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
                add(n + norm + ".weight", E, value=1)
            add(n + "self_attention_res_proj.weight", 1, E, std=0.01)
            add(n + "mlp_res_proj.weight", 1, E, std=0.01)
            a = n + "self_attn."
            if i + 1 in c["full_attn_layers"]:
                N, q, kv = c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
                nope, rope, vd = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
                linear(a + "q_a_proj", q, E)
                add(a + "q_a_layernorm.weight", q, value=1)
                linear(a + "q_b_proj", N * (nope + rope), q)
                linear(a + "kv_a_proj_with_mqa", kv + rope, E)
                add(a + "kv_a_layernorm.weight", kv, value=1)
                linear(a + "kv_b_proj", N * (nope + vd), kv)
                linear(a + "g_proj", N * vd, E)
                linear(a + "o_proj", E, N * vd, deep * 2)
            else:
                H, D, K = c["kda_heads"], c["kda_head_dim"], c["short_conv_kernel_size"]
                for x in "qkv":
                    linear(a + x + "_proj", H * D, E)
                    add(a + x + "_conv1d.weight", H * D, 1, K, std=0.3)
                    with torch.no_grad():
                        self.p[(a + x + "_conv1d.weight").replace(".", "/")][:, 0, -1] += 0.7
                add(a + "A_log", H, std=0.1)
                # decays spread from slow to fast: exp(lb * sigmoid(dt_bias)) covers about 0.999 to 0.2
                add(a + "dt_bias", H * D, value=0)
                with torch.no_grad():
                    self.p[(a + "dt_bias").replace(".", "/")].copy_(torch.linspace(-7, -1, H * D)[torch.randperm(H * D, generator=gen)])
                linear(a + "f_a_proj", D, E)
                linear(a + "f_b_proj", H * D, D, 0.5)
                linear(a + "b_proj", H, E)
                linear(a + "g_proj", H * D, E)
                add(a + "o_norm.weight", D, value=1)
                linear(a + "o_proj", E, H * D, deep * 2)
            if i < c["first_k_dense_replace"]:
                I = c["intermediate_size"]
                linear(n + "mlp.gate_proj", I, E)
                linear(n + "mlp.up_proj", I, E)
                linear(n + "mlp.down_proj", E, I, deep * 2)
            else:
                b, X, R, I = n + "block_sparse_moe.", c["num_experts"], c["routed_expert_hidden_size"], c["moe_intermediate_size"]
                S = I * c["num_shared_experts"]
                linear(b + "gate", X, E)
                add(b + "gate.e_score_correction_bias", X, value=0)
                linear(b + "routed_expert_down_proj", R, E)
                add(b + "routed_expert_norm.weight", R, value=1)
                linear(b + "routed_expert_up_proj", E, R, deep * 2)
                add(b + "experts.w1", X, I, R, std=R ** -0.5)
                add(b + "experts.w3", X, I, R, std=R ** -0.5)
                add(b + "experts.w2", X, R, I, std=I ** -0.5)
                linear(b + "shared_experts.gate_proj", S, E)
                linear(b + "shared_experts.up_proj", S, E)
                linear(b + "shared_experts.down_proj", E, S, deep)
        add("output_attn_res_norm.weight", E, value=1)
        add("output_attn_res_proj.weight", 1, E, std=0.01)
        add("norm.weight", E, value=1)
        linear("lm_head", c["vocab_size"], E, 0.5)
        for name, t in self.named():
            if name.endswith("e_score_correction_bias"):
                t.requires_grad_(False)  # moved by the load of the experts, not by the gradient

    def named(self):
        return [(key.replace("/", "."), t) for key, t in self.p.items()]

    def w(self, name):
        t = self.p[name.replace(".", "/")]
        if not self.quantise or name.endswith(FLOAT32):
            return t
        return fake_mxfp4(t) if ".experts." in name else fake_bf16(t)

    def mm(self, name, x):
        return F.linear(x, self.w(name + ".weight"))

    def mix(self, sources, name):
        """Attention residuals: a softmax over the earlier blocks and the running sum, of the raw values."""
        key = self.w(name + "_norm.weight") * self.w(name + "_proj.weight")[0]
        return self.ops.mix(sources, key, self.c["rms_norm_eps"])

    def kda(self, a, x, cache):
        c = self.c
        H, D = c["kda_heads"], c["kda_head_dim"]
        B, T, _ = x.shape
        taps = [self.w(a + n + "_conv1d.weight")[:, 0] for n in "qkv"]
        z = self.mm(a + "f_b_proj", self.mm(a + "f_a_proj", x))
        args = [*(self.mm(a + n + "_proj", x) for n in "qkv"), *taps, z, self.w(a + "dt_bias"), self.w(a + "A_log"), self.mm(a + "b_proj", x)]
        o = self.ops.kda(*args, c["gate_lower_bound"], *([] if cache is None else [cache]))
        gate = self.mm(a + "g_proj", x).view(B, T, H, D)
        o = self.ops.rmsnorm(o.view(B, T, H, D), self.w(a + "o_norm.weight"), c["rms_norm_eps"], gate)
        return self.mm(a + "o_proj", o.reshape(B, T, H * D))

    def mla(self, a, x, cache):
        c = self.c
        N, kv, vd = c["num_attention_heads"], c["kv_lora_rank"], c["v_head_dim"]
        nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        B, T, _ = x.shape
        q = self.mm(a + "q_b_proj", self.ops.rmsnorm(self.mm(a + "q_a_proj", x), self.w(a + "q_a_layernorm.weight"), LOW_RANK_EPS))
        q = q.view(B, T, N, nope + rope).transpose(1, 2)
        latent, r = self.mm(a + "kv_a_proj_with_mqa", x).split([kv, rope], -1)
        latent = torch.cat([self.ops.rmsnorm(latent, self.w(a + "kv_a_layernorm.weight"), LOW_RANK_EPS), r], -1)
        if cache is not None:
            latent = torch.cat([cache["latent"], latent], 1) if cache else latent
            cache["latent"] = latent
        latent, r = latent.split([kv, rope], -1)
        S = latent.shape[1]
        k, v = self.mm(a + "kv_b_proj", latent).view(B, S, N, nope + vd).transpose(1, 2).split([nope, vd], -1)
        k = torch.cat([k, r[:, None].expand(B, N, S, rope)], -1)
        if self.ops is PLAIN:
            score = (q @ k.transpose(2, 3)) * (nope + rope) ** -0.5
            late = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
            o = torch.softmax(score.masked_fill(late, -math.inf), -1) @ v
        else:  # the fused kernel wants one width for all three
            o = F.scaled_dot_product_attention(q, k, F.pad(v, (0, nope + rope - vd)), is_causal=True)[..., :vd]
        o = o.transpose(1, 2).reshape(B, T, N * vd) * torch.sigmoid(self.mm(a + "g_proj", x))
        return self.mm(a + "o_proj", o)

    def route(self, b, x):
        """x [n, E] -> scores, expert numbers [n, k] (best first), weights [n, k], lead of the last chosen over the first left out."""
        k = self.c["num_experts_per_token"]
        s = torch.sigmoid(self.mm(b + "gate", x))
        best = (s.detach() + self.w(b + "gate.e_score_correction_bias")).topk(k + 1, -1)
        ids = best.indices[:, :k]
        w = s.gather(1, ids)
        w = w / (w.sum(-1, keepdim=True) + 1e-20) * self.c["routed_scaling_factor"]
        return ids, w, best.values[:, k - 1] - best.values[:, k]

    def experts(self, b, z, ids):
        """z [n, R], ids [n, k] -> [n, k, R]: tokens are gathered into one padded batch per expert."""
        n, k = ids.shape
        X, flat = self.c["num_experts"], ids.reshape(-1)
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=X)
        room = int(counts.max())
        starts = counts.cumsum(0) - counts
        place = torch.empty_like(flat)
        place[order] = torch.arange(n * k, device=z.device) - starts[flat[order]] + flat[order] * room
        source = torch.full((X * room,), n, device=z.device)
        source[place] = torch.arange(n * k, device=z.device) // k
        batch = torch.cat([z, z.new_zeros(1, z.shape[1])]).index_select(0, source).view(X, room, -1)
        w1, w2, w3 = (self.w(b + "experts." + m).transpose(1, 2) for m in ("w1", "w2", "w3"))
        y = self.ops.situ(batch @ w1, batch @ w3, *self.limits) @ w2
        return y.reshape(X * room, -1).index_select(0, place).view(n, k, -1), counts

    def moe(self, i, x, taps):
        b, shape = f"layers.{i}.block_sparse_moe.", x.shape
        x = x.reshape(-1, shape[-1])
        s = b + "shared_experts."
        out = self.mm(s + "down_proj", self.ops.situ(self.mm(s + "gate_proj", x), self.mm(s + "up_proj", x), *self.limits))
        if self.routed:
            ids, w, lead = self.route(b, x)
            y, self.loads[i] = self.experts(b, self.mm(b + "routed_expert_down_proj", x), ids)
            y = (y * w.unsqueeze(-1)).sum(1)
            y = self.ops.rmsnorm(y, self.w(b + "routed_expert_norm.weight"), self.c["rms_norm_eps"])
            out = out + self.mm(b + "routed_expert_up_proj", y)
            if taps is not None:
                taps.setdefault("router", []).append((ids, w, lead))
        return out.view(shape)

    def forward(self, ids, cache=None, taps=None):
        """ids [B, T] -> logits [B, T, vocabulary]. cache: a dict that is filled and carried on. taps: a dict for inner values."""
        c = self.c
        tap = (lambda name, t: taps.setdefault(name, []).append(t)) if taps is not None else (lambda name, t: None)
        prefix, blocks = F.embedding(ids, self.w("embed_tokens.weight")), []
        tap("embed", prefix)
        for i in range(c["num_hidden_layers"]):
            n = f"layers.{i}."
            h = self.mix(blocks + [prefix], n + "self_attention_res") if blocks else prefix
            if i % c["attn_res_block_size"] == 0:
                blocks, prefix = blocks + [prefix], None
            tap("attn_mix", h)
            attend = self.mla if i + 1 in c["full_attn_layers"] else self.kda
            held = None if cache is None else cache.setdefault(i, {})
            a = attend(n + "self_attn.", self.ops.rmsnorm(h, self.w(n + "input_layernorm.weight"), c["rms_norm_eps"]), held)
            tap("attn_out", a)
            prefix = a if prefix is None else prefix + a
            h = self.mix(blocks + [prefix], n + "mlp_res")
            tap("mlp_mix", h)
            x = self.ops.rmsnorm(h, self.w(n + "post_attention_layernorm.weight"), c["rms_norm_eps"])
            if i < c["first_k_dense_replace"]:
                m = self.mm(n + "mlp.down_proj", self.ops.situ(self.mm(n + "mlp.gate_proj", x), self.mm(n + "mlp.up_proj", x), *self.limits))
            else:
                m = self.moe(i, x, taps)
            tap("mlp_out", m)
            prefix = prefix + m
            tap("prefix_sum", prefix)
        h = self.mix(blocks + [prefix], "output_attn_res")
        tap("output_mix", h)
        h = self.ops.rmsnorm(h, self.w("norm.weight"), c["rms_norm_eps"])
        tap("final_norm", h)
        return self.mm("lm_head", h)
