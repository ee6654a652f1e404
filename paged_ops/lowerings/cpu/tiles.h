// Tiles of keys and values: the formats of a cache, and matmuls with a tile, in place or converted to float32 (wide).
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

constexpr int TILE = 64;  // keys computed at once
static_assert(TILE % WIDTH == 0, "a tile is whole vectors");

// Formats of a cache --------------------------------------------------------------------------------------------------

// A 32-bit word holds PARTS cells. Part p of a vector of words is every PARTS-th cell. Keys and values stay in this
// order; queries are reordered to it, and outputs from it. Zero bits are 0 in each format. Above DIRECT rows, converting
// a tile once is faster, by measurement.

struct Float32 {
    static constexpr int PARTS = 1;
    static constexpr int64_t DIRECT = 16;
    static Floats part(Words words, int) { return bits<Floats>(words); }
};

struct BFloat16 {
    static constexpr int PARTS = 2;
    static constexpr int64_t DIRECT = 16;
    static Floats part(Words words, int p) { return bits<Floats>(p == 0 ? words << 16 : words & 0xffff0000u); }
};

// Rounds to bfloat16, in the upper half of each word; and packs two such vectors into one.
inline Floats rounded(Floats from) {
    const Words words = bits<Words>(from), nearest = words + 0x7fffu + (words >> 16 & 1u);
    return bits<Floats>(from == from ? nearest : words | 0x400000u);
}
inline Words pair(Floats low, Floats high) { return bits<Words>(low) >> 16 | (bits<Words>(high) & 0xffff0000u); }

// Narrower formats: subnormals are converted by their integer magnitude, other numbers by shifting their bits to their
// places in float32. Magnitudes from SPECIAL on are infinity and NaN.
template <int BITS, int MANTISSA, int BIAS, uint32_t SPECIAL>
struct Narrow {
    static constexpr int PARTS = 32 / BITS;
    static constexpr int64_t DIRECT = 4;
    static constexpr float power(int n) { return n == 0 ? 1.0f : 0.5f * power(n - 1); }
    static Floats part(Words words, int p) {
        const Words cells = words << (32 - BITS * (p + 1)), magnitudes = (cells & 0x7fffffffu) >> (32 - BITS);
        Words normal = (magnitudes << (23 - MANTISSA)) + ((127u - BIAS) << 23);
        normal |= magnitudes >= SPECIAL ? Words{} + 0x7f800000u : Words{};
        // The float32 2^23 + magnitude has the magnitude as its last bits.
        const Floats small = (bits<Floats>(magnitudes | 0x4b000000u) - 8388608.0f) * power(BIAS - 1 + MANTISSA);
        const Words positive = magnitudes < (1u << MANTISSA) ? bits<Words>(small) : normal;
        return bits<Floats>(positive | (cells & 0x80000000u));
    }
};
typedef Narrow<16, 10, 15, 0x7c00> Float16;
typedef Narrow<8, 3, 7, 0x7f> Float8_e4m3fn;
typedef Narrow<8, 2, 15, 0x7c> Float8_e5m2;

// Rounds to float16, in the lower half of each word; and packs two such vectors into one.
inline Words half(Floats from) {
    const Words words = bits<Words>(from), magnitudes = words & 0x7fffffffu;
    const Words normal = (magnitudes - (112u << 23) + 0xfffu + (magnitudes >> 13 & 1u)) >> 13;
    const Words small = bits<Words>(bits<Floats>(magnitudes) + 0.5f) - 0x3f000000u;  // 0.5 has 2^-24 as its last bit
    Words half = magnitudes < 0x38800000u ? small : normal;
    half = magnitudes >= 0x47800000u ? Words{} + 0x7c00u : half;  // from 65536 on it is infinity
    half = magnitudes > 0x7f800000u ? Words{} + 0x7e00u : half;
    return half | (words >> 16 & 0x8000u);
}
inline Words halves(Floats low, Floats high) { return half(low) | half(high) << 16; }

// Rows of keys and values ---------------------------------------------------------------------------------------------

// The keys or values of a tile and head. Rows are padded to whole vectors of words.
struct Rows {
    const char* const* at;  // TILE addresses
    int64_t offset;
    const char* operator[](int64_t j) const { return at[j] + offset; }
};

