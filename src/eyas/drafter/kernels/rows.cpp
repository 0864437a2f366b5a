// What the drafter does between its matrix products on a CPU, row by row.
//
// A row stays in a core's cache from its first pass to its last, and is widened to float32 and narrowed again on
// the way; as operations of their own these passes go through memory a dozen times. Every row is computed by one
// thread in one order, so results do not depend on the number of threads.
//
// Shape letters are those of eyas.drafter.batch. All arrays are contiguous unless a stride is given. OpenMP is
// that of torch: its symbols are there once torch is imported.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }

inline float wide(bf16 x) { return __builtin_bit_cast(float, uint32_t(x.bits) << 16); }

inline void put(float x, float& place) { place = x; }

// To the nearest, ties to even, as torch does.
inline void put(float x, bf16& place) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    place.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// exp(x) within two units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (the minimax
// coefficients of Cephes). Zero where the result would not be a normal number; NaN stays NaN.
inline float exponential(float x) {
    const float low = -87.3365f, high = 88.3762f;
    const float bounded = x < low ? low : (x > high ? high : x);
    const float whole = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f;
    const float rest = (bounded - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float power = 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    const float scale = __builtin_bit_cast(float, uint32_t(int32_t(whole) + 127) << 23);
    return x < low ? 0.0f : power * scale;
}

std::unique_ptr<float[]> scratch(int64_t width) { return std::unique_ptr<float[]>(new float[width]); }

template <class T>
float widened(const T* from, float* row, int64_t width) {
    float peak = -INFINITY;
#pragma omp simd reduction(max : peak)
    for (int64_t i = 0; i < width; i++) {
        const float x = wide(from[i]);
        row[i] = x;
        peak = peak < x ? x : peak;
    }
    return peak;
}

// Numbered as in compiled.py.
enum Kind { SOFT_CE = 0, LK = 1, MIXED = 2 };

template <class T>
void loss_rows(T* logits, const float* teacher, const float* mass, int64_t rows, int64_t width, int64_t kind,
               int64_t gradient, float weight, float least, float* losses, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const auto held = scratch(width);
        float* row = held.get();
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            T* place = logits + r * width;
            const float* p = teacher + r * width;
            const float peak = widened(place, row, width);
            float sum = 0, score = 0;
#pragma omp simd reduction(+ : sum, score)
            for (int64_t i = 0; i < width; i++) {
                const float e = exponential(row[i] - peak);
                score += p[i] * row[i];
                row[i] = e;
                sum += e;
            }
            const float scale = 1.0f / sum;
            float loss = kind == LK ? 0.0f : std::log(sum) + peak - score;
            if (kind == SOFT_CE) {
                if (gradient) {
                    const float factor = weight * scale;
#pragma omp simd
                    for (int64_t i = 0; i < width; i++) put(row[i] * factor - weight * p[i], place[i]);
                }
                losses[r] = loss;
                continue;
            }
            float alpha = 0, below = 0;
            const float m = mass[r];
#pragma omp simd reduction(+ : alpha, below)
            for (int64_t i = 0; i < width; i++) {
                const float q = row[i] * scale, real = p[i] * m;
                row[i] = q;
                alpha += q < real ? q : real;
                below += q < real ? q : 0.0f;
            }
            const float bounded = alpha < least ? least : alpha;
            losses[r] = loss - std::log(bounded);
            if (gradient) {
                // only drafts that the target wants more of move alpha: d(alpha)/dz = q (below - sum below q)
                const float slope = alpha > least ? weight / bounded : 0.0f;
                const float entropy = kind == MIXED ? weight : 0.0f;
#pragma omp simd
                for (int64_t i = 0; i < width; i++) {
                    const float q = row[i], inside = q < p[i] * m ? 1.0f : 0.0f;
                    put(entropy * (q - p[i]) - slope * q * (inside - below), place[i]);
                }
            }
        }
    }
}

