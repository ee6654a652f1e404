// The arguments of attention, the table of cache formats, and the division of the work.
#pragma once

#include <limits>
#include <vector>

#include "matrix.h"

constexpr int64_t SPAN = 256, MOST_SPAN = 1024;  // rows of a key/value head that share each loaded key
constexpr int64_t TASKS = 64;                    // with this many spans and heads, keys are not split
constexpr float INF = std::numeric_limits<float>::infinity();

// The arguments, as in fused.py. Strides are in elements.
struct Call {
    const char* query;   // [T, H, D], contiguous in the last dimension
    const char* key;     // [N, B, K, D/x, x]
    const char* value;   // [N, B, K, Dv]
    const int32_t* block_tables;
    const int32_t* seq_lens;
    const int32_t* query_start_loc;
    const int32_t* sequences;   // the sequences to serve; null: all, and Batch checks the values
    const float* alibi_slopes;  // [H]; this and the next four may be null
    const float* sinks;         // [H]
    const float* k_scale;       // [K]
    const float* v_scale;       // [K]
    const int32_t* ranges;      // [S, R, 2]
    char* out;                  // [T, H, Dv], contiguous
    float* lse;                 // [T, H], or null
    int64_t query_strides[2], key_strides[5], value_strides[4], table_strides[2];
    int64_t num_sequences, T, N, M, H, K, D, Dv, B, x;
    int64_t cell, query_cell, out_cell;  // formats; query and out have one of the first three
    int64_t causal, window, chunk, first_tokens, R, threads, batch_invariant, ranges_in_window;
    float scale, soft_cap;
};

// The tensors of a call that was checked with others: see prepared.py.
struct Tensors {
    const char* inputs[6];  // query, kv_cache, value_cache, block_tables, seq_lens, query_start_loc
    char* out;
    float* lse;
    int64_t threads;
    int64_t bytes[6];  // from an input's first element to the end of its last one
    int64_t where[2];  // bytes from the caches to the first key and value

    // Whether out or lse may share memory with another tensor.
    bool overlap(const Call& c) const {
        const int64_t out_bytes = c.T * c.H * c.Dv * (c.out_cell == 0 ? 4 : 2), lse_bytes = lse ? c.T * c.H * 4 : 0;
        const char* of_lse = reinterpret_cast<const char*>(lse);
        bool found = lse && out < of_lse + lse_bytes && of_lse < out + out_bytes;
        for (int n = 0; n < 6; n++) {
            found |= out < inputs[n] + bytes[n] && inputs[n] < out + out_bytes;
            found |= lse && of_lse < inputs[n] + bytes[n] && inputs[n] < of_lse + lse_bytes;
        }
        return found;
    }

    Call of(Call c) const {
        c.query = inputs[0], c.key = inputs[1] + where[0], c.value = inputs[2] + where[1];
        c.block_tables = reinterpret_cast<const int32_t*>(inputs[3]);
        c.seq_lens = reinterpret_cast<const int32_t*>(inputs[4]);
        c.query_start_loc = reinterpret_cast<const int32_t*>(inputs[5]);
        c.out = out, c.lse = lse, c.threads = threads;
        return c;
    }
};

// A checked copy of a batch's values: no other thread can change it between check and use.
struct Batch {
    std::vector<int32_t> lens, starts, tables, sequences;
    bool valid = true;  // if not, nothing may be read or written

    explicit Batch(const Call& c)
        : lens(c.seq_lens, c.seq_lens + c.num_sequences),
          starts(c.query_start_loc, c.query_start_loc + c.num_sequences + 1) {
        int64_t columns = 0;
        valid = starts.front() == 0 && starts.back() <= c.T && std::is_sorted(starts.begin(), starts.end());
        for (const int64_t n : lens) {
            valid = valid && n >= 0 && n <= c.M * c.B;
            columns = std::max(columns, (n + c.B - 1) / c.B);
        }
        if (!valid) return;
        tables.resize(c.num_sequences * columns);
        for (int64_t s = 0; s < c.num_sequences; s++) {
            sequences.push_back(s);
            const int64_t needed = (lens[s] + c.B - 1) / c.B;
            for (int64_t m = 0; m < needed; m++) {
                const int32_t block = c.block_tables[s * c.table_strides[0] + m * c.table_strides[1]];
                valid = valid && block >= 0 && block < c.N;
                tables[s * columns + m] = block;
            }
        }
    }

