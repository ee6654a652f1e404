// bfloat16 matmuls with float32 accumulators by the matrix unit of x86 processors (AMX), and dot products by their vector
// instruction for pairs (AVX512_BF16).
//
// The operands of the matrix unit are tiles of 16 rows of 64 bytes: C[16][16] += A[16][32] B[32][16]. A row of A has 32 bfloat16. B is
// stored as [16][16][2]: row i holds pairs of rows 2i and 2i + 1. A 32-bit word holds a pair, so a tile of A or B has
// [16][16] words.
#pragma once

#include "tiles.h"

constexpr int SIDE = 16;                // rows of a tile, and words in a row
constexpr int PAIRED = 2 * SIDE;        // length of the dot products of one instruction
constexpr int AREA = SIDE * SIDE;       // words in a tile

// Packs n keys as tiles [TILE / 16][D / 32] of B, pairs in the order of parts; keys past n are zeros.
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

// Packs n values as tiles [TILE / 32][Dv / 16] of B, columns in the order of parts; values past n are zeros. Returns
// whether all are finite.
template <class Cell>
bool pair_values(Rows rows, uint32_t* to, int64_t n, int64_t Dv) {
    constexpr int P = Cell::PARTS;
    Floats zeros = {};  // becomes NaN if a value is not finite
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

// Asks Linux for permission to use the unit, whose state is large. Returns whether this process may use it.
inline bool request_matrix_unit() {
    unsigned a, b, c, d, more, none;
    const unsigned bfloat16 = 1 << 22, tiles = 1 << 24, conversion = 1 << 5;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & bfloat16) || !(d & tiles)) return false;
    if (!__get_cpuid_count(7, 1, &more, &none, &none, &none) || !(more & conversion)) return false;
    const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

inline bool matrix_unit() {
    static const bool usable = request_matrix_unit();  // once: it is slow in a virtual machine
    return usable;
}

// Intel's processors have the instruction, but float32 is faster there (2.1 GHz Xeons with AMX: by a quarter).
inline bool has_pair_products() {
    static const bool has = __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
    return has;
}

// The same as multiply in tiles.h, for queries [R][D] and keys in bfloat16.
template <int R>
__attribute__((target("avx512bf16"))) void multiply_pairs(const float* queries, Rows keys, Rows next, float* logits,
                                                          int64_t n, int64_t D) {
    constexpr int KEYS = WIDTH / R;
    const char* q = reinterpret_cast<const char*>(queries);
    for (int64_t j = 0; j < n; j += KEYS) {
        const char *k[KEYS], *near[KEYS], *far[KEYS];
        for (int c = 0; c < KEYS; c++) {
            k[c] = keys[std::min(j + c, n - 1)];
            near[c] = j + KEYS < n ? keys[std::min(j + KEYS + c, n - 1)] : next[c];
            far[c] = next[j + c];
        }
        __m512 partial[WIDTH] = {};
        for (int64_t byte = 0; byte < 2 * D; byte += sizeof(Words)) {
            __m512bh query[R];
            for (int r = 0; r < R; r++) query[r] = load<__m512bh>(q + r * 2 * D + byte);
            for (int c = 0; c < KEYS; c++) {
                const __m512bh key = load<__m512bh>(k[c] + byte);
                __builtin_prefetch(near[c] + byte);
                __builtin_prefetch(far[c] + byte, 0, SECOND_LEVEL);
                for (int r = 0; r < R; r++) {
                    __m512& sum = partial[r * KEYS + c];
                    sum = _mm512_dpbf16_ps(sum, query[r], key);
                }
            }
        }
        Floats sums[WIDTH];
        std::memcpy(sums, partial, sizeof sums);
        const Floats all = reduce_lanes(sums, add);
        for (int r = 0; r < R; r++)
            std::memcpy(logits + r * TILE + j, reinterpret_cast<const float*>(&all) + r * KEYS, KEYS * sizeof(float));
    }
}
constexpr decltype(&multiply_pairs<1>) MULTIPLY_PAIRS[] = {multiply_pairs<1>, multiply_pairs<2>, multiply_pairs<4>};

// acc[r] = rescale[r] acc[r] + weights[r] . v for R rows, n values in bfloat16 and W vectors of words from column d on; two
// values at once, with pairs of weights. An odd last value is paired with a zero.
template <int R, int W>
__attribute__((target("avx512bf16"))) inline void add_pairs(const uint32_t (*weights)[TILE / 2], const float* rescale,
                                                            Rows values, Rows next, float* acc, int64_t n, int64_t Dv,
                                                            int64_t d) {
    constexpr __mmask32 UPPER = 0xaaaaaaaa;
    __m512 s[R][2 * W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < 2 * W; w++) s[r][w] = __m512(load<Floats>(acc + r * Dv + d + w * WIDTH) * rescale[r]);
    for (int64_t j = 0; j < n; j += 2)
        for (int w = 0; w < W; w++) {
            const int64_t byte = 2 * d + w * int64_t(sizeof(Words)), last = std::min(j + 1, n - 1);
            const __m512i one = load<__m512i>(values[j] + byte);
            const __m512i two = last > j ? load<__m512i>(values[last] + byte) : __m512i{};
            __builtin_prefetch(next[j] + byte, 0, SECOND_LEVEL);
            __builtin_prefetch(next[last] + byte, 0, SECOND_LEVEL);
            const auto even = bits<__m512bh>(_mm512_mask_blend_epi16(UPPER, one, _mm512_slli_epi32(two, 16)));
            const auto odd = bits<__m512bh>(_mm512_mask_blend_epi16(UPPER, _mm512_srli_epi32(one, 16), two));
            for (int r = 0; r < R; r++) {
                const auto pair = bits<__m512bh>(_mm512_set1_epi32(int(weights[r][j / 2])));
                s[r][2 * w] = _mm512_dpbf16_ps(s[r][2 * w], pair, even);
                s[r][2 * w + 1] = _mm512_dpbf16_ps(s[r][2 * w + 1], pair, odd);
            }
        }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < 2 * W; w++) store(acc + r * Dv + d + w * WIDTH, Floats(s[r][w]));
}