// Rows often have a stride of 4096 bytes: the first-level cache then holds 8 of them, so the next tile is prefetched
// into the second level.
constexpr int SECOND_LEVEL = 2;

// logits[r][j] = q[r] . k[j] for R rows and n keys; the rest of the last vector is arbitrary. Prefetches `next`, and the
// keys that follow into the first level.
template <class Cell, int R>
void multiply(const float* q, Rows keys, Rows next, float* logits, int64_t n, int64_t D) {
    constexpr int KEYS = WIDTH / R, P = Cell::PARTS;
    for (int64_t j = 0; j < n; j += KEYS) {
        const char *k[KEYS], *near[KEYS], *far[KEYS];
        for (int c = 0; c < KEYS; c++) {
            k[c] = keys[std::min(j + c, n - 1)];
            near[c] = j + KEYS < n ? keys[std::min(j + KEYS + c, n - 1)] : next[c];
            far[c] = next[j + c];
        }
        Floats partial[WIDTH] = {};
        for (int64_t d = 0; d < D; d += WIDTH * P)
            for (int c = 0; c < KEYS; c++) {
                const Words words = load<Words>(k[c] + d * 4 / P);
                __builtin_prefetch(near[c] + d * 4 / P);
                __builtin_prefetch(far[c] + d * 4 / P, 0, SECOND_LEVEL);
                for (int p = 0; p < P; p++) {
                    const Floats key = Cell::part(words, p);
                    for (int r = 0; r < R; r++) {
                        Floats& sum = partial[r * KEYS + c];
                        sum = multiply_add(load<Floats>(q + r * D + d + p * WIDTH), key, sum);
                    }
                }
            }
        const Floats all = reduce_lanes(partial, add);
        for (int r = 0; r < R; r++)
            std::memcpy(logits + r * TILE + j, reinterpret_cast<const float*>(&all) + r * KEYS, KEYS * sizeof(float));
    }
}

// acc[r] = rescale[r] acc[r] + weights[r] . v for R rows, n values and W vectors of words from column d on.
template <class Cell, int R, int W>
inline void add(const float* weights, const float* rescale, Rows values, Rows next, float* acc, int64_t n, int64_t Dv,
                int64_t d) {
    constexpr int P = Cell::PARTS;
    Floats s[R][W * P];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W * P; c++) s[r][c] = load<Floats>(acc + r * Dv + d + c * WIDTH) * rescale[r];
    for (int64_t j = 0; j < n; j++)
        for (int w = 0; w < W; w++) {
            const int64_t byte = d * 4 / P + w * sizeof(Words);
            const Words words = load<Words>(values[j] + byte);
            __builtin_prefetch(next[j] + byte, 0, SECOND_LEVEL);
            for (int p = 0; p < P; p++) {
                const Floats value = Cell::part(words, p);
                for (int r = 0; r < R; r++) {
                    Floats& sum = s[r][w * P + p];
                    sum = multiply_add(weights[r * TILE + j], value, sum);
                }
            }
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W * P; c++) store(acc + r * Dv + d + c * WIDTH, s[r][c]);
}

template <class Cell, int R>
void accumulate(const float* weights, const float* rescale, Rows values, Rows next, float* acc, int64_t n, int64_t Dv) {
    constexpr int P = Cell::PARTS, W = std::max(1, (WIDTH == 16 ? 4 : 2) / P);  // what the registers hold
    int64_t d = 0;
    for (; d + W * P * WIDTH <= Dv; d += W * P * WIDTH) add<Cell, R, W>(weights, rescale, values, next, acc, n, Dv, d);
    if constexpr (W > 1)
        for (; d < Dv; d += P * WIDTH) add<Cell, R, 1>(weights, rescale, values, next, acc, n, Dv, d);
}

// Wide tiles ----------------------------------------------------------------------------------------------------------

// For many rows, a tile is first converted to contiguous float32, and its keys are transposed: the lanes of a vector are
// keys, so no reduction over lanes is needed. Keys are stored in strips of two vectors, [TILE / STRIP][D][STRIP], which
// fit the first-level cache.
constexpr int STRIP = 2 * WIDTH;
constexpr int64_t CHAIN = 64;  // additions to one accumulator
constexpr int STRIP_ROWS = WIDTH == 16 ? 8 : 4;  // rows whose accumulators for a strip the registers hold
constexpr int COLUMNS = WIDTH == 16 ? 64 : 16;  // columns of values whose accumulators for four rows they hold

