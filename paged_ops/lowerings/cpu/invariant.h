// Batch-invariant attention: the bits of a row do not depend on the other rows, nor on how the work is divided.
//
// Keys are cut at fixed positions: into segments of SEGMENT keys, these into tiles of TILE keys, and once more at the end
// of the first tokens of a window. A segment starts from an empty state, and the segments of a row are merged from the
// first to the last, also if one thread computes all. A row adds its visible keys one by one, whatever other rows of the
// tile see. Products with converted keys and with keys in place add in one order (multiply in tiles.h).
#pragma once

constexpr int64_t SEGMENT = 512;
constexpr int64_t PARTIAL = 1 << 24;  // bounds the floats of partial results
static_assert(SEGMENT % TILE == 0, "tiles do not cross the ends of segments");

// A tile with the n keys from position `from` on.
struct Tile {
    int64_t from, n;
    bool ends;  // whether it is the last visible one of its segment
};

struct Steady : Worker {
    States part;  // of one segment, if a piece has several
    Steady(const Attention& attention, int64_t rows) : Worker(attention, rows, true), part(rows, Dv) {}

    static void clear(State state, int64_t rows, int64_t Dv) {
        std::fill_n(state.largest, rows, -INF);
        std::fill_n(state.total, rows, 0.0f);
        std::fill_n(state.values, rows * Dv, 0.0f);
    }

    // Appends the keys of the next segment to a row's state. A side without keys changes no bit of the other.
    __attribute__((noinline)) static void append(State to, State next, int64_t row, int64_t Dv) {
        float &largest = to.largest[row], &total = to.total[row], *values = to.values + row * Dv;
        const float other = next.largest[row], *more = next.values + row * Dv;
        if (other == -INF && next.total[row] == 0) return;
        if (largest == -INF && total == 0) {
            largest = other;
            total = next.total[row];
            std::copy_n(more, Dv, values);
            return;
        }
        const float top = std::max(largest, other), base = top == -INF ? 0.0f : top;
        const float before = std::exp(largest - base), after = std::exp(other - base);
        largest = top;
        total = total * before + next.total[row] * after;
        for (int64_t d = 0; d < Dv; d++) values[d] = values[d] * before + more[d] * after;
    }

    // Adds the tiles to the states of the rows of heads [head, end).
    void run(const Span& span, const std::vector<Tile>& tiles, const Piece& piece, State state) {
        const int64_t R = span.rows * G, count = (piece.end - piece.head) * R;
        const bool widened = is_wide(span), several = piece.row < 0;
        const Format& cells = widened ? FORMATS[FLOAT32] : format;
        const char* wide_at[2][TILE];
        for (int64_t j = 0; j < TILE; j++) {
            wide_at[0][j] = reinterpret_cast<const char*>(wide.data + j * D);
            wide_at[1][j] = reinterpret_cast<const char*>(wide.data + TILE * D + j * Dv);
        }
        arrange(span, piece);
        clear(state, count, Dv);
        const State own = several ? part.at(0) : state;
        if (several) clear(own, count, Dv);
        const auto find = [&](int64_t n) { locate(n & 1, span.sequence, tiles[n].from, tiles[n].n); };
        if (piece.first < piece.last) find(piece.first);
        for (int64_t t = piece.first; t < piece.last; t++) {
            const auto [from, n, ends] = tiles[t];
            if (t + 1 < piece.last) find(t + 1);
            for (int64_t head = piece.head; head < piece.end; head++) {
                const bool last = head + 1 == piece.end, end = last && t + 1 == piece.last;
                Rows tile[2], next[2];
                for (int plane = 0; plane < 2; plane++) {
                    tile[plane] = rows_of(t & 1, plane, head);
                    next[plane] = end ? tile[plane] : rows_of((t + last) & 1, plane, last ? piece.head : head + 1);
                    if (!direct) tile[plane] = stage(plane, tile[plane], n);
                    if (!widened) continue;
                    format.widen(tile[plane], wide.data + plane * TILE * D, n, plane ? Dv : D);
                    tile[plane] = {wide_at[plane], 0};
                }
                for (int64_t r = 0; r < R; r += ROWS) {
                    const int64_t row = (head - piece.head) * R + r;
                    if (widened) prefetch(next, r * TILE / R, std::min(r + ROWS, R) * TILE / R);
                    compute(Path::DIRECT, cells, span, head, r, std::min<int64_t>(ROWS, R - r), from, n, queries.data + row * D,
                            tile, widened ? tile : next, {own.largest + row, own.total + row, own.values + row * Dv});
                }
            }
            if (!several || !ends) continue;
            for (int64_t row = 0; row < count; row++) append(state, own, row, Dv);
            clear(own, count, Dv);
        }
    }
};