    Call of(Call c) const {
        c.seq_lens = lens.data(), c.query_start_loc = starts.data(), c.sequences = sequences.data();
        c.block_tables = tables.data();
        c.table_strides[0] = lens.empty() ? 0 : int64_t(tables.size() / lens.size()), c.table_strides[1] = 1;
        return c;
    }
};

// Formats -------------------------------------------------------------------------------------------------------------

// By log2 of the number of rows.
const decltype(&accumulate_wide<1>) ACCUMULATE_WIDE[] = {accumulate_wide<1>, accumulate_wide<2>, accumulate_wide<4>};

// The functions of a format; multiply and accumulate by log2 of the number of rows.
struct Format {
    int64_t parts, direct;
    decltype(&widen<Float32>) widen, transpose_keys;
    decltype(&multiply<Float32, 1>) multiply[3];
    decltype(&accumulate<Float32, 1>) accumulate[3];
    decltype(&pair_keys<BFloat16>) pair_keys;  // null if bfloat16 cannot hold its numbers
    decltype(&pair_values<BFloat16>) pair_values;
};

template <class Cell>
constexpr Format format() {
    Format f = {Cell::PARTS,
                Cell::DIRECT,
                widen<Cell>,
                transpose_keys<Cell>,
                {multiply<Cell, 1>, multiply<Cell, 2>, multiply<Cell, 4>},
                {accumulate<Cell, 1>, accumulate<Cell, 2>, accumulate<Cell, 4>},
                nullptr,
                nullptr};
    if constexpr (WIDTH == SIDE && !std::is_same_v<Cell, Float32> && !std::is_same_v<Cell, Float16>)
        f.pair_keys = pair_keys<Cell>, f.pair_values = pair_values<Cell>;
    return f;
}

enum { FLOAT32, FLOAT16, BFLOAT16 };  // the first indices of FORMATS
const Format FORMATS[] = {format<Float32>(), format<Float16>(), format<BFloat16>(), format<Float8_e4m3fn>(),
                          format<Float8_e5m2>()};

// Division ------------------------------------------------------------------------------------------------------------

// Rows of one sequence that share each loaded key.
struct Span {
    int64_t sequence, start, rows;  // start: the index of the first one in query
    int64_t position, keys;         // position of the first row; keys of the sequence
    int64_t gap, after;             // no row sees the `gap` keys between the first tokens and key `after`
};

// A work item: keys [first, last) of a span for key/value heads [head, end). `row` is negative if these are all keys of
// the span; else partial results go to shared rows from `row` on. Keys before a span's gap are numbered as if they came
// right before key `after`.
struct Piece {
    int64_t span, first, last, row, head, end;
};

// Per head and token, head by head: the maximum logit (up to SLACK), the sum of exponentials relative to it, and the
// accumulated values.
struct State {
    float *largest, *total, *values;
};

struct States {
    const int64_t rows, width;
    const Buffer data;
    States(int64_t rows, int64_t Dv) : rows(round_up(rows, WIDTH)), width(Dv), data(this->rows * (2 + Dv)) {}
    State at(int64_t row) const {
        return {data.data + row, data.data + rows + row, data.data + 2 * rows + row * width};
    }
};

