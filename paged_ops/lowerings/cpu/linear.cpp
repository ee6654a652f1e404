// Linear layers whose results do not depend on the number of rows.
//
// Each element of out is one sum over c in WIDTH lanes, in an order that the number of columns alone decides (multiply in
// tiles.h), then the sum of the lanes, then the bias. Tiles and threads only decide who adds.

#include <vector>

#include "tiles.h"

constexpr int64_t BYTES = 1 << 18;  // of the weight's rows in a tile, which stay in the processor's cache
constexpr int64_t ROWS = 64;        // of x in a task
enum { FLOAT32, FLOAT16, BFLOAT16 };

// The arguments, as in linear.py. All tensors are contiguous.
struct Linear {
    const char* x;       // [T, C]
    const char* weight;  // [O, C]
    const char* bias;    // [O], or null
    char* out;           // [T, O]
    int64_t T, O, C, cell, threads;
};

template <class Cell>
void widen_row(const char* from, float* to, int64_t C) {
    constexpr int64_t SIZE = 4 / Cell::PARTS;
    for (int64_t c = 0; c < C; c += WIDTH * Cell::PARTS) {
        Words words{};
        std::memcpy(&words, from + c * SIZE, std::min<int64_t>(sizeof words, (C - c) * SIZE));
        for (int p = 0; p < Cell::PARTS; p++) store(to + c + p * WIDTH, Cell::part(words, p));
    }
}

inline float number(const char* from, int64_t i, int64_t cell) {
    if (cell == FLOAT32) return reinterpret_cast<const float*>(from)[i];
    const Words word = Words{} + reinterpret_cast<const uint16_t*>(from)[i];
    return (cell == BFLOAT16 ? BFloat16::part(word, 0) : Float16::part(word, 0))[0];
}

void write(const float* from, char* to, int64_t n, int64_t cell) {
    if (cell == FLOAT32) {
        std::memcpy(to, from, n * sizeof *from);
        return;
    }
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Floats values = load<Floats>(from + i);
        const Words words = cell == BFLOAT16 ? bits<Words>(rounded(values)) >> 16 : half(values);
        for (int64_t l = 0; l < std::min<int64_t>(WIDTH, n - i); l++)
            reinterpret_cast<uint16_t*>(to)[i + l] = uint16_t(words[l]);
    }
}

template <class Cell>
void run(const Linear& c) {
    constexpr int64_t STEP = WIDTH * Cell::PARTS, SIZE = 4 / Cell::PARTS;
    const int64_t width = round_up(c.C, STEP), bytes = width * SIZE;
    const bool padded = width != c.C;
    const int64_t n = std::clamp(BYTES / std::max<int64_t>(bytes, 1) / WIDTH * WIDTH, int64_t(WIDTH), int64_t(TILE));
    const int64_t tiles = (c.O + n - 1) / n, spans = (c.T + ROWS - 1) / ROWS;
    const Buffer x(c.T * width + 1);
    const int threads = tiles * spans == 1 ? 1 : int(c.threads);
#pragma omp parallel num_threads(threads)
    {
        const Buffer copy(padded ? n * bytes / 4 : 1);
        std::vector<float> sums(4 * TILE), bias(TILE);
#pragma omp for
        for (int64_t t = 0; t < c.T; t++) widen_row<Cell>(c.x + t * c.C * SIZE, x.data + t * width, c.C);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tiles * spans; task++) {
            const int64_t first = task / spans * n, count = std::min(n, c.O - first), start = task % spans * ROWS;
            const char *at[TILE], *next[TILE];
            for (int64_t o = 0; o < TILE; o++) {
                const int64_t row = first + std::min(o, count - 1);
                at[o] = c.weight + row * c.C * SIZE;
                next[o] = c.weight + std::min(row + n, c.O - 1) * c.C * SIZE;
                if (c.bias) bias[o] = number(c.bias, row, c.cell);
                if (padded) {
                    char* whole = reinterpret_cast<char*>(copy.data) + std::min(o, count - 1) * bytes;
                    if (o < count) {
                        std::memcpy(whole, at[o], c.C * SIZE);
                        std::memset(whole + c.C * SIZE, 0, bytes - c.C * SIZE);
                    }
                    at[o] = next[o] = whole;
                }
            }
            const int64_t end = std::min(start + ROWS, c.T);
            for (int64_t t = start, rows; t < end; t += rows) {
                rows = end - t >= 4 ? 4 : end - t >= 2 ? 2 : 1;
                const auto multiplied = rows == 4 ? multiply<Cell, 4> : rows == 2 ? multiply<Cell, 2> : multiply<Cell, 1>;
                multiplied(x.data + t * width, {at, 0}, {t + rows < end ? at : next, 0}, sums.data(), count, width);
                for (int64_t r = 0; r < rows; r++) {
                    float* row = sums.data() + r * TILE;
                    if (c.bias)
                        for (int64_t o = 0; o < count; o++) row[o] += bias[o];
                    write(row, c.out + ((t + r) * c.O + first) * SIZE, count, c.cell);
                }
            }
        }
    }
}

extern "C" void invariant_linear(const Linear* c) {
    if (c->cell == FLOAT32) run<Float32>(*c);
    else if (c->cell == FLOAT16) run<Float16>(*c);
    else run<BFloat16>(*c);
}