template <class T>
void softmax_rows(const T* logits, float* powers, float* normalisers, float* entropies, int64_t rows,
                  int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        float* row = powers + r * width;
        const float peak = widened(logits + r * width, row, width);
        float sum = 0, score = 0;
#pragma omp simd reduction(+ : sum, score)
        for (int64_t i = 0; i < width; i++) {
            const float e = exponential(row[i] - peak);
            score += e * row[i];
            row[i] = e;
            sum += e;
        }
        const float scale = 1.0f / sum;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) row[i] *= scale;
        normalisers[r] = std::log(sum) + peak;
        if (entropies) entropies[r] = score * scale - normalisers[r];
    }
}

template <class T>
void norm_forward(const T* x, const float* weight, float eps, T* normed, float* scales, int64_t rows,
                  int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const T* from = x + r * width;
        T* to = normed + r * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += wide(from[i]) * wide(from[i]);
        const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
        scales[r] = scale;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) put(wide(from[i]) * scale * weight[i], to[i]);
    }
}

// Rows whose shares of a weight's gradient are added up by one thread; the sums of all such blocks by one.
constexpr int64_t BLOCK = 32;

template <class T>
void norm_backward(const T* d_normed, const T* x, const float* weight, const float* scales, T* d_x,
                   float* d_weight, int64_t rows, int64_t width, int64_t threads) {
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
    const auto held = scratch(blocks * width);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        float* share = held.get() + b * width;
        for (int64_t i = 0; i < width; i++) share[i] = 0;
        for (int64_t r = b * BLOCK; r < rows && r < (b + 1) * BLOCK; r++) {
            const T *from = x + r * width, *gradient = d_normed + r * width;
            const float scale = scales[r];
            float along = 0;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < width; i++) {
                const float product = wide(gradient[i]) * wide(from[i]) * scale;
                share[i] += product;
                along += product * weight[i];
            }
            if (!d_x) continue;
            // d(x / r) for r = root of the mean square: what lies along x goes into r and is lost
            along /= float(width);
            T* to = d_x + r * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++)
                put((wide(gradient[i]) * weight[i] - wide(from[i]) * scale * along) * scale, to[i]);
        }
    }
    for (int64_t i = 0; i < width; i++) d_weight[i] = 0;
    for (int64_t b = 0; b < blocks; b++)
#pragma omp simd
        for (int64_t i = 0; i < width; i++) d_weight[i] += held[b * width + i];
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Numbers that a thread takes at a time.
constexpr int64_t PART = 1 << 13;

template <class T>
void gate_forward(const T* gate, const T* up, T* gated, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t first = 0; first < count; first += PART) {
        const int64_t last = first + PART < count ? first + PART : count;
#pragma omp simd
        for (int64_t i = first; i < last; i++) {
            const float x = wide(gate[i]);
            put(x * sigmoid(x) * wide(up[i]), gated[i]);
        }
    }
}

template <class T>
void gate_backward(const T* d_gated, const T* gate, const T* up, T* d_gate, T* d_up, int64_t count,
                   int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t first = 0; first < count; first += PART) {
        const int64_t last = first + PART < count ? first + PART : count;
#pragma omp simd
        for (int64_t i = first; i < last; i++) {
            const float x = wide(gate[i]), d = wide(d_gated[i]), s = sigmoid(x);
            put(d * x * s, d_up[i]);
            put(d * wide(up[i]) * s * (1.0f + x * (1.0f - s)), d_gate[i]);
        }
    }
}

// Pair i of a head is (x[i], x[i + D/2]); direction is 1, or -1 for the gradient.
template <class T>
void turn(const T* x, int64_t stride, const float* cosine, const float* sine, float direction, T* turned,
          int64_t rows, int64_t heads, int64_t width, int64_t threads) {
    const int64_t half = width / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cosine + r * half, *s = sine + r * half;
        for (int64_t h = 0; h < heads; h++) {
            const T* from = x + r * stride + h * width;
            T* to = turned + (r * heads + h) * width;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = wide(from[i]), b = wide(from[i + half]), t = s[i] * direction;
                put(a * c[i] - b * t, to[i]);
                put(b * c[i] + a * t, to[i + half]);
            }
        }
    }
}

