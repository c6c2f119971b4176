// GKA on a CPU, token by token with the state of a head in the processor's cache: the recurrence of naive.py in float32,
// with the solver's polynomial in product form (README.md, "Product form"), and its gradient (README.md, "Backward").
//
//     H = e^g H + b^2 k k^T,  U = e^g U + b^2 v k^T,  x = CH(H + ridge |H| I, q),  o = scale U (q + alpha (x - q))
//
// An iteration is one product of H with a vector, 2 D^2 FLOP. The chunk form takes 2 (D^2 + 2 C D), and moves every vector
// through memory between its operators.

#include <algorithm>

#include "../layer.h"

namespace {

// What one head needs beside its state. Vectors and rows are padded with zeros to whole `Lanes`.
struct Scratch {
    int D, width;
    Floats copy, x, residual, next, right;

    explicit Scratch(int D)
        : D(D), width(round_up(D, LANES)), copy(width > D ? size_t(D) * width : 0), x(width), residual(width), next(width),
          right(width) {}

    // H with padded rows: H itself where its rows are whole `Lanes`
    const float* padded(const float* H) {
        for (int j = 0; width > D && j < D; ++j) std::copy_n(H + j * D, D, &copy[j * width]);
        return width > D ? copy.data() : H;
    }
};

// y = keep r + take A r, for a symmetric A: the rows of A times the numbers of r, N Lanes of columns at a time. A sum
// waits for the one before it, so SETS sums of each column run side by side.
template <int N, int SETS>
int columns(const float* A, const float* r, float* y, int D, int width, int at, float keep, float take) {
    Lanes sum[SETS][N] = {};
    int j = 0;
    for (; j + SETS <= D; j += SETS)
        for (int set = 0; set < SETS; ++set)
            for (int i = 0; i < N; ++i)
                sum[set][i] += r[j + set] * *reinterpret_cast<const Lanes*>(A + (j + set) * width + at + i * LANES);
    for (; j < D; ++j)
        for (int i = 0; i < N; ++i) sum[0][i] += r[j] * *reinterpret_cast<const Lanes*>(A + j * width + at + i * LANES);
    for (int set = 1; set < SETS; ++set)
        for (int i = 0; i < N; ++i) sum[0][i] += sum[set][i];
    for (int i = 0; i < N; ++i, at += LANES)
        *reinterpret_cast<Lanes*>(y + at) = keep * *reinterpret_cast<const Lanes*>(r + at) + take * sum[0][i];
    return at;
}

void product(const float* A, const float* r, float* y, int D, int width, float keep, float take) {
    int at = 0;
    while (width - at >= 8 * LANES) at = columns<8, 1>(A, r, y, D, width, at, keep, take);
    if (width - at >= 4 * LANES) at = columns<4, 2>(A, r, y, D, width, at, keep, take);
    if (width - at >= 2 * LANES) at = columns<2, 4>(A, r, y, D, width, at, keep, take);
    if (width - at >= LANES) columns<1, 8>(A, r, y, D, width, at, keep, take);
}

// s.x = CH(A + ridge norm I, q), for A = H with padded rows and norm = |H|; 0 where H is zero. `steps` holds the tau of
// all phases, one phase after the other.
void solve(const float* A, float norm, const float* q, Scratch& s, const float* steps, const int64_t* phases, int count,
           float ridge) {
    std::fill(s.x.begin(), s.x.end(), 0.0f);
    if (norm == 0) return;
    const float inverse = 1 / norm;
    for (int i = 0; i < s.D; ++i) s.right[i] = inverse * q[i];
    float *r = s.residual.data(), *next = s.next.data(), *x = s.x.data();
    for (int phase = 0; phase < count; ++phase) {
        if (phase == 0) {
            std::copy(s.right.begin(), s.right.end(), r);
        } else {
            product(A, x, r, s.D, s.width, -ridge, -inverse);
            for (int i = 0; i < s.width; ++i) r[i] += s.right[i];
        }
        for (int n = 0; n < phases[phase]; ++n) {
            const float tau = *steps++;
            for (int i = 0; i < s.width; ++i) x[i] += tau * r[i];
            if (n + 1 == phases[phase]) break;
            product(A, r, next, s.D, s.width, 1 - tau * ridge, -tau * inverse);
            std::swap(r, next);
        }
    }
}

// H = decay H + k written^T; returns |H|
float advance(float* H, const float* k, const float* written, float decay, int D) {
    Sum squares[ROWS];
    over_rows(D, [&](int first, auto rows) {
        over_columns(D, [&](int i, auto kind) {
            for (int n = 0; n < rows; ++n) {
                float* at = H + (first + n) * D + i;
                const auto h = decay * get(at, kind) + k[first + n] * get(written + i, kind);
                put(at, h);
                squares[n] += h * h;
            }
        });
    });
    float square = 0;
    for (const Sum& sum : squares) square += sum.total();
    return std::sqrt(square);
}

// U = decay U + v written^T, o = U mixed
void advance_and_read(float* U, const float* v, const float* written, const float* mixed, float decay, float* o, int D,
                      int Dv) {
    over_rows(Dv, [&](int first, auto rows) {
        Sum read[ROWS];
        over_columns(D, [&](int i, auto kind) {
            for (int n = 0; n < rows; ++n) {
                float* at = U + (first + n) * D + i;
                const auto u = decay * get(at, kind) + v[first + n] * get(written + i, kind);
                put(at, u);
                read[n] += u * get(mixed + i, kind);
            }
        });
        for (int n = 0; n < rows; ++n) o[first + n] = read[n].total();
    });
}

// U = decay U + v written^T, m = scale U^T above
void advance_and_pull(float* U, const float* v, const float* written, const float* above, float decay, float scale, float* m,
                      int D, int Dv) {
    std::fill_n(m, D, 0.0f);
    over_rows(Dv, [&](int first, auto rows) {
        over_columns(D, [&](int i, auto kind) {
            auto sum = get(m + i, kind);
            for (int n = 0; n < rows; ++n) {
                float* at = U + (first + n) * D + i;
                const auto u = decay * get(at, kind) + v[first + n] * get(written + i, kind);
                put(at, u);
                sum += scale * above[first + n] * u;
            }
            put(m + i, sum);
        });
    });
}

// E += z x^T + x z^T + along H, Ek = E k, then E = decay E
void carry_e(float* E, const float* z, const float* x, const float* H, const float* k, float along, float decay, float* Ek,
             int D) {
    over_rows(D, [&](int first, auto rows) {
        Sum sums[ROWS];
        over_columns(D, [&](int i, auto kind) {
            for (int n = 0; n < rows; ++n) {
                const int row = first + n, at = row * D + i;
                const auto e = get(E + at, kind) + z[row] * get(x + i, kind) + x[row] * get(z + i, kind) +
                               along * get(H + at, kind);
                put(E + at, decay * e);
                sums[n] += e * get(k + i, kind);
            }
        });
        for (int n = 0; n < rows; ++n) Ek[first + n] = sums[n].total();
    });
}

// R += scale above m^T, Rk = R k and Rv = R^T v, then R = decay R
void carry_r(float* R, const float* above, const float* m, const float* k, const float* v, float scale, float decay,
             float* Rk, float* Rv, int D, int Dv) {
    std::fill_n(Rv, D, 0.0f);
    over_rows(Dv, [&](int first, auto rows) {
        Sum sums[ROWS];
        over_columns(D, [&](int i, auto kind) {
            auto sum = get(Rv + i, kind);
            for (int n = 0; n < rows; ++n) {
                float* at = R + (first + n) * D + i;
                const auto r = get(at, kind) + scale * above[first + n] * get(m + i, kind);
                put(at, decay * r);
                sums[n] += r * get(k + i, kind);
                sum += v[first + n] * r;
            }
            put(Rv + i, sum);
        });
        for (int n = 0; n < rows; ++n) Rk[first + n] = sums[n].total();
    });
}

template <class T>
float dot(const T* a, const T* b, int64_t n) {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += load(a[i]) * load(b[i]);
    return sum;
}

// The gates of `gka_gates`. A row of weights is read once for all rows of the batch.
template <class T>
void gates(const T* x, const T* const* weights, const T* const* biases, const float* dt_bias, const float* A_log,
           float* const* results, int64_t batch, int64_t hidden, int64_t heads, float beta_eps) {
    for (int gate = 0; gate < 3; ++gate)
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t b = 0; b < batch; ++b) {
                float z = dot(x + b * hidden, weights[gate] + head * hidden, hidden);
                if (biases[gate]) z += load(biases[gate][head]);
                results[gate][b * heads + head] = gate == 0   ? -std::exp(A_log[head]) * softplus(z + dt_bias[head])
                                                  : gate == 1 ? sigmoid(z) + beta_eps
                                                              : sigmoid(z);
            }
}

}  // namespace

