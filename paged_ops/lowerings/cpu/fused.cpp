// Attention over a paged cache in one pass: each key and value is read once for all the query heads that share it.
// paged_ops/lowerings/cpu/fused.py compiles and calls this. It is written with the vector types of GCC and clang, so
// that one source serves SSE, AVX2, AVX-512 and NEON.
//
// Letters as in paged_ops/ops.py; also G = H/K query heads per key/value head, q rows of a sequence.
//
// The rows of a sequence are divided into spans, and the keys of a span into pieces. Threads take pieces, and the
// partial softmaxes of a span's pieces merge in the order of their keys, so results depend on shapes and lengths, not
// on the number of threads. A piece goes through its keys by tiles. For each tile it goes through the heads, whose rows
// are added by an online softmax (Milakov and Gimelshein, arXiv:1805.02867). Each load is accompanied by a prefetch of
// what is read next, so that memory works while the processor computes.
//
// Longer than 500 lines: one function, and this file is all that its compiler is given.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int TILE = 64;                      // keys that are computed with their rows at once
constexpr int ROWS = 16;                      // rows whose logits are held at once
constexpr int64_t SPAN = 256;                 // rows of a key/value head that go through the keys together
constexpr int64_t PIECE = 256;                // the fewest keys of a piece
constexpr int64_t PIECES = 512;               // about the most pieces of one row each, as they keep partial results
constexpr float INF = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Words __attribute__((vector_size(WIDTH * 4)));
static_assert(TILE % WIDTH == 0, "a tile is whole vectors");

// The arguments, as in fused.py. Strides are in elements.
struct Call {
    const float* query;  // [T, H, D], contiguous
    const char* key;     // [N, B, K, D/x, x]
    const char* value;   // [N, B, K, Dv]
    const int32_t* block_tables;
    const int32_t* seq_lens;
    const int32_t* query_start_loc;
    const int32_t* sequences;   // the sequences to serve
    const float* alibi_slopes;  // [H], or null, as the next four
    const float* sinks;         // [H]
    const float* k_scale;       // [K]
    const float* v_scale;       // [K]
    const int32_t* ranges;      // [S, R, 2]
    float* out;                 // [T, H, Dv], contiguous
    float* lse;                 // [T, H]
    int64_t key_strides[5], value_strides[4], table_strides[2];
    int64_t num_sequences, H, K, D, Dv, B, x;
    int64_t cell, causal, window, chunk, R, threads;
    float scale, soft_cap;
};

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
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

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Sums over lanes -----------------------------------------------------------------------------------------------------

// Lane l of a pair of vectors (lane WIDTH + l: the second's), where blocks of two halves fold into one half: the first
// half of a block comes from the first vector. `high` picks the half that is added to the other.
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

// Lane l of the result is the sum of the lanes of v[l].
template <int N = WIDTH>
inline Floats sums_of(Floats* v) {
    if constexpr (N > 1) {
        const auto lanes = std::make_index_sequence<WIDTH>();
        for (int i = 0; i < N / 2; i++)
            v[i] = fold<N, false>(v[i], v[i + N / 2], lanes) + fold<N, true>(v[i], v[i + N / 2], lanes);
        return sums_of<N / 2>(v);
    }
    return v[0];
}

// Each lane of the result is v's lanes by an operation that may take them in any order.
template <int N = WIDTH, class Operation>
inline Floats over_lanes(Floats v, Operation operation) {
    if constexpr (N > 1) {
        const auto lanes = std::make_index_sequence<WIDTH>();
        return over_lanes<N / 2>(operation(fold<N, false>(v, v, lanes), fold<N, true>(v, v, lanes)), operation);
    }
    return v;
}

// Formats of a cache --------------------------------------------------------------------------------------------------

// A word of 32 bits holds PARTS cells, and part p of a vector of words is every PARTS-th cell. Keys and values keep
// this order; queries are put into it, and outputs back from it. Zeros are zero in each format. By measurement,
// making a tile wide once pays for more than DIRECT rows.

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