inline int64_t within(int64_t count, int64_t most) { return count < 0 ? 0 : (count < most ? count : most); }

// Scores [G, n, group, keys] become the weights of their softmax over the first seen[n] keys, zero elsewhere.
template <class T>
void weights_of_scores(T* scores, const int64_t* seen, float* normalisers, int64_t groups, int64_t queries,
                       int64_t group, int64_t keys, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const auto held = scratch(keys);
        float* row = held.get();
#pragma omp for schedule(static)
        for (int64_t r = 0; r < groups * queries * group; r++) {
            T* place = scores + r * keys;
            const int64_t count = within(seen[r / group % queries], keys);
            const float peak = widened(place, row, count);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < count; i++) {
                row[i] = exponential(row[i] - peak);
                sum += row[i];
            }
            const float scale = 1.0f / sum;
#pragma omp simd
            for (int64_t i = 0; i < count; i++) put(row[i] * scale, place[i]);
            for (int64_t i = count; i < keys; i++) put(0.0f, place[i]);
            normalisers[r] = std::log(sum) + peak;
        }
    }
}

// Scores become weights once more, d(weights) become d(scores) = weight (d(weight) - mean).
template <class T>
void gradient_of_scores(T* scores, T* d_weights, const int64_t* seen, const float* normalisers,
                        const float* means, int64_t groups, int64_t queries, int64_t group, int64_t keys,
                        int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < groups * queries * group; r++) {
        T *place = scores + r * keys, *gradient = d_weights + r * keys;
        const int64_t count = within(seen[r / group % queries], keys);
        const float normaliser = normalisers[r], mean = means[r];
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            const float weight = exponential(wide(place[i]) - normaliser);
            put((wide(gradient[i]) - mean) * weight, gradient[i]);
            put(weight, place[i]);
        }
        for (int64_t i = count; i < keys; i++) {
            put(0.0f, place[i]);
            put(0.0f, gradient[i]);
        }
    }
}

template <class T>
inline float product(const T* a, const T* b, int64_t width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += wide(a[i]) * wide(b[i]);
    return sum;
}

// Keys and values [steps, n, G, D] of each query's own row, merged into an output [n, heads, D] whose
// normaliser [n, heads] is known; both are replaced.
template <class T>
void own_forward(const T* query, const T* key, const T* value, T* output, float* normalisers, int64_t steps,
                 int64_t rows, int64_t groups, int64_t group, int64_t width, int64_t threads) {
    const float scale = 1.0f / std::sqrt(float(width));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const auto held = scratch(steps + width);
        float *scores = held.get(), *merged = scores + steps;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows * groups * group; r++) {
            const int64_t place = r / group * width, step = rows * groups * width;
            const float first = normalisers[r];
            float peak = first;
            for (int64_t j = 0; j < steps; j++) {
                scores[j] = scale * product(query + r * width, key + j * step + place, width);
                peak = peak < scores[j] ? scores[j] : peak;
            }
            float sum = std::exp(first - peak);
            for (int64_t j = 0; j < steps; j++) sum += std::exp(scores[j] - peak);
            const float normaliser = std::log(sum) + peak, kept = std::exp(first - normaliser);
            T* out = output + r * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) merged[i] = wide(out[i]) * kept;
            for (int64_t j = 0; j < steps; j++) {
                const float weight = std::exp(scores[j] - normaliser);
                const T* from = value + j * step + place;
#pragma omp simd
                for (int64_t i = 0; i < width; i++) merged[i] += weight * wide(from[i]);
            }
#pragma omp simd
            for (int64_t i = 0; i < width; i++) put(merged[i], out[i]);
            normalisers[r] = normaliser;
        }
    }
}