// Advance H and, if there are values, U over the tokens of some heads of some sequences.
//
// q, x [tokens, heads, D], k [tokens, kv_heads, D], v [tokens, kv_heads, Dv], o [tokens, heads, Dv], the gates
// [tokens, heads], all contiguous. Sequence n has the tokens starts[n] .. starts[n + 1] - 1 and the state h + page *
// h_stride, u + page * u_stride, where page is pages[n], or n without pages. Row r = n heads + head; rows first .. last - 1
// are computed. Without v only the solutions x are written; without x they are not written. alpha may be null for 1.
EXPORT void gka_tokens(const float* q, const float* k, const float* v, const float* log_decay, const float* alpha,
                       const float* beta, float* h, float* u, const int64_t* pages, int64_t h_stride, int64_t u_stride,
                       float* o, float* x, const int64_t* starts, const float* steps, const int64_t* phases,
                       int64_t phase_count, int64_t heads, int64_t kv_heads, int64_t D, int64_t Dv, float ridge,
                       float scale, int64_t first, int64_t last) {
    Scratch s(D);
    Floats written(D), mixed(D);
    for (int64_t row = first; row < last; ++row) {
        const int64_t n = row / heads, head = row % heads, kv_head = head / (heads / kv_heads);
        float* H = page(h, pages, h_stride, n) + head * D * D;
        float* U = v ? page(u, pages, u_stride, n) + head * Dv * D : nullptr;
        for (int64_t t = starts[n]; t < starts[n + 1]; ++t) {
            const int64_t gate = t * heads + head;
            const float decay = exponential(log_decay[gate]), write = beta ? beta[gate] * beta[gate] : 1.0f;
            const float *query = q + gate * D, *key = k + (t * kv_heads + kv_head) * D;
            for (int i = 0; i < D; ++i) written[i] = write * key[i];
            const float norm = advance(H, key, written.data(), decay, D);
            solve(s.padded(H), norm, query, s, steps, phases, phase_count, ridge);
            if (x) std::copy_n(s.x.data(), D, x + gate * D);
            if (!v) continue;
            const float *value = v + (t * kv_heads + kv_head) * Dv, blend = alpha ? alpha[gate] : 1.0f;
            for (int i = 0; i < D; ++i) mixed[i] = scale * (query[i] + blend * (s.x[i] - query[i]));
            advance_and_read(U, value, written.data(), mixed.data(), decay, o + gate * Dv, D, Dv);
        }
    }
}