// Narrower formats: numbers of exponent 0 are converted by their integer magnitude, others by moving their bits to
// their places in float32. From the magnitude SPECIAL on they are infinity and NaN.
template <int BITS, int MANTISSA, int BIAS, uint32_t SPECIAL>
struct Narrow {
    static constexpr int PARTS = 32 / BITS;
    static constexpr int64_t DIRECT = 4;
    static constexpr float power(int n) { return n == 0 ? 1.0f : 0.5f * power(n - 1); }
    static Floats part(Words words, int p) {
        const Words cells = words << (32 - BITS * (p + 1)), magnitudes = (cells & 0x7fffffffu) >> (32 - BITS);
        Words normal = (magnitudes << (23 - MANTISSA)) + ((127u - BIAS) << 23);
        normal |= magnitudes >= SPECIAL ? Words{} + 0x7f800000u : Words{};
        // 2^23 + magnitude is a float32 with the magnitude as its last bits.
        const Floats small = (bits<Floats>(magnitudes | 0x4b000000u) - 8388608.0f) * power(BIAS - 1 + MANTISSA);
        const Words positive = magnitudes < (1u << MANTISSA) ? bits<Words>(small) : normal;
        return bits<Floats>(positive | (cells & 0x80000000u));
    }
};
typedef Narrow<16, 10, 15, 0x7c00> Float16;
typedef Narrow<8, 3, 7, 0x7f> Float8_e4m3fn;
typedef Narrow<8, 2, 15, 0x7c> Float8_e5m2;

// Rows of keys and values ---------------------------------------------------------------------------------------------

// A tile's keys or values of a head. A vector of words is the unit: rows are padded to it.
struct Rows {
    const char* const* at;  // TILE of them
    int64_t offset;
    const char* operator[](int64_t j) const { return at[j] + offset; }
};

// logits[r][j] = q[r] . k[j] for R rows and n keys; the rest of the last vector is arbitrary. Fetches next.
template <class Cell, int R>
void multiply(const float* q, Rows keys, Rows next, float* logits, int64_t n, int64_t D) {
    constexpr int KEYS = WIDTH / R, P = Cell::PARTS;
    for (int64_t j = 0; j < n; j += KEYS) {
        const char *k[KEYS], *ahead[KEYS];
        for (int c = 0; c < KEYS; c++) {
            k[c] = keys[std::min(j + c, n - 1)];
            ahead[c] = next[j + c];
        }
        Floats sums[WIDTH] = {};
        for (int64_t d = 0; d < D; d += WIDTH * P)
            for (int c = 0; c < KEYS; c++) {
                const Words words = load<Words>(k[c] + d * 4 / P);
                __builtin_prefetch(ahead[c] + d * 4 / P);
                for (int p = 0; p < P; p++) {
                    const Floats key = Cell::part(words, p);
                    for (int r = 0; r < R; r++) sums[r * KEYS + c] += load<Floats>(q + r * D + d + p * WIDTH) * key;
                }
            }
        const Floats all = sums_of(sums);
        for (int r = 0; r < R; r++)
            std::memcpy(logits + r * TILE + j, reinterpret_cast<const float*>(&all) + r * KEYS, KEYS * sizeof(float));
    }
}

// sums[r] = decay[r] sums[r] + weights[r] . v for R rows, n values and W vectors of words from column d on.
template <class Cell, int R, int W>
inline void add(const float* weights, const float* decay, Rows values, Rows next, float* sums, int64_t n, int64_t Dv,
                int64_t d) {
    constexpr int P = Cell::PARTS;
    Floats s[R][W * P];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W * P; c++) s[r][c] = load<Floats>(sums + r * Dv + d + c * WIDTH) * decay[r];
    for (int64_t j = 0; j < n; j++)
        for (int w = 0; w < W; w++) {
            const int64_t byte = d * 4 / P + w * sizeof(Words);
            const Words words = load<Words>(values[j] + byte);
            __builtin_prefetch(next[j] + byte);
            for (int p = 0; p < P; p++) {
                const Floats value = Cell::part(words, p);
                for (int r = 0; r < R; r++) s[r][w * P + p] += weights[r * TILE + j] * value;
            }
        }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < W * P; c++) store(sums + r * Dv + d + c * WIDTH, s[r][c]);
}

