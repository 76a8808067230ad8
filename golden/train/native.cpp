// The expensive parts of training as exact native operators with hand-written gradients (float32, CPU):
//   kda   short convolutions, SiLU, length normalisation, decay, beta and the recurrence, token by token (no chunked form)
//   mix   attention residuals         norm   RMSNorm with or without a sigmoid gate         situ   the bounded gated activation
// Each has a plain twin in model.py; test_native.py compares values and gradients. One task per (batch, head) or per run of rows.
#include <torch/extension.h>
#include <ATen/Parallel.h>
#include <cmath>
#include <vector>

constexpr int D = 32;           // KDA head width
constexpr int K = 4;            // convolution taps
constexpr int64_t CHUNK = 16;   // the backward recurrence keeps the state at every CHUNK-th token and recomputes between
using at::Tensor;
using Tensors = std::vector<Tensor>;

static inline float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
static inline float tanh_by_exp(float x) { return 2.f * sigmoid(2.f * x) - 1.f; }
static const float* in(const Tensor& t) {
  TORCH_CHECK(t.is_contiguous() && t.scalar_type() == at::kFloat, "native: contiguous float32 wanted");
  return t.data_ptr<float>();
}

// ---- KDA ----------------------------------------------------------------------------------------------------------------
struct Head {  // one (batch, head): rows are `stride` apart in the inputs, D apart in the buffers
  int64_t T, stride;
  std::vector<float> q, k, v, al, be;
};

// c = convolution (before SiLU) of row t
static inline void conv_row(const float* y, int64_t stride, int64_t t, const float* taps, float* c) {
  for (int i = 0; i < D; i++) c[i] = 0;
  for (int j = 0; j < K; j++) {
    int64_t s = t - (K - 1) + j;
    if (s < 0) continue;
    for (int i = 0; i < D; i++) c[i] += taps[j * D + i] * y[s * stride + i];
  }
}

static void conv_forward(const float* y, int64_t stride, int64_t T, const float* taps, float scale, float* out) {
  for (int64_t t = 0; t < T; t++) {
    float c[D], sum = 0;
    conv_row(y, stride, t, taps, c);
    for (int i = 0; i < D; i++) { c[i] *= sigmoid(c[i]); sum += c[i] * c[i]; }
    float r = scale == 0 ? 1.f : scale / sqrtf(sum + 1e-6f);  // scale 0: no length normalisation (v)
    for (int i = 0; i < D; i++) out[t * D + i] = c[i] * r;
  }
}

static void conv_backward(const float* y, int64_t stride, int64_t T, const float* taps, float scale, const float* g, float* gy, float* gtaps) {
  for (int64_t t = 0; t < T; t++) for (int i = 0; i < D; i++) gy[t * stride + i] = 0;
  for (int64_t t = 0; t < T; t++) {
    float c[D], sg[D], x[D], dx[D], sum = 0, dot = 0;
    const float* G = g + t * D;
    conv_row(y, stride, t, taps, c);
    for (int i = 0; i < D; i++) { sg[i] = sigmoid(c[i]); x[i] = c[i] * sg[i]; sum += x[i] * x[i]; dot += x[i] * G[i]; }
    if (scale == 0) {
      for (int i = 0; i < D; i++) dx[i] = G[i];
    } else {
      float r = 1.f / sqrtf(sum + 1e-6f);
      for (int i = 0; i < D; i++) dx[i] = scale * (G[i] * r - x[i] * r * r * r * dot);
    }
    for (int i = 0; i < D; i++) dx[i] *= sg[i] * (1.f + c[i] * (1.f - sg[i]));
    for (int j = 0; j < K; j++) {
      int64_t s = t - (K - 1) + j;
      if (s < 0) continue;
      for (int i = 0; i < D; i++) { gy[s * stride + i] += taps[j * D + i] * dx[i]; gtaps[j * D + i] += dx[i] * y[s * stride + i]; }
    }
  }
}