// The same as accumulate in tiles.h, for values in bfloat16. Weights are rounded to bfloat16.
template <int R>
__attribute__((target("avx512bf16"))) void accumulate_pairs(const float* weights, const float* rescale, Rows values,
                                                            Rows next, float* acc, int64_t n, int64_t Dv) {
    uint32_t pairs[R][TILE / 2];
    for (int r = 0; r < R; r++)
        for (int64_t j = 0; j < n; j += SIDE) {
            const __mmask16 some = n - j >= SIDE ? 0xffff : (1 << (n - j)) - 1;
            const __m256bh half = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, weights + r * TILE + j));
            std::memcpy(pairs[r] + j / 2, &half, sizeof half);
        }
    int64_t d = 0;
    for (; d + 2 * PAIRED <= Dv; d += 2 * PAIRED) add_pairs<R, 2>(pairs, rescale, values, next, acc, n, Dv, d);
    for (; d < Dv; d += PAIRED) add_pairs<R, 1>(pairs, rescale, values, next, acc, n, Dv, d);
}
constexpr decltype(&accumulate_pairs<1>) ACCUMULATE_PAIRS[] = {accumulate_pairs<1>, accumulate_pairs<2>, accumulate_pairs<4>};

// Configures this thread's tiles to the full size, and restores the previous configuration at the end, as other
// libraries rely on it. The compilers' intrinsics would declare only the first 8 bytes of the memory as used.
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

// c[i][j] += a[i] . b[j] for 16 rows i of A and 16 N columns j of B, over K tiles [j][k] of B. Strides in words: `row`
// between rows of A, `column` and `depth` between tiles of B, `width` between rows of c. `fresh`: c starts at 0.
template <int N>
USES_MATRIX_UNIT void multiply_tiles(const uint32_t* a, int64_t row, const uint32_t* b, int64_t column, int64_t depth,
                                     int64_t K, float* c, int64_t width, bool fresh) {
    static_assert(N == 2 || N == 4, "tiles 0 to 3 accumulate, 4 holds A, 5 and 6 hold B");
    __asm__ volatile("" : : : "memory");  // stores must precede the tile loads, which the compiler does not see
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
    for (int64_t k = 0; k < K; k++, a += SIDE, b += depth) {
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
USES_MATRIX_UNIT inline void to_bfloat16(const float* from, uint32_t* to) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + SIDE), _mm512_loadu_ps(from));
    std::memcpy(to, &both, sizeof both);
}

// One thread: its scratch, and the matmuls with a tile of keys and values of one head.
struct Matrix {
    const FullTiles shape;
    const int64_t D, Dv;
    Buffer queries, keys, values, weights, padded;

    Matrix(int64_t rows, int64_t D, int64_t Dv)
        : D(D), Dv(Dv), queries((rows + SIDE) * D / 2), keys(TILE * D / 2), values(TILE * Dv / 2),
          weights(SIDE * TILE / 2), padded(SIDE * Dv) {}

    // q . k [16][TILE] of the rows from `row` on.
    void multiply(int64_t row, float* logits) {
        const int64_t depth = AREA, column = D / PAIRED * AREA;
        multiply_tiles<4>(queries.words() + row * D / 2, D / 2, keys.words(), column, depth, D / PAIRED, logits, TILE, true);
    }

    // acc[r] = rescale[r] acc[r] + weights[r] . v for `count` rows and n values.
    USES_MATRIX_UNIT void add(const float* logits, int64_t count, int64_t n, const float* rescale, float* acc) {
        for (int64_t r = 0; r < count; r++)
            for (int64_t j = 0; j < TILE; j += PAIRED)
                to_bfloat16(logits + r * TILE + j, weights.words() + (r * TILE + j) / 2);
        for (int64_t r = 0; r < count; r++)
            if (rescale[r] != 1)
                for (int64_t d = 0; d < Dv; d += WIDTH) store(acc + r * Dv + d, load<Floats>(acc + r * Dv + d) * rescale[r]);
        if (count == SIDE) return add_all(n, acc);
        std::copy_n(acc, count * Dv, padded.data);
        add_all(n, padded.data);
        std::copy_n(padded.data, count * Dv, acc);
    }

private:
    void add_all(int64_t n, float* acc) {
        const int64_t steps = (n + PAIRED - 1) / PAIRED;
        for (int64_t d = 0; d < Dv; d += 4 * SIDE)
            (d + 4 * SIDE <= Dv ? multiply_tiles<4> : multiply_tiles<2>)(
                weights.words(), TILE / 2, values.words() + d * SIDE, AREA, Dv * SIDE, steps, acc + d, Dv, false);
    }
};

#else

inline bool matrix_unit() { return false; }
inline bool has_pair_products() { return false; }
constexpr decltype(&multiply<BFloat16, 1>) MULTIPLY_PAIRS[3] = {};  // never used
constexpr decltype(&accumulate<BFloat16, 1>) ACCUMULATE_PAIRS[3] = {};  // never used

struct Matrix {  // never used
    Buffer queries, keys, values;
    Matrix(int64_t, int64_t, int64_t) : queries(0), keys(0), values(0) {}
    void multiply(int64_t, float*) {}
    void add(const float*, int64_t, int64_t, const float*, float*) {}
};

#endif
