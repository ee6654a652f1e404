// A step of a batch in plain integers: checks, then positions, slots, lengths and block tables, in one pass over each.
// paged_ops/metadata/fill.py compiles and calls this. It returns only whether a step is right; the builder's own checks
// raise the errors of a wrong one.
//
// Letters as in builder.py: n requests, S sequences and T tokens (padded), B tokens per block, M columns of a table.

#include <cstdint>

struct Pool {
    const void* block_ids;  // [n, W], int64 if wide, else int32
    int64_t row, column;    // strides in elements
    int64_t W, wide;
    int64_t num_blocks;
    int64_t* slots;   // [T]
    int32_t* table;   // [S, M]
    int32_t* packed;  // for [n, width] of it
};

struct Step {
    const void* query_lens;  // [n], int64 if wide, else int32
    const void* computed;    // [n]
    int64_t wide_lens, wide_computed;
    int64_t n, S, T;  // S and T: -1 is the batch's own size
    int64_t B, M, max_seqs, max_tokens, lookahead;
    int64_t compact_bytes;  // tables are written without the columns past the longest, if these are more bytes; 0: never
    int64_t num_pools;
    const Pool* pools;
    int32_t* starts;     // [S + 1]
    int32_t* lens;       // [S]
    int64_t* positions;  // [T]
    const int64_t* ids;  // [num_ids]
    int64_t num_ids;     // -1: there are none
    int64_t* input_ids;  // [T], or none
    int64_t* last_rows;  // [S], or none
    int32_t* starts_host;
    int32_t* lens_host;
    int32_t* computed_host;
    // Results.
    int64_t tokens, max_query_len, max_seq_len, width, compact;
};

namespace {

inline int64_t at(const void* numbers, int64_t wide, int64_t i) {
    return wide ? static_cast<const int64_t*>(numbers)[i] : static_cast<const int32_t*>(numbers)[i];
}

inline int64_t blocks_for(int64_t tokens, int64_t B) { return (tokens + B - 1) / B; }

// Writes the results alone.
bool is_right(Step& s) {
    if (s.n > s.max_seqs || s.lookahead < 0 || s.lookahead > s.M * s.B) return false;
    const int64_t most = s.M * s.B;
    int64_t longest = 0;
    s.tokens = s.max_query_len = s.max_seq_len = 0;
    for (int64_t i = 0; i < s.n; i++) {
        const int64_t q = at(s.query_lens, s.wide_lens, i), c = at(s.computed, s.wide_computed, i);
        if (q < 0 || c < 0 || q > most || c > most) return false;
        s.tokens += q;
        if (q > s.max_query_len) s.max_query_len = q;
        if (c + q > s.max_seq_len) s.max_seq_len = c + q;
    }
    if (s.n) longest = s.max_seq_len + s.lookahead;
    if (s.S < 0) s.S = s.n;
    if (s.T < 0) s.T = s.tokens;
    if (s.num_ids >= 0 && (!s.input_ids || s.num_ids != s.tokens)) return false;
    if (longest > most || s.n > s.S || s.S > s.max_seqs || s.tokens > s.T || s.T > s.max_tokens) return false;
    s.width = blocks_for(longest, s.B);
    for (int64_t p = 0; p < s.num_pools; p++) {
        const Pool& pool = s.pools[p];
        if (pool.W < s.width) return false;
        for (int64_t i = 0; i < s.n; i++) {
            const int64_t len = at(s.query_lens, s.wide_lens, i) + at(s.computed, s.wide_computed, i);
            const int64_t needed = blocks_for(len + s.lookahead, s.B), first = i * pool.row;
            for (int64_t j = 0; j < needed; j++) {
                const int64_t id = at(pool.block_ids, pool.wide, first + j * pool.column);
                if (id < 0 || id >= pool.num_blocks) return false;
            }
        }
    }
    return true;
}

void write_rows(const Step& s) {
    int32_t start = 0;
    s.starts[0] = s.starts_host[0] = 0;
    for (int64_t i = 0; i < s.S; i++) {
        const bool live = i < s.n;
        const int32_t q = live ? at(s.query_lens, s.wide_lens, i) : 0, c = live ? at(s.computed, s.wide_computed, i) : 0;
        for (int32_t r = 0; r < q; r++) s.positions[start + r] = c + r;
        start += q;
        s.starts[i + 1] = s.starts_host[i + 1] = start;
        s.lens[i] = s.lens_host[i] = c + q;
        s.computed_host[i] = c;
        if (s.last_rows) s.last_rows[i] = start ? start - 1 : 0;
    }
    for (int64_t t = s.tokens; t < s.T; t++) s.positions[t] = 0;
    if (s.num_ids >= 0)
        for (int64_t t = 0; t < s.T; t++) s.input_ids[t] = t < s.tokens ? s.ids[t] : 0;
}

void write_pool(const Step& s, const Pool& pool) {
    const int64_t stride = s.compact ? s.width : s.M;
    int32_t* const table = s.compact ? pool.packed : pool.table;
    for (int64_t i = 0; i < s.n; i++) {
        const int64_t first = i * pool.row;
        for (int64_t j = 0; j < s.width; j++)
            table[i * stride + j] = at(pool.block_ids, pool.wide, first + j * pool.column);
        for (int64_t t = s.starts_host[i]; t < s.starts_host[i + 1]; t++) {
            const int64_t position = s.positions[t], block = position / s.B;
            pool.slots[t] = at(pool.block_ids, pool.wide, first + block * pool.column) * s.B + position - block * s.B;
        }
    }
    for (int64_t t = s.tokens; t < s.T; t++) pool.slots[t] = -1;
}

}  // namespace

// 1 if the step was right and is written; else 0, and nothing is written.
extern "C" int64_t fill_step(Step* step) {
    Step& s = *step;
    if (!is_right(s)) return 0;
    s.compact = s.compact_bytes && 4 * s.n * (s.M - s.width) > s.compact_bytes && 2 * s.width <= s.M;
    write_rows(s);
    for (int64_t p = 0; p < s.num_pools; p++) write_pool(s, s.pools[p]);
    return 1;
}