// one token: S = diag(al) S; u = S^T k; w = be (v - u); S += k w^T; o = S^T q
static inline void advance(float* __restrict S, const float* q, const float* k, const float* v, const float* al, float be, float* __restrict w, float* __restrict o) {
  float u[D] = {0}, r[D] = {0};
  for (int i = 0; i < D; i++)
    for (int j = 0; j < D; j++) { S[i * D + j] *= al[i]; u[j] += S[i * D + j] * k[i]; }
  for (int j = 0; j < D; j++) w[j] = be * (v[j] - u[j]);
  for (int i = 0; i < D; i++)
    for (int j = 0; j < D; j++) { S[i * D + j] += k[i] * w[j]; r[j] += S[i * D + j] * q[i]; }
  for (int j = 0; j < D; j++) o[j] = r[j];
}

struct Kda {  // the inputs of the whole operator
  Tensor yq, yk, yv, taps, z, dt, A, b;  // y*, z [B,T,H*D]; taps [3,H,K,D]; dt [H*D]; A [H]; b [B,T,H]
  float lower;
  int64_t B() const { return yq.size(0); }
  int64_t T() const { return yq.size(1); }
  int64_t H() const { return A.size(0); }
  int64_t at(int64_t b, int64_t h) const { return (b * T() * H() + h) * D; }
  const float* taps_of(int which, int64_t h) const { return in(taps) + (which * H() + h) * K * D; }

  Head head(int64_t n) const {
    int64_t bi = n / H(), h = n % H(), T = this->T(), x = at(bi, h);
    Head out{T, H() * D, std::vector<float>(T * D), std::vector<float>(T * D), std::vector<float>(T * D), std::vector<float>(T * D), std::vector<float>(T)};
    conv_forward(in(yq) + x, out.stride, T, taps_of(0, h), 1.f / sqrtf(D), out.q.data());
    conv_forward(in(yk) + x, out.stride, T, taps_of(1, h), 1.f, out.k.data());
    conv_forward(in(yv) + x, out.stride, T, taps_of(2, h), 0.f, out.v.data());
    float e = expf(in(A)[h]);
    const float *Z = in(z) + x, *dtb = in(dt) + h * D, *bb = in(b) + bi * T * H() + h;
    for (int64_t t = 0; t < T; t++) {
      for (int i = 0; i < D; i++) out.al[t * D + i] = expf(lower * sigmoid(e * (Z[t * out.stride + i] + dtb[i])));
      out.be[t] = sigmoid(bb[t * H()]);
    }
    return out;
  }
};

static void recurrence_backward(const Head& f, const float* kept, const float* go, int64_t stride, Head& g) {
  std::vector<float> states((CHUNK + 1) * D * D), ws(CHUNK * D), carry(D * D, 0.f);
  float* G = carry.data();
  float unused[D];
  for (int64_t c = (f.T - 1) / CHUNK; c >= 0; c--) {
    int64_t begin = c * CHUNK, end = std::min(f.T, begin + CHUNK);
    std::copy(kept + c * D * D, kept + (c + 1) * D * D, states.begin());
    for (int64_t t = begin; t < end; t++) {
      float* next = states.data() + (t - begin + 1) * D * D;
      std::copy(next - D * D, next, next);
      advance(next, &f.q[t * D], &f.k[t * D], &f.v[t * D], &f.al[t * D], f.be[t], &ws[(t - begin) * D], unused);
    }
    for (int64_t t = end - 1; t >= begin; t--) {
      const float *before = states.data() + (t - begin) * D * D, *S = before + D * D, *w = &ws[(t - begin) * D];
      const float *Q = &f.q[t * D], *Kk = &f.k[t * D], *V = &f.v[t * D], *A = &f.al[t * D], *dO = go + t * stride;
      float be = f.be[t], dw[D] = {0}, du[D], u[D] = {0}, db = 0;
      float *gq = &g.q[t * D], *gk = &g.k[t * D], *gv = &g.v[t * D], *ga = &g.al[t * D];
      for (int i = 0; i < D; i++) {
        float sq = 0, sk = 0;
        for (int j = 0; j < D; j++) {
          sq += S[i * D + j] * dO[j];
          float gs = G[i * D + j] + Q[i] * dO[j];
          G[i * D + j] = gs;
          sk += gs * w[j];
          dw[j] += gs * Kk[i];
          u[j] += A[i] * before[i * D + j] * Kk[i];
        }
        gq[i] = sq; gk[i] = sk;
      }
      for (int j = 0; j < D; j++) { db += dw[j] * (V[j] - u[j]); gv[j] = be * dw[j]; du[j] = -be * dw[j]; }
      g.be[t] = db;
      for (int i = 0; i < D; i++) {
        float sk = 0, sa = 0;
        for (int j = 0; j < D; j++) {
          float p = before[i * D + j], gs = G[i * D + j] + Kk[i] * du[j];
          sk += p * du[j];
          sa += gs * p;
          G[i * D + j] = gs * A[i];
        }
        gk[i] += A[i] * sk; ga[i] = sa;
      }
    }
  }
}

