// Products of bfloat16 by the matrix unit of x86 processors (AMX), with sums in float32.
//
// Its operands are tiles of 16 rows of 64 bytes: C[16][16] += A[16][32] B[32][16], where A has 32 bfloat16 in a row,
// and a row of B has pairs: [16][16][2], those of rows 2i and 2i + 1. A word of 32 bits holds a pair, so a tile of
// either is [16][16] words.
#pragma once

#include "tiles.h"

constexpr int SIDE = 16;                // rows of a tile, and words in one
constexpr int PAIRED = 2 * SIDE;        // the length of products that one instruction adds
constexpr int AREA = SIDE * SIDE;       // words of a tile

// n keys as tiles [TILE / 16][D / 32] of B, pairs of the order of parts; keys past n are zeros.
template <class Cell>
void pair_keys(Rows rows, uint32_t* to, int64_t n, int64_t D) {
    constexpr int P = Cell::PARTS;
    for (int64_t j = 0; j < TILE; j += SIDE)
        for (int64_t d = 0; d < D; d += WIDTH * P)
            for (int p = 0; p < P; p += 2, to += AREA) {
                Floats v[WIDTH];
                for (int64_t l = 0; l < SIDE; l++) {
                    const Words words = j + l < n ? load<Words>(rows[j + l] + d * 4 / P) : Words{};
                    v[l] = bits<Floats>(pair(Cell::part(words, p), Cell::part(words, p + 1)));
                }
                transpose(v);
                for (int l = 0; l < SIDE; l++) store(reinterpret_cast<float*>(to) + l * SIDE, v[l]);
            }
}

// n values as tiles [TILE / 32][Dv / 16] of B, columns in the order of parts; values past n are zeros. Returns whether
// all are finite.
template <class Cell>
bool pair_values(Rows rows, uint32_t* to, int64_t n, int64_t Dv) {
    constexpr int P = Cell::PARTS;
    Floats zeros = {};  // NaN after a number that is not finite
    for (int64_t j = 0; j < TILE; j += 2) {
        uint32_t* tile = to + j / PAIRED * Dv * SIDE + j % PAIRED / 2 * SIDE;
        for (int64_t d = 0; d < Dv; d += WIDTH * P) {
            const Words even = j < n ? load<Words>(rows[j] + d * 4 / P) : Words{};
            const Words odd = j + 1 < n ? load<Words>(rows[j + 1] + d * 4 / P) : Words{};
            for (int p = 0; p < P; p++, tile += AREA) {
                const Floats low = Cell::part(even, p), high = Cell::part(odd, p);
                const Words both = pair(low, high);
                zeros += low * 0.0f + high * 0.0f;
                std::memcpy(tile, &both, sizeof both);
            }
        }
    }
    float nan[WIDTH];
    std::memcpy(nan, &zeros, sizeof nan);
    return std::none_of(nan, nan + WIDTH, [](float n) { return n != n; });
}

#if defined(__AVX512F__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define USES_MATRIX_UNIT __attribute__((target("amx-tile,amx-bf16,avx512bf16")))

// Whether this process may use the unit. Linux wants to be asked first, as the unit's state is large.
inline bool ask_for_matrix_unit() {
    unsigned a, b, c, d, more, none;
    const unsigned bfloat16 = 1 << 22, tiles = 1 << 24, conversion = 1 << 5;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & bfloat16) || !(d & tiles)) return false;
    if (!__get_cpuid_count(7, 1, &more, &none, &none, &none) || !(more & conversion)) return false;
    const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

inline bool matrix_unit() {
    static const bool usable = ask_for_matrix_unit();  // which takes long in a virtual machine
    return usable;
}

// While it lives, this thread's tiles are of the full size; then again what they were before, which others rely on.
// The compilers' own functions for this tell them of the first 8 bytes only.
class FullTiles {
    struct alignas(64) Shape {
        uint8_t palette = 0, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } before;
    static void load(const Shape& shape) { __asm__ volatile("ldtilecfg %0" : : "m"(shape)); }

public:
    FullTiles() {
        Shape full;
        full.palette = 1;
        std::fill_n(full.row_bytes, 8, 4 * SIDE);
        std::fill_n(full.rows, 8, SIDE);
        __asm__ volatile("sttilecfg %0" : "=m"(before));
        load(full);
    }
    ~FullTiles() { load(before); }
    FullTiles(const FullTiles&) = delete;
};

