// Vectors of the processor, by the vector extensions of GCC and clang: one source serves SSE, AVX2, AVX-512 and NEON.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

// Only the first lanes of v. The usual case, all lanes, is a constant that the compiler knows.
inline void load_some(Floats& v, const float* from, int64_t lanes) {
    if (lanes == WIDTH) std::memcpy(&v, from, sizeof v);
    else std::memcpy(&v, from, lanes * sizeof *from);
}

inline void store_some(float* to, Floats v, int64_t lanes) {
    if (lanes == WIDTH) std::memcpy(to, &v, sizeof v);
    else std::memcpy(to, &v, lanes * sizeof *to);
}

// a * b + c, rounded once if the processor can: then each kernel that adds in the same order gets the same bits.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__FMA__)
    return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__aarch64__)
    return Floats(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
    return a * b + c;
#endif
}
inline Floats multiply_add(float a, Floats b, Floats c) { return multiply_add(a - Floats{}, b, c); }

struct Buffer {
    float* const data;
    explicit Buffer(int64_t floats)  // none if floats is 0
        : data(floats ? static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t(64))) : nullptr) {}
    ~Buffer() { ::operator delete(data, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
    uint32_t* words() const { return reinterpret_cast<uint32_t*>(data); }
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Reductions over lanes -----------------------------------------------------------------------------------------------

// The source lane for lane l when the halves of each block are combined: the first half of a block of the result comes
// from the first vector, the second from the second (lanes WIDTH + l). `high` selects the upper halves.
constexpr int folded(int l, int block, bool high) {
    return l / block * block + (l % block < block / 2 ? l % block : WIDTH + l % block - block / 2) + high * (block / 2);
}

template <int BLOCK, bool HIGH, size_t... L>
inline Floats fold(Floats a, Floats b, std::index_sequence<L...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, folded(L, BLOCK, HIGH)...);
#else
    return __builtin_shuffle(a, b, Ints{folded(L, BLOCK, HIGH)...});
#endif
}

inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b if a is NaN

// Lane l of the result is the reduction of all lanes of v[l] by an associative, commutative operation.
template <int N = WIDTH>
inline Floats reduce_lanes(Floats* v, Floats operation(Floats, Floats)) {
    if constexpr (N > 1) {
        const auto lanes = std::make_index_sequence<WIDTH>();
        for (int i = 0; i < N / 2; i++)
            v[i] = operation(fold<N, false>(v[i], v[i + N / 2], lanes), fold<N, true>(v[i], v[i + N / 2], lanes));
        return reduce_lanes<N / 2>(v, operation);
    }
    return v[0];
}

// Swaps v[i][l] and v[l][i].
template <int N = WIDTH>
inline void transpose(Floats* v) {
    if constexpr (N > 1) {
        const auto lanes = std::make_index_sequence<WIDTH>();
        for (int i = 0; i < WIDTH; i++)
            if (i % N < N / 2) {
                const Floats a = v[i], b = v[i + N / 2];
                v[i] = fold<N, false>(a, b, lanes);
                v[i + N / 2] = fold<N, true>(a, b, lanes);
            }
        transpose<N / 2>(v);
    }
}

// Exponentials --------------------------------------------------------------------------------------------------------

// exp(x) - 1 = power (1 + result) - 1 for |x| < 87: with x = n ln 2 + f, power is 2^n, and the result is the Taylor
// series of exp(f) - 1 up to f^7. The error is about one unit in the last place.
inline Floats expm1(Floats x, Floats& power) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction
    const Floats t = x * 1.44269504f + round, n = t - round;
    power = bits<Floats>((bits<Words>(t) << 23) + (127u << 23));  // the last bits of t are n
    Floats f = x - n * 0.693145752f;  // ln 2 in two parts: this multiplication is exact
    f -= n * 1.42860677e-6f;
    Floats series = f * (1.0f / 5040) + 1.0f / 720;
    series = series * f + 1.0f / 120;
    series = series * f + 1.0f / 24;
    series = series * f + 1.0f / 6;
    series = series * f + 0.5f;
    return series * f * f + f;
}

inline Floats exp(Floats x) {  // for x < 87; NaN stays NaN
    Floats power;
    const Floats rest = expm1(x, power);
    return x < -87.0f ? Floats{} : power + power * rest;
}

inline Floats tanh(Floats x) {  // by exp(2x) - 1, which is accurate for small x
    Floats y = 2.0f * x, power;
    y = y > 30.0f ? Floats{} + 30.0f : y;
    y = y < -30.0f ? Floats{} - 30.0f : y;
    const Floats rest = expm1(y, power), less = power * rest + (power - 1.0f);
    return less / (less + 2.0f);
}