Tensors kda_forward(Tensor yq, Tensor yk, Tensor yv, Tensor taps, Tensor z, Tensor dt, Tensor A, Tensor b, double lower) {
  Kda a{yq, yk, yv, taps, z, dt, A, b, (float)lower};
  int64_t T = a.T(), H = a.H(), C = (T + CHUNK - 1) / CHUNK;
  TORCH_CHECK(yq.size(2) == H * D && taps.size(2) == K && taps.size(3) == D, "kda: head width 32 and 4 taps wanted");
  auto o = at::empty_like(yq), kept = at::empty({a.B(), H, C, D, D}, yq.options());
  float *O = o.data_ptr<float>(), *keep = kept.data_ptr<float>();
  at::parallel_for(0, a.B() * H, 1, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n++) {
      Head f = a.head(n);
      float S[D * D] = {0}, w[D], *out = O + a.at(n / H, n % H);
      for (int64_t t = 0; t < T; t++) {
        if (t % CHUNK == 0) std::copy(S, S + D * D, keep + (n * C + t / CHUNK) * D * D);
        advance(S, &f.q[t * D], &f.k[t * D], &f.v[t * D], &f.al[t * D], f.be[t], w, out + t * f.stride);
      }
    }
  });
  return {o, kept};
}

Tensors kda_backward(Tensor yq, Tensor yk, Tensor yv, Tensor taps, Tensor z, Tensor dt, Tensor A, Tensor b, double lower, Tensor kept, Tensor go) {
  Kda a{yq, yk, yv, taps, z, dt, A, b, (float)lower};
  int64_t B = a.B(), T = a.T(), H = a.H(), C = kept.size(2);
  auto gq = at::empty_like(yq), gk = at::empty_like(yk), gv = at::empty_like(yv), gz = at::empty_like(z), gb = at::empty_like(b);
  auto gt = at::zeros({B, 3, H, K, D}, z.options()), gd = at::zeros({B, H * D}, z.options()), gA = at::zeros({B, H}, z.options());
  const float *keep = in(kept), *GO = in(go);
  at::parallel_for(0, B * H, 1, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n++) {
      int64_t bi = n / H, h = n % H, x = a.at(bi, h);
      Head f = a.head(n), g = f;
      recurrence_backward(f, keep + n * C * D * D, GO + x, f.stride, g);
      auto gtaps = [&](int which) { return gt.data_ptr<float>() + ((bi * 3 + which) * H + h) * K * D; };
      conv_backward(in(yq) + x, f.stride, T, a.taps_of(0, h), 1.f / sqrtf(D), g.q.data(), gq.data_ptr<float>() + x, gtaps(0));
      conv_backward(in(yk) + x, f.stride, T, a.taps_of(1, h), 1.f, g.k.data(), gk.data_ptr<float>() + x, gtaps(1));
      conv_backward(in(yv) + x, f.stride, T, a.taps_of(2, h), 0.f, g.v.data(), gv.data_ptr<float>() + x, gtaps(2));
      float e = expf(in(A)[h]), dA = 0, *gzp = gz.data_ptr<float>() + x, *gdp = gd.data_ptr<float>() + (bi * H + h) * D;
      const float *Z = in(z) + x, *dtb = in(dt) + h * D;
      for (int64_t t = 0; t < T; t++) {
        for (int i = 0; i < D; i++) {
          float y = Z[t * f.stride + i] + dtb[i], s = sigmoid(e * y);
          float d = g.al[t * D + i] * f.al[t * D + i] * a.lower * s * (1.f - s) * e;
          gzp[t * f.stride + i] = d; gdp[i] += d; dA += d * y;
        }
        gb.data_ptr<float>()[(bi * T + t) * H + h] = g.be[t] * f.be[t] * (1.f - f.be[t]);
      }
      gA.data_ptr<float>()[n] = dA;
    }
  });
  return {gq, gk, gv, gt.sum(0), gz, gd.sum(0), gA.sum(0), gb};
}

