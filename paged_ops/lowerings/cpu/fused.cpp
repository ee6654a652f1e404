// Attention over a paged cache in one pass: each key and value is read once for all the query heads that share it.
// Compiled and called by fused.py. The vector types of GCC and clang let one source serve SSE, AVX2, AVX-512 and NEON.
//
// Letters as in paged_ops/ops.py; also G = H/K query heads per key/value head, q rows of a sequence.
//
// The rows of a sequence are divided into spans, and the keys of a span into pieces: the work items of the threads. The
// partial results of a span's pieces are merged in the order of their keys, so results depend on shapes and lengths,
// not on the number of threads. A piece loops over tiles of keys and, within a tile, over heads, with an online softmax
// (Milakov and Gimelshein, arXiv:1805.02867). Each load comes with a prefetch for the next head or tile.

#include <cmath>
#include <optional>

#include "work.h"

constexpr int ROWS = SIDE;        // rows computed together
constexpr int64_t PIECE = 128;    // minimum number of keys of a piece
constexpr int64_t PIECES = 512;   // bounds the memory of partial results: about this many pieces per row
constexpr int64_t SHARED = 1 << 19;  // multiply-adds from which a short sequence is divided by heads
constexpr float SLACK = 4;        // a row is rescaled only if a logit exceeds its current maximum by more

enum class Path { DIRECT, PAIRS, WIDE, MATRIX };

// One thread: its scratch, and the computation of one piece.
struct Worker : Attention {
    const bool direct;           // whether rows can be read in place
    const bool pairs;            // whether few rows are multiplied as pairs of bfloat16
    Buffer queries, logits;
    Buffer staged;               // copies of rows that are not contiguous or not whole vectors
    Buffer wide;                 // a tile converted to float32, for wide spans
    std::optional<Matrix> matrix;
    States own;                  // the state of a piece that has all keys of its span
    Buffer merged;               // a row of out
    Buffer reordered, padded;    // a row of out or query
    const char* at[2][2][TILE];  // [this tile or the next][keys or values]: addresses of tokens, at head 0
    const char* staged_at[2][TILE];

    Worker(const Attention& attention, int64_t rows, bool widens)
        : Attention(attention),
          direct(c.D == D && c.Dv == Dv && c.key_strides[4] == 1 && c.value_strides[3] == 1 && c.x == c.D),
          pairs(c.query_cell == BFLOAT16 && c.cell == BFLOAT16 && has_pair_products()),
          queries(rows * D),
          logits(ROWS * TILE),
          staged(direct ? 0 : TILE * (D + Dv)),
          wide(widens ? TILE * (D + Dv) : 0),
          own(rows, Dv),
          merged(Dv),
          reordered(round_up(std::max(D, Dv), 2 * WIDTH)),
          padded(round_up(D, 2 * WIDTH)) {
        std::fill_n(padded.data, round_up(D, 2 * WIDTH), 0.0f);
        for (int64_t j = 0; j < TILE; j++) {
            staged_at[0][j] = reinterpret_cast<char*>(staged.data) + j * D * cell_bytes;
            staged_at[1][j] = reinterpret_cast<char*>(staged.data + TILE * D) + j * Dv * cell_bytes;
        }
        if (!direct) std::fill_n(staged.data, TILE * (D + Dv), 0.0f);
        if (widens && c.query_cell == BFLOAT16 && format.pair_keys && matrix_unit()) matrix.emplace(rows, D, Dv);
    }

    const char* query_of(const Span& s, int64_t head, int64_t row) const {
        const int64_t token = s.start + row / G, h = head * G + row % G;
        return c.query + (token * c.query_strides[0] + h * c.query_strides[1]) * 4 / FORMATS[c.query_cell].parts;
    }

    // Converts the queries of a piece's heads to float32, columns in the order of parts.
    void arrange(const Span& s, const Piece& piece) {
        const Format& query = FORMATS[c.query_cell];
        float* to = queries.data;
        for (int64_t head = piece.head; head < piece.end; head++)
            for (int64_t row = 0; row < s.rows * G; row++, to += D) {
                const char* from = query_of(s, head, row);
                const int64_t size = round_up(c.D, WIDTH * query.parts);
                if (c.D < size) from = static_cast<char*>(std::memcpy(padded.data, from, c.D * 4 / query.parts));
                if (query.parts == format.parts) {
                    query.widen({&from, 0}, to, 1, size);
                    continue;
                }
                query.widen({&from, 0}, reordered.data, 1, size);
                if (c.D < D) std::fill_n(to, D, 0.0f);
                for (int64_t d = 0; d < c.D; d++) to[place[d]] = reordered.data[query_place[d]];
            }
    }