// The gradient of the above: that of the query is added to what is there.
template <class T>
void own_backward(const T* d_output, const T* query, const T* key, const T* value, const T* output,
                  const float* normalisers, T* d_query, T* d_key, T* d_value, int64_t steps, int64_t rows,
                  int64_t groups, int64_t group, int64_t width, int64_t threads) {
    const float scale = 1.0f / std::sqrt(float(width));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const auto held = scratch((2 * steps + 1) * width);
#pragma omp for schedule(static)
        for (int64_t g = 0; g < rows * groups; g++) {
            float *d_keys = held.get(), *d_values = d_keys + steps * width, *d_q = d_values + steps * width;
            for (int64_t i = 0; i < 2 * steps * width; i++) d_keys[i] = 0;
            for (int64_t r = g * group; r < (g + 1) * group; r++) {
                const T *q = query + r * width, *d_out = d_output + r * width;
                const float mean = product(d_out, output + r * width, width);
#pragma omp simd
                for (int64_t i = 0; i < width; i++) d_q[i] = wide(d_query[r * width + i]);
                for (int64_t j = 0; j < steps; j++) {
                    const int64_t place = (j * rows * groups + g) * width;
                    const T *k = key + place, *v = value + place;
                    const float weight = std::exp(scale * product(q, k, width) - normalisers[r]);
                    const float d_score = scale * weight * (product(d_out, v, width) - mean);
                    float *d_k = d_keys + j * width, *d_v = d_values + j * width;
#pragma omp simd
                    for (int64_t i = 0; i < width; i++) {
                        d_q[i] += d_score * wide(k[i]);
                        d_k[i] += d_score * wide(q[i]);
                        d_v[i] += weight * wide(d_out[i]);
                    }
                }
#pragma omp simd
                for (int64_t i = 0; i < width; i++) put(d_q[i], d_query[r * width + i]);
            }
            for (int64_t j = 0; j < steps; j++) {
                const int64_t place = (j * rows * groups + g) * width;
#pragma omp simd
                for (int64_t i = 0; i < width; i++) {
                    put(d_keys[j * width + i], d_key[place + i]);
                    put(d_values[j * width + i], d_value[place + i]);
                }
            }
        }
    }
}

}  // namespace

extern "C" {

// Of the functions' arguments; the same number stands in compiled.py.
int64_t eyas_rows_revision = 1;

// Rows of so many bytes, strides in bytes. Written past the caches: a batch is larger than they are and is read later,
// so that a third of the traffic (fetching what is then written over) and what others keep there are saved.
void eyas_copy_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t rows, int64_t bytes,
                    int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        char* place = to + r * to_stride;
        const char* source = from + r * from_stride;
        int64_t left = bytes;
#ifdef __SSE2__
        const int64_t before = -reinterpret_cast<uintptr_t>(place) & 63;
        if (left >= before + 64) {
            std::memcpy(place, source, before);
            place += before, source += before, left -= before;
            for (; left >= 64; place += 64, source += 64, left -= 64) {
                const auto* load = reinterpret_cast<const __m128i*>(source);
                auto* store = reinterpret_cast<__m128i*>(place);
                const __m128i a = _mm_loadu_si128(load), b = _mm_loadu_si128(load + 1);
                const __m128i c = _mm_loadu_si128(load + 2), d = _mm_loadu_si128(load + 3);
                _mm_stream_si128(store, a);
                _mm_stream_si128(store + 1, b);
                _mm_stream_si128(store + 2, c);
                _mm_stream_si128(store + 3, d);
            }
        }
#endif
        if (left > 0) std::memcpy(place, source, left);
#ifdef __SSE2__
        _mm_sfence();
#endif
    }
}

}

// Pointers to the functions, by name and arithmetic; their arguments are listed in compiled.py.
#define EXPORTED(name)                                  \
    extern "C" {                                        \
    auto* eyas_##name##_float32 = &name<float>;         \
    auto* eyas_##name##_bfloat16 = &name<bf16>;         \
    }

EXPORTED(loss_rows)
EXPORTED(softmax_rows)
EXPORTED(norm_forward)
EXPORTED(norm_backward)
EXPORTED(gate_forward)
EXPORTED(gate_backward)
EXPORTED(turn)
EXPORTED(weights_of_scores)
EXPORTED(gradient_of_scores)
EXPORTED(own_forward)
EXPORTED(own_backward)