// The index of each column in the order of parts: a permutation of each 4 * WIDTH columns.
struct Places {
    int32_t of[4 * WIDTH];
    constexpr explicit Places(int32_t parts) : of() {
        const int32_t unit = WIDTH * parts;
        for (int32_t d = 0; d < 4 * WIDTH; d++) of[d] = d / unit * unit + d % parts * WIDTH + d % unit / parts;
    }
    int64_t operator[](int64_t d) const { return d / (4 * WIDTH) * (4 * WIDTH) + of[d % (4 * WIDTH)]; }
};
constexpr Places PLACES[] = {Places(1), Places(2), Places(4)};  // of 1, 2 and 4 parts

struct Attention {
    const Call& c;
    const Format format;
    const int64_t G, cell_bytes, unit, D, Dv;  // D and Dv rounded up to whole vectors of words
    const int64_t span;                        // maximum rows of a span
    const Places &place, &query_place, &out_place;

    explicit Attention(const Call& call)
        : c(call),
          format(FORMATS[call.cell]),
          G(c.H / c.K),
          cell_bytes(4 / format.parts),
          unit(WIDTH * format.parts),
          D(round_up(c.D, unit)),
          Dv(round_up(c.Dv, unit)),
          span(std::max<int64_t>(std::clamp(rows() * c.H / (2 * TASKS), SPAN, MOST_SPAN) / G, 1)),
          place(PLACES[format.parts / 2]),
          query_place(PLACES[FORMATS[c.query_cell].parts / 2]),
          out_place(PLACES[FORMATS[c.out_cell].parts / 2]) {}

    int64_t rows() const {  // of all served sequences
        int64_t sum = 0;
        for (int64_t n = 0; n < c.num_sequences; n++)
            sum += c.query_start_loc[c.sequences[n] + 1] - c.query_start_loc[c.sequences[n]];
        return sum;
    }

    // The first visible key for a row at position i, among keys like `from`: a window does not hide first tokens.
    int64_t first(int64_t i, int64_t from) const {
        const int64_t window = c.window && from >= c.first_tokens ? i - c.window + 1 : 0;
        const int64_t chunk = c.chunk && i > 0 ? i / c.chunk * c.chunk : 0;
        return std::max<int64_t>(std::max(window, chunk), 0);
    }
    int64_t last(const Span& s, int64_t i) const { return c.causal ? std::min(i + 1, s.keys) : s.keys; }

    // The interval [low, high) of keys that any of the rows at positions [i, i + rows) sees. With first tokens: among
    // the first tokens if key `from` is one, else among the other keys. In each part a row sees one interval, as the
    // bidirectional ranges of a row contain its own key.
    void reach(const Span& s, int64_t i, int64_t rows, int64_t from, int64_t& low, int64_t& high) const {
        low = first(i, from);
        high = last(s, i + rows - 1);
        for (const int32_t* range = c.ranges + s.sequence * c.R * 2, *end = range + c.R * 2; range < end; range += 2)
            if (range[0] >= 0 && range[0] < range[1] && range[0] < i + rows && i < range[1]) {
                if (!c.ranges_in_window) low = std::min<int64_t>(low, range[0]);
                high = std::max<int64_t>(high, std::min<int64_t>(range[1], s.keys));
            }
    }

    // The keys [first, last) of a span in the numbering of pieces. Sets its gap.
    std::pair<int64_t, int64_t> keys_of(Span& s) const {
        int64_t begin, low, high;  // visible first tokens start at `begin`, other keys at `low`
        reach(s, s.position, s.rows, 0, begin, high);
        reach(s, s.position, s.rows, c.first_tokens, low, high);
        const int64_t end = std::min(c.first_tokens, s.keys), count = std::max<int64_t>(end - begin, 0);
        s.after = std::max(std::min(low, s.keys), end);
        s.gap = count ? s.after - end : 0;
        return {s.after - count, std::max(s.after - count, high)};
    }

    // The position of key number n of a span.
    int64_t key(const Span& s, int64_t n) const { return n < s.after ? n - s.gap : n; }

    bool is_wide(const Span& s) const { return s.rows * G > format.direct; }
};