// The gradients of the results of `gka_tokens`, for states without pages. Tensors of gradients have the shapes of their
// tensors, but dk and dv have all heads; x are the solutions of the forward pass. `steps` and `phases` are those of z.
//
// One walk over the tokens finds z, dq and what a token gives to the gradient of its own state; it keeps a state of every
// window. The walk back repeats the states of a window, and carries E and R, the gradients of the later tokens.
EXPORT void gka_gradients(const float* dout, const float* dh, const float* du, const float* q, const float* k,
                          const float* v, const float* log_decay, const float* alpha, const float* beta, const float* h0,
                          const float* u0, const float* x, float* dq, float* dk, float* dv, float* dlog_decay,
                          float* dalpha, float* dbeta, float* dh0, float* du0, const int64_t* starts, const float* steps,
                          const int64_t* phases, int64_t phase_count, int64_t heads, int64_t kv_heads, int64_t D,
                          int64_t Dv, float ridge, float scale, int64_t first, int64_t last) {
    Scratch s(D);
    const int64_t size_h = D * D, size_u = Dv * D;
    Floats written(D), dm(D), mixed(D), padded(s.width), image(s.width), Ek(D), Rk(Dv), Rv(D), H(size_h), U(size_u);
    for (int64_t row = first; row < last; ++row) {
        const int64_t n = row / heads, head = row % heads, kv_head = head / (heads / kv_heads);
        const int64_t tokens = starts[n + 1] - starts[n];
        const int64_t window = std::max<int64_t>(16, std::sqrt(double(tokens))), windows = (tokens + window - 1) / window;
        // z, the ridge's factor 2 a (x . z) / |H|, and <m, its gradient> - z . A x of every token
        Floats z(tokens * D), along(tokens), local(tokens);
        Floats kept_h((windows + 1) * size_h), kept_u((windows + 1) * size_u), states(window * size_h);
        std::copy_n(h0 + row * size_h, size_h, H.data());
        std::copy_n(u0 + row * size_u, size_u, U.data());
        for (int64_t t = 0; t < tokens; ++t) {
            if (t % window == 0) {
                std::copy(H.begin(), H.end(), &kept_h[t / window * size_h]);
                std::copy(U.begin(), U.end(), &kept_u[t / window * size_u]);
            }
            const int64_t token = starts[n] + t, gate = token * heads + head, kv = token * kv_heads + kv_head;
            const float decay = exponential(log_decay[gate]), write = beta[gate] * beta[gate], blend = alpha[gate];
            const float *query = q + gate * D, *solution = x + gate * D, *above = dout + gate * Dv;
            for (int i = 0; i < D; ++i) written[i] = write * k[kv * D + i];
            const float norm = advance(H.data(), k + kv * D, written.data(), decay, D);
            advance_and_pull(U.data(), v + kv * Dv, written.data(), above, decay, scale, dm.data(), D, Dv);
            float by_alpha = 0, read = 0;
            for (int i = 0; i < D; ++i) {
                by_alpha += (solution[i] - query[i]) * dm[i];
                read += query[i] * dm[i];
                mixed[i] = blend * dm[i];
                padded[i] = solution[i];
            }
            dalpha[gate] = by_alpha;
            const float* matrix = s.padded(H.data());
            solve(matrix, norm, mixed.data(), s, steps, phases, phase_count, ridge);
            product(matrix, padded.data(), image.data(), D, s.width, 0, 1);
            float xz = 0, zAx = 0;
            for (int i = 0; i < D; ++i) {
                xz += solution[i] * s.x[i];
                zAx += image[i] * s.x[i];
                dq[gate * D + i] = (1 - blend) * dm[i] + s.x[i];
                z[t * D + i] = s.x[i];
            }
            along[t] = norm == 0 ? 0 : 2 * ridge * xz / norm;
            local[t] = read + blend * by_alpha - zAx - ridge * norm * xz;
        }
        std::copy(H.begin(), H.end(), &kept_h[windows * size_h]);
        std::copy(U.begin(), U.end(), &kept_u[windows * size_u]);

        float *E = dh0 + row * size_h, *R = du0 + row * size_u;
        for (int j = 0; j < D; ++j)
            for (int i = 0; i < D; ++i) E[j * D + i] = -dh[row * size_h + j * D + i] - dh[row * size_h + i * D + j];
        std::copy_n(du + row * size_u, size_u, R);
        for (int64_t w = windows - 1; w >= 0; --w) {
            const int64_t begin = w * window, end = std::min(begin + window, tokens);
            // <gradient of the state, state>: taken anew at the end of a window, so that its rounding does not add up
            double held = dot(R, &kept_u[(w + 1) * size_u], size_u) - 0.5 * dot(E, &kept_h[(w + 1) * size_h], size_h);
            std::copy_n(&kept_h[w * size_h], size_h, H.data());
            for (int64_t t = begin; t < end; ++t) {
                const int64_t gate = (starts[n] + t) * heads + head, kv = (starts[n] + t) * kv_heads + kv_head;
                for (int i = 0; i < D; ++i) written[i] = beta[gate] * beta[gate] * k[kv * D + i];
                advance(H.data(), k + kv * D, written.data(), exponential(log_decay[gate]), D);
                std::copy(H.begin(), H.end(), &states[(t - begin) * size_h]);
            }
            for (int64_t t = end - 1; t >= begin; --t) {
                const int64_t token = starts[n] + t, gate = token * heads + head, kv = token * kv_heads + kv_head;
                const float decay = exponential(log_decay[gate]), write = beta[gate] * beta[gate], blend = alpha[gate];
                const float *key = k + kv * D, *value = v + kv * Dv, *above = dout + gate * Dv, *query = q + gate * D;
                const float *state = &states[(t - begin) * size_h], *zt = &z[t * D], *xt = x + gate * D;
                for (int i = 0; i < D; ++i) mixed[i] = query[i] + blend * (xt[i] - query[i]);
                carry_e(E, zt, xt, state, key, along[t], decay, Ek.data(), D);
                carry_r(R, above, mixed.data(), key, value, scale, decay, Rk.data(), Rv.data(), D, Dv);
                for (int j = 0; j < Dv; ++j) dv[gate * Dv + j] = write * Rk[j];
                for (int i = 0; i < D; ++i) dk[gate * D + i] = write * (Rv[i] - Ek[i]);
                const float dw = dot(value, Rk.data(), Dv) - 0.5f * dot(key, Ek.data(), D);
                dbeta[gate] = 2 * beta[gate] * dw;
                held += local[t] - write * dw;
                dlog_decay[gate] = held;
            }
        }
        for (int64_t i = 0; i < size_h; ++i) E[i] *= -0.5f;
    }
}