    // Copies the queries of a piece's heads as bfloat16 pairs in the order of parts.
    void arrange_pairs(const Span& s, const Piece& piece, const Buffer& words) const {
        uint16_t* to = reinterpret_cast<uint16_t*>(words.data);
        for (int64_t head = piece.head; head < piece.end; head++)
            for (int64_t row = 0; row < s.rows * G; row++, to += D) {
                const char* from = query_of(s, head, row);
                if (c.D < D) std::fill_n(to, D, 0);
                if (format.parts == 2) std::memcpy(to, from, 2 * c.D);
                else
                    for (int64_t d = 0; d < c.D; d++)
                        to[place[d] / PAIRED * PAIRED + place[d] % SIDE * 2 + place[d] % PAIRED / SIDE] =
                            load<uint16_t>(from + 2 * d);
            }
    }

    int64_t head_stride(int plane) const { return (plane ? c.value_strides[2] : c.key_strides[2]) * cell_bytes; }

    // Finds the addresses of a tile's tokens.
    void locate(int which, int64_t s, int64_t first, int64_t n) {
        for (int64_t j = 0; j < TILE; j++) {
            const int64_t token = first + std::min(j, n - 1), column = token / c.B, offset = token % c.B;
            const int64_t block = c.block_tables[s * c.table_strides[0] + column * c.table_strides[1]];
            at[which][0][j] = c.key + (block * c.key_strides[0] + offset * c.key_strides[1]) * cell_bytes;
            at[which][1][j] = c.value + (block * c.value_strides[0] + offset * c.value_strides[1]) * cell_bytes;
        }
    }

    Rows rows_of(int which, int plane, int64_t head) const { return {at[which][plane], head * head_stride(plane)}; }