template <class Cell, int R>
void accumulate(const float* weights, const float* decay, Rows values, Rows next, float* sums, int64_t n, int64_t Dv) {
    constexpr int P = Cell::PARTS, W = std::max(1, (WIDTH == 16 ? 4 : 2) / P);  // as much as the registers hold
    int64_t d = 0;
    for (; d + W * P * WIDTH <= Dv; d += W * P * WIDTH) add<Cell, R, W>(weights, decay, values, next, sums, n, Dv, d);
    if constexpr (W > 1)
        for (; d < Dv; d += P * WIDTH) add<Cell, R, 1>(weights, decay, values, next, sums, n, Dv, d);
}

// Wide tiles ----------------------------------------------------------------------------------------------------------

// For many rows, a tile is made float32 and contiguous first, and its keys are turned: then the lanes of a vector are
// keys, no sums over lanes are needed, and what a loop reads stays in the first-level cache. Keys lie in strips of two
// vectors, [TILE / STRIP][D][STRIP].
constexpr int STRIP = 2 * WIDTH;
constexpr int64_t SUMMED = 64;  // products in one sum
constexpr int TALL = WIDTH == 16 ? 8 : 4;  // the most rows whose products with a strip the registers hold
constexpr int COLUMNS = WIDTH == 16 ? 64 : 16;  // of values, whose sums for four rows they hold

// v[i][l] and v[l][i] change places.
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