// Transposes n keys to strips; the rest of the last strip repeats the last key.
template <class Cell>
void transpose_keys(Rows rows, float* to, int64_t n, int64_t D) {
    constexpr int P = Cell::PARTS;
    for (int64_t j = 0; j < round_up(n, STRIP); j += WIDTH)
        for (int64_t d = 0; d < D; d += WIDTH * P)
            for (int p = 0; p < P; p++) {
                Floats v[WIDTH];
                for (int l = 0; l < WIDTH; l++)
                    v[l] = Cell::part(load<Words>(rows[std::min(j + l, n - 1)] + d * 4 / P), p);
                transpose(v);
                for (int l = 0; l < WIDTH; l++)
                    store(to + (j / STRIP * D + d + p * WIDTH + l) * STRIP + j % STRIP, v[l]);
            }
}

// logits[r][j] = q[r] . k[j] for R rows and a strip. Long acc lose digits, so an accumulator takes CHAIN additions.
template <int R>
inline void multiply_strip(const float* q, const float* strip, float* logits, int64_t D) {
    for (int64_t first = 0; first < D; first += CHAIN) {
        const int64_t last = std::min(first + CHAIN, D);
        Floats acc[R][2] = {};
        for (int64_t d = first; d < last; d++, strip += STRIP) {
            const Floats low = load<Floats>(strip), high = load<Floats>(strip + WIDTH);
            for (int r = 0; r < R; r++) {
                acc[r][0] += q[r * D + d] * low;
                acc[r][1] += q[r * D + d] * high;
            }
        }
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) {
                float* to = logits + r * TILE + half * WIDTH;
                store(to, first ? load<Floats>(to) + acc[r][half] : acc[r][half]);
            }
    }
}

// acc[r] = rescale[r] acc[r] + weights[r] . v for R rows, n values with a stride of Dv, and W vectors of columns.
template <int R, int W>
inline void add_wide(const float* weights, const float* rescale, const float* values, float* acc, int64_t n, int64_t Dv) {
    Floats s[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) s[r][w] = load<Floats>(acc + r * Dv + w * WIDTH) * rescale[r];
    for (int64_t j = 0; j < n; j++, values += Dv) {
        Floats v[W];
        for (int w = 0; w < W; w++) v[w] = load<Floats>(values + w * WIDTH);
        for (int r = 0; r < R; r++)
            for (int w = 0; w < W; w++) s[r][w] += weights[r * TILE + j] * v[w];
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) store(acc + r * Dv + w * WIDTH, s[r][w]);
}

template <int R>
void accumulate_wide(const float* weights, const float* rescale, const float* values, float* acc, int64_t n, int64_t Dv,
                     int64_t columns) {
    constexpr int W = COLUMNS / WIDTH;
    if (columns == COLUMNS) return add_wide<R, W>(weights, rescale, values, acc, n, Dv);
    for (int64_t d = 0; d < columns; d += WIDTH) add_wide<R, 1>(weights, rescale, values + d, acc + d, n, Dv);
}

// Converts n rows to float32, columns in the order of parts.
template <class Cell>
void widen(Rows rows, float* to, int64_t n, int64_t D) {
    constexpr int P = Cell::PARTS;
    for (int64_t j = 0; j < n; j++)
        for (int64_t d = 0; d < D; d += WIDTH * P) {
            const Words words = load<Words>(rows[j] + d * 4 / P);
            for (int p = 0; p < P; p++) store(to + j * D + d + p * WIDTH, Cell::part(words, p));
        }
}

// Copies one row of cells to be contiguous. It has packs of x cells; strides: `pack` between packs, `step` inside.
template <class T>
void gather(char* to, const char* from, int64_t size, int64_t x, int64_t pack, int64_t step) {
    const T* cells = reinterpret_cast<const T*>(from);
    if (x == size && step == 1) {
        std::memcpy(to, cells, size * sizeof(T));
    } else if (x * sizeof(T) == 16 && step == 1) {
        for (int64_t d = 0; d < size; d += x, cells += pack) std::memcpy(to + d * sizeof(T), cells, 16);
    } else {
        T* out = reinterpret_cast<T*>(to);
        for (int64_t d = 0; d < size; d += x, cells += pack)
            for (int64_t e = 0; e < x; e++) out[d + e] = cells[e * step];
    }
}