// c[i][j] += a[i] . b[j] for 16 rows i of A, which are `row` words apart, and 16 N columns j of B, whose tiles [j][k] are
// `column` and `deep` words apart; there are K along the products. c's rows are `width` floats apart; `fresh`: it was 0.
template <int N>
USES_MATRIX_UNIT void multiply_tiles(const uint32_t* a, int64_t row, const uint32_t* b, int64_t column, int64_t deep,
                                     int64_t K, float* c, int64_t width, bool fresh) {
    static_assert(N == 2 || N == 4, "tiles 0 to 3 are sums, 4 is of A, 5 and 6 are of B");
    __asm__ volatile("" : : : "memory");  // all is stored that is loaded below, of which the compiler knows nothing
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        if (N == 4) _tile_zero(2);
        if (N == 4) _tile_zero(3);
    } else {
        _tile_loadd(0, c, width * 4);
        _tile_loadd(1, c + SIDE, width * 4);
        if (N == 4) _tile_loadd(2, c + 2 * SIDE, width * 4);
        if (N == 4) _tile_loadd(3, c + 3 * SIDE, width * 4);
    }
    for (int64_t k = 0; k < K; k++, a += SIDE, b += deep) {
        _tile_loadd(4, a, row * 4);
        _tile_loadd(5, b, SIDE * 4);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, b + column, SIDE * 4);
        _tile_dpbf16ps(1, 4, 6);
        if (N == 4) {
            _tile_loadd(5, b + 2 * column, SIDE * 4);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, b + 3 * column, SIDE * 4);
            _tile_dpbf16ps(3, 4, 6);
        }
    }
    _tile_stored(0, c, width * 4);
    _tile_stored(1, c + SIDE, width * 4);
    if (N == 4) _tile_stored(2, c + 2 * SIDE, width * 4);
    if (N == 4) _tile_stored(3, c + 3 * SIDE, width * 4);
}

// Rounds 32 floats to bfloat16.
USES_MATRIX_UNIT inline void halve(const float* from, uint32_t* to) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + SIDE), _mm512_loadu_ps(from));
    std::memcpy(to, &both, sizeof both);
}

// The scratch of one thread, and what it does with a tile of keys and values of one head.
struct Matrix {
    const FullTiles shape;
    const int64_t D, Dv;
    Buffer queries, keys, values, weights, some;

    Matrix(int64_t rows, int64_t D, int64_t Dv)
        : D(D), Dv(Dv), queries((rows + SIDE) * D / 2), keys(TILE * D / 2), values(TILE * Dv / 2),
          weights(SIDE * TILE / 2), some(SIDE * Dv) {}

    // Logits [16][TILE] of rows from `row` on.
    void multiply(int64_t row, float* logits) {
        const int64_t deep = AREA, column = D / PAIRED * AREA;
        multiply_tiles<4>(queries.words() + row * D / 2, D / 2, keys.words(), column, deep, D / PAIRED, logits, TILE, true);
    }

    // sums[r] = decay[r] sums[r] + weights[r] . v for `count` rows and n values.
    USES_MATRIX_UNIT void add(const float* logits, int64_t count, int64_t n, const float* decay, float* sums) {
        for (int64_t r = 0; r < count; r++)
            for (int64_t j = 0; j < TILE; j += PAIRED)
                halve(logits + r * TILE + j, weights.words() + (r * TILE + j) / 2);
        for (int64_t r = 0; r < count; r++)
            if (decay[r] != 1)
                for (int64_t d = 0; d < Dv; d += WIDTH) store(sums + r * Dv + d, load<Floats>(sums + r * Dv + d) * decay[r]);
        if (count == SIDE) return add_all(n, sums);
        std::copy_n(sums, count * Dv, some.data);
        add_all(n, some.data);
        std::copy_n(some.data, count * Dv, sums);
    }

private:
    void add_all(int64_t n, float* sums) {
        const int64_t steps = (n + PAIRED - 1) / PAIRED;
        for (int64_t d = 0; d < Dv; d += 4 * SIDE)
            (d + 4 * SIDE <= Dv ? multiply_tiles<4> : multiply_tiles<2>)(
                weights.words(), TILE / 2, values.words() + d * SIDE, AREA, Dv * SIDE, steps, sums + d, Dv, false);
    }
};

#else

inline bool matrix_unit() { return false; }

struct Matrix {  // never used
    Buffer queries, keys, values;
    Matrix(int64_t, int64_t, int64_t) : queries(0), keys(0), values(0) {}
    void multiply(int64_t, float*) {}
    void add(const float*, int64_t, int64_t, const float*, float*) {}
};

#endif