// n keys as strips; the rest of the last strip is the last key.
template <class Cell>
void turn(Rows rows, float* to, int64_t n, int64_t D) {
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

// logits[r][j] = q[r] . key j, for R rows and a strip. One sum of many products would lose digits: there are several.
template <int R>
inline void multiply_strip(const float* q, const float* strip, float* logits, int64_t D) {
    for (int64_t first = 0; first < D; first += SUMMED) {
        const int64_t last = std::min(first + SUMMED, D);
        Floats sums[R][2] = {};
        for (int64_t d = first; d < last; d++, strip += STRIP) {
            const Floats low = load<Floats>(strip), high = load<Floats>(strip + WIDTH);
            for (int r = 0; r < R; r++) {
                sums[r][0] += q[r * D + d] * low;
                sums[r][1] += q[r * D + d] * high;
            }
        }
        for (int r = 0; r < R; r++)
            for (int half = 0; half < 2; half++) {
                float* to = logits + r * TILE + half * WIDTH;
                store(to, first ? load<Floats>(to) + sums[r][half] : sums[r][half]);
            }
    }
}

// sums[r] = decay[r] sums[r] + weights[r] . v for R rows, n values and W vectors of columns; a value is Dv from the one
// before it.
template <int R, int W>
inline void add_wide(const float* weights, const float* decay, const float* values, float* sums, int64_t n, int64_t Dv) {
    Floats s[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) s[r][w] = load<Floats>(sums + r * Dv + w * WIDTH) * decay[r];
    for (int64_t j = 0; j < n; j++, values += Dv) {
        Floats v[W];
        for (int w = 0; w < W; w++) v[w] = load<Floats>(values + w * WIDTH);
        for (int r = 0; r < R; r++)
            for (int w = 0; w < W; w++) s[r][w] += weights[r * TILE + j] * v[w];
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) store(sums + r * Dv + w * WIDTH, s[r][w]);
}

template <int R>
void accumulate_wide(const float* weights, const float* decay, const float* values, float* sums, int64_t n, int64_t Dv,
                     int64_t columns) {
    constexpr int W = COLUMNS / WIDTH;
    if (columns == COLUMNS) return add_wide<R, W>(weights, decay, values, sums, n, Dv);
    for (int64_t d = 0; d < columns; d += WIDTH) add_wide<R, 1>(weights, decay, values + d, sums + d, n, Dv);
}

// n rows as float32, in the order of parts.
template <class Cell>
void widen(Rows rows, float* to, int64_t n, int64_t D) {
    constexpr int P = Cell::PARTS;
    for (int64_t j = 0; j < n; j++)
        for (int64_t d = 0; d < D; d += WIDTH * P) {
            const Words words = load<Words>(rows[j] + d * 4 / P);
            for (int p = 0; p < P; p++) store(to + j * D + d + p * WIDTH, Cell::part(words, p));
        }
}

// Makes one row of cells contiguous; it lies in packs of x cells that are `pack` apart, with steps inside.
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

// By log2 of their rows.
const decltype(&accumulate_wide<1>) ACCUMULATE_WIDE[] = {accumulate_wide<1>, accumulate_wide<2>, accumulate_wide<4>};

// A format's functions; two of them by log2 of their rows.
struct Format {
    int64_t parts, direct;
    decltype(&widen<Float32>) widen, turn;
    decltype(&multiply<Float32, 1>) multiply[3];
    decltype(&accumulate<Float32, 1>) accumulate[3];
};

template <class Cell>
constexpr Format format() {
    return {Cell::PARTS,
            Cell::DIRECT,
            widen<Cell>,
            turn<Cell>,
            {multiply<Cell, 1>, multiply<Cell, 2>, multiply<Cell, 4>},
            {accumulate<Cell, 1>, accumulate<Cell, 2>, accumulate<Cell, 4>}};
}

const Format FORMATS[] = {format<Float32>(), format<Float16>(), format<BFloat16>(), format<Float8_e4m3fn>(),
                          format<Float8_e5m2>()};

// Softmax -------------------------------------------------------------------------------------------------------------

// exp(x) - 1 is power (1 + result) - 1: with x = n ln 2 + f, power = 2^n and the result, exp(f) - 1, is its Taylor
// series up to f^7. To about a unit in the last place; for |x| < 87.
inline Floats expm1(Floats x, Floats& power) {
    const float round = 12582912.0f;  // 1.5 * 2^23: a number added to it loses its fraction
    const Floats t = x * 1.44269504f + round, n = t - round;
    power = bits<Floats>((bits<Ints>(t) - bits<int32_t>(round) + 127) << 23);
    Floats f = x - n * 0.693145752f;  // the leading bits of ln 2, so that the product is exact, and the rest
    f -= n * 1.42860677e-6f;
    Floats series = f * (1.0f / 5040) + 1.0f / 720;
    series = series * f + 1.0f / 120;
    series = series * f + 1.0f / 24;
    series = series * f + 1.0f / 6;
    series = series * f + 0.5f;
    return series * f * f + f;
}

inline Floats exp(Floats x) {  // for numbers that are not positive; NaN stays NaN
    Floats power;
    const Floats rest = expm1(x, power);
    return x < -87.0f ? Floats{} : power + power * rest;
}

inline Floats tanh(Floats x) {  // by exp(2x) - 1, which keeps the digits of a small x
    Floats y = 2.0f * x, power;
    y = y > 30.0f ? Floats{} + 30.0f : y;
    y = y < -30.0f ? Floats{} - 30.0f : y;
    const Floats rest = expm1(y, power), less = power * rest + (power - 1.0f);
    return less / (less + 2.0f);
}

// Work ----------------------------------------------------------------------------------------------------------------

// Rows of one sequence that go through its keys together.
struct Span {
    int64_t sequence, start, rows;  // start: the index of the first one in query
    int64_t position, keys;         // position of the first row; keys of the sequence
};

// The part of a span's work with keys [first, last) for key/value heads [head, end). If its keys are all of the span's,
// `row` is negative; else it leaves its results in shared rows from `row` on.
struct Piece {
    int64_t span, first, last, row, head, end;
};

struct Buffer {
    float* const data;
    explicit Buffer(int64_t floats)
        : data(static_cast<float*>(::operator new(floats * sizeof(float), std::align_val_t(64)))) {}
    ~Buffer() { ::operator delete(data, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
};

// One row per head and token, head by head: the largest logit, the sum of exponentials relative to it, the weighted
// values.
struct State {
    float *largest, *total, *values;
};

struct States {
    Buffer largest, total, values;
    const int64_t width;
    States(int64_t rows, int64_t Dv) : largest(rows), total(rows), values(rows * Dv), width(Dv) {}
    State at(int64_t row) const { return {largest.data + row, total.data + row, values.data + row * width}; }
};

struct Attention {
    const Call& c;
    const Format format;
    const int64_t G, cell_bytes, unit, D, Dv;  // D and Dv in whole vectors of words
    const int64_t span;                        // the most rows of a span
    std::vector<int32_t> place;                // the place of a column in the order of parts

    explicit Attention(const Call& call)
        : c(call),
          format(FORMATS[call.cell]),
          G(c.H / c.K),
          cell_bytes(4 / format.parts),
          unit(WIDTH * format.parts),
          D(round_up(c.D, unit)),
          Dv(round_up(c.Dv, unit)),
          span(std::max<int64_t>(SPAN / G, 1)) {
        for (int64_t d = 0; d < std::max(D, Dv); d++)
            place.push_back(d / unit * unit + d % format.parts * WIDTH + d % unit / format.parts);
    }

    int64_t first(int64_t i) const {  // the first key that a row at position i sees
        const int64_t window = c.window ? i - c.window + 1 : 0, chunk = c.chunk && i > 0 ? i / c.chunk * c.chunk : 0;
        return std::max<int64_t>(std::max(window, chunk), 0);
    }
    int64_t last(const Span& s, int64_t i) const { return c.causal ? std::min(i + 1, s.keys) : s.keys; }

    // The keys [low, high) that rows at positions [i, i + rows) see: from the first to the last that any of them sees.
    // The bidirectional ranges that hold a row also hold its own key, so all keys that it sees are one interval.
    void reach(const Span& s, int64_t i, int64_t rows, int64_t& low, int64_t& high) const {
        low = first(i);
        high = last(s, i + rows - 1);
        for (const int32_t* range = c.ranges + s.sequence * c.R * 2, *end = range + c.R * 2; range < end; range += 2)
            if (range[0] >= 0 && range[0] < range[1] && range[0] < i + rows && i < range[1]) {
                low = std::min<int64_t>(low, range[0]);
                high = std::max<int64_t>(high, std::min<int64_t>(range[1], s.keys));
            }
    }

    bool is_wide(const Span& s) const { return s.rows * G > format.direct; }

    void arrange(const Span& s, const Piece& piece, float* queries) const {
        queries += piece.head * s.rows * G * D;
        for (int64_t head = piece.head; head < piece.end; head++)
            for (int64_t row = 0; row < s.rows * G; row++, queries += D) {
                const float* from = c.query + ((s.start + row / G) * c.H + head * G + row % G) * c.D;
                if (c.D < D) std::fill_n(queries, D, 0.0f);
                for (int64_t d = 0; d < c.D; d++) queries[place[d]] = from[d];
            }
    }
};

// The scratch of one thread, and what it does with a piece.
struct Worker : Attention {
    const bool direct;           // whether rows can be read in place
    Buffer queries, logits;
    Buffer staged;               // rows that are not contiguous, or not whole vectors
    Buffer wide;                 // rows as float32
    States own;                  // the states of a span's only piece
    Buffer sums;                 // a row of out
    const char* at[2][2][TILE];  // [this tile or the next][keys or values]: tokens in the cache, at head 0
    const char* staged_at[2][TILE];

    Worker(const Call& call, int64_t rows)
        : Attention(call),
          direct(c.D == D && c.Dv == Dv && c.key_strides[4] == 1 && c.value_strides[3] == 1 && c.x == c.D),
          queries(rows * c.H * D),
          logits(ROWS * TILE),
          staged(direct ? 0 : TILE * (D + Dv)),
          wide(TILE * (D + Dv)),
          own(rows * c.H, Dv),
          sums(Dv) {
        for (int64_t j = 0; j < TILE; j++) {
            staged_at[0][j] = reinterpret_cast<char*>(staged.data) + j * D * cell_bytes;
            staged_at[1][j] = reinterpret_cast<char*>(staged.data + TILE * D) + j * Dv * cell_bytes;
        }
        if (!direct) std::fill_n(staged.data, TILE * (D + Dv), 0.0f);
    }

    int64_t head_stride(int plane) const { return (plane ? c.value_strides[2] : c.key_strides[2]) * cell_bytes; }

    void locate(int which, int64_t s, int64_t first, int64_t n) {
        for (int64_t j = 0; j < TILE; j++) {
            const int64_t token = first + std::min(j, n - 1), column = token / c.B, offset = token % c.B;
            const int64_t block = c.block_tables[s * c.table_strides[0] + column * c.table_strides[1]];
            at[which][0][j] = c.key + (block * c.key_strides[0] + offset * c.key_strides[1]) * cell_bytes;
            at[which][1][j] = c.value + (block * c.value_strides[0] + offset * c.value_strides[1]) * cell_bytes;
        }
    }

    Rows rows_of(int which, int plane, int64_t head) const { return {at[which][plane], head * head_stride(plane)}; }

    // Copies n rows so that they are contiguous and padded with zeros.
    Rows stage(int plane, Rows rows, int64_t n) {
        const int64_t size = plane ? c.Dv : c.D, x = plane ? c.Dv : c.x, pack = plane ? 0 : c.key_strides[3];
        const int64_t step = plane ? c.value_strides[3] : c.key_strides[4];
        for (int64_t j = 0; j < n; j++) {
            char* to = const_cast<char*>(staged_at[plane][j]);
            if (format.parts == 1) gather<uint32_t>(to, rows[j], size, x, pack, step);
            if (format.parts == 2) gather<uint16_t>(to, rows[j], size, x, pack, step);
            if (format.parts == 4) gather<uint8_t>(to, rows[j], size, x, pack, step);
        }
        return {staged_at[plane], 0};
    }

    void run(const Span& span, const Piece& piece, State state) {
        const int64_t R = span.rows * G;
        const int64_t first = piece.head * R, count = (piece.end - piece.head) * R;
        const bool widened = is_wide(span);
        arrange(span, piece, queries.data);
        std::fill_n(state.largest + first, count, -INF);
        std::fill_n(state.total + first, count, 0.0f);
        std::fill_n(state.values + first * Dv, count * Dv, 0.0f);
        const auto keys = [&](int64_t from) { return std::min<int64_t>(TILE, piece.last - from); };
        int which = 0;
        if (piece.first < piece.last) locate(which, span.sequence, piece.first, keys(piece.first));
        for (int64_t from = piece.first; from < piece.last; from += TILE, which ^= 1) {
            const int64_t n = keys(from), after = from + TILE;
            if (after < piece.last) locate(which ^ 1, span.sequence, after, keys(after));
            for (int64_t head = piece.head; head < piece.end; head++) {
                const bool last = head + 1 == piece.end, end = last && after >= piece.last;
                Rows tile[2], next[2];
                for (int plane = 0; plane < 2; plane++) {
                    tile[plane] = rows_of(which, plane, head);
                    next[plane] = end ? tile[plane] : rows_of(which ^ last, plane, last ? piece.head : head + 1);
                    if (!direct) tile[plane] = stage(plane, tile[plane], n);
                }
                if (widened) {
                    format.turn(tile[0], wide.data, n, D);
                    format.widen(tile[1], wide.data + TILE * D, n, Dv);
                }
                for (int64_t r = 0; r < R; r += ROWS) {
                    const int64_t row = head * R + r;
                    if (widened) fetch(next, r * TILE / R, std::min(r + ROWS, R) * TILE / R);
                    meet(widened, span, head, r, std::min<int64_t>(ROWS, R - r), from, n, queries.data + row * D, tile,
                         next, {state.largest + row, state.total + row, state.values + row * Dv});
                }
            }
        }
    }

    // Fetches rows [first, last) of a tile that is made wide later.
    void fetch(const Rows* tile, int64_t first, int64_t last) const {
        for (int plane = 0; plane < 2; plane++)
            for (int64_t j = first; j < last; j++)
                for (int64_t byte = 0; byte < (plane ? Dv : D) * cell_bytes; byte += 64)
                    __builtin_prefetch(tile[plane][j] + byte);
    }

    // Computes rows [row, row + count) of a head with n keys, the first at position `from`; of a wide tile or in place.
    void meet(bool widened, const Span& span, int64_t head, int64_t row, int64_t count, int64_t from, int64_t n,
              const float* q, const Rows* tile, const Rows* next, State state) {
        int64_t low[ROWS], high[ROWS], seen = 0;  // the keys [low, high) that each row sees; all are below `seen`
        for (int64_t r = 0; r < count; r++) {
            reach(span, span.position + (row + r) / G, 1, low[r], high[r]);
            low[r] = std::max<int64_t>(low[r] - from, 0);
            high[r] = std::min(high[r] - from, n);
            if (low[r] < high[r]) seen = std::max(seen, high[r]);
        }
        if (seen == 0) return;
        float decay[ROWS];
        const auto size = [&](int64_t r) { return count - r >= 4 ? 2 : count - r >= 2 ? 1 : 0; };  // log2
        if (widened) multiply_wide(q, count, seen);
        else
            for (int64_t r = 0; r < count; r += 1 << size(r))
                format.multiply[size(r)](q + r * D, tile[0], next[0], logits.data + r * TILE, seen, D);
        for (int64_t r = 0; r < count; r++) {
            const int64_t h = head * G + (row + r) % G, distance = from - span.position - (row + r) / G;
            decay[r] = softmax(logits.data + r * TILE, seen, low[r], high[r], head, h, distance, state.largest[r],
                               state.total[r]);
        }
        // 0 * NaN is NaN, so values are only multiplied for rows that see them; several rows at once if all of them do.
        const int64_t columns = widened ? COLUMNS : Dv;  // at once
        for (int64_t d = 0; d < Dv; d += columns) {
            float shrink[ROWS];
            std::copy_n(decay, count, shrink);
            const auto weigh = [&](int64_t r, int log2, int64_t begin, int64_t end) {
                if (begin >= end) return;
                const float* weights = logits.data + r * TILE + begin;
                float* sums = state.values + r * Dv + d;
                if (widened) {
                    const float* values = wide.data + TILE * D + begin * Dv + d;
                    ACCUMULATE_WIDE[log2](weights, shrink + r, values, sums, end - begin, Dv, std::min(columns, Dv - d));
                } else {
                    const Rows values = {tile[1].at + begin, tile[1].offset};
                    const Rows ahead = {next[1].at + begin, next[1].offset};
                    format.accumulate[log2](weights, shrink + r, values, ahead, sums, end - begin, Dv);
                }
                std::fill_n(shrink + r, 1 << log2, 1.0f);
            };
            for (int64_t r = 0; r < count; r += 1 << size(r)) {
                const int64_t last = r + (1 << size(r)), begin = *std::max_element(low + r, low + last);
                const int64_t end = std::max(begin, *std::min_element(high + r, high + last));
                for (int64_t one = r; one < last; one++) weigh(one, 0, low[one], std::min(high[one], begin));
                weigh(r, size(r), begin, end);
                for (int64_t one = r; one < last; one++) weigh(one, 0, std::max(low[one], end), high[one]);
            }
        }
    }

    // The logits of some rows with the keys of the wide tile, by strips, which stay in the first-level cache.
    void multiply_wide(const float* q, int64_t count, int64_t seen) {
        for (int64_t j = 0; j < seen; j += STRIP) {
            const float* strip = wide.data + j * D;
            int64_t r = 0;
            const auto at_once = [&](auto rows) {
                for (; r + rows() <= count; r += rows())
                    multiply_strip<rows()>(q + r * D, strip, logits.data + r * TILE + j, D);
            };
            at_once(std::integral_constant<int, TALL>());
            at_once(std::integral_constant<int, 4>());
            at_once(std::integral_constant<int, 2>());
            at_once(std::integral_constant<int, 1>());
        }
    }

    // Turns the products of one row with n keys into weights relative to its largest logit so far. Keys outside of
    // [first, last) are not seen. Returns the factor by which the sums so far shrink.
    float softmax(float* row, int64_t n, int64_t first, int64_t last, int64_t head, int64_t h, int64_t distance,
                  float& largest, float& total) const {
        Floats lane;
        for (int l = 0; l < WIDTH; l++) lane[l] = float(l);
        const float scale = c.scale * (c.k_scale ? c.k_scale[head] : 1.0f);
        Floats tops = Floats{} - INF;
        for (int64_t j = 0; j < n; j += WIDTH) {
            Floats x = load<Floats>(row + j) * scale;
            const Floats key = lane + float(j);
            if (c.soft_cap != 0) x = c.soft_cap * tanh(x / c.soft_cap);
            if (c.alibi_slopes) x += c.alibi_slopes[h] * (key + float(distance));
            x = key >= float(first) ? x : Floats{} - INF;
            x = key < float(last) ? x : Floats{} - INF;
            store(row + j, x);
            tops = x > tops ? x : tops;
        }
        const float top = std::max(largest, over_lanes(tops, [](Floats a, Floats b) { return a > b ? a : b; })[0]);
        const float base = top == -INF ? 0.0f : top;
        Floats sums = {};
        for (int64_t j = 0; j < n; j += WIDTH) {
            const Floats weight = exp(load<Floats>(row + j) - base);
            store(row + j, weight);
            sums += weight;
        }
        const float sum = over_lanes(sums, [](Floats a, Floats b) { return a + b; })[0];
        const float decay = exp(Floats{} + (largest - base))[0];
        total = total * decay + sum;
        largest = top;
        return decay;
    }

    // out and lse of some heads of a span from their partial results, in the order of their keys.
    void merge(const Span& span, int64_t head, int64_t end, const State* parts, int64_t count) {
        const int64_t R = span.rows * G;
        for (int64_t row = head * R; row < end * R; row++) {
            const int64_t k = row / R, h = k * G + row % G, to = (span.start + row % R / G) * c.H + h;
            float largest = c.sinks ? c.sinks[h] : -INF;
            for (int64_t p = 0; p < count; p++) largest = std::max(largest, parts[p].largest[row]);
            const float base = largest == -INF ? 0.0f : largest;
            float total = c.sinks ? std::exp(c.sinks[h] - base) : 0.0f;
            std::fill_n(sums.data, Dv, 0.0f);
            for (int64_t p = 0; p < count; p++) {
                const float share = std::exp(parts[p].largest[row] - base);
                total += parts[p].total[row] * share;
                for (int64_t d = 0; d < Dv; d++) sums.data[d] += parts[p].values[row * Dv + d] * share;
            }
            const float factor = total == 0 ? 0.0f : (c.v_scale ? c.v_scale[k] : 1.0f) / total;
            for (int64_t d = 0; d < c.Dv; d++) c.out[to * c.Dv + d] = sums.data[place[d]] * factor;
            c.lse[to] = base + std::log(total);
        }
    }
};

extern "C" void paged_attention(const Call* call) {
    const Call& c = *call;
    const Attention a(c);
    std::vector<Span> spans;
    int64_t pairs = 0, longest = 0;
    const auto keys_of = [&](const Span& s) {  // from, to
        std::pair<int64_t, int64_t> keys;
        a.reach(s, s.position, s.rows, keys.first, keys.second);
        keys.first = std::min(keys.first, s.keys);
        keys.second = std::max(keys.second, keys.first);
        return keys;
    };
    for (int64_t n = 0; n < c.num_sequences; n++) {
        const int64_t s = c.sequences[n], end = c.query_start_loc[s + 1];
        for (int64_t start = c.query_start_loc[s]; start < end; start += a.span) {
            spans.push_back({s, start, std::min(a.span, end - start), c.seq_lens[s] - end + start, c.seq_lens[s]});
            longest = std::max(longest, spans.back().rows);
            const auto [from, to] = keys_of(spans.back());
            pairs += (to - from) * spans.back().rows;
        }
    }
    const int64_t length = round_up(std::max(PIECE, pairs / PIECES), TILE);
    std::vector<Piece> pieces;
    std::vector<int64_t> begin;  // of each span, among the pieces
    int64_t rows = 0;
    for (int64_t n = 0; n < int64_t(spans.size()); n++) {
        const auto [from, to] = keys_of(spans[n]);
        const int64_t count = spans[n].rows * c.H;
        begin.push_back(pieces.size());
        // All heads of a key lie side by side in memory; with many rows, what one head keeps should stay in the cache.
        const int64_t heads = a.is_wide(spans[n]) ? 1 : c.K;
        const auto add = [&](int64_t first, int64_t last, int64_t row) {
            for (int64_t head = 0; head < c.K; head += heads) pieces.push_back({n, first, last, row, head, head + heads});
        };
        if (to - from <= length) add(from, to, -1);
        else
            for (int64_t key = from; key < to; key += length, rows += count) add(key, std::min(key + length, to), rows);
    }
    begin.push_back(pieces.size());
    const States shared(rows, a.Dv);
#pragma omp parallel num_threads(int(c.threads))
    {
        Worker worker(c, longest);
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < int64_t(pieces.size()); n++) {
            const Piece& piece = pieces[n];
            const State state = piece.row < 0 ? worker.own.at(0) : shared.at(piece.row);
            worker.run(spans[piece.span], piece, state);
            if (piece.row < 0) worker.merge(spans[piece.span], piece.head, piece.end, &state, 1);
        }
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < int64_t(spans.size()); n++) {
            std::vector<State> parts;
            for (int64_t p = begin[n]; p < begin[n + 1]; p++)
                if (pieces[p].row >= 0 && pieces[p].head == 0) parts.push_back(shared.at(pieces[p].row));
            if (!parts.empty()) worker.merge(spans[n], 0, c.K, parts.data(), parts.size());
        }
    }
}