    // Copies n rows to be contiguous and padded with zeros.
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
        const int64_t count = (piece.end - piece.head) * R;
        const bool widened = is_wide(span);
        bool arranged = widened ? !matrix : !pairs;
        if (arranged) arrange(span, piece);
        else arrange_pairs(span, piece, widened ? matrix->queries : queries);
        std::fill_n(state.largest, count, -INF);
        std::fill_n(state.total, count, 0.0f);
        std::fill_n(state.values, count * Dv, 0.0f);
        // The number of keys of the tile that begins at `from`: no tile has keys on both sides of the span's gap.
        const auto keys = [&](int64_t from) {
            return std::min<int64_t>(TILE, (from < span.after ? std::min(span.after, piece.last) : piece.last) - from);
        };
        const auto find = [&](int which, int64_t from) { locate(which, span.sequence, key(span, from), keys(from)); };
        int which = 0;
        if (piece.first < piece.last) find(which, piece.first);
        for (int64_t from = piece.first, n; from < piece.last; from += n, which ^= 1) {
            n = keys(from);
            const int64_t after = from + n;
            if (after < piece.last) find(which ^ 1, after);
            for (int64_t head = piece.head; head < piece.end; head++) {
                const bool last = head + 1 == piece.end, end = last && after >= piece.last;
                Rows tile[2], next[2];
                for (int plane = 0; plane < 2; plane++) {
                    tile[plane] = rows_of(which, plane, head);
                    next[plane] = end ? tile[plane] : rows_of(which ^ last, plane, last ? piece.head : head + 1);
                    if (!direct) tile[plane] = stage(plane, tile[plane], n);
                }
                Path path = widened ? Path::WIDE : pairs ? Path::PAIRS : Path::DIRECT;
                if (widened && matrix) {
                    format.pair_keys(tile[0], matrix->keys.words(), n, D);
                    if (format.pair_values(tile[1], matrix->values.words(), n, Dv)) path = Path::MATRIX;
                }
                if (path == Path::WIDE) {
                    if (!arranged) arrange(span, piece);
                    arranged = true;
                    format.transpose_keys(tile[0], wide.data, n, D);
                    format.widen(tile[1], wide.data + TILE * D, n, Dv);
                }
                for (int64_t r = 0; r < R; r += ROWS) {
                    const int64_t row = (head - piece.head) * R + r;
                    if (widened) prefetch(next, r * TILE / R, std::min(r + ROWS, R) * TILE / R);
                    compute(path, format, span, head, r, std::min<int64_t>(ROWS, R - r), key(span, from), n,
                            queries.data + row * (path == Path::PAIRS ? D / 2 : D), tile, next,
                            {state.largest + row, state.total + row, state.values + row * Dv});
                }
            }
        }
    }

    // Prefetches rows [first, last) of a tile that will be converted to float32.
    void prefetch(const Rows* tile, int64_t first, int64_t last) const {
        for (int plane = 0; plane < 2; plane++)
            for (int64_t j = first; j < last; j++)
                for (int64_t byte = 0; byte < (plane ? Dv : D) * cell_bytes; byte += 64)
                    __builtin_prefetch(tile[plane][j] + byte);
    }

    // Computes rows [row, row + count) of a head with the n keys from position `from`. `cells`: the format of tile.
    void compute(Path path, const Format& cells, const Span& span, int64_t head, int64_t row, int64_t count, int64_t from, int64_t n,
              const float* q, const Rows* tile, const Rows* next, State state) {
        int64_t low[ROWS], high[ROWS], seen = 0;  // each row sees keys [low, high); `seen` is the largest high
        for (int64_t r = 0, token = row / G, next = (token + 1) * G - row; r < count; token++, next += G) {
            int64_t first, last;
            reach(span, span.position + token, 1, from, first, last);
            first = std::max<int64_t>(first - from, 0);
            last = std::min(last - from, n);
            if (first < last) seen = std::max(seen, last);
            for (; r < std::min(next, count); r++) low[r] = first, high[r] = last;
        }
        if (seen == 0) return;
        const bool widened = path == Path::WIDE;
        if (path == Path::MATRIX) seen = round_up(seen, PAIRED);
        float rescale[ROWS];
        const auto size = [&](int64_t r) { return count - r >= 4 ? 2 : count - r >= 2 ? 1 : 0; };  // log2
        if (path == Path::MATRIX) matrix->multiply(row, logits.data);
        else if (widened) multiply_wide(q, count, seen);
        else
            for (int64_t r = 0; r < count; r += 1 << size(r)) {
                const bool paired = path == Path::PAIRS;
                const auto product = paired ? MULTIPLY_PAIRS[size(r)] : cells.multiply[size(r)];
                product(q + r * (paired ? D / 2 : D), tile[0], next[0], logits.data + r * TILE, seen, D);
            }
        softmax(count, seen, low, high, head, row, from - span.position, state, rescale);
        if (path == Path::MATRIX) return matrix->add(logits.data, count, seen, rescale, state.values);
        // Hidden values may be NaN, and 0 * NaN is NaN: several rows share a value only if all of them see it.
        const int64_t columns = widened ? COLUMNS : Dv;  // at once
        for (int64_t d = 0; d < Dv; d += columns) {
            float factor[ROWS];
            std::copy_n(rescale, count, factor);
            const auto add_values = [&](int64_t r, int log2, int64_t begin, int64_t end) {
                if (begin >= end) return;
                const float* weights = logits.data + r * TILE + begin;
                float* acc = state.values + r * Dv + d;
                if (widened) {
                    const float* values = wide.data + TILE * D + begin * Dv + d;
                    ACCUMULATE_WIDE[log2](weights, factor + r, values, acc, end - begin, Dv, std::min(columns, Dv - d));
                } else {
                    const Rows values = {tile[1].at + begin, tile[1].offset};
                    const Rows ahead = {next[1].at + begin, next[1].offset};
                    const auto add = path == Path::PAIRS ? ACCUMULATE_PAIRS[log2] : cells.accumulate[log2];
                    add(weights, factor + r, values, ahead, acc, end - begin, Dv);
                }
                std::fill_n(factor + r, 1 << log2, 1.0f);
            };
            for (int64_t r = 0; r < count; r += 1 << size(r)) {
                const int64_t last = r + (1 << size(r)), begin = *std::max_element(low + r, low + last);
                const int64_t end = std::max(begin, *std::min_element(high + r, high + last));
                for (int64_t one = r; one < last; one++) add_values(one, 0, low[one], std::min(high[one], begin));
                add_values(r, size(r), begin, end);
                for (int64_t one = r; one < last; one++) add_values(one, 0, std::max(low[one], end), high[one]);
            }
        }
    }

    // The logits of some rows with the keys of the float32 tile, by strips that fit the first-level cache.
    void multiply_wide(const float* q, int64_t count, int64_t seen) {
        for (int64_t j = 0; j < seen; j += STRIP) {
            const float* strip = wide.data + j * D;
            int64_t r = 0;
            const auto at_once = [&](auto rows) {
                for (; r + rows() <= count; r += rows())
                    multiply_strip<rows()>(q + r * D, strip, logits.data + r * TILE + j, D);
            };
            at_once(std::integral_constant<int, STRIP_ROWS>());
            at_once(std::integral_constant<int, 4>());
            at_once(std::integral_constant<int, 2>());
            at_once(std::integral_constant<int, 1>());
        }
    }

    // Online softmax of rows [row, row + count) of a head: turns q . k with n keys into weights relative to each row's
    // maximum so far; 0 outside of [low, high). The first key is `distance` after the span's first row. `rescale` returns
    // the factors for the accumulators.
    void softmax(int64_t count, int64_t n, const int64_t* low, const int64_t* high, int64_t head, int64_t row,
                 int64_t distance, State state, float* rescale) {
        for (int64_t r = 0; r < count; r += WIDTH) {
            const int64_t some = std::min<int64_t>(WIDTH, count - r);
            const float scale = c.scale * (c.k_scale ? c.k_scale[head] : 1.0f);
            Floats each[WIDTH], largest = {}, total = {};
            float factors[WIDTH], bases[WIDTH];
            std::fill_n(each, WIDTH, Floats{} - INF);
            for (int64_t l = 0; l < some; l++) {
                const bool plain = !c.batch_invariant && low[r + l] <= 0 && high[r + l] >= round_up(n, WIDTH) && c.soft_cap == 0 && !c.alibi_slopes;
                factors[l] = plain ? scale : 1.0f;
                float* x = logits.data + (r + l) * TILE;
                if (!plain) to_logits(x, n, low[r + l], high[r + l], scale, head, row + r + l, distance);
                for (int64_t j = 0; j < n; j += WIDTH) each[l] = larger(load<Floats>(x + j) * factors[l], each[l]);
            }
            load_some(largest, state.largest + r, some);
            load_some(total, state.total + r, some);
            Floats top = reduce_lanes(each, larger);
            top = top > largest + SLACK ? top : largest;  // mostly the maximum stays, and nothing is rescaled
            const Floats base = top == -INF ? Floats{} : top;
            const Floats factor = exp(largest - base);
            std::memcpy(bases, &base, sizeof base);
            std::fill_n(each, WIDTH, Floats{});
            for (int64_t l = 0; l < some; l++) {
                float* x = logits.data + (r + l) * TILE;
                for (int64_t j = 0; j < n; j += WIDTH) {
                    const Floats weight = exp(load<Floats>(x + j) * factors[l] - bases[l]);
                    store(x + j, weight);
                    each[l] += weight;
                }
            }
            total = total * factor + reduce_lanes(each, add);
            store_some(state.largest + r, top, some);
            store_some(state.total + r, total, some);
            store_some(rescale + r, factor, some);
        }
    }

    // The logits of one row from q . k with n keys, in place; -inf outside of [low, high).
    void to_logits(float* x_row, int64_t n, int64_t low, int64_t high, float scale, int64_t head, int64_t row,
                int64_t distance) const {
        const float slope = c.alibi_slopes ? c.alibi_slopes[head * G + row % G] : 0.0f;
        Floats lane;
        for (int l = 0; l < WIDTH; l++) lane[l] = float(l);
        for (int64_t j = 0; j < n; j += WIDTH) {
            Floats x = load<Floats>(x_row + j) * scale;
            const Floats key = lane + float(j);
            if (c.soft_cap != 0) x = c.soft_cap * tanh(x / c.soft_cap);
            if (c.alibi_slopes) x += slope * (key + float(distance - row / G));
            x = key >= float(low) ? x : Floats{} - INF;
            x = key < float(high) ? x : Floats{} - INF;
            store(x_row + j, x);
        }
    }

    // Writes row `to` of out: accumulated values times a factor.
    void write(const float* values, float factor, int64_t to) {
        if (c.out_cell == FLOAT32) {
            float* out = reinterpret_cast<float*>(c.out) + to * c.Dv;
            if (format.parts == 1)
                for (int64_t d = 0; d < c.Dv; d++) out[d] = values[d] * factor;
            else
                for (int64_t d = 0; d < c.Dv; d++) out[d] = values[place[d]] * factor;
            return;
        }
        if (format.parts != 2) {
            for (int64_t d = 0; d < c.Dv; d++) reordered.data[out_place[d]] = values[place[d]];
            values = reordered.data;
        }
        for (int64_t d = 0; d < c.Dv; d += 2 * WIDTH) {
            const Floats even = load<Floats>(values + d) * factor, odd = load<Floats>(values + d + WIDTH) * factor;
            const Words both = c.out_cell == BFLOAT16 ? pair(rounded(even), rounded(odd)) : halves(even, odd);
            char* out = c.out + 2 * (to * c.Dv + d);
            if (d + 2 * WIDTH <= c.Dv) std::memcpy(out, &both, sizeof both);
            else std::memcpy(out, &both, 2 * (c.Dv - d));
        }
    }

    // Writes out and lse of heads [head, end) of a span: merges partial results in the order of their keys.
    void merge(const Span& span, int64_t head, int64_t end, const State* parts, int64_t count) {
        int64_t row = 0;
        for (int64_t k = head; k < end; k++)
            for (int64_t token = span.start; token < span.start + span.rows; token++)
                for (int64_t h = k * G; h < (k + 1) * G; h++, row++) merge_row(row, k, h, token * c.H + h, parts, count);
    }

    void merge_row(int64_t row, int64_t k, int64_t h, int64_t to, const State* parts, int64_t count) {
        float largest = c.sinks ? c.sinks[h] : -INF;
        for (int64_t p = 0; p < count; p++) largest = std::max(largest, parts[p].largest[row]);
        const float base = largest == -INF ? 0.0f : largest;
        float share = std::exp(parts[0].largest[row] - base);
        float total = parts[0].total[row] * share + (c.sinks ? std::exp(c.sinks[h] - base) : 0.0f);
        const float* values = parts[0].values + row * Dv;
        if (count > 1) {
            for (int64_t d = 0; d < Dv; d++) merged.data[d] = values[d] * share;
            for (int64_t p = 1; p < count; p++) {
                share = std::exp(parts[p].largest[row] - base);
                total += parts[p].total[row] * share;
                for (int64_t d = 0; d < Dv; d++) merged.data[d] += parts[p].values[row * Dv + d] * share;
            }
            values = merged.data;
            share = 1;
        }
        write(values, total == 0 ? 0.0f : share * (c.v_scale ? c.v_scale[k] : 1.0f) / total, to);
        if (c.lse) c.lse[to] = base + std::log(total);
    }
};