// log_decay = -e^A_log softplus(W_0 x + dt_bias), beta = sigmoid(W_1 x + b_1) + beta_eps and alpha = sigmoid(W_2 x + b_2)
// [batch, heads], for x [batch, hidden] and weights [heads, hidden]; a bias may be null.
EXPORT void gka_gates(const void* x, const void* const* weights, const void* const* biases, const float* dt_bias,
                      const float* A_log, float* const* results, int64_t batch, int64_t hidden, int64_t heads,
                      float beta_eps, int64_t in_bf16) {
    if (in_bf16)
        gates<bf16>(static_cast<const bf16*>(x), reinterpret_cast<const bf16* const*>(weights),
                    reinterpret_cast<const bf16* const*>(biases), dt_bias, A_log, results, batch, hidden, heads, beta_eps);
    else
        gates<float>(static_cast<const float*>(x), reinterpret_cast<const float* const*>(weights),
                     reinterpret_cast<const float* const*>(biases), dt_bias, A_log, results, batch, hidden, heads,
                     beta_eps);
}

namespace {

// What a layer's decode step reads beside `Layer`: weights and biases of the gates as in `gka_gates`, states H and U
// [heads, D, D], and the solver. FIELDS of native_path.py has the same fields.
struct Ridge {
    const void *weights[3], *biases[3];
    const float *dt_bias, *A_log;
    float *h, *u;
    const float* steps;
    const int64_t* phases;
    int64_t phase_count, kv_heads;
    float beta_eps, ridge, scale;
};

template <class T>
void layer(const Layer& l, const Ridge& r) {
    const int64_t starts[] = {0, 1}, heads = l.rows[0] / l.D;
    Floats q(l.rows[0]), k(l.rows[1]), v(l.rows[2]), o(l.rows[0]), log_decay(heads), beta(heads), alpha(heads);
    project<T>(l, 0, q.data());
    project<T>(l, 1, k.data());
    project<T>(l, 2, v.data());
    float* const results[] = {log_decay.data(), beta.data(), alpha.data()};
    gates<T>(as<T>(l.x), reinterpret_cast<const T* const*>(r.weights), reinterpret_cast<const T* const*>(r.biases),
             r.dt_bias, r.A_log, results, 1, l.hidden, heads, r.beta_eps);
    gka_tokens(q.data(), k.data(), v.data(), log_decay.data(), alpha.data(), beta.data(), r.h, r.u, nullptr, 0, 0,
               o.data(), nullptr, starts, r.steps, r.phases, r.phase_count, heads, r.kv_heads, l.D, l.D, r.ridge,
               r.scale, 0, heads);
    read_out<T>(l, o.data());
}

}  // namespace

// One token of one sequence.
EXPORT void gka_layer(const Layer* l, const Ridge* r, int64_t in_bf16) {
    in_bf16 ? layer<bf16>(*l, *r) : layer<float>(*l, *r);
}