// ---- row operators ------------------------------------------------------------------------------------------------------
template <typename F>
static void parts(int64_t rows, F f) {  // f(part, from, to); as many parts as threads, so that sums over rows have few partials
  int64_t P = at::get_num_threads();
  at::parallel_for(0, P, 1, [&](int64_t a, int64_t b) { for (int64_t p = a; p < b; p++) f(p, rows * p / P, rows * (p + 1) / P); });
}

Tensor norm_forward(Tensor x, Tensor w, double eps, std::optional<Tensor> gate) {
  int64_t E = w.size(0), rows = x.numel() / E;
  auto y = at::empty_like(x);
  const float *X = in(x), *W = in(w), *S = gate ? in(*gate) : nullptr;
  float* Y = y.data_ptr<float>();
  parts(rows, [&](int64_t, int64_t from, int64_t to) {
    for (int64_t n = from * E; n < to * E; n += E) {
      float sum = 0;
      for (int64_t i = 0; i < E; i++) sum += X[n + i] * X[n + i];
      float r = 1.f / sqrtf(sum / E + (float)eps);
      for (int64_t i = 0; i < E; i++) Y[n + i] = X[n + i] * r * W[i];
      if (S) for (int64_t i = 0; i < E; i++) Y[n + i] *= sigmoid(S[n + i]);
    }
  });
  return y;
}

Tensors norm_backward(Tensor x, Tensor w, double eps, std::optional<Tensor> gate, Tensor g) {
  int64_t E = w.size(0), rows = x.numel() / E;
  auto gx = at::empty_like(x), gw = at::zeros({at::get_num_threads(), E}, x.options()), gs = gate ? at::empty_like(x) : Tensor();
  const float *X = in(x), *W = in(w), *G = in(g), *S = gate ? in(*gate) : nullptr;
  float *GX = gx.data_ptr<float>(), *GS = gate ? gs.data_ptr<float>() : nullptr;
  parts(rows, [&](int64_t p, int64_t from, int64_t to) {
    float* GW = gw.data_ptr<float>() + p * E;
    for (int64_t n = from * E; n < to * E; n += E) {
      float sum = 0, dot = 0;
      for (int64_t i = 0; i < E; i++) sum += X[n + i] * X[n + i];
      float r = 1.f / sqrtf(sum / E + (float)eps);
      for (int64_t i = 0; i < E; i++) {
        float d = G[n + i];
        if (S) { float s = sigmoid(S[n + i]); GS[n + i] = d * X[n + i] * r * W[i] * s * (1.f - s); d *= s; }
        GW[i] += d * X[n + i] * r;
        d *= W[i];
        dot += d * X[n + i];
        GX[n + i] = d * r;
      }
      float f = r * r * r * dot / E;
      for (int64_t i = 0; i < E; i++) GX[n + i] -= f * X[n + i];
    }
  });
  return {gx, gw.sum(0), gs};
}

constexpr int SOURCES = 8;
struct Mixed { float r[SOURCES], s[SOURCES], p[SOURCES]; };
static Mixed mix_row(const std::vector<const float*>& v, const float* key, int64_t n, int64_t E, float eps) {
  Mixed m;
  float top = -INFINITY, sum = 0;
  for (size_t a = 0; a < v.size(); a++) {
    float ss = 0, dot = 0;
    for (int64_t i = 0; i < E; i++) { ss += v[a][n + i] * v[a][n + i]; dot += v[a][n + i] * key[i]; }
    m.r[a] = 1.f / sqrtf(ss / E + eps);
    m.s[a] = dot * m.r[a];
    top = std::max(top, m.s[a]);
  }
  for (size_t a = 0; a < v.size(); a++) sum += m.p[a] = expf(m.s[a] - top);
  for (size_t a = 0; a < v.size(); a++) m.p[a] /= sum;
  return m;
}