#include "invariant.h"

void attend(const Call& c) {
    if (c.batch_invariant) return attend_steadily(c);
    const Attention a(c);
    std::vector<Span> spans;
    int64_t keys = 0, pairs = 0, tasks = 0, most = 0;  // tasks: heads of wide spans; most: rows of a state
    for (int64_t n = 0; n < c.num_sequences; n++) {
        const int64_t s = c.sequences[n], end = c.query_start_loc[s + 1];
        for (int64_t start = c.query_start_loc[s]; start < end; start += a.span) {
            spans.push_back({s, start, std::min(a.span, end - start), c.seq_lens[s] - end + start, c.seq_lens[s], 0, 0});
            Span& span = spans.back();
            const auto [from, to] = a.keys_of(span);
            keys += to - from;
            pairs += (to - from) * span.rows;
            tasks += a.is_wide(span) ? c.K : 0;
            most = std::max(most, span.rows * a.G * (a.is_wide(span) ? 1 : c.K));
        }
    }
    const int64_t length = round_up(std::max(PIECE, pairs / PIECES), TILE);
    // All heads of a token are adjacent in memory. With many rows, one head at a time fits the processor's cache. A few short
    // sequences are divided by heads, too, so that each thread has work; this changes no bit.
    const bool few = int64_t(spans.size()) + keys / length < 2 * c.threads && pairs * c.H * (c.D + c.Dv) >= SHARED;
    const int64_t heads = few ? (c.K + c.threads - 1) / c.threads : c.K;
    std::vector<Piece> pieces;
    std::vector<int64_t> begin;  // the first piece of each span
    int64_t rows = 0;
    for (int64_t n = 0; n < int64_t(spans.size()); n++) {
        const auto [from, to] = a.keys_of(spans[n]);
        const int64_t count = spans[n].rows * c.H;
        begin.push_back(pieces.size());
        const bool wide = a.is_wide(spans[n]), whole = wide && tasks >= TASKS;
        const int64_t step = wide ? 1 : heads;
        const auto add = [&](int64_t first, int64_t last, int64_t row) {
            for (int64_t head = 0; head < c.K; head += step)
                pieces.push_back({n, first, last, row, head, std::min(head + step, c.K)});
        };
        if (whole || to - from <= length) add(from, to, -1);
        else
            for (int64_t key = from; key < to; key += length, rows += count) add(key, std::min(key + length, to), rows);
    }
    begin.push_back(pieces.size());
    const States shared(rows, a.Dv);
    // The last rows of a prompt see the most keys. They are computed first, so that threads finish together.
    const auto compute = [&](Worker& worker, int64_t n) {
        const Piece& piece = pieces[pieces.size() - 1 - n];
        const Span& span = spans[piece.span];
        const State state = piece.row < 0 ? worker.own.at(0) : shared.at(piece.row + piece.head * span.rows * a.G);
        worker.run(span, piece, state);
        if (piece.row < 0) worker.merge(span, piece.head, piece.end, &state, 1);
    };
    const auto merge = [&](Worker& worker, int64_t n) {
        std::vector<State> parts;
        for (int64_t p = begin[n]; p < begin[n + 1]; p++)
            if (pieces[p].row >= 0 && pieces[p].head == 0) parts.push_back(shared.at(pieces[p].row));
        if (!parts.empty()) worker.merge(spans[n], 0, c.K, parts.data(), parts.size());
    };
    if (pieces.size() == 1 || c.threads == 1) {  // OpenMP makes system calls for one thread, too
        Worker worker(a, most, tasks > 0);
        for (int64_t n = 0; n < int64_t(pieces.size()); n++) compute(worker, n);
        for (int64_t n = 0; n < int64_t(spans.size()); n++) merge(worker, n);
        return;
    }
#pragma omp parallel num_threads(int(c.threads))  // always this number: OpenMP would end threads of a smaller team
    {
        Worker worker(a, most, tasks > 0);
#pragma omp for schedule(dynamic) nowait
        for (int64_t n = 0; n < int64_t(pieces.size()); n++) compute(worker, n);
        if (rows) {
#pragma omp barrier
#pragma omp for schedule(dynamic) nowait
            for (int64_t n = 0; n < int64_t(spans.size()); n++) merge(worker, n);
        }
    }
}

// Attends with the given tensors; without them, call has all addresses, and the sequences to serve, whose values are not
// checked. Returns 0, or 1 if Python must check: a value of the batch is invalid, or out may share memory with another
// tensor; then nothing was written. Without a call: whether bfloat16 uses the matrix unit.
extern "C" int64_t paged_attention(const Call* call, const Tensors* tensors) {
    if (!call) return matrix_unit();
    if (!tensors) return attend(*call), 0;
    if (tensors->overlap(*call)) return 1;
    const Call c = tensors->of(*call);
    const Batch batch(c);
    if (!batch.valid) return 1;
    const int64_t rows = batch.starts.back() * c.H, padding = (c.T - batch.starts.back()) * c.H;
    const int64_t row_bytes = c.Dv * (c.out_cell == FLOAT32 ? 4 : 2);
    std::memset(c.out + rows * row_bytes, 0, padding * row_bytes);
    if (c.lse) std::fill_n(c.lse + rows, padding, -INF);
    attend(batch.of(c));
    return 0;
}