// The tiles of a span that have a key seen by some row.
std::vector<Tile> tiles_of(const Attention& a, const Span& span) {
    std::vector<Tile> tiles;
    for (int64_t from = 0, to; from < span.keys; from = to) {
        to = from / TILE * TILE + TILE;
        if (from < a.c.first_tokens && a.c.first_tokens < to) to = a.c.first_tokens;
        int64_t low, high;
        a.reach(span, span.position, span.rows, from, low, high);
        if (std::max(low, from) >= std::min({high, to, span.keys})) continue;
        if (!tiles.empty()) tiles.back().ends = tiles.back().from / SEGMENT < from / SEGMENT;
        tiles.push_back({from, std::min(to, span.keys) - from, true});
    }
    return tiles;
}

void attend_steadily(const Call& c) {
    const Attention a(c);
    std::vector<Span> spans;
    std::vector<std::vector<Tile>> tiles;
    int64_t tasks = 0, most = 0;  // tasks: of spans that are not divided by keys; most: rows of a state
    for (int64_t n = 0; n < c.num_sequences; n++) {
        const int64_t s = c.sequences[n], end = c.query_start_loc[s + 1];
        for (int64_t start = c.query_start_loc[s]; start < end; start += a.span) {
            spans.push_back({s, start, std::min(a.span, end - start), c.seq_lens[s] - end + start, c.seq_lens[s], 0, 0});
            tiles.push_back(tiles_of(a, spans.back()));
            tasks += a.is_wide(spans.back()) ? c.K : 1;
            most = std::max(most, spans.back().rows * c.H);
        }
    }
    std::vector<Piece> pieces;
    std::vector<int64_t> begin;  // the first piece of each span
    int64_t rows = 0;
    for (int64_t n = 0; n < int64_t(spans.size()); n++) {
        begin.push_back(pieces.size());
        const int64_t count = spans[n].rows * c.H, heads = a.is_wide(spans[n]) ? 1 : c.K, last = tiles[n].size();
        const int64_t segments = std::count_if(tiles[n].begin(), tiles[n].end(), [](const Tile& t) { return t.ends; });
        const auto add = [&](int64_t first, int64_t last, int64_t row) {
            for (int64_t head = 0; head < c.K; head += heads) pieces.push_back({n, first, last, row, head, head + heads});
        };
        if (segments < 2 || tasks >= TASKS || (rows + segments * count) * a.Dv > PARTIAL) add(0, last, -1);
        else
            for (int64_t t = 0, first = 0; t < last; t++)
                if (tiles[n][t].ends) {
                    add(first, t + 1, rows);
                    first = t + 1;
                    rows += count;
                }
    }
    begin.push_back(pieces.size());
    const States shared(rows, a.Dv);
    const int threads = pieces.size() == 1 ? 1 : int(c.threads);
#pragma omp parallel num_threads(threads)
    {
        Steady worker(a, most);
#pragma omp for schedule(dynamic)
        for (int64_t n = int64_t(pieces.size()) - 1; n >= 0; n--) {
            const Piece& piece = pieces[n];
            const Span& span = spans[piece.span];
            const State state = piece.row < 0 ? worker.own.at(0) : shared.at(piece.row + piece.head * span.rows * a.G);
            worker.run(span, tiles[piece.span], piece, state);
            if (piece.row < 0) worker.merge(span, piece.head, piece.end, &state, 1);
        }
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < int64_t(spans.size()) * c.K; n++) {
            const int64_t s = n / c.K, head = n % c.K, R = spans[s].rows * a.G;
            if (pieces[begin[s]].row < 0) continue;
            const State state = worker.own.at(0);
            Steady::clear(state, R, a.Dv);
            for (int64_t p = begin[s]; p < begin[s + 1]; p++)
                if (pieces[p].head == 0)
                    for (int64_t row = 0; row < R; row++)
                        Steady::append(state, shared.at(pieces[p].row + head * R), row, a.Dv);
            worker.merge(spans[s], head, head + 1, &state, 1);
        }
    }
}