Tensor mix_forward(Tensors v, Tensor key, double eps) {
  TORCH_CHECK(v.size() <= SOURCES, "mix: too many sources");
  int64_t E = key.size(0), rows = v[0].numel() / E;
  auto y = at::empty_like(v[0]);
  std::vector<const float*> V;
  for (auto& t : v) V.push_back(in(t));
  const float* W = in(key);
  float* Y = y.data_ptr<float>();
  parts(rows, [&](int64_t, int64_t from, int64_t to) {
    for (int64_t n = from * E; n < to * E; n += E) {
      Mixed m = mix_row(V, W, n, E, eps);
      for (int64_t i = 0; i < E; i++) Y[n + i] = m.p[0] * V[0][n + i];
      for (size_t a = 1; a < V.size(); a++)
        for (int64_t i = 0; i < E; i++) Y[n + i] += m.p[a] * V[a][n + i];
    }
  });
  return y;
}

Tensors mix_backward(Tensors v, Tensor key, double eps, Tensor g) {
  int64_t E = key.size(0), rows = v[0].numel() / E;
  auto gk = at::zeros({at::get_num_threads(), E}, key.options());
  Tensors out;
  std::vector<const float*> V;
  std::vector<float*> O;
  for (auto& t : v) { V.push_back(in(t)); out.push_back(at::empty_like(t)); O.push_back(out.back().data_ptr<float>()); }
  const float *W = in(key), *G = in(g);
  parts(rows, [&](int64_t part, int64_t from, int64_t to) {
    float* GK = gk.data_ptr<float>() + part * E;
    for (int64_t n = from * E; n < to * E; n += E) {
      Mixed m = mix_row(V, W, n, E, eps);
      float dp[SOURCES], mean = 0;
      for (size_t a = 0; a < V.size(); a++) {
        float dot = 0;
        for (int64_t i = 0; i < E; i++) dot += G[n + i] * V[a][n + i];
        dp[a] = dot;
        mean += m.p[a] * dot;
      }
      for (size_t a = 0; a < V.size(); a++) {
        float ds = m.p[a] * (dp[a] - mean), f = ds * m.r[a], h = ds * m.s[a] * m.r[a] * m.r[a] / E;
        for (int64_t i = 0; i < E; i++) { O[a][n + i] = m.p[a] * G[n + i] + f * W[i] - h * V[a][n + i]; GK[i] += f * V[a][n + i]; }
      }
    }
  });
  out.push_back(gk.sum(0));
  return out;
}

Tensor situ_forward(Tensor g, Tensor u, double b, double l) {
  auto y = at::empty_like(g);
  const float *G = in(g), *U = in(u), B = b, L = l;
  float* Y = y.data_ptr<float>();
  parts(g.numel(), [&](int64_t, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) Y[i] = B * tanh_by_exp(G[i] / B) * sigmoid(G[i]) * L * tanh_by_exp(U[i] / L);
  });
  return y;
}

Tensors situ_backward(Tensor g, Tensor u, double b, double l, Tensor go) {
  auto gg = at::empty_like(g), gu = at::empty_like(u);
  const float *G = in(g), *U = in(u), *O = in(go), B = b, L = l;
  float *GG = gg.data_ptr<float>(), *GU = gu.data_ptr<float>();
  parts(g.numel(), [&](int64_t, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      float t = tanh_by_exp(G[i] / B), s = sigmoid(G[i]), c = tanh_by_exp(U[i] / L);
      GG[i] = O[i] * L * c * s * ((1.f - t * t) + B * t * (1.f - s));
      GU[i] = O[i] * B * t * s * (1.f - c * c);
    }
  });
  return {gg, gu};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("kda_forward", &kda_forward); m.def("kda_backward", &kda_backward);
  m.def("norm_forward", &norm_forward); m.def("norm_backward", &norm_backward);
  m.def("mix_forward", &mix_forward); m.def("mix_backward", &mix_backward);
  m.def("situ_forward", &situ_forward); m.def("situ_backward", &situ_backward);
}
